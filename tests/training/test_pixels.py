"""Networks for pixels are trained and evaluated: torchcaps' own, and a module of one's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pixel_support import TinyPixels, disc_set, register_tiny_pixels
from support import assert_close, assert_raises, registered_for_now
from tiny_runs import StopAt
from torchcaps import fit
from torchcaps.analysis import evaluate
from torchcaps.datasets import Augmentation, BatchLoader, PatchSet
from torchcaps.errors import InputError
from torchcaps.ops.segmentation import pixel_cross_entropy
from torchcaps.parts import build
from torchcaps.ranges import IGNORED
from torchcaps.training import Interrupted, Progress, Recipe

RECIPE = Recipe(epochs=12, batch_size=8, learning_rate=2e-2, schedule="one-cycle")


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with registered_for_now():
        register_tiny_pixels()
        yield


def test_a_network_learns_discs_and_is_evaluated() -> None:
    torch.manual_seed(0)
    network = TinyPixels((1, 24, 20), 3)
    rows = fit(network, disc_set(48), RECIPE, validation=disc_set(16, seed=1), progress=Progress())
    found = evaluate(network, disc_set(16, seed=1), class_names=["ground", "disc", "square"])
    assert found.accuracy == pytest.approx(max(row["validation_accuracy"] for row in rows), abs=1e-6)
    assert found.accuracy > 0.8
    assert found.loss == pytest.approx(min(row["validation_loss"] for row in rows), rel=0.5)
    assert [row["name"] for row in found.per_class] == ["ground", "disc", "square"]
    assert found.per_class[1]["dice"] > 0.7


def test_images_larger_than_the_network_are_seen_in_windows() -> None:
    network = TinyPixels((1, 24, 20), 3).eval()
    large = disc_set(3, (40, 31))
    whole, parts = (network(large.images / 255), network._task.infer(network, large.images / 255))
    inside = (slice(None), slice(None), slice(0, 15), slice(0, 11))  # seen by one window, far from its edges
    assert_close(parts.scores[inside], whole.scores[inside], tol=1e-6)
    assert evaluate(network, large).num_images == 3


def test_a_module_of_ones_own_says_its_task() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    module.task = "pixels"
    images = disc_set(48)
    (*_, last) = fit(module, images, RECIPE, progress=Progress())
    assert last["train_accuracy"] > 0.6
    with torch.no_grad():
        assert float(pixel_cross_entropy(module(images.images / 255), images.labels)) < 0.3
    del module.task
    assert_raises(
        InputError, fit, module, images, RECIPE, say='labels are masks, but the task is classes; set task="pixels"'
    )


@pytest.mark.parametrize("loss", ["dice", "pixel-cross-entropy", "dice-cross-entropy", "pixel-margin"])
def test_each_loss_is_a_part(loss: str) -> None:
    network, images = TinyPixels((1, 24, 20), 3, classification_loss=loss), disc_set(8)
    output = network(images.images / 255)
    before = float(network.loss(output, images.images, images.labels).total.detach())
    right = torch.nn.functional.one_hot(images.labels.long(), 3).movedim(3, 1).float()
    part = build("loss", loss)
    assert float(part(right, images.labels)) < float(part(1 - right, images.labels))
    assert np.isfinite(before)


def test_class_weights_weigh_the_gradient_of_each_pixel() -> None:
    images, gradients = disc_set(8), []
    for weights in (None, (1.0, 2.0, 4.0)):
        torch.manual_seed(0)
        network = TinyPixels((1, 24, 20), 3, classification_loss="pixel-cross-entropy")
        before = network.last.bias.detach().clone()
        recipe = Recipe(epochs=1, batch_size=8, learning_rate=1.0, class_weights=weights)
        fit(network, images, recipe.replace({"optimizer": {"name": "sgd", "momentum": 0.0}}), progress=Progress())
        gradients.append(before - network.last.bias.detach())
    torch.manual_seed(0)
    network = TinyPixels((1, 24, 20), 3)
    logits = network(images.images / 255).logits.detach().requires_grad_()
    (plain,) = torch.autograd.grad(pixel_cross_entropy(logits, images.labels), logits)
    weighted = plain * torch.tensor([1.0, 2.0, 4.0])[images.labels.long()].unsqueeze(1)
    assert_close(gradients[0], plain.sum((0, 2, 3)), tol=1e-5)
    assert_close(gradients[1], weighted.sum((0, 2, 3)), tol=1e-5)


def test_a_stopped_run_on_patches_resumes_to_the_bit(tmp_path: Path) -> None:
    recipe = Recipe(epochs=2, batch_size=4, learning_rate=1e-2, flip=True, max_rotation=20.0)
    small, large = disc_set(6), disc_set(4, (40, 31))
    data = PatchSet((*small.images, *large.images), (*small.labels, *large.labels), patch=(16, 16))
    weights = []
    for stops in (False, True):
        torch.manual_seed(0)
        network = TinyPixels((1, 16, 16), 3)
        options = {"validation": large, "out": tmp_path / str(stops)}
        if stops:
            with pytest.raises(Interrupted):
                fit(network, data, recipe, progress=StopAt(7), **options)
            torch.manual_seed(0)
            network = TinyPixels((1, 16, 16), 3)
        fit(network, data, recipe, progress=Progress(), **options)
        weights.append(network.state_dict())
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


def test_masks_move_with_their_images() -> None:
    images = disc_set(16)
    bright = images.with_pixels(lambda pixels: (80 * (pixels > 75)).to(torch.uint8), lambda masks: masks)
    for options in ({"max_shift": 5}, {"max_rotation": 180.0, "max_scaling": 0.3, "flip": True}, {"crop": 12}):
        loader = BatchLoader(bright, 16, shuffle=True, augmentation=Augmentation(**options))
        (batch,) = loader.batches(0)
        inside = batch.labels != IGNORED
        assert batch.labels.shape == batch.images.shape[:1] + batch.images.shape[2:]
        agree = ((batch.images[:, 0] > 40 / 255) == (batch.labels > 0))[inside].float().mean()
        assert agree > 0.97, options
        assert (batch.images[:, 0][~inside] < 80 / 255).all()
        assert ("crop" in options) == bool(inside.all())
    resized = images.resize((48, 40))
    assert resized.labels[:, ::2, ::2].equal(images.labels)
