"""Random augmentation of training images: shifts, crops, mirroring, rotation, scaling, brightness and contrast.

Random numbers are drawn on the CPU for a full batch at a time, and each kind of change has a separate stream. So a
batch is the same on any device (rotated images up to rounding) and with any number of processes. Switching one change
on or off does not affect another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float32, Float64, Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.datasets import hvc_augmentation
from torchcaps.datasets.affine import Interpolation, cut_windows, inverse_maps, linear_maps, warp
from torchcaps.datasets.image_set import check_crop
from torchcaps.datasets.rng import BRIGHTNESS, CONTRAST, CROPS, FLIPS, ROTATIONS, SCALINGS, SHIFTS, Key, stream_of
from torchcaps.errors import InputError
from torchcaps.parts import Settings
from torchcaps.ranges import IGNORED, Degrees, Fill, Share, ShareBelowOne

_MIN_SCALE = 1e-3  # smaller images would vanish


class Changes(NamedTuple):
    """Random changes of each image of a batch. None: this change is switched off."""

    corners: Int64[Tensor, "B 2"]
    """Row and column where the window begins, counted from the corner of the padded image."""
    linear: Float64[Tensor, "B 2 2"] | None = None
    """Matrix that rotates and scales the image about its centre, before the window is cut out."""
    flips: Int64[Tensor, "B"] | None = None
    """1 if the image is mirrored left to right, else 0."""
    brightness: Float32[Tensor, "B"] | None = None
    """Number added to every pixel (0..1)."""
    contrast: Float32[Tensor, "B"] | None = None
    """Relative change of the distance of every pixel from the mean of its channel."""
    published: Float64[Tensor, "B N"] | None = None
    """Random numbers of a published augmentation."""

    def share(self, part: slice) -> Changes:
        """Return the changes of a part of the images."""
        return Changes._make(None if each is None else each[part] for each in self)


@dataclass(frozen=True)
class Augmentation(Settings):
    """Random augmentation of training images.

    Images are first rotated and scaled about their centres. Then they are moved, cropped and mirrored, and contrast and
    brightness are changed. If an image has several objects, the image of each single object changes in the same way. So
    do masks, with the nearest pixel; their pixels that enter from outside are ignored.

    Args:
        max_shift: Largest shift in pixels. The shifts down and to the right are uniform in -max_shift..max_shift.
        crop: Side in pixels of a square cut out at a random position; None: the full image.
        flip: Mirror an image left to right, with probability 1/2.
        brightness: Largest number added to all pixels (0..1) of an image. The number is uniform in ±brightness, and the
            result is clipped to 0..1.
        contrast: Largest relative change of the contrast. The distance of pixels from the mean of their channel is
            multiplied by a factor uniform in 1 ± contrast, one for each image. The result is clipped to 0..1.
        max_rotation: Largest angle of rotation, degrees. The angle is uniform in ±max_rotation.
        max_scaling: Largest relative change of size. The factor is uniform in 1 ± max_scaling. Rotated and scaled
            images are interpolated bilinearly.
        fill: Pixels that enter when an image is moved, rotated or scaled: ``"zeros"``, or the nearest pixel of the
            ``"edge"``.
        published_augmentation: Augmentation of a publication instead of the other options; see
            :mod:`torchcaps.datasets.hvc_augmentation`.

    Raises:
        InputError: A number is out of the range of its field.
    """

    max_shift: int = 0
    crop: int | None = None
    flip: bool = False
    brightness: Share = 0.0
    contrast: Share = 0.0
    max_rotation: Degrees = 0.0
    max_scaling: ShareBelowOne = 0.0
    fill: Fill = "zeros"
    published_augmentation: Literal["none", "hvc2021"] = "none"

    def check(self, in_shape: tuple[int, ...], num_objects: int, has_masks: bool = False) -> None:
        """Raise InputError if images of this shape and with this number of objects cannot be augmented like this."""
        if self.published_augmentation != "none":
            self._check_published(in_shape, num_objects, has_masks)
        smallest = min(in_shape[1:])
        moves = (self.max_shift, self.crop, self.max_rotation, self.max_scaling)
        if len(in_shape) == 4 and moves != (0, None, 0, 0):
            raise InputError(
                "volumes can be mirrored and changed in brightness and contrast, but not moved, cropped, rotated or "
                "scaled; set max_shift, max_rotation and max_scaling to 0, and leave crop out"
            )
        if not 0 <= self.max_shift < smallest:
            raise InputError(
                f"max_shift is {self.max_shift} pixels, but images of {smallest} pixels can be moved by 0 to "
                f"{smallest - 1}"
            )
        if self.crop is not None:
            check_crop(in_shape, self.crop)
        if num_objects > 1 and (self.brightness or self.contrast):
            raise InputError(
                f"brightness and contrast are for images of one object, got {num_objects} objects in each; changed, it "
                "would not be the sum of its objects"
            )

    def _check_published(self, in_shape: tuple[int, ...], num_objects: int, has_masks: bool) -> None:
        own = self.published_augmentation
        name = f'published_augmentation="{own}" (--published-augmentation {own})'
        alone = Augmentation(fill=self.fill, published_augmentation=self.published_augmentation)
        others = [field.name for field in fields(self) if getattr(self, field.name) != getattr(alone, field.name)]
        if others:
            raise InputError(f"{name} replaces all other changes of images; leave out {' and '.join(others)}")
        if len(in_shape) == 4 or num_objects > 1 or has_masks:
            raise InputError(f"{name} is for images of one object without masks; choose other augmentation")
        if min(in_shape[1:]) < hvc_augmentation.MIN_SIDE:
            least = hvc_augmentation.MIN_SIDE
            raise InputError(f"{name} needs images of at least {least}×{least} pixels, got {in_shape[1]}×{in_shape[2]}")

    def draw(self, in_shape: tuple[int, int, int], n: int, key: Key) -> Changes:
        """Draw the changes of a batch of ``n`` images, whose shape before the crop is ``in_shape``.

        ``key`` is (seed, epoch, batch).
        """

        def uniform(stream: int, limit: float) -> Tensor | None:
            return (2 * torch.rand(n, generator=stream_of(stream, key)) - 1) * limit if limit else None

        m, corners, linear, zeros = self.max_shift, torch.zeros(n, 2, dtype=torch.int64), None, torch.zeros(n)
        if m:  # a window that begins at m - shift shows the image moved by the shift
            corners += m - torch.randint(-m, m + 1, (n, 2), generator=stream_of(SHIFTS, key))
        if self.crop is not None:
            generator, free = stream_of(CROPS, key), [length - self.crop + 1 for length in in_shape[1:]]
            corners += torch.stack([torch.randint(each, (n,), generator=generator) for each in free], 1)
        rotation, scaling = uniform(ROTATIONS, self.max_rotation), uniform(SCALINGS, self.max_scaling)
        if rotation is not None or scaling is not None:
            scale = (1 + (zeros if scaling is None else scaling)).clamp(min=_MIN_SCALE)
            linear = linear_maps(zeros if rotation is None else rotation, scale[:, None].expand(-1, 2))
        flips = torch.randint(2, (n,), generator=stream_of(FLIPS, key)) if self.flip else None
        published = None if self.published_augmentation == "none" else hvc_augmentation.draw(n, key)
        brightness, contrast = uniform(BRIGHTNESS, self.brightness), uniform(CONTRAST, self.contrast)
        return Changes(corners, linear, flips, brightness, contrast, published)

    def apply(self, images: Shaped[Tensor, "B C H W"], changes: Changes) -> Float32[Tensor, "B C h w"]:
        """Change images, uint8 of 0..255 or float32 of 0..1, and return pixels of 0..1."""
        if changes.published is not None:
            pixels = hvc_augmentation.apply(images, changes.published)
            return pixels / 255 if images.dtype == torch.uint8 else pixels
        pixels = self._moved(images, changes, self.fill)

        def each(numbers: Tensor) -> Tensor:
            return numbers.to(images.device, non_blocking=True).view(-1, *[1] * (images.ndim - 1))

        if changes.contrast is not None:
            mean = pixels.mean(tuple(range(2, pixels.ndim)), keepdim=True)
            pixels = (pixels - mean) * each(1 + changes.contrast) + mean
        pixels = pixels / 255 if images.dtype == torch.uint8 else pixels
        if changes.brightness is not None:
            pixels = pixels + each(changes.brightness)
        recoloured = changes.brightness is not None or changes.contrast is not None
        return pixels.clamp(0, 1) if recoloured else pixels

    def apply_to_masks(self, masks: UInt8[Tensor, "B H W"], changes: Changes) -> UInt8[Tensor, "B h w"]:
        """Move masks as :meth:`apply` moves their images, to the nearest pixel. Pixels from outside are ignored."""
        inverted = IGNORED - masks.unsqueeze(1)  # so that zeros from outside become IGNORED
        return IGNORED - self._moved(inverted, changes, "zeros", "nearest").to(torch.uint8)[:, 0]

    def _moved(
        self, images: Shaped[Tensor, "B C H W"], changes: Changes, fill: Fill, mode: Interpolation = "bilinear"
    ) -> Float32[Tensor, "B C h w"]:
        """Rotate, scale, move, crop and mirror images; values keep their range."""
        height, width = images.shape[-2:]
        size = (height, width) if self.crop is None else (self.crop, self.crop)

        def here(numbers: Tensor) -> Tensor:
            return numbers.to(images.device, non_blocking=True)

        if images.ndim == 5:  # volumes, which are not moved
            pixels = images.float()
        elif changes.linear is None:
            pixels = cut_windows(images, here(changes.corners), size, self.max_shift, fill).float()
        else:
            # offset (down, right) from the centre of the image to the centre of the window; flipped to (x, y) below
            free = torch.tensor([size[0] - height, size[1] - width]) / 2
            offset = changes.corners - self.max_shift + free
            maps = inverse_maps(changes.linear, -offset.flip(1))
            pixels = warp(images, here(maps.float()), size, fill, mode)
        if changes.flips is not None:
            flips = here(changes.flips).view(-1, *[1] * (images.ndim - 1))
            pixels = torch.where(flips.bool(), pixels.flip(-1), pixels)
        return pixels
