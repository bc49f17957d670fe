"""Grades: thresholds in order, answers by the median, agreement as scikit-learn measures it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import cohen_kappa_score, mean_absolute_error
from torch import nn

from support import assert_raises
from torchcaps import create_model, fit
from torchcaps.analysis import evaluate
from torchcaps.analysis.evaluation import Evaluation
from torchcaps.analysis.grades import GradeEvaluation
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.errors import InputError
from torchcaps.ops.labels import decreasing, grade_scores
from torchcaps.tasks import find_task
from torchcaps.training import Recipe

ORDINAL = find_task("ordinal")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
def test_the_projection_is_the_nearest_decreasing_sequence(length: int) -> None:
    rows = torch.rand(50, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[0] = 0.5
    rows[1:3] = rows[1:3].sort(1).values
    projected = decreasing(rows).numpy()
    for row, ours in zip(rows.numpy(), projected, strict=True):
        expected = IsotonicRegression(increasing=False).fit_transform(np.arange(length), row)
        np.testing.assert_allclose(ours, expected, atol=1e-12)
    assert torch.autograd.gradcheck(decreasing, rows[3:6].clone().requires_grad_())


def test_scores_are_differences_of_thresholds_and_the_answer_counts_those_above_a_half() -> None:
    thresholds = torch.rand(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1.2
    scores = grade_scores(thresholds)
    assert (scores >= -1e-12).all()
    torch.testing.assert_close(scores.sum(1), torch.ones(200, dtype=torch.float64))
    above = decreasing(thresholds[:, 1:].clamp(max=1))
    answers = ORDINAL.predict_classes(scores)
    assert answers.equal((above > 0.5).sum(1))
    assert set(answers.tolist()) == {0, 1, 2, 3, 4}
    assert (ORDINAL.predict_classes(scores.numpy()) == answers.numpy()).all(), "an array, as of an ONNX file"
    moved = torch.cat([torch.rand(200, 1, dtype=torch.float64), thresholds[:, 1:]], 1)
    assert grade_scores(moved).equal(scores), "output 0 does not count"


def test_targets_are_ones_up_to_the_grade_and_mixed_images_have_shares() -> None:
    network = create_model("compact", num_classes=4, decoder=False, task="ordinal")
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    output = network(images)
    lengths = ORDINAL.thresholds(output, network)  # type: ignore[attr-defined]
    rows = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    loss = network.loss(output, images, torch.tensor([0, 2, 3])).total
    torch.testing.assert_close(loss, symmetric_margin_loss(lengths, rows))
    shares = torch.tensor([[0.25, 0, 0.75, 0]] * 3)
    torch.testing.assert_close(
        network.loss(output, images, shares).total,
        symmetric_margin_loss(lengths, torch.tensor([[1, 0.75, 0.75, 0]] * 3)),
    )
    assert network.score(output.scores, torch.tensor([3, 0, 1])).tolist() == [
        float(answer == label) for answer, label in zip(ORDINAL.predict_classes(output.scores), (3, 0, 1), strict=True)
    ]


def symmetric_margin_loss(lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The margin loss with the same weight for both sides of a threshold, times the mean of 1 and λ = ½."""
    return 0.75 * (rows * (0.9 - lengths).relu() ** 2 + (1 - rows) * (lengths - 0.1).relu() ** 2).sum(1).mean()


def of_answers(labels: np.ndarray, answers: np.ndarray, kind: Any, classes: int) -> Any:
    scores = np.eye(classes, dtype=np.float32)[answers]
    return kind(labels, scores, 0.0, tuple(map(str, range(classes))))


@pytest.mark.parametrize(("kind", "weights"), [(Evaluation, None), (GradeEvaluation, "quadratic")])
@pytest.mark.parametrize("classes", [2, 3, 5, 12])
def test_kappa_is_that_of_scikit_learn(kind: Any, weights: str | None, classes: int) -> None:
    rng = np.random.default_rng(classes)
    for _ in range(20):
        labels = rng.integers(0, classes, 150)
        answers = np.where(rng.uniform(size=150) < 0.5, labels, rng.integers(0, max(classes - 1, 2), 150))
        result = of_answers(labels, answers, kind, classes)
        expected = cohen_kappa_score(labels, answers, weights=weights, labels=range(classes))
        assert result.kappa == pytest.approx(expected, abs=1e-12)
        if weights:
            assert result.mean_absolute_error == pytest.approx(mean_absolute_error(labels, answers), abs=1e-12)
            low, high = result.kappa_interval
            assert low < result.kappa < high
            assert result.to_dict()["kappa_interval"] == result.kappa_interval


def test_kappa_without_any_variation_is_undefined() -> None:
    result = of_answers(np.zeros(9, int), np.zeros(9, int), GradeEvaluation, 3)
    assert (result.kappa, result.kappa_interval, result.accuracy) == (None, None, 1.0)
    assert any(row[0] == "Kappa" and str(row[1]).startswith("–") for row in result.tables()[0].rows)


