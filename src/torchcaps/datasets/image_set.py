"""Images in memory, with the class of each: what every data set is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.machine import check_memory
from torchcaps.ranges import Pixels
from torchcaps.tasks import Task, any_form, task_of_targets

_CHUNK = 2**20  # numbers resized at once: bounds the float copies to a few MiB, or to those of one image


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and the class of each, or the classes of the P objects in each, all in memory.

    Args:
        images: Pixels, uint8 from 0 (no ink) to 255, shape (N, C, H, W), N at least 1. Sequences are float32 numbers,
            (N, C, 1, L), which a network is given as they are, NaN after the end of each.
        labels: The class of each image, int64 from 0, shape (N,); with P objects an image, P at least 2, their
            classes, (N, P), no two of one image alike. For the task ``labels`` zeros and ones, for a regression
            numbers, float32, (N, J).
        parts: Each of the P objects alone on the same canvas, uint8, (N, P, C, H, W); None for images of one object,
            or where the single objects are not known.
        factors: What else is known of each image, by its name, (N,) each: quantities as floats, such as ``"azimuth"``
            and ``"elevation"`` in degrees, and what only names a thing, such as ``"instance"``, as int64. By
            ``"weight"`` an image counts in the gradient of training.

    Raises:
        InputError: The shapes or dtypes do not fit, there is no image, a label is negative, or two labels of one image
            are alike.
    """

    images: Float32[Tensor, "N C H W"] | UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, "N"] | Int64[Tensor, "N P"] | Float32[Tensor, "N J"]
    parts: UInt8[Tensor, "N P C H W"] | None = None
    factors: Mapping[str, Shaped[Tensor, "N"]] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        images, sizes = self.images, dict[str, Any]()
        for name, hint in (get_type_hints(ImageSet, include_extras=True) | {"labels": any_form()}).items():
            check(name, getattr(self, name), hint, sizes)
        for name, values in self.factors.items():
            check(f"the factor {name}", values, Shaped[Tensor, "N"], sizes)
        if 0 in images.shape:
            raise InputError(f"images must have the shape (N, C, H, W) with no axis empty, got {tuple(images.shape)}")
        self.task.check_form(self.labels, has_parts=self.parts is not None)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @cached_property
    def task(self) -> Task:
        """The task whose form the labels have; numbers that are all zeros and ones count as labels."""
        return task_of_targets(self.labels)

    @property
    def num_objects(self) -> int:
        """How many objects are in every image: P."""
        return self.task.objects

    @property
    def is_pixels(self) -> bool:
        """Whether images are uint8, which may be changed at random, and not numbers, such as sequences."""
        return self.images.dtype == torch.uint8

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Images, labels, and parts where there are any."""
        return (self.images, self.labels) if self.parts is None else (self.images, self.labels, self.parts)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on another device (itself when they are there already)."""
        if self.images.device == torch.device(device):
            return self
        return self._each(lambda tensor: tensor.to(device))

    def take(self, n: int | None) -> ImageSet:
        """The first ``n`` images; all of them, the set itself, where there are no more or ``n`` is None."""
        return self if n is None or n >= len(self) else self._each(lambda tensor: tensor[:n])

    def preview(self, n: int) -> ImageSet:
        """At most ``n`` images to look at: the first ones."""
        return self.take(n)

    def gather(self, index: Int64[Tensor, "B"], *_batch: object) -> tuple[Tensor, ...]:
        """The tensors of the images at ``index``; those of a `PairSet` depend on the batch, too."""
        return tuple(tensor[index] for tensor in self.tensors)

    def select(self, indices: Int64[Tensor, "n"]) -> ImageSet:
        """The images at ``indices``, in that order, as a copy."""
        return self._each(lambda tensor: tensor[indices])

    def resize(self, size: tuple[int, int]) -> ImageSet:
        """The images, and their parts, brought to another height and width, as by `resize_images`."""
        return self.with_pixels(lambda images: resize_images(images, size))

    def with_pixels(self, change: Callable[[Tensor], Tensor]) -> ImageSet:
        """The set with ``change``, of images (N, C, H, W), made to the images and to their parts."""
        parts = None
        if self.parts is not None:
            parts = change(self.parts.flatten(0, 1)).unflatten(0, self.parts.shape[:2])
        return replace(self, images=change(self.images), parts=parts)

    def _each(self, change: Callable[[Tensor], Tensor]) -> ImageSet:
        """The set with ``change`` made to all that it holds."""
        factors = {name: change(values) for name, values in self.factors.items()}
        return ImageSet(*map(change, self.tensors), factors=factors)


def pad_sequences(sequences: Sequence[Float[np.ndarray, "C l"]], length: int, where: str) -> Float32[Tensor, "N C 1 L"]:
    """Sequences of any lengths as numbers of one shape, NaN after the end of each.

    Raises:
        InputError: A number is NaN, infinite or beyond float32; the sentence begins with ``where``.
    """
    padded = torch.full((len(sequences), len(sequences[0]), 1, length), torch.nan)
    for row, each in zip(padded, sequences, strict=True):
        with np.errstate(over="ignore"):
            numbers = np.asarray(each, np.float32)
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{where} has a number that is NaN, infinite or beyond float32 before the end of its sequence"
            )
        row[:, 0, : each.shape[1]] = torch.from_numpy(numbers)
    return padded


@checked
def resize_images(images: UInt8[Tensor, "N C h w"], size: tuple[Pixels, Pixels]) -> UInt8[Tensor, "N C H W"]:
    """Bring images to ``size`` (height, width in pixels), bicubic, smoothed first where they shrink.

    Height and width are scaled by a factor each: another aspect ratio is stretched, not cropped.

    Raises:
        InputError: The images are no uint8 tensor or have another shape, ``size`` is not two numbers of pixels, or the
            images do not fit into memory at that size.
    """
    if images.shape[2:] == torch.Size(size):
        return images
    count, channels = images.shape[:2]
    resized = count * channels * math.prod(size)
    check_memory(2 * resized, f"{count:,} images of {size[0]}×{size[1]} pixels")  # the chunks and their copy in one
    at_once = max(1, _CHUNK // (channels * max(math.prod(images.shape[2:]), math.prod(size))))
    chunks = (
        F.interpolate(chunk.float(), size, mode="bicubic", align_corners=False, antialias=True)
        for chunk in images.split(at_once)
    )
    return torch.cat([chunk.round_().clamp_(0, 255).to(torch.uint8) for chunk in chunks])


@checked
def center_crop(image_set: ImageSet, size: int) -> ImageSet:
    """The squares of ``size`` pixels in the middle of images and parts; of two middles the upper left one.

    The pixels are shared with the given set.

    Raises:
        InputError: ``size`` is below 1 or larger than the images.
    """
    check_crop(image_set.in_shape, size)
    y, x = ((length - size) // 2 for length in image_set.in_shape[1:])
    return image_set.with_pixels(lambda images: images[..., y : y + size, x : x + size])


def check_crop(in_shape: tuple[int, int, int], size: int) -> None:
    """Raise InputError unless squares of ``size`` pixels can be cut out of images of this shape."""
    smallest = min(in_shape[1:])
    if not 1 <= size <= smallest:
        raise InputError(f"crop is {size} pixels, but squares of 1 to {smallest} can be cut out of these images")
