"""Probabilities and sets of classes: measured on validation images, and held to theory and to plain loops."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import betabinom
from sklearn.isotonic import IsotonicRegression

from torchcaps.analysis.certainty import BINS, MIN_ISOTONIC_IMAGES, Certainty, calibration_error
from torchcaps.errors import InputError

DRAWS = 200


def drawn(rng: np.random.Generator, images: int, classes: int = 4, sharpness: float = 2.0) -> tuple[Any, Any]:
    """Softmax scores of random logits, and labels that follow the probabilities of half of these logits."""
    logits = sharpness * rng.normal(size=(images, classes))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(1)
    powers = np.exp(logits)
    return (powers / powers.sum(1, keepdims=True)).astype(np.float32), labels


def fitted(scores: np.ndarray, labels: np.ndarray, **options: Any) -> Certainty:
    return Certainty.fit(scores, labels, scores.argmax(1), **options)


def covered(sets: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(sets, labels[:, None], 1)[:, 0]


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_coverage_follows_the_beta_binomial_law(coverage: float) -> None:
    """Of m test images, BetaBinomial(m, k, n + 1 − k) are covered, k = ⌈(n + 1) · coverage⌉: Vovk 2012."""
    n, m, rng = 99, 400, np.random.default_rng(0)
    k = math.ceil((n + 1) * coverage - 1e-9)
    law, counts = betabinom(m, k, n + 1 - k), []
    for _ in range(DRAWS):
        scores, labels = drawn(rng, n + m)
        sets = fitted(scores[:n], labels[:n]).sets(scores[n:], coverage)
        counts.append(covered(sets, labels[n:]).sum())
    outside = 1e-3 / DRAWS / 2
    assert law.ppf(outside) <= min(counts) <= max(counts) <= law.ppf(1 - outside)
    assert abs(np.mean(counts) - law.mean()) < 4 * law.std() / DRAWS**0.5
    assert law.mean() / m == pytest.approx(k / (n + 1))


def test_coverage_over_classes_holds_for_each_class() -> None:
    """Class 0 is rarer and harder: over all images it is covered too seldom, over classes it is not."""
    rng, shares = np.random.default_rng(1), {"all": [], "class": []}
    for _ in range(DRAWS // 4):
        scores, labels = drawn(rng, 1200)
        scores[labels == 0, 0] *= 0.3
        for over, found in shares.items():
            sets = fitted(scores[:400], labels[:400]).sets(scores[400:], 0.8, over)  # type: ignore[arg-type]
            found.append([covered(sets, labels[400:])[labels[400:] == j].mean() for j in range(4)])
    images, classes = (np.mean(each, 0) for each in shares.values())
    assert images.min() < 0.7
    assert abs(classes - 0.81).max() < 0.02  # ⌈(n + 1) · 0.8⌉ / (n + 1), a little above 0.8


def test_coverage_over_groups_holds_for_new_groups() -> None:
    """Images of a patient are alike: six patients of 60 have many easy images, the others few and harder ones."""
    rng = np.random.default_rng(2)
    found: dict[Any, list[float]] = {"all": [], "group": []}
    for _ in range(DRAWS // 4):
        groups = np.repeat(np.arange(60), np.where(np.arange(60) < 6, 200, rng.integers(1, 40, 60)))
        hardness = np.where(np.arange(60) < 6, 1, rng.uniform(0.1, 1, 60))[groups]
        scores, labels = drawn(rng, len(groups))
        scores[np.arange(len(labels)), labels] *= hardness
        new = np.isin(groups, rng.permutation(60)[:20])
        certainty = fitted(scores[~new], labels[~new], groups=[f"P{each}" for each in groups[~new]])
        for over, shares in found.items():
            hits = covered(certainty.sets(scores[new], 0.8, over), labels[new])
            shares += [hits[groups[new] == each].mean() for each in np.unique(groups[new])]
    images, of_groups = (float(np.mean(shares)) for shares in found.values())
    assert images < 0.78, "six large groups of easy images set the limit"
    assert 0.79 < of_groups < 0.84


def test_sets_of_mean_scores_hold_for_new_groups() -> None:
    """A patient has one class and five images; the answer is the mean of their scores, and the sets are for it."""
    rng, hits = np.random.default_rng(4), list[float]()
    for _ in range(DRAWS // 4):
        scores, labels = drawn(rng, 1000)
        order = np.argsort(labels, kind="stable")[: 5 * (len(labels) // 5)]
        scores, labels = scores[order].reshape(-1, 5, 4), labels[order].reshape(-1, 5)
        alone = (labels == labels[:, :1]).all(1)
        new = rng.random(len(scores)) < 0.5
        old = scores[~new].reshape(-1, 4), labels[~new].reshape(-1)
        certainty = fitted(*old, groups=[f"P{n // 5}" for n in range(len(old[1]))]).of_groups()
        assert certainty.images == alone[~new].sum(), "a group of two classes has no true one"
        hits.append(covered(certainty.sets(scores[new & alone].mean(1), 0.8), labels[new & alone, 0]).mean())
    assert 0.79 < np.mean(hits) < 0.825
    with pytest.raises(InputError, match="no groups; set --group in training"):
        fitted(*drawn(rng, 40)).of_groups()


def test_sets_equal_a_plain_loop_and_too_few_images_give_all_classes() -> None:
    rng = np.random.default_rng(3)
    scores, labels = drawn(rng, 130)
    certainty = fitted(scores[:100], labels[:100])
    for coverage in (0.3, 0.9, 0.985):
        misses = sorted(1 - float(scores[n, labels[n]]) for n in range(100))
        k = math.ceil(101 * coverage - 1e-9)
        limit = misses[k - 1] if k <= 100 else math.inf
        expected = [[1 - float(score) <= limit + 1e-6 for score in row] for row in scores[100:]]
        assert certainty.sets(scores[100:], coverage).tolist() == expected
    assert certainty.sets(scores, 0.9999).all()
    assert certainty.sets(scores, 0.99, "class").all(), "a class of 25 images has no 99 %"


def test_sets_of_an_image_do_not_depend_on_the_images_beside_it() -> None:
    scores, labels = drawn(np.random.default_rng(4), 300)
    certainty = fitted(scores[:200], labels[:200], groups=[str(n % 20) for n in range(200)])
    for over in ("all", "class", "group"):
        together = certainty.sets(scores[200:], 0.8, over)  # type: ignore[arg-type]
        alone = np.concatenate([certainty.sets(row[None], 0.8, over) for row in scores[200:]])  # type: ignore[arg-type]
        assert (together == alone).all()


def test_the_calibration_error_equals_a_plain_loop() -> None:
    scores, labels = drawn(np.random.default_rng(5), 500)
    certainties, right = scores.max(1).astype(np.float64), scores.argmax(1) == labels
    error = 0.0
    for b in range(BINS):
        mine = [n for n in range(500) if min(int(certainties[n] * BINS), BINS - 1) == b]
        error += abs(sum(float(right[n]) - certainties[n] for n in mine)) / 500
    assert calibration_error(certainties, right) == pytest.approx(error, abs=1e-12)


def test_a_temperature_undoes_too_certain_probabilities() -> None:
    rng = np.random.default_rng(6)
    scores, labels = drawn(rng, 20_000)
    certainty = fitted(scores[:10_000], labels[:10_000], are_probabilities=True)
    assert certainty.map == "temperature"
    assert certainty.parameters[0] == pytest.approx(2, abs=0.05)
    test, true = scores[10_000:], labels[10_000:]
    before = calibration_error(test.max(1), test.argmax(1) == true)
    after = calibration_error(certainty.probabilities(test, test.argmax(1)), test.argmax(1) == true)
    assert before > 0.08
    assert after < 0.02


@pytest.mark.parametrize("images", [60, MIN_ISOTONIC_IMAGES - 1, MIN_ISOTONIC_IMAGES, 4000])
def test_lengths_get_an_isotonic_map_if_there_are_enough_images(images: int) -> None:
    rng = np.random.default_rng(7)
    scores = rng.uniform(0, 1, (images + 4000, 3))
    answered = scores.max(1)
    right = rng.uniform(size=len(scores)) < answered**6  # a length is no probability
    labels = np.where(right, scores.argmax(1), scores.argmin(1))
    certainty = fitted(scores[:images], labels[:images])
    assert certainty.map == ("isotonic" if images >= MIN_ISOTONIC_IMAGES else "logistic")
    values = certainty.probabilities(scores[images:], scores[images:].argmax(1))
    assert ((values >= 0) & (values <= 1)).all()
    order = np.argsort(answered[images:])
    assert (np.diff(values[order]) >= -1e-12).all(), "a higher score has a higher probability"
    assert calibration_error(values, right[images:]) < 0.5 * calibration_error(answered[images:], right[images:])
    if certainty.map == "isotonic":
        oracle = IsotonicRegression(out_of_bounds="clip").fit(answered[:images], right[:images])
        np.testing.assert_allclose(values, oracle.predict(answered[images:]), atol=1e-6)


@pytest.mark.parametrize("right", [True, False])
def test_validation_images_that_are_all_right_or_all_wrong(right: bool) -> None:
    scores, _ = drawn(np.random.default_rng(8), 700)
    labels = scores.argmax(1) if right else scores.argmin(1)
    for count in (20, 700):
        for are_probabilities in (False, True):
            certainty = fitted(scores[:count], labels[:count], are_probabilities=are_probabilities)
            assert np.isfinite(certainty.probabilities(scores, scores.argmax(1))).all()


def test_it_is_the_same_after_a_file_and_keeps_at_most_ten_thousand_scores() -> None:
    scores, labels = drawn(np.random.default_rng(9), 25_000)
    certainty = fitted(scores, labels, groups=[str(n // 5) for n in range(25_000)])
    assert sum(map(len, certainty.scores)) == 10_000
    assert certainty.images == 25_000
    again = Certainty(**json.loads(json.dumps(dataclasses.asdict(certainty))))
    assert again == certainty
    for over in ("all", "class", "group"):
        assert (again.sets(scores, 0.9, over) == certainty.sets(scores, 0.9, over)).all()  # type: ignore[arg-type]


CONTENTS = dataclasses.asdict(fitted(*drawn(np.random.default_rng(10), 40), groups=["a", "b"] * 20))


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("value", ["x", None, [], [1], [["x"]], [[math.nan] * 3] * 4, {}, -1, [[1], [2, 3]], math.inf])
def test_contents_of_a_file_that_do_not_fit_are_named(name: str, value: Any) -> None:
    if name == "groups" and value is None:
        return
    with pytest.raises(InputError, match=f'"{name}" of a certainty does not fit|"groups" of a certainty'):
        Certainty(**CONTENTS | {name: value})


@pytest.mark.parametrize("coverage", [0, 1, -0.1, 90, math.nan, "0.9"])
def test_a_coverage_is_above_0_and_below_1(coverage: Any) -> None:
    with pytest.raises(InputError, match="coverage must be above 0 and below 1"):
        Certainty(**CONTENTS).sets(np.ones((1, 4)), coverage)


def test_groups_are_needed_for_a_coverage_over_groups() -> None:
    with pytest.raises(InputError, match="have no groups; set --group in training"):
        Certainty(**CONTENTS | {"groups": None}).sets(np.ones((1, 4)), 0.9, "group")
