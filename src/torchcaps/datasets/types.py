"""What a data set is once it is loaded: uint8 images and their labels, in three parts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from torchcaps.datasets.images import resize_images
from torchcaps.errors import InputError

if TYPE_CHECKING:
    from torchcaps.datasets.pairs import PairSet


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and the class of each, or the classes of the P objects in each, whole in memory.

    Args:
        images: Pixels, uint8 from 0 (no ink) to 255, shape (N, C, H, W), N at least 1.
        labels: The class of each image, int64 from 0, shape (N,); with P objects an image, P at least 2, their
            classes, (N, P), no two of one image alike.
        parts: Each of the P objects alone on the same canvas, uint8, (N, P, C, H, W); None for images of one object,
            or where nobody knows.

    Raises:
        TypeError: When a dtype is another one.
        InputError: When the shapes do not fit each other, there is no image, a label is negative, or two of one image
            are alike.
    """

    images: UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, "N"] | Int64[Tensor, "N P"]
    parts: UInt8[Tensor, "N P C H W"] | None = None

    def __post_init__(self) -> None:
        _check_images(self.images)
        _check_labels(self.labels, len(self.images))
        if self.parts is not None:
            _check_parts(self)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def num_objects(self) -> int:
        """How many objects are in every image: P."""
        return self.labels.shape[1] if self.labels.ndim == 2 else 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of: images, labels, and parts where there are any."""
        return (self.images, self.labels) if self.parts is None else (self.images, self.labels, self.parts)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on another device (itself when they are there already)."""
        if self.images.device == torch.device(device):
            return self
        return ImageSet(*(tensor.to(device) for tensor in self.tensors))

    def take(self, n: int) -> ImageSet:
        """The first ``n`` images; ``n`` from 1 to all of them.

        Raises:
            InputError: When ``n`` is below 1 or there are fewer images.
        """
        if not 1 <= n <= len(self):
            raise InputError(f"the first {n} images were asked for, but 1 to {len(self)} can be taken")
        return ImageSet(*(tensor[:n] for tensor in self.tensors))

    def preview(self, n: int) -> ImageSet:
        """At most ``n`` images to look at: the first ones."""
        return self.take(min(n, len(self)))

    def select(self, indices: Int64[Tensor, "n"]) -> ImageSet:
        """The images at ``indices``, in that order, as a copy."""
        return ImageSet(*(tensor[indices] for tensor in self.tensors))

    def resize(self, size: tuple[int, int]) -> ImageSet:
        """The images, and their parts, brought to another height and width, as by `resize_images`."""
        parts = None
        if self.parts is not None:
            parts = resize_images(self.parts.flatten(0, 1), size).unflatten(0, self.parts.shape[:2])
        return ImageSet(resize_images(self.images, size), self.labels, parts)


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be uint8 pixels of 0..255, got {got}")
    if images.ndim != 4 or 0 in images.shape:
        raise InputError(f"images must have the shape (N, C, H, W) with no axis empty, got {tuple(images.shape)}")


def _check_labels(labels: Tensor, num_images: int) -> None:
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be int64, got {got}")
    if labels.shape[:1] != (num_images,) or labels.ndim > 2 or labels.shape[1:] in ((0,), (1,)):
        raise InputError(
            f"labels must have the shape ({num_images},), one for each image, or ({num_images}, P), one for each of "
            f"P objects from 2, got {tuple(labels.shape)}"
        )
    if labels.min() < 0:
        raise InputError(f"labels must be 0 or greater, got {int(labels.min())}")
    if labels.ndim == 2:
        rows = labels.sort(1).values
        alike = (rows[:, 1:] == rows[:, :-1]).any(1).nonzero()
        if len(alike):
            i = int(alike[0])
            raise InputError(f"the labels of one image must all differ, got {labels[i].tolist()} for image {i}")


def _check_parts(image_set: ImageSet) -> None:
    parts, images = image_set.parts, image_set.images
    assert parts is not None
    if parts.dtype != torch.uint8:
        raise TypeError(f"parts must be uint8 pixels of 0..255, got {parts.dtype}")
    wanted = (len(images), image_set.num_objects, *image_set.in_shape)
    if image_set.labels.ndim == 1 or parts.shape != wanted:
        raise InputError(
            f"parts must have the shape (N, P, C, H, W) and labels (N, P), of images (N, C, H, W); got "
            f"{tuple(parts.shape)}, {tuple(image_set.labels.shape)} and {tuple(images.shape)}"
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in its three parts, no image in two of them.

    Args:
        name: What it was loaded as, e.g. ``"mnist"`` or ``"folder:photos"``.
        train: Images to learn from; a `PairSet` makes them as they are asked for.
        validation: Images that choose the best epoch and the settings.
        test: Images for the one figure at the end; nothing is ever chosen by them.
        class_names: The name of each label, in the order of the labels, no two alike.

    Raises:
        InputError: When the parts differ in image shape or in the objects an image, a label has no class name, two
            have the same, or one is not UTF-8.
    """

    name: str
    train: ImageSet | PairSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, count in Counter(self.class_names).items():
            if count > 1:
                raise InputError(
                    f'{self.name}: two classes are called "{name}"; results are given by name, so each needs its own'
                )
            try:
                name.encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"{self.name}: the class {name!a} has a name that is not UTF-8, which no result can be "
                    "written by; rename it"
                ) from None
        for part in ("validation", "test"):
            images = getattr(self, part)
            if images.in_shape != self.train.in_shape:
                raise InputError(
                    f"{self.name}: the {part} images are {images.in_shape}, the training images {self.train.in_shape} "
                    "(channels, height, width); both must be the same"
                )
            if images.num_objects != self.train.num_objects:
                raise InputError(
                    f"{self.name}: the {part} images have {images.num_objects} objects each, the training images "
                    f"{self.train.num_objects}; both must be the same"
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

    @property
    def num_objects(self) -> int:
        """How many objects are in every image: P."""
        return self.train.num_objects