def test_the_interval_of_kappa_covers_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(0), []
    population = rng.integers(0, 4, 200_000)
    answered = (population + rng.integers(-1, 2, 200_000)).clip(0, 3)
    true = cohen_kappa_score(population, answered, weights="quadratic")
    for _ in range(100):
        chosen = rng.integers(0, 200_000, 200)
        low, high = of_answers(population[chosen], answered[chosen], GradeEvaluation, 4).kappa_interval
        hits.append(low <= true <= high)
    assert 88 <= sum(hits) <= 100


def test_violations_are_counted_before_the_projection() -> None:
    network = create_model("compact", num_classes=4, decoder=False, task="ordinal").eval()
    images = ImageSet(torch.randint(0, 256, (30, 1, 28, 28), dtype=torch.uint8), torch.arange(30) % 4)
    with torch.no_grad():
        lengths = network(images.images / 255).capsules.norm(dim=2)
    expected = float((lengths[:, 1:].diff(dim=1) > 0).any(1).double().mean())
    result = evaluate(network, images)
    assert isinstance(result, GradeEvaluation)
    assert expected > 0
    assert result.violations == result.to_dict()["order_violations"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["10", "9", "0"], ["0", "9", "10"]),
        (["0 none", "10 worst", "2 mild"], ["0 none", "2 mild", "10 worst"]),
        (["1.5x", "0.5x"], ["0.5x", "1.5x"]),
        (["1 right", "-1 left", "+0 middle"], ["-1 left", "+0 middle", "1 right"]),
        (["mild", "none", "severe"], '"mild" begins with none'),
        (["1 a", "1 b"], "two grades begin with the same number"),
    ],
)
def test_names_of_folders_texts_and_tables_are_in_the_order_of_grades(
    tmp_path: Path, names: list[str], order: list[str] | str
) -> None:
    """Alphabetical order is not the order of grades: numbers decide, or a sentence says so."""
    rng = np.random.default_rng(0)
    lines = ["image,label"]
    for name in sorted(names):
        (tmp_path / "folder" / name).mkdir(parents=True)
        for n in range(6):
            image = Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8))
            image.save(tmp_path / "folder" / name / f"{n}.png")
            lines.append(f"folder/{name}/{n}.png,{name}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    texts = np.array(names * 6)
    np.savez(tmp_path / "t.npz", x=rng.integers(0, 255, (len(texts), 8, 8), np.uint8), y=texts)
    for spec in ("folder:folder", "csv:t.csv", "npz:t.npz"):
        kind, path = spec.split(":")
        if isinstance(order, str):
            with pytest.raises(InputError, match=order):
                load_dataset(f"{kind}:{tmp_path / path}", task="ordinal")
        else:
            data = load_dataset(f"{kind}:{tmp_path / path}", task="ordinal")
            assert (data.task.name, list(data.class_names)) == ("ordinal", order)


def test_too_many_grades_are_refused_before_their_projection_fills_the_memory(tmp_path: Path) -> None:
    said = "num_classes must be 2 to 200, got 201"
    assert_raises(InputError, create_model, "compact", (1, 28, 28), 201, task="ordinal", say=said)
    grades = np.arange(804) % 201
    np.savez(tmp_path / "t.npz", x=np.zeros((804, 8, 8), np.uint8), y=grades)
    said = "has 201 grades, but the task ordinal takes at most 200; join some, or set"
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 't.npz'}", task="ordinal", say=said)


def test_class_names_of_a_file_are_an_order_of_their_own(tmp_path: Path) -> None:
    images, grades = np.zeros((30, 8, 8), np.uint8), np.arange(30) % 3
    np.savez(tmp_path / "t.npz", x=images, y=grades, class_names=["none", "mild", "severe"])
    data = load_dataset(f"npz:{tmp_path / 't.npz'}", task="ordinal")
    assert data.class_names == ("none", "mild", "severe")
    assert data.train.labels.dtype == torch.int64
    names = np.array(["none", "mild", "severe"])
    np.savez(tmp_path / "t.npz", x=images, y=names[grades], class_names=names)
    of_texts = load_dataset(f"npz:{tmp_path / 't.npz'}", task="ordinal")
    assert of_texts.class_names == data.class_names
    assert torch.equal(of_texts.train.labels, data.train.labels)
    np.savez(tmp_path / "t.npz", x=images, y=names[grades], class_names=names[:2])
    said = 'y has the text "severe", which is not the name of a class'
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 't.npz'}", task="ordinal", say=said)
    np.savez(tmp_path / "t.npz", x=images, y=np.array([0, 1, 3])[grades])
    said = 'the grade "2" is in none of 21 training images'
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 't.npz'}", task="ordinal", say=said)


def test_a_network_of_ones_own_learns_grades_by_its_logits() -> None:
    random = torch.Generator().manual_seed(0)
    grades = torch.arange(240) % 4
    images = torch.rand(240, 1, 6, 6, generator=random) * 0.2 + grades[:, None, None, None] / 5
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    rows = fit(network, (images, grades), Recipe(epochs=40, batch_size=24, learning_rate=0.05), task="ordinal")
    assert rows[-1]["train_accuracy"] > 0.9


def test_grades_are_of_one_object_and_not_for_the_estimator() -> None:
    with pytest.raises(InputError, match="objects must be 1 for the task ordinal"):
        create_model("compact", num_classes=4, task="ordinal", objects=2)
    assert not ORDINAL.supports("classifier")
