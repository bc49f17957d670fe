"""What a data set is once it is loaded: uint8 images and their labels, in three parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from torchcaps.errors import InputError


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and the class of each, whole in memory.

    Args:
        images: Pixels, uint8 from 0 (no ink) to 255, shape (N, C, H, W), N at least 1.
        labels: The class of each image, int64 from 0, shape (N,).

    Raises:
        TypeError: When a dtype is another one.
        InputError: When the shapes do not fit each other, there is no image, or a label is negative.
    """

    images: UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, "N"]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8 pixels of 0..255, got {self.images.dtype}")
        if self.labels.dtype != torch.int64:
            raise TypeError(f"labels must be int64, got {self.labels.dtype}")
        if self.images.ndim != 4 or 0 in self.images.shape:
            raise InputError(
                f"images must have the shape (N, C, H, W) with no axis empty, got {tuple(self.images.shape)}"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise InputError(
                f"labels must have the shape ({len(self.images)},), one for each image, got {tuple(self.labels.shape)}"
            )
        if self.labels.min() < 0:
            raise InputError(f"labels must be 0 or greater, got {int(self.labels.min())}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on another device (itself when they are there already)."""
        if self.images.device == torch.device(device):
            return self
        return ImageSet(self.images.to(device), self.labels.to(device))

    def take(self, n: int) -> ImageSet:
        """The first ``n`` images; ``n`` from 1 to all of them.

        Raises:
            InputError: When ``n`` is below 1 or there are fewer images.
        """
        if not 1 <= n <= len(self):
            raise InputError(f"the first {n} images were asked for, but 1 to {len(self)} can be taken")
        return ImageSet(self.images[:n], self.labels[:n])

    def select(self, indices: Int64[Tensor, "n"]) -> ImageSet:
        """The images at ``indices``, in that order, as a copy."""
        return ImageSet(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in its three parts, no image in two of them.

    Args:
        name: What it was loaded as, e.g. ``"mnist"`` or ``"folder:photos"``.
        train: Images to learn from.
        validation: Images that choose the best epoch and the settings.
        test: Images for the one figure at the end; nothing is ever chosen by them.
        class_names: The name of each label, in the order of the labels, no two alike.

    Raises:
        InputError: When the parts differ in image shape, a label has no class name, or two have the same.
    """

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        repeated = [name for n, name in enumerate(self.class_names) if name in self.class_names[:n]]
        if repeated:
            raise InputError(
                f'{self.name}: two classes are called "{repeated[0]}"; results are given by name, so each needs its own'
            )
        for part in ("validation", "test"):
            shape = getattr(self, part).in_shape
            if shape != self.train.in_shape:
                raise InputError(
                    f"{self.name}: the {part} images are {shape}, the training images {self.train.in_shape} "
                    "(channels, height, width); both must be the same"
                )
        for part in ("train", "validation", "test"):
            highest = int(getattr(self, part).labels.max())
            if highest >= self.num_classes:
                raise InputError(
                    f"{self.name}: a {part} label is {highest}, but the {self.num_classes} classes "
                    f"go from 0 to {self.num_classes - 1}"
                )

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        return self.train.in_shape

    @property
    def num_classes(self) -> int:
        """How many classes there are: J."""
        return len(self.class_names)
