"""Images and labels in memory, the building block of every data set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.checks import check, checked
from torchcaps.datasets.rng import Key
from torchcaps.errors import InputError
from torchcaps.machine import check_memory
from torchcaps.ranges import Pixels
from torchcaps.tasks import Task, any_form, task_of_targets
from torchcaps.words import counted

Names = Mapping[str, tuple[str, ...]]
"""Texts of each image, by their kind."""
_CHUNK = 2**20  # numbers resized at once, which limits float copies to a few MiB or to one image


class Images(ABC):
    """Base class of images in memory, with ``labels``, and with ``factors``, further values of each image."""

    labels: Any
    factors: Any
    names: Mapping[str, tuple[str, ...]] = {}
    """Names that belong to each image, by their kind."""
    at_once: int | None = None
    """Largest number of images in a batch; None: any number."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """Task of the labels."""

    @property
    def masks(self) -> Any:
        """The labels if they are masks, uint8; None for other labels."""
        return self.labels if self.labels[0].dtype == torch.uint8 else None

    @property
    @abstractmethod
    def num_objects(self) -> int:
        """Number of objects in every image: P."""

    @property
    @abstractmethod
    def can_be_augmented(self) -> bool:
        """True for pixels: uint8, or floats of 0..1."""

    @property
    @abstractmethod
    def has_parts(self) -> bool:
        """True if each object is known alone, or each image has one object."""

    @property
    @abstractmethod
    def in_shape(self) -> Any:
        """Channels and sides of every image: (C, *S)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the images, of which the fingerprint of a run is computed."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @property
    def epoch_size(self) -> int:
        """Number of training images in an epoch."""
        return len(self)

    @property
    def targets(self) -> Any:
        """Labels of the training images of an epoch; None if images are made anew in each epoch."""
        return self.labels

    @abstractmethod
    def to(self, device: torch.device | str) -> Images:
        """Return the images on another device; the set itself if it is on this device."""

    @abstractmethod
    def gather(self, index: Int64[Tensor, "B"], key: Key, n: int, share: slice) -> tuple[Tensor, ...]:
        """Return images, labels and perhaps parts at ``index``.

        Args:
            index: Numbers of the images in the epoch.
            key: Batch (seed, epoch, batch), from which all random numbers follow.
            n: Number of images in the full batch.
            share: Slice of the full batch to return.
        """

    @abstractmethod
    def preview(self, n: int) -> ImageSet:
        """Return the first ``n`` images, to be shown."""

    @abstractmethod
    def resize(self, size: tuple[int, int]) -> Images:
        """Return the images resized to (height, width)."""

    @abstractmethod
    def with_labels(self, change: Callable[[Tensor], Tensor]) -> Images:
        """Return the same images with ``change`` applied to their labels."""

    def for_evaluation(self) -> Images:
        """Return the images as evaluation takes them; InputError if they are for training only."""
        return self

    @abstractmethod
    def cropped(self, size: int) -> Images:
        """Return the square of ``size`` pixels in the middle of each image; see :func:`center_crop`."""


def images_of(data: Any) -> Images | None:
    """Return data that are images in memory; None for other data."""
    return data if isinstance(data, Images) else None


def for_task(images: Images, task: Task, num_outputs: int | None, where: str = "labels") -> Images:
    """Return images with their labels in the form of a task.

    Raises:
        InputError: The labels do not fit the task; the error begins with ``where``.
    """
    if images.task.name == task.name:
        return images
    if images.masks is not None:
        if images.task.form == task.form:
            return images
        raise InputError(
            f'{where} are masks, but the task is {task.name}; set task="{images.task.name}" (--task {images.task.name})'
        )
    if task.has_form(images.labels):
        return images
    return images.with_labels(partial(task.convert_targets, num_outputs=num_outputs, where=where))


