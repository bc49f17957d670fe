"""Images of different sizes, or volumes, with masks: random patches for training, whole images for evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from torchcaps.checks import check
from torchcaps.datasets.image_set import (
    Images,
    ImageSet,
    check_names,
    is_pixels,
    join_names,
    resize_images,
    resize_masks,
    select_names,
)
from torchcaps.datasets.rng import PATCHES, Key, stream_of
from torchcaps.errors import InputError
from torchcaps.ranges import IGNORED
from torchcaps.tasks import Task, find_task
from torchcaps.words import counted

CLASS_SHARE = 0.5
"""Share of the patches that are taken around a pixel of a class; all other patches lie anywhere."""
NO_PATCH: tuple[int, ...] = ()
"""Sides of the patches of a set before :func:`sized` decides them."""
MAX_NAMED = 3
"""Largest number of sizes that an error names."""


@dataclass(frozen=True, eq=False)
class PatchSet(ImageSet):
    """Images of different sizes, or volumes, with masks.

    Training draws patches: half of them around a pixel of a class, each class of the image (except the background)
    equally likely, and half of them anywhere. An epoch has as many patches as cover all images. An image that is
    smaller than a patch is continued by its edge pixels, which are ignored. Evaluation takes whole images, one at a
    time.

    Args:
        images: Pixels of each image (C, H, W) or (C, D, H, W), all with the same number of channels and axes, and all
            uint8 of 0..255 or all float32 of 0..1.
        labels: Mask of each image, uint8 (H, W) or (D, H, W); 255: ignored.
        patch: Sides of a patch, pixels, one for each axis. Without them, images may have any sizes until
            ``load_dataset`` decides on patches or one size.
        spacing: Distances of neighbouring pixels along the axes of each image, such as millimetres; None: 1.
        is_whole: Images are taken whole.

    Raises:
        InputError: Images and masks differ in number or size, images in channels or axes, or ``patch`` does not fit.
    """

    images: Any
    labels: Any
    patch: tuple[int, ...] = NO_PATCH
    spacing: tuple[tuple[float, ...], ...] | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        for name in ("images", "labels", "patch"):
            check(f"PatchSet: {name}", getattr(self, name), Sequence[Any])
        check_names(self.names, len(self.images))
        if not self.images or len(self.images) != len(self.labels):
            raise InputError(
                f"there must be a mask for each image, and one image at least, got "
                f"{counted(len(self.images), 'image')} and "
                f"{counted(len(self.labels), 'mask')}"
            )
        for number, (image, mask) in enumerate(zip(self.images, self.labels, strict=True)):
            check(f"image {number}", image, UInt8[Tensor, "C ..."] | Float32[Tensor, "C ..."])
            check(f"mask {number}", mask, UInt8[Tensor, "..."])
            fits = len(image) == len(self.images[0]) and image.dtype == self.images[0].dtype
            if image.shape[1:] != mask.shape or not fits or image.numel() == 0:
                raise InputError(
                    f"image {number} has the shape {tuple(image.shape)} and its mask {tuple(mask.shape)}; all images "
                    f"must have {counted(len(self.images[0]), 'channel')} and one dtype, and a mask must have the size "
                    "of its image"
                )
        axes = self.labels[0].ndim
        if axes not in (2, 3) or any(mask.ndim != axes for mask in self.labels) or len(self.patch) not in (0, axes):
            raise InputError(f"images must have 2 axes, or 3, and patch a side for each, got {self.patch} for {axes}")

    @property
    def in_shape(self) -> Any:
        """Channels and sides of a patch: (C, H, W) or (C, D, H, W)."""
        return len(self.images[0]), *self.patch

    @cached_property
    def task(self) -> Task:
        return find_task("pixels")

    @cached_property
    def can_be_augmented(self) -> bool:
        return all(map(is_pixels, self.images))

    @property
    def epoch_size(self) -> int:
        return len(self._image_of)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.images, *self.labels

    @cached_property
    def _image_of(self) -> Int64[Tensor, "epoch_size"]:
        """Number of the image of each patch."""
        if self.is_whole:
            return torch.arange(len(self))
        tiles = [
            math.prod(-(-size // side) for size, side in zip(m.shape, self.patch, strict=True)) for m in self.labels
        ]
        return torch.arange(len(self)).repeat_interleave(torch.tensor(tiles))

    @property
    def at_once(self) -> int | None:  # type: ignore[override]  # read only
        """1 for whole images, which may differ in size."""
        return 1 if self.is_whole else None

    def for_evaluation(self) -> PatchSet:
        return replace(self, is_whole=True)

    def with_labels(self, change: Callable[[Tensor], Tensor]) -> PatchSet:
        return replace(self, labels=tuple(map(change, self.labels)))

    def to(self, device: torch.device | str) -> PatchSet:
        images, masks = (tuple(each.to(device) for each in tensors) for tensors in (self.images, self.labels))
        return replace(self, images=images, labels=masks)

    def take(self, n: int | None) -> PatchSet:
        return self if n is None or n >= len(self) else self.select(torch.arange(n))

    def select(self, indices: Int64[Tensor, "n"]) -> PatchSet:
        def chosen(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[i] for i in indices.tolist())

        spacing = None if self.spacing is None else chosen(self.spacing)
        names = select_names(self.names, indices)
        return replace(self, images=chosen(self.images), labels=chosen(self.labels), spacing=spacing, names=names)

    def followed_by(self, other: Any) -> PatchSet:
        spacing = None if self.spacing is None or other.spacing is None else (*self.spacing, *other.spacing)
        images, labels = (*self.images, *other.images), (*self.labels, *other.labels)
        return replace(self, images=images, labels=labels, spacing=spacing, names=join_names(self.names, other.names))

    def resize(self, size: tuple[int, int]) -> PatchSet:
        """Return the set with all images resized to (height, width), and masks to the nearest pixel."""
        if self.labels[0].ndim != 2:
            raise InputError("volumes cannot be resized; leave image_size (--image-size) out")
        images = tuple(resize_images(each[None], size)[0] for each in self.images)
        masks = tuple(resize_masks(each[None, None], size)[0, 0] for each in self.labels)
        return replace(self, images=images, labels=masks, patch=tuple(map(min, self.patch, size)))

    def cropped(self, size: int) -> PatchSet:  # noqa: ARG002  as the base class
        raise InputError("images that training takes patches of cannot be cropped; leave crop (--crop) out")

    def gather(
        self, index: Int64[Tensor, "B"], key: Key = (0, 0, 0), n: int = 0, share: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Return patches, or whole images of one size, and their masks."""
        numbers = self._image_of[index.cpu()].tolist()
        if self.is_whole:
            pairs = [(self.images[i], self.labels[i]) for i in numbers]
        else:
            drawn = torch.rand(n, 3 + len(self.patch), generator=stream_of(PATCHES, key))[share]
            pairs = [self._patch(i, each) for i, each in zip(numbers, drawn.tolist(), strict=True)]
        if not pairs:  # a process without a share of the last batch
            image, mask = self.images[0], self.labels[0]
            return image.new_empty(0, *self.in_shape), mask.new_empty(0, *self.patch)
        return tuple(map(torch.stack, zip(*pairs, strict=True)))

    def _patch(self, number: int, drawn: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return a patch of an image and of its mask, by random numbers of 0..1."""
        image, mask = self.images[number], self.labels[number]
        around, which, where, *places = drawn
        free = [max(size - side, 0) for size, side in zip(mask.shape, self.patch, strict=True)]
        corner = [int(place * (most + 1)) for place, most in zip(places, free, strict=True)]
        classes = [j for j in mask.unique().tolist() if j != IGNORED]
        classes = [j for j in classes if j] or classes
        if around < CLASS_SHARE and classes:
            pixels = (mask == classes[int(which * len(classes))]).flatten().nonzero()[:, 0]
            middle = torch.unravel_index(pixels[int(where * len(pixels))], mask.shape)
            inside = [int(place * side) for place, side in zip(places, self.patch, strict=True)]
            corner = [min(max(int(m) - i, 0), most) for m, i, most in zip(middle, inside, free, strict=True)]
        for axis, (first, side, size) in enumerate(zip(corner, self.patch, mask.shape, strict=True)):
            rows = torch.arange(first, first + side, device=mask.device)
            image = image.index_select(axis + 1, rows.clamp(max=size - 1))
            mask = mask.index_select(axis, rows.clamp(max=size - 1)).index_fill(
                axis, (rows >= size).nonzero()[:, 0], IGNORED
            )
        return image, mask


def sized(images: Images, size: tuple[int, int] | None, patch: int | tuple[int, ...] | None, where: str) -> Images:
    """Return images of a data set in the size that training takes.

    Args:
        images: The images.
        size: Height and width to resize them to; None: they keep their size.
        patch: Sides of the patches of images with masks, or one side for all axes. None: whole images.
        where: Name of the data set, which begins errors.

    Raises:
        InputError: Images cannot be resized, images for patches have no masks, or whole images differ in size.
    """
    images = images if size is None else images.resize(size)
    if images.masks is None and patch is not None:
        raise InputError(
            f"{where} has no masks, and only images with masks are trained on in patches; leave patch (--patch) out"
        )
    if patch is None and getattr(images, "patch", None) != NO_PATCH:
        return images
    sides = {tuple(mask.shape) for mask in images.labels}
    axes = len(next(iter(sides)))
    if patch is None and len(sides) > 1:
        side = max(8, min(min(map(min, sides)), 128) // 8 * 8)
        resize = ", or bring them to one size with --image-size" if axes == 2 else ""
        first = ", ".join("×".join(map(str, each)) for each in sorted(sides)[:MAX_NAMED]) + ", …" * (
            len(sides) > MAX_NAMED
        )
        raise InputError(
            f"{where} has images of {len(sides)} sizes ({first}); train on patches of them with --patch, such as "
            f"--patch {side}{resize}"
        )
    many: Any = images
    if patch is None and axes == 2:
        return ImageSet(torch.stack(many.images), torch.stack(many.labels), names=many.names)
    own: Any = {"spacing": getattr(images, "spacing", None), "names": many.names}
    patch = (patch,) * axes if isinstance(patch, int) else patch or sides.pop()
    return PatchSet(tuple(many.images), tuple(many.labels), patch=patch, **own)
