"""One answer for several files: the mean of their scores, for every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import assert_raises
from torchcaps.analysis import Prediction
from torchcaps.analysis.calibration import Calibration
from torchcaps.analysis.groups import GroupAnswers, average_answers, group_files
from torchcaps.analysis.photos import PhotoAnswers
from torchcaps.datasets.preparation import Prepared
from torchcaps.errors import InputError

FILES = [Path("b/1.png"), Path("a/1.png"), Path("b/2.png")]
SCORES = np.array([[0.9, 0.1, 0.3], [0.2, 0.4, 0.8], [0.0, 0.6, 0.5]], dtype=np.float32)
PIXELS = np.zeros((1, 4, 4), np.uint8)


def answers(classes: Any, calibration: Calibration | None = None, **options: Any) -> GroupAnswers:
    prepared = [Prepared(PIXELS, ("cut",)), Prepared(PIXELS), Prepared(PIXELS, ("cut", "turned light"))]
    said = Prediction(np.array(classes), SCORES, None, [("single",)] * 3)
    single = PhotoAnswers(FILES, prepared, said, ("x", "y", "z"), **options)
    return average_answers(single, group_files(FILES, "^."), calibration)


def test_groups_keep_the_order_of_their_files() -> None:
    assert group_files(FILES, "^.") == {"b": [0, 2], "a": [1]}
    assert group_files(FILES, r"(\d)\.png") == {"1": [0, 1], "2": [2]}
    assert group_files(FILES, r"(c)?/") == {"/": [0, 1, 2]}, "a group that takes no part leaves the whole match"
    assert_raises(InputError, group_files, FILES, "a", say="--group 'a' does not match b/1.png")


@pytest.mark.parametrize(
    ("task", "classes", "given"),
    [
        ("classes", [0, 2, 1], [["x"], ["z"]]),
        ("classes", [[0, 2], [2, 1], [1, 2]], [["x", "z"], ["z", "y"]]),
        ("labels", [0, 2, 1], [[], ["z"]]),
        ("regression", [0, 2, 1], [["x 0.45", "y 0.35", "z 0.4"], ["x 0.2", "y 0.4", "z 0.8"]]),
    ],
)
def test_every_task_has_an_answer_for_a_group(task: Any, classes: Any, given: list[list[str]]) -> None:
    found = answers(classes, task=task)
    assert [found.given(n) for n in range(2)] == given
    np.testing.assert_allclose(found.prediction.scores, [SCORES[[0, 2]].mean(0), SCORES[1]])
    assert [each["group"] for each in found.to_dict()] == ["b", "a"]
    if task == "classes":
        several = np.ndim(classes) == 2
        assert [each["classes"] if several else [each["class"]] for each in found.to_dict()] == given
    assert [each["prepared"] for each in found.to_dict()] == [("cut", "turned light"), ()]
    assert found.to_csv().splitlines()[1].startswith("b,2,")
    assert [each.title.partition("  (")[2] for each in found.tables()] == ["mean of 2 images)", "1 image)"]


def test_the_mean_is_compared_with_the_bounds_of_the_network() -> None:
    unsure = answers([0, 2, 1], Calibration(score=0.5)).prediction.caveats
    assert unsure[1] == ()
    assert unsure[0] == ("length 0.45 is below 0.50",)
