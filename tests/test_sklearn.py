"""The classifier keeps to scikit-learn's rules, and takes images in every form that it promises."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

from support import assert_raises
from torchcaps import InputError
from torchcaps.parts import describe, flat
from torchcaps.sklearn import CapsNetClassifier
from torchcaps.training import devices

SMALL = {"conv_kernel": 3, "conv_channels": 16, "primary_kernel": 3, "primary_stride": 1, "primary_types": 2}
SMALL |= {"primary_dim": 4, "capsule_dim": 4, "weight_init": "balanced", "decoder": False}


def small(**options: Any) -> CapsNetClassifier:
    return CapsNetClassifier(**{"options": SMALL, "epochs": 1, "random_state": 0, **options})


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The first 300 digits, 8×8, 0..1."""
    images, labels = load_digits(return_X_y=True)
    return images[:300].reshape(-1, 8, 8) / 16, labels[:300]


ROWS = SMALL | {"conv_kernel": 1, "primary_kernel": 1}
"""A network that makes capsules of the features of a row one by one."""
TABULAR: dict[str, Any] = {"options": ROWS, "epochs": 8, "batch_size": 16, "learning_rate": 5e-2, "random_state": 0}

EXCLUDED = {
    "check_sample_weight_equivalence_on_dense_data": "batches and their order are drawn by the number of images",
    "check_methods_sample_order_invariance": "asks for 1e-9, float32 has 1e-7; see the test of every form below",
    "check_methods_subset_invariance": "asks for 1e-7, which float32 holds only for scores, not for their softmax",
}


@pytest.mark.slow
@parametrize_with_checks(
    [CapsNetClassifier(image_shape=(1, -1), **TABULAR)],
    expected_failed_checks=lambda _: EXCLUDED,
    xfail_strict=False,
)
def test_scikit_learns_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_checks_with_rows_of_any_width_are_refused_by_tags(recwarn: pytest.WarningsRecorder) -> None:
    """Images have a size, so that scikit-learn's tables do not fit them; the checks of parameters pass."""
    for estimator in (CapsNetClassifier(), CapsNetClassifier(image_shape=(8, 8))):
        results = check_estimator(estimator, on_fail="raise", on_skip=None)
        assert {each["status"] for each in results} == {"passed"}
    assert "Can't test estimator CapsNetClassifier which requires input" in str(recwarn.pop(SkipTestWarning).message)


def test_rows_of_features_have_a_scale_each() -> None:
    random = np.random.default_rng(0)
    rows, labels = random.random((90, 3)), np.arange(90) % 3
    rows[np.arange(90), labels] += 1
    classifier = CapsNetClassifier(image_shape=(1, -1), **TABULAR).fit(rows, labels)
    assert classifier.network_.in_shape == (1, 1, 3)
    assert classifier.score(rows, labels) > 0.9
    other = rows * [1e-6, 1e6, 1] + [0, 5, -1]
    again = CapsNetClassifier(image_shape=(1, -1), **TABULAR).fit(other, labels)
    np.testing.assert_allclose(again.capsule_scores(other), classifier.capsule_scores(rows), atol=1e-5)
    with pytest.raises(ValueError, match="X has 4 features, but CapsNetClassifier is expecting 3 features"):
        classifier.predict(np.zeros((2, 4)))


