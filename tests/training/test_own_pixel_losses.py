"""Modules and losses of one's own for the task pixels: by the right axes, or one sentence."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pixel_support import TinyPixels, disc_set
from torchcaps import fit
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.tasks import find_task
from torchcaps.training import Progress, Recipe

IMAGES = disc_set(8)
RECIPE = Recipe(epochs=2, batch_size=4, learning_rate=0.01)


def module(outputs: int, *, sigmoid: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, outputs, 3, padding=1)]
    return nn.Sequential(*layers, *([nn.Sigmoid()] if sigmoid else []))


def binary(images: ImageSet = IMAGES) -> tuple[Tensor, Tensor]:
    return images.images, (images.labels > 0).to(torch.uint8)


def dice(scores: Tensor, masks: Tensor) -> Tensor:
    """The usual formula, which broadcasts masks without a channel axis in silence."""
    shares = scores.sigmoid()
    return 1 - (2 * (shares * masks).sum() + 1) / (shares.sum() + masks.sum() + 1)


def squeezed(scores: Tensor, masks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores[:, 0], masks)


def start(outputs: int, data: Any, **options: Any) -> list[dict[str, Any]]:
    return fit(module(outputs), data, RECIPE, **{"task": "pixels", "progress": Progress()} | options)


LOSSES: dict[str, tuple[int, str | None, Any]] = {
    "cross-entropy": (3, None, F.cross_entropy),
    "cross-entropy, named axes": (3, "BHW", F.cross_entropy),
    "cross-entropy of squeezed masks": (3, "B1HW", lambda scores, masks: F.cross_entropy(scores, masks[:, 0])),
    "binary cross-entropy": (1, "B1HW", F.binary_cross_entropy_with_logits),
    "binary cross-entropy without a channel": (1, "BHW", squeezed),
    "Dice": (1, "B1HW", dice),
}
"""Scores of a pixel, axes and loss."""


@pytest.mark.parametrize("form", ["set", "arrays", "channel axis", "batches"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_gets_masks_of_its_axes(name: str, form: str) -> None:
    """Every form of masks gives the first loss that the formula gives by hand."""
    outputs, axes, loss = LOSSES[name]
    images, masks = (IMAGES.images, IMAGES.labels) if outputs > 1 else binary()
    data: Any = {
        "set": ImageSet(images, masks),
        "arrays": (images.numpy(), masks.numpy().astype(np.int64)),
        "channel axis": (images.numpy(), masks.numpy()[:, None].astype(np.float32)),
        "batches": [(image / 255, mask) for image, mask in zip(images, masks, strict=True)],
    }[form]
    rows = start(outputs, data, loss=loss, target_axes=axes)
    targets = masks.long() if outputs > 1 else masks.float()
    targets = targets[:, None] if axes == "B1HW" else targets
    whole = RECIPE.replace({"epochs": 1, "batch_size": 8})
    first = fit(module(outputs), data, whole, task="pixels", loss=loss, target_axes=axes, progress=Progress())
    with torch.no_grad():
        by_hand = float(loss(module(outputs)(images / 255), targets))
    assert first[0]["train_loss"] == pytest.approx(by_hand, rel=1e-5)
    assert rows[1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.parametrize(
    ("outputs", "loss", "options", "sentence"),
    [
        (
            1,
            dice,
            {},
            r"ambiguous, because the scores are \(4, 1, 24, 20\) and the masks \(4, 24, 20\); set target_axes",
        ),
        (3, F.mse_loss, {}, "the loss raised RuntimeError: .*; set target_axes of fit to the axes of the masks"),
        (1, F.binary_cross_entropy_with_logits, {"target_axes": "BHW"}, "the loss raised ValueError: .*target_axes"),
        (3, None, {"target_axes": "BHW"}, "target_axes is for a loss of your own for the task pixels"),
        (
            3,
            dice,
            {"task": "classes", "target_axes": "BHW"},
            "target_axes is for a loss of your own for the task pixels",
        ),
        (
            3,
            lambda scores, masks: F.cross_entropy(scores, masks.long()),
            {"task": None},
            r'needs scores \(B, J\), but .*; for a class of each pixel, set task="pixels"',
        ),
        (3, dice, {"target_axes": "BWH"}, "target_axes must be one of BHW, B1HW"),
        (3, dice, {"task": "masks"}, "task must be one of classes"),
    ],
)
def test_a_loss_that_does_not_fit_is_one_sentence(outputs: int, loss: Any, options: Any, sentence: str) -> None:
    images, masks = (IMAGES.images, IMAGES.labels) if outputs > 1 else binary()
    with pytest.raises(InputError, match=sentence):
        start(outputs, ImageSet(images, masks), loss=loss, **options)


def test_ignored_pixels_are_no_number_of_a_single_score() -> None:
    images, masks = binary()
    masks = masks.index_fill(1, torch.tensor([0]), 255)
    with pytest.raises(InputError, match=r"ignored pixels \(255\), but a loss of a single score"):
        start(1, (images, masks), loss=dice, target_axes="B1HW")
    ignoring = nn.CrossEntropyLoss(ignore_index=255)
    assert start(2, (images, masks), loss=ignoring)[-1]["train_loss"] > 0


def test_a_network_of_torchcaps_keeps_its_task_and_its_loss() -> None:
    network = TinyPixels((1, 24, 20), 3)
    assert len(fit(network, IMAGES, RECIPE, task="pixels", progress=Progress())) == 2
    for options in ({"task": "classes"}, {"task": "pixels", "target_axes": "BHW", "loss": dice}):
        with pytest.raises(
            InputError, match="made for the task pixels and has its own loss; leave task and target_axes"
        ):
            fit(network, IMAGES, RECIPE, progress=Progress(), **options)


@pytest.mark.parametrize("named", ["by fit", "by the module"])
@pytest.mark.parametrize("task", ["labels", "regression"])
def test_a_module_may_be_of_any_task(task: Any, named: str) -> None:
    """The task gives the loss and the metric, as of the linear model by hand."""
    torch.manual_seed(0)
    images = torch.rand(16, 1, 3, 3)
    targets = torch.stack([images[:, 0, 0, 0], images[:, 0, 1, 1]], 1)
    targets = (targets > 0.5).float() if task == "labels" else 20 * targets
    network: Any = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    if named == "by the module":
        network.task = task
    with torch.no_grad():
        scores = network(images)
    recipe = RECIPE.replace({"epochs": 1, "batch_size": 16})
    (row,) = fit(network, (images, targets), recipe, task=None if network_has(network) else task, progress=Progress())
    loss, metric = {
        "labels": (F.binary_cross_entropy_with_logits(scores, targets), ((scores > 0) == (targets > 0)).float().mean()),
        "regression": (
            F.mse_loss(scores, targets),
            1 - ((scores - targets) / targets.std(0, correction=0)).square().mean(),
        ),
    }[task]
    assert row["train_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert row["train_accuracy"] == pytest.approx(float(metric), rel=1e-5)


def network_has(network: Any) -> bool:
    return hasattr(network, "task")


def test_single_logits_of_a_module_are_scored_as_logits() -> None:
    """A logit of 0.3 is a probability of 0.57, so class 1; a probability of 0.3 is not."""
    masks, task = torch.ones(1, 4, 4, dtype=torch.uint8), find_task("pixels")
    logits = torch.full((1, 1, 4, 4), 0.3)
    logits[0, 0, 0, 0] = 7
    assert task.score(logits, masks, nn.Identity()) == 1
    assert task.score(logits.clamp(max=1), masks, nn.Identity()) < 0.2
    assert task.score(logits, masks, TinyPixels((1, 4, 4), 2)) < 0.2
