"""Masks: their forms, names, statistics, weights and chance."""

from typing import Any

import numpy as np
import pytest
import torch

from pixel_support import discs
from support import assert_raises
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.ranges import IGNORED
from torchcaps.tasks import find_task, guess_task, task_of_targets
from torchcaps.training.step import balanced_weights, weights_of

TASK = find_task("pixels")
MASKS = discs(6)[1]
FORMS: dict[str, Any] = {
    **{name: MASKS.astype(name) for name in ("uint8", "int64", "uint16", ">i4", "f4")},
    "channel": MASKS[:, None],
    "tensor": torch.from_numpy(MASKS),
    "list": MASKS.tolist(),
    "Fortran": np.asfortranarray(MASKS),
}


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_any_form(form: str) -> None:
    brought = TASK.convert_targets(FORMS[form], 3)
    assert brought.dtype == torch.uint8
    assert brought.tolist() == MASKS.tolist()
    assert task_of_targets(brought).name == "pixels"
    assert guess_task(MASKS).name == "pixels"


WRONG: dict[str, tuple[Any, str]] = {
    "classes": ([0, 1, 2], 'set task="classes" (--task classes)'),
    "fractions": (MASKS + 0.5, "must be masks"),
    "too high": (MASKS + 5, "must be in 0..2, or 255 for ignored pixels, got 5..7"),
    "negative": (MASKS.astype(int) - 1, "must be in 0..2"),
    "empty": (MASKS[:, :0], "must be masks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_do_not_fit_are_one_sentence(name: str) -> None:
    values, words = WRONG[name]
    assert_raises(InputError, TASK.convert_targets, values, 3, "y", say=words)


@pytest.mark.parametrize("name", ["classes", "labels", "regression"])
def test_other_tasks_name_this_one(name: str) -> None:
    assert_raises(InputError, find_task(name).convert_targets, MASKS, say='set task="pixels" (--task pixels)')


def test_ignored_pixels_are_no_class() -> None:
    masks = torch.from_numpy(MASKS.copy())
    masks[:, 0] = IGNORED
    assert TASK.names(masks) == ("0", "1", "2")
    assert TASK.names(masks.clamp(max=0)) == ("0", "1")
    assert TASK.describe(("a", "b", "c"), masks[0]) == "a + b + c"
    statistics = TASK.statistics(masks, 3)
    assert statistics["images"] == [6, 6, 6]
    assert sum(statistics["% of pixels"]) == pytest.approx(100)
    counts = [int((masks == j).sum()) for j in range(3)]
    class_counts = TASK.class_counts(masks)
    assert class_counts is not None
    assert class_counts.tolist() == counts
    weights = balanced_weights(class_counts)
    assert weights.tolist() == pytest.approx([sum(counts) / (3 * each) for each in counts])
    of_pixels = weights_of(weights, masks)
    assert of_pixels.shape == (6, 1, 24, 20)
    assert float(of_pixels[0, 0, 0, 0]) == 0
    assert float(of_pixels.sum()) == pytest.approx(sum(counts))


def test_chance_is_the_best_single_class() -> None:
    masks = torch.zeros(4, 2, 4, dtype=torch.uint8)
    masks[:2, 0] = 1
    # all 1: Dice 2·4 / (8 + 4) in two images, 0 in the others; all 0: 0 in two images, 1 in the others
    found = TASK.chance(masks)
    assert found is not None
    assert found[0] == pytest.approx(0.5)


def test_a_missing_class_and_a_network_for_images_are_refused() -> None:
    masks = torch.from_numpy(MASKS).clamp(max=1)
    words = "no training mask has the class 2 (vein); add images with it"
    assert_raises(InputError, TASK.check_training, masks, ("ground", "leaf", "vein"), "leaves", say=words)
    words = "gives one answer for each image, but the task pixels needs a score for each pixel"
    assert_raises(InputError, create_model, "compact", task="pixels", say=words)