def test_every_form_of_the_same_images_gives_the_same(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    grey = (images * 255).round().astype(np.uint8)
    wanted = small().fit(images, labels).capsule_scores(images)
    forms = {
        "channels": (images[:, None], None),
        "uint8": (grey, None),
        "list": (images.tolist(), None),
        "flat": (images.reshape(300, 64), (8, 8)),
        "flat with channels": (grey.reshape(300, 64), (1, 8, 8)),
        "rounded": (images * (1 + 1e-8), None),
    }
    for name, (form, shape) in forms.items():
        classifier = small(image_shape=shape).fit(form, labels)
        assert np.array_equal(classifier.capsule_scores(form), wanted), name
        assert hasattr(classifier, "n_features_in_") == (shape is not None)
        if shape is None:  # fitted to the one form, it takes the other
            for other in (grey, images.astype(np.float32)):
                assert np.array_equal(classifier.capsule_scores(other), wanted), name
    assert np.allclose(classifier.capsule_scores(form[::-1])[::-1], wanted, rtol=1e-5, atol=1e-6), "in another order"


def test_other_numbers_are_scaled_by_what_fit_saw_and_clipped(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits  # 0..1, and both ends are there
    wanted = small().fit(images, labels).capsule_scores(images)
    for low, high in ((0, 16), (-1, 1), (-3e30, 5e30)):
        other = images * high + (1 - images) * low
        classifier = small().fit(other, labels)
        assert np.array_equal(classifier.capsule_scores(other), wanted), high
        assert classifier.pixel_range_ == (low, high)
        beyond = other + high / 20 * (images == 1) - high / 20 * (images == 0)
        assert np.array_equal(classifier.capsule_scores(beyond), wanted), f"{high}: not clipped"
        assert not np.array_equal(classifier.capsule_scores(other / 2), wanted), f"{high}: scaled anew"


def test_bytes_of_a_network_that_is_scaled_are_numbers(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    grey = (images * 255).round().astype(np.uint8)
    twice = small().fit(2.0 * grey, labels)
    assert twice.pixel_range_ == (0, 510)
    assert np.array_equal(twice.capsule_scores(grey), small().fit(grey, labels).capsule_scores(grey / 2 / 255))
    constant = small().fit(np.full((6, 8, 8), 16), [0, 1, 2, 0, 1, 2])
    assert np.isfinite(constant.capsule_scores(np.full((2, 8, 8), 7))).all()


def test_colour_and_the_order_of_axes() -> None:
    """Channels come first or last, in images and in flat rows."""
    labels = np.arange(40) % 2
    images = np.random.default_rng(0).random((40, 3, 6, 7))
    ambiguous = images[:, :, :, :3]
    assert_raises(InputError, small().fit, ambiguous, labels, say="both axis 1 and axis 3 could be 1 to 4 channels")
    wide = {"options": SMALL | {"conv_kernel": 1, "primary_kernel": 1}}
    for order, shape in (("first", (3, 6, 3)), ("last", (3, 3, 6))):
        assert small(channels=order, **wide).fit(ambiguous, labels).network_.in_shape == shape
    classifier = small().fit(images, labels)
    assert classifier.network_.in_shape == (3, 6, 7)
    last = images.transpose(0, 2, 3, 1)
    for form, shape in ((last, None), (images.reshape(40, -1), (3, 6, 7)), (last.reshape(40, -1), (6, 7, 3))):
        other = small(image_shape=shape).fit(form, labels)
        assert np.array_equal(other.capsule_scores(form), classifier.capsule_scores(images))


def test_images_count_by_their_weight(digits: tuple[np.ndarray, np.ndarray]) -> None:
    """An image that counts nothing teaches nothing, whatever its label; equal weights change nothing."""
    images, labels = digits
    wrong, weights = np.where(np.arange(300) < 100, 0, labels), np.where(np.arange(300) < 100, 0, 7)
    plain, equal, right, masked = (
        small().fit(images, given, sample_weight=each).network_.state_dict()
        for given, each in ((labels, None), (labels, np.full(300, 3)), (labels, weights), (wrong, weights))
    )
    assert all(torch.equal(plain[name], equal[name]) for name in plain)
    assert all(torch.equal(right[name], masked[name]) for name in plain)
    assert not all(torch.equal(right[name], plain[name]) for name in plain)
    for bad in (-np.ones(300), np.zeros(300)):
        assert_raises(
            InputError, small().fit, images, labels, bad, say="sample_weight and class_weight must not be negative"
        )


WRONG: list[tuple[np.ndarray, dict[str, Any], str]] = [
    (np.zeros((6, 64)), {}, r"must have shape .* or be flat rows with image_shape, got \(6, 64\)"),
    (np.zeros((6, 64)), {"image_shape": (8, 9)}, r"\(8, 9\) has 72 numbers an image, but X has 64 features"),
    (np.zeros((6, 64)), {"image_shape": (64,)}, r"must be \(H, W\), .* or \(H, W, C\), of which .*, got \(64,\)"),
    (np.zeros((6, 64)), {"image_shape": (-1, -1)}, r"of which one may be -1, got \(-1, -1\)"),
    (np.zeros((6, 64)), {"image_shape": (5, -1)}, r"\(5, -1\) has a multiple of 5 numbers an image, but X has 64"),
    (
        np.zeros((6, 8, 8)),
        {"options": SMALL | {"task": "labels"}},
        "a classifier works for the task classes; this network was trained for the task labels",
    ),
    (np.zeros((6, 8, 8)), {"class_weight": {0: 0, 1: 0, 2: 0}}, "must not be negative, nor zero for all images"),
    (np.zeros((6, 8, 8)), {"device": "cuda:77"}, "this machine has no cuda:77 device that PyTorch can use"),
    (
        np.zeros((6, 8, 8)),
        {"preset": "sabour2017-multimnist"},
        "is for images with 2 objects, but here each image has one",
    ),
    (np.ones((6, 8, 8)), {"learning_rate": 1e30}, r"NaN or infinite; learning_rate must be below 1e\+30"),
]


def test_what_does_not_fit_is_said_and_changes_nothing(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    fitted = small().fit(images, labels)
    before = fitted.classes_, fitted.network_, fitted.loss_curve_
    usual = fitted.get_params()
    for wrong, options, says in WRONG:
        for classifier in (small(), fitted):
            with pytest.raises(ValueError, match=says):
                classifier.set_params(**{"epochs": 8, **options}).fit(wrong, [0, 1, 2, 0, 1, 2])
        fitted.set_params(**usual)
    assert (fitted.classes_, fitted.network_, fitted.loss_curve_) == before
    assert fitted.predict(images[:1]) in labels
    assert_raises(InputError, fitted.predict, images[:, :7], say="the images are (1, 7, 8), but fit saw (1, 8, 8)")
    assert_raises(InputError, small().fit, images, np.zeros(300), say="y must have at least two classes, got one")
    with pytest.raises(ValueError, match="Unknown label type"):
        small().fit(images, labels + 0.5)
    with pytest.raises(NotFittedError):
        small().predict(images)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_learns_and_scores_are_lengths(digits: tuple[np.ndarray, np.ndarray], device: str) -> None:
    images, labels = digits
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[labels]
    classifier = small(epochs=12, batch_size=16, learning_rate=1e-2, max_shift=1, device=device)
    classifier.fit(images[:200], names[:200])
    assert classifier.score(images[200:], names[200:]) > 0.6
    assert list(classifier.classes_) == sorted(set(names))
    lengths = classifier.decision_function(images)
    assert np.array_equal(classifier.predict(images), classifier.classes_[lengths.argmax(1)])
    assert np.array_equal(lengths, classifier.capsule_scores(images))
    assert len(classifier.loss_curve_) == 12
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0] / 2
    assert np.array_equal(pickle.loads(pickle.dumps(classifier)).capsule_scores(images), lengths)
    assert next(classifier.network_.parameters()).device.type == "cpu"


def test_options_reach_the_network_and_the_training(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    fields = flat(describe(small(num_iterations=2, softmax_over="inputs").fit(images, labels).network_))
    assert (fields["num_iterations"], fields["softmax_over"], fields["conv_channels"]) == (2, "inputs", 16)
    cnn = small(preset="baseline-cnn", options={"channels": [4], "hidden": [8]}).fit(images, labels)
    assert type(cnn.network_).__name__ == "BaselineCNN"
    plain, shifted, full, half = (
        small(**options).fit(images, labels)
        for options in ({}, {"max_shift": 2}, {"precision": "32"}, {"precision": "bf16"})
    )
    assert shifted.loss_curve_ != plain.loss_curve_ == full.loss_curve_ != half.loss_curve_
    assert half.loss_curve_ == pytest.approx(full.loss_curve_, rel=0.05)
    assert half.capsule_scores(images[:2]).dtype == np.float32


def test_classes_count_by_their_weight(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    kept = (labels != 1) | (np.arange(300) < 60)
    images, labels = images[kept], labels[kept]
    weights = {label: 0.0 if label == 3 else 1.0 for label in range(10)}
    balanced = len(labels) / (10 * np.bincount(labels))
    for given, each in ((weights, np.array(list(weights.values()))), ("balanced", balanced)):
        by_class = small(class_weight=given).fit(images, labels)
        by_image = small().fit(images, labels, sample_weight=each[labels])
        assert np.allclose(by_class.capsule_scores(images), by_image.capsule_scores(images), atol=1e-5)
        assert not np.allclose(by_class.capsule_scores(images), small().fit(images, labels).capsule_scores(images))
    both = small(class_weight=weights).fit(images, labels, sample_weight=1 + (labels == 3))
    assert np.array_equal(
        both.capsule_scores(images), small(class_weight=weights).fit(images, labels).capsule_scores(images)
    )


def test_early_stopping_keeps_the_best_epoch_of_held_out_images(digits: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = digits
    options: dict[str, Any] = {"epochs": 40, "batch_size": 16, "learning_rate": 1e-2}
    stopped = small(early_stopping=True, validation_fraction=0.2, n_iter_no_change=2, **options).fit(images, labels)
    scores = stopped.validation_scores_
    assert len(scores) == len(stopped.loss_curve_) == stopped.n_iter_ < 40
    assert max(scores) > 0.6
    assert int(np.argmax(scores)) in range(len(scores) - 3, len(scores))
    _, held_out = train_test_split(np.arange(300), test_size=0.2, stratify=labels, random_state=_seed(0))
    assert stopped.score(images[held_out], labels[held_out]) == pytest.approx(max(scores))
    assert small().fit(images, labels).validation_scores_ is None
    with pytest.raises(ValueError, match="The least populated classes in y have only 1 member"):
        small(early_stopping=True).fit(images[:20], np.arange(20) % 19)


def _seed(random_state: int) -> int:
    """The seed that the estimator draws from its random state."""
    return int(np.random.RandomState(random_state).randint(2**31))


def test_probabilities_are_a_softmax_of_the_scores_with_the_likeliest_scale(
    digits: tuple[np.ndarray, np.ndarray],
) -> None:
    images, labels = digits
    classifier = small(epochs=8, batch_size=16, learning_rate=1e-2, early_stopping=True, validation_fraction=0.4)
    classifier.fit(images, labels)
    said, scores = classifier.predict_proba(images), classifier.capsule_scores(images).astype(float)
    assert np.allclose(said.sum(1), 1)
    assert np.array_equal(said.argmax(1), scores.argmax(1))
    powers = np.exp(classifier.score_scale_ * scores)
    assert np.allclose(said, powers / powers.sum(1, keepdims=True))
    _, held_out = train_test_split(np.arange(300), test_size=0.4, stratify=labels, random_state=_seed(0))

    def entropy(scale: float) -> float:
        return float(log_loss(labels[held_out], softmax(scale * scores[held_out], axis=1), labels=range(10)))

    best = entropy(classifier.score_scale_)
    assert best < min(entropy(factor * classifier.score_scale_) for factor in (0.5, 0.8, 1.25, 2))
    cnn = small(preset="baseline-cnn", options={"channels": [4], "hidden": [8]}).fit(images, labels)
    assert cnn.score_scale_ is None, "a CNN's scores are probabilities"
    assert np.allclose(cnn.predict_proba(images), cnn.capsule_scores(images), atol=1e-6)


def test_one_of_several_devices_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Recorded(devices.Fabric):
        def __init__(self, *, accelerator: str, devices: Any, **others: Any) -> None:
            asked.append((accelerator, devices))
            super().__init__(accelerator="cpu", devices=1, **others)

    monkeypatch.setattr(devices, "Fabric", Recorded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, wanted in (("cuda:1", ("cuda", [1])), ("cuda", ("cuda", 1)), ("cpu", ("cpu", 1))):
        devices.launch(name)
        assert asked.pop() == wanted
    assert_raises(InputError, devices.launch, "cuda:2", say="this machine has no cuda:2 device")
    assert_raises(InputError, devices.launch, "cuda:1", 2, say="cuda:1 is one device, but there are 2 processes")


@pytest.mark.parametrize("preset", ["sabour2017", "baseline-cnn"])
def test_transform_returns_poses_for_other_models(preset: str) -> None:
    images, labels = np.random.default_rng(0).uniform(0, 1, (30, 12, 12)), np.arange(30) % 3
    small: dict[str, Any] = {"channels": (4, 4), "hidden": (6,)}
    if preset == "sabour2017":
        small = {"conv_channels": 4, "conv_kernel": 3, "primary_kernel": 3, "primary_types": 2, "decoder": False}
    network = CapsNetClassifier(preset, options=small, epochs=1, random_state=0).fit(images, labels)
    rows = network.transform(images)
    assert rows.shape[0] == 30
    assert len(network.get_feature_names_out()) == rows.shape[1]
    make_pipeline(network).set_output(transform="default")  # refused for a transformer without names of columns
    if preset == "sabour2017":
        lengths = np.linalg.norm(rows.reshape(30, 3, -1), axis=2)
        np.testing.assert_allclose(lengths, network.capsule_scores(images), atol=1e-3)
    else:
        assert rows.shape == (30, 6)
