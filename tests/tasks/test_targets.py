"""Targets of any form become the task's form, or one sentence says what would be right."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_raises
from torchcaps.errors import InputError
from torchcaps.ops.labels import is_correct
from torchcaps.tasks import TASKS, find_task, guess_task, task_of_targets

CLASSES = np.array([0, 2, 1, 0, 1, 2])
ONE_HOT = np.eye(3)[CLASSES]
TEXTS = np.array(["ant", "bee", "cat"])[CLASSES]
CLASS_FORMS: dict[str, Any] = {
    **{
        name: CLASSES.astype(name)
        for name in ("int8", "int32", "int64", "uint8", "uint16", "uint64", ">i4", "f4", "f8")
    },
    "list": CLASSES.tolist(),
    "tensor": torch.from_numpy(CLASSES),
    "column": CLASSES[:, None],
    "float column": CLASSES[:, None].astype(np.float32),
    "one-hot int": ONE_HOT.astype(int),
    "one-hot float": ONE_HOT,
    "one-hot bool": ONE_HOT.astype(bool),
    "one-hot tensor": torch.from_numpy(ONE_HOT).bfloat16(),
    "one-hot list": ONE_HOT.tolist(),
    "Fortran": np.asfortranarray(ONE_HOT),
    "texts": TEXTS,
    "bytes": TEXTS.astype("S"),
    "list of texts": TEXTS.tolist(),
    "objects that are texts": TEXTS.astype(object),
    "objects that are numbers": CLASSES.astype(object),
}


@pytest.mark.parametrize("form", CLASS_FORMS)
@pytest.mark.parametrize("outputs", [None, 3])
def test_classes_of_any_form(form: str, outputs: int | None) -> None:
    values = CLASS_FORMS[form]
    brought = find_task("classes").convert_targets(values, outputs)
    assert brought.dtype == torch.int64
    assert brought.tolist() == CLASSES.tolist()
    of_a_file = "regression" if form in ("f4", "f8", "float column") else "classes"  # floats of a file are numbers
    assert guess_task(values).name == of_a_file


def test_true_and_false_are_two_classes_or_a_label() -> None:
    values = np.array([True, False, True])
    assert find_task("classes").convert_targets(values, 2).tolist() == [1, 0, 1]
    assert guess_task(values).name == "labels"
    assert find_task("labels").convert_targets(values).tolist() == [[1], [0], [1]]


def test_texts_are_numbered_by_the_names_of_the_classes() -> None:
    assert find_task("classes").names(TEXTS) == ("ant", "bee", "cat")
    assert find_task("classes").names(CLASSES) == find_task("classes").names(ONE_HOT) == ("0", "1", "2")
    assert find_task("classes").names(np.eye(4)[CLASSES]) == ("0", "1", "2", "3")
    assert find_task("classes").convert_targets(["cat", "ant"], 3, class_names=("ant", "bee", "cat")).tolist() == [2, 0]
    with pytest.raises(InputError, match='the text "dog", which is not the name of a class'):
        find_task("classes").convert_targets(["dog"], 3, class_names=("ant", "bee", "cat"))


def test_rows_that_are_not_one_hot_stay_rows() -> None:
    rows = np.array([[1, 1, 0], [0.25, 0, 0.75], [0, 0, 1]])
    brought = find_task("classes").convert_targets(rows, 3)
    assert brought.dtype == torch.float32
    assert brought.tolist() == rows.tolist()


WRONG: dict[str, tuple[str, Any, int | None, str]] = {
    "texts in rows": ("classes", [["a", "b"], ["b", "a"]], 2, "must be whole numbers from 0"),
    "several labels": ("classes", [[1, 1, 0], [0, 1, 0]], None, 'set task="labels" (--task labels)'),
    "numbers": ("classes", [0.5, 1.25], None, 'set task="regression" (--task regression)'),
    "from 1": ("classes", [1, 2, 3], 3, "must be in 0..2, got 1..3; classes are counted from 0, so subtract 1"),
    "too high": ("classes", [0, 7], 3, "must be in 0..2, got 0..7"),
    "2⁶³": ("classes", np.array([0, 2**63], np.uint64), None, "2 images can have at most 2 classes"),
    "negative": ("classes", [-1, 0], None, "must be 0 or greater, got -1"),
    "NaN": ("classes", [0.0, np.nan], 3, "must be whole numbers from 0"),
    "objects": ("classes", np.array([{}, {}]), 3, "must be a tensor, an array or a list of numbers"),
    "None": ("classes", None, 3, "must be a tensor, an array or a list of numbers, got NoneType"),
    "ragged": ("classes", [[1], [1, 0]], 3, "rows of different lengths"),
    "complex": ("classes", np.array([1j]), 3, "got complex128 in the shape (1,)"),
    "shares beyond 1": ("classes", [[2.0, 0.0]], 2, "must lie in 0..1"),
    "no labels": ("labels", [[0, 2]], 2, "must be zeros and ones"),
    "numbers for labels": ("labels", [[0.5, 2]], 2, 'set task="regression"'),
    "classes for labels": ("labels", [0, 1, 2], 3, 'set task="classes"'),
    "columns": ("labels", [[0, 1]], 3, "must have 3 columns, one for each output, got 2"),
    "texts for numbers": ("regression", ["a"], 1, "must be finite numbers, (N,) or (N, T), got <U1"),
    "inf": ("regression", [np.inf], 1, "must be finite numbers"),
    "beyond float32": ("regression", [1e39], 1, "must be numbers within the range of float32, got 1e+39"),
}


@pytest.mark.parametrize("name", WRONG)
def test_targets_that_do_not_fit_are_one_sentence(name: str) -> None:
    task, values, outputs, words = WRONG[name]
    with pytest.raises(InputError) as raised:
        find_task(task).convert_targets(values, outputs, where="y")
    assert words in str(raised.value)
    assert str(raised.value).startswith("y ")
    assert "\n" not in str(raised.value)


def test_objects_are_classes_of_one_image() -> None:
    objects = find_task("classes", 2)
    assert objects.convert_targets([[0, 2], [1, 0]], 3).tolist() == [[0, 2], [1, 0]]
    for wrong in ([[1, 1]], [0, 1]):
        with pytest.raises(InputError, match="the different classes of the objects"):
            objects.convert_targets(wrong, 3)
    with pytest.raises(InputError, match="objects must be 1 for the task labels, got 2"):
        find_task("labels", 2)


def test_rows_of_zeros_and_ones_are_the_classes_of_several_objects() -> None:
    objects, pairs = TASKS["classes"].with_objects(2), [[0, 2], [1, 2], [0, 1]]
    rows = np.array([np.eye(3)[pair].sum(0) for pair in pairs])
    for form in (rows, rows.astype(bool), rows.astype(int).tolist()):
        assert objects.convert_targets(form, 3).tolist() == pairs
    for wrong in (np.eye(3), rows / 2, np.ones((3, 3))):
        assert_raises(
            InputError, objects.convert_targets, wrong, 3, say="labels in rows must be zeros and 2 ones for each image"
        )


def test_each_form_is_of_one_task() -> None:
    forms = {
        "classes": torch.tensor([1, 0]),
        "ordinal": torch.tensor([1, 0]),
        "labels": torch.tensor([[1.0, 0.0]]),
        "regression": torch.tensor([[1.5]]),
        "pixels": torch.zeros(1, 2, 2, dtype=torch.uint8),
    }
    assert forms.keys() == TASKS.keys() - {"objects"}, "masks of objects have the form of those of classes"
    for name, targets in forms.items():
        assert task_of_targets(targets).name == {"ordinal": "classes"}.get(name, name), "grades are named by the user"
        assert TASKS[name].convert_targets(targets, None).equal(targets)
    assert task_of_targets(torch.tensor([[2, 1, 0]])).objects == 3
    with pytest.raises(InputError, match="labels must be"):
        task_of_targets(torch.tensor([[1 + 1j]]))


def test_chance_is_of_the_classes_that_have_images() -> None:
    classes, labels = find_task("classes"), find_task("labels")
    share, error = classes.chance(torch.tensor([0, 0, 0, 2])) or (0, 0)
    assert (share, error) == pytest.approx((0.75, np.sqrt(0.75 * 0.25 / 4)))
    share, error = classes.chance(torch.tensor([0, 0, 0, 2]), balanced=True) or (0, 0)
    assert (share, error) == pytest.approx((0.5, np.sqrt(0.25 * (1 / 3 + 1)) / 2))
    assert classes.chance(torch.tensor([1, 1])) is None
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert labels.chance(rows) == pytest.approx((0.875, np.sqrt(0.75 * 0.25 / 2 / 4)))
    assert labels.chance(rows[:, :1]) is None


def test_one_hot_rows_are_right_where_their_classes_are() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (200, 3), generator=random).float()  # with equal scores
    classes = torch.randint(0, 3, (200,), generator=random)
    rows = torch.eye(3)[classes]
    for same in (rows, rows.long(), rows.bool().float(), rows * 0.75 + (1 - rows) * 0.125):
        assert is_correct(scores, same).equal(is_correct(scores, classes))
    two = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert is_correct(torch.tensor([[3.0, 2, 1], [3, 1, 2], [3, 2, 1]]), two).tolist() == [True, False, False]


@pytest.mark.slow
def test_tasks_load_without_torch() -> None:
    import subprocess

    code = "import sys, torchcaps.tasks, torchcaps.training.image_spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