@dataclass(frozen=True, eq=False)
class ImageSet(Images):
    """Images in memory, with one class each, or with the classes of P objects each.

    Args:
        images: Pixels, uint8 from 0 (no ink) to 255, shape (N, C, H, W), N at least 1; or, for more than 256 levels,
            float32 of 0..1. Sequences are float32 numbers (N, C, 1, L), with NaN after the end of each, and reach the
            network unchanged.
        labels: Class of each image, int64 from 0, shape (N,). With P objects in each image, P at least 2, their classes
            (N, P), all different within an image. For the task ``labels`` zeros and ones, for a regression any numbers,
            both float32 (N, J). For the task ``pixels`` the class of each pixel, uint8 (N, H, W); 255: ignored.
        parts: Image of each of the P objects alone on the same canvas, uint8, (N, P, C, H, W); None for images of one
            object, or if the single objects are unknown.
        factors: Further values of each image, (N,) for each name. Quantities are floats, such as ``"azimuth"`` and
            ``"elevation"`` in degrees; identifiers are int64, such as ``"instance"``. ``"weight"`` weights an image in
            the gradient.
        names: Names that belong to each image, N texts for each kind: ``"file"``, the path of its file from the folder
            of the data set; ``"group"``, such as its patient, which no split divides; ``"record"``, the long sequence
            that it is a window of.

    Raises:
        InputError: Shapes or dtypes do not fit, there is no image, a label is negative, or an image has the same label
            twice.
    """

    images: Float32[Tensor, "N C H W"] | UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, "N"] | Int64[Tensor, "N P"] | Float32[Tensor, "N J"] | UInt8[Tensor, "N H W"]
    parts: UInt8[Tensor, "N P C H W"] | None = None
    factors: Mapping[str, Shaped[Tensor, "N"]] = field(default_factory=dict, kw_only=True)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        images, sizes = self.images, dict[str, Any]()
        hints = get_type_hints(ImageSet, include_extras=True) | {"labels": any_form()}
        for each in fields(ImageSet):
            check(each.name, getattr(self, each.name), hints[each.name], sizes)
        for name, values in self.factors.items():
            check(f"the factor {name}", values, Shaped[Tensor, "N"], sizes)
        check_names(self.names, len(images))
        if 0 in images.shape:
            raise InputError(f"images must have the shape (N, C, H, W) with no axis empty, got {tuple(images.shape)}")
        if self.parts is not None and self.num_objects == 1:
            raise InputError("parts are for images of several objects, whose labels have the shape (N, P)")
        self.task.check_targets(self.labels)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return channels, height, width

    @cached_property
    def task(self) -> Task:
        """Task of the labels, by their form; numbers that are all zeros and ones count as ``labels``."""
        return task_of_targets(self.labels)

    @property
    def num_objects(self) -> int:
        return self.task.objects

    @property
    def has_parts(self) -> bool:
        return self.num_objects == 1 or self.parts is not None

    @cached_property
    def can_be_augmented(self) -> bool:
        """True for pixels: uint8, or floats of 0..1. False for other numbers, such as sequences."""
        return is_pixels(self.images)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.images, self.labels) if self.parts is None else (self.images, self.labels, self.parts)

    def to(self, device: torch.device | str) -> ImageSet:
        if self.images.device == torch.device(device):
            return self
        return self._each(lambda tensor: tensor.to(device))

    def take(self, n: int | None) -> ImageSet:
        """Return the first ``n`` images; the set itself if ``n`` is None or at least its size."""
        return self if n is None or n >= len(self) else self._each(lambda tensor: tensor[:n])

    def preview(self, n: int) -> ImageSet:
        return self.take(n)

    def gather(
        self,
        index: Int64[Tensor, "B"],
        key: Key = (0, 0, 0),  # noqa: ARG002  used by sets that draw random numbers
        n: int = 0,  # noqa: ARG002
        share: slice = slice(None),  # noqa: ARG002
    ) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def select(self, indices: Int64[Tensor, "n"]) -> ImageSet:
        """Return a copy of the images at ``indices``, in that order."""
        return self._each(lambda tensor: tensor[indices])

    def followed_by(self, other: ImageSet) -> ImageSet:
        """Return the images of both sets, those of ``other`` last.

        Factors and names that only one of them has are left out.
        """
        if self.images.dtype != other.images.dtype:  # uint8 beside images with more levels
            ours, theirs = (replace(each, images=to_floats(each.images)) for each in (self, other))
            return ours.followed_by(theirs)
        pairs = zip(self.tensors, other.tensors, strict=True)
        factors = {
            name: torch.cat([self.factors[name], other.factors[name]]) for name in self.factors if name in other.factors
        }
        return ImageSet(
            *(torch.cat(pair) for pair in pairs), factors=factors, names=join_names(self.names, other.names)
        )

    def resize(self, size: tuple[int, int]) -> ImageSet:
        """Return the set resized to (height, width): images and parts by `resize_images`, masks by `resize_masks`.

        Sequences are padded with NaN to (1, length); InputError if they are longer.
        """
        if not self.can_be_augmented and self.in_shape[1] == 1:
            return self.with_pixels(partial(_pad_sequences_to, size=size))
        return self.with_pixels(partial(resize_images, size=size), partial(resize_masks, size=size))

    def with_pixels(
        self, change: Callable[[Tensor], Tensor], change_masks: Callable[[Tensor], Tensor] | None = None
    ) -> ImageSet:
        """Return the set with ``change``, a function of images (N, C, H, W), applied to images, parts and masks.

        Masks are changed as images of one channel, by ``change_masks`` if given.
        """
        parts, masks = None, change_masks or change
        if self.parts is not None:
            parts = change(self.parts.flatten(0, 1)).unflatten(0, self.parts.shape[:2])
        labels = self.labels if self.masks is None else masks(self.labels.unsqueeze(1)).squeeze(1)
        return replace(self, images=change(self.images), labels=labels, parts=parts)

    def with_labels(self, change: Callable[[Tensor], Tensor]) -> ImageSet:
        return replace(self, labels=change(self.labels))

    def cropped(self, size: int) -> ImageSet:
        check_crop(self.in_shape, size)
        y, x = ((length - size) // 2 for length in self.in_shape[1:])
        return self.with_pixels(lambda images: images[..., y : y + size, x : x + size])

    def _each(self, change: Callable[[Tensor], Tensor]) -> ImageSet:
        """Return the set with ``change``, which may leave images out, applied to every tensor and to the names."""
        factors = {name: change(values) for name, values in self.factors.items()}
        names = select_names(self.names, change(torch.arange(len(self)))) if self.names else {}
        return ImageSet(*map(change, self.tensors), factors=factors, names=names)


def check_names(names: Names, images: int) -> None:
    """Raise an error unless each kind of names has a text for each image."""
    for kind, texts in names.items():
        check(f"the names {kind}", texts, tuple)
        if len(texts) != images:
            raise InputError(
                f"the names {kind} must be {counted(images, 'text')}, one for each image, got {len(texts)}"
            )


def select_names(names: Names, indices: Int64[Tensor, "n"]) -> Names:
    """Return the names of the images at ``indices``."""
    numbers = indices.tolist()
    return {kind: tuple(texts[n] for n in numbers) for kind, texts in names.items()}


def join_names(first: Names, second: Names) -> Names:
    """Return the names of images of two sets; kinds that only one of them has are left out."""
    return {kind: (*texts, *second[kind]) for kind, texts in first.items() if kind in second}


def _pad_sequences_to(sequences: Float32[Tensor, "N C 1 l"], size: tuple[int, int]) -> Float32[Tensor, "N C 1 L"]:
    """Pad sequences with NaN to the length of a network."""
    steps = sequences.shape[-1]
    if size[0] != 1 or size[1] < steps:
        raise InputError(
            f"sequences of {steps:,} steps are not resized to {size[0]}×{size[1]}; leave --image-size out, and cut "
            "sequences that are longer than those of a trained network"
        )
    return F.pad(sequences, (0, size[1] - steps), value=torch.nan)


def to_floats(images: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return pixels, uint8 of 0..255 or floats of 0..1, as floats of 0..1."""
    return images if images.is_floating_point() else images / 255


def is_pixels(images: Shaped[Tensor, "N C H W"]) -> bool:
    """Return True for uint8, and for floats of 0..1 that are no sequences."""
    if images.dtype == torch.uint8:
        return True
    return images.shape[-2] > 1 and bool((images >= 0).all()) and bool((images <= 1).all())


@checked
def resize_images(
    images: UInt8[Tensor, "N C h w"] | Float32[Tensor, "N C h w"], size: tuple[Pixels, Pixels]
) -> UInt8[Tensor, "N C H W"] | Float32[Tensor, "N C H W"]:
    """Resize images to ``size`` (height, width in pixels), bicubic, with smoothing if they shrink.

    Height and width have separate factors, so another aspect ratio is stretched, not cropped.

    Raises:
        InputError: The images are no tensor (N, C, h, w) of uint8 or float32, ``size`` is not two numbers of pixels, or
            the resized images do not fit into memory.
    """
    if images.shape[2:] == torch.Size(size):
        return images
    count, channels = images.shape[:2]
    resized = count * channels * math.prod(size) * images.itemsize
    check_memory(2 * resized, f"{count:,} images of {size[0]}×{size[1]} pixels")  # chunks, and the joined tensor
    at_once = max(1, _CHUNK // (channels * max(math.prod(images.shape[2:]), math.prod(size))))
    chunks = (
        F.interpolate(chunk.float(), size, mode="bicubic", align_corners=False, antialias=True)
        for chunk in images.split(at_once)
    )
    if images.is_floating_point():
        return torch.cat([chunk.clamp_(0, 1) for chunk in chunks])
    return torch.cat([chunk.round_().clamp_(0, 255).to(torch.uint8) for chunk in chunks])


def resize_masks(masks: UInt8[Tensor, "N 1 h w"], size: tuple[int, int]) -> UInt8[Tensor, "N 1 H W"]:
    """Resize masks to ``size`` (height, width in pixels): each pixel gets the class of the nearest one."""
    return F.interpolate(masks.float(), size, mode="nearest-exact").to(torch.uint8)


@checked
def center_crop(image_set: ImageSet, size: int) -> ImageSet:
    """Cut the square of ``size`` pixels out of the middle of images and parts.

    If the middle lies between two pixels, the upper left one counts. The result shares its memory with the given set.

    Raises:
        InputError: ``size`` is below 1 or larger than the images.
    """
    return image_set.cropped(size)


def check_crop(in_shape: tuple[int, ...], size: int) -> None:
    """Raise InputError if images of this shape are smaller than a square of ``size`` pixels."""
    smallest = min(in_shape[1:])
    if not 1 <= size <= smallest:
        raise InputError(f"crop is {size} pixels, but squares of 1 to {smallest} can be cut out of these images")
