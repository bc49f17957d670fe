"""Results as numbers, tables and figures, and figures inside the axes of a caller."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from torchcaps.analysis import Evaluation, Probe, Probing, Robustness, RobustnessCurve, TargetEvaluation
from torchcaps.analysis.results import Comparison, Result, lower_first, percent
from torchcaps.errors import InputError


@dataclasses.dataclass(frozen=True)
class Number(Result):
    value: float


def test_a_result_is_a_dict_of_its_fields_without_tables_or_figures() -> None:
    result = Number(2.0)
    assert (result.to_dict(), list(result.tables()), dict(result.figures())) == ({"value": 2.0}, [], {})


@pytest.mark.parametrize(
    ("images", "title"),
    [
        ({"a": "MNIST"}, "a: MNIST"),
        ({"a": ""}, "a"),
        ({"a": "MNIST", "b": "MNIST"}, "MNIST"),
        ({"a": "MNIST", "b": "digits"}, "a: MNIST\nb: digits"),
    ],
)
def test_a_comparison_names_networks_and_images(images, title) -> None:
    assert Comparison(dict.fromkeys(images), images).title == title


@pytest.mark.parametrize(("share", "text"), [(None, "–"), (0.9944, "99.44 %"), (1.0, "100.00 %")])
def test_shares_are_percentages(share, text) -> None:
    assert percent(share) == text


def test_a_sentence_continues_with_a_small_letter() -> None:
    assert (lower_first("Test image 3"), lower_first("")) == ("test image 3", "")


def curve(kind: Any) -> RobustnessCurve:
    return RobustnessCurve(kind, (0.0, 0.1), (0.9, 0.5), 10)


SCORES = np.array([[0.9, 0.1], [0.2, 0.7], [0.6, 0.4]])
LABELS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
ONE_AXES = {
    "evaluation": Evaluation(np.array([0, 1, 1]), SCORES, 0.1, ("ant", "bee"), "network, images"),
    "labels": TargetEvaluation("labels", LABELS, SCORES, 0.1, 0.9, ("ant", "bee"), "network, images"),
    "regression": TargetEvaluation("regression", LABELS, SCORES, 0.1, 0.9, ("ant", "bee"), "network, images"),
    "probing": Probing({"a": [Probe("pose", 16, {"rotation": 0.5}, {"rotation": 0.0})]}, {"a": "images"}),
    "robustness": Robustness({"a": [curve("fgsm")]}, {"a": "images"}),
}


@pytest.mark.parametrize("result", ONE_AXES.values(), ids=ONE_AXES)
def test_figures_of_one_axes_are_drawn_into_the_axes_of_the_caller(result) -> None:
    figure = Figure(figsize=(8, 4))
    left, right = figure.subplots(1, 2)
    assert dict(result.figures(ax=right)) == {"": figure}
    assert not left.has_data()
    assert right.has_data()
    (alone,) = result.figures().values()
    drawn = next(axes for axes in alone.axes if axes.has_data())
    assert [len(right.lines), len(right.patches), len(right.images)] == [
        len(drawn.lines),
        len(drawn.patches),
        len(drawn.images),
    ]
    assert (right.get_xlabel(), right.get_ylabel()) == (drawn.get_xlabel(), drawn.get_ylabel())


def test_several_kinds_of_robustness_do_not_fit_one_axes() -> None:
    result = Robustness({"a": [curve("fgsm"), curve("pgd")]}, {"a": "images"})
    with pytest.raises(InputError, match="ax takes curves of one kind, got fgsm, pgd"):
        result.figures(ax=Figure().subplots())
