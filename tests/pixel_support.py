"""Images with masks, and the smallest network for pixels."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from torchcaps.datasets import ImageSet
from torchcaps.models import Losses, ModelOutput, Network, register_preset
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import Width
from torchcaps.tasks import TaskName


def discs(count: int, size: tuple[int, int] = (24, 20), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W) of a grey disc (class 1) and a white square (class 2), and their masks; uint8."""
    rng, (rows, columns) = np.random.default_rng(seed), np.indices(size)
    images, masks = rng.integers(0, 60, (count, *size)), np.zeros((count, *size), np.uint8)
    for image, mask in zip(images, masks, strict=True):
        (y, x), (top, left) = (rng.integers(4, np.array(size) - 6) for _ in range(2))
        mask[(rows - y) ** 2 + (columns - x) ** 2 <= 16] = 1
        mask[top : top + 5, left : left + 5] = 2
        image += 90 * (mask == 1) + 190 * (mask == 2)
    return images.clip(0, 255).astype(np.uint8), masks


def disc_set(count: int, size: tuple[int, int] = (24, 20), seed: int = 0) -> ImageSet:
    images, masks = map(torch.from_numpy, discs(count, size, seed))
    return ImageSet(images[:, None], masks)


class TinyPixels(Network):
    """Two convolutions.

    Args:
        tiny_width: Channels of the first convolution.
        classification_loss: Loss of the pixels.
    """

    per_pixel = True

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "pixels",
        tiny_width: Width = 8,
        classification_loss: Annotated[Spec, Choice("loss")] = "dice-cross-entropy",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.tiny_width, self.layers, self.decoder = tiny_width, nn.ModuleList(), None
        self.first = nn.Conv2d(in_shape[0], tiny_width, 3, padding=1)
        self.last = nn.Conv2d(tiny_width, num_classes, 3, padding=1)
        self.classification_loss = build("loss", classification_loss, num_classes=num_classes)

    def forward(self, images: Tensor, targets: Any = None, return_coupling: bool = False) -> ModelOutput:
        logits = self.last(self.first(images).relu())
        return ModelOutput(self._task.activate(logits, self), logits=logits)

    def loss(self, output: ModelOutput, images: Tensor, targets: Tensor) -> Losses:
        loss = self._task.loss(output, targets, self)
        return Losses(loss, loss)


def register_tiny_pixels() -> None:
    """Register the network and its preset; call it within ``registered_for_now``."""
    register("network", "tiny-pixels")(TinyPixels)
    register_preset("tiny-pixels", "Two convolutions.", network={"name": "tiny-pixels"}, in_shape=(1, 24, 20))


def write_folder(
    folder: Path,
    count: int,
    sizes: Sequence[tuple[int, int]] = ((24, 20),),
    change: Callable[[np.ndarray], np.ndarray] = lambda mask: mask,
) -> Path:
    """Write images/ and masks/ of discs; sizes take turns, and ``change`` is applied to each mask."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        images, masks = discs(count, sizes[number % len(sizes)])
        Image.fromarray(images[number]).save(folder / f"images/{number}.png")
        Image.fromarray(change(masks[number])).save(folder / f"masks/{number}.png")
    return folder
