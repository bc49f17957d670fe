"""Random changes of training images: they are moved, cropped, mirrored, turned, scaled, and changed in colour.

Every number is drawn on the CPU, for a full batch at a time, from a stream of its own: a batch looks the same on any
device (turned images up to rounding), in one process or in many, and each change is the same whatever else is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor

from torchcaps.datasets.affine import cut_windows, inverse_maps, linear_maps, warp
from torchcaps.datasets.image_set import check_crop
from torchcaps.datasets.rng import BRIGHTNESS, CONTRAST, CROPS, FLIPS, ROTATIONS, SCALINGS, SHIFTS, Key, stream_of
from torchcaps.errors import InputError
from torchcaps.parts import Settings
from torchcaps.ranges import Degrees, Fill, Share, ShareBelowOne

_SMALLEST = 1e-3  # factor of the size: an image that is no larger has vanished


class Changes(NamedTuple):
    """The changes of each image of a batch; None for a change that is not made."""

    corners: Int64[Tensor, "B 2"]
    """Row and column at which the window onto the image begins, counted from the corner of the image's margin."""
    linear: Float64[Tensor, "B 2 2"] | None = None
    """The matrix that turns and scales the image about its centre, before the window is cut out."""
    flips: Int64[Tensor, "B"] | None = None
    """1 where the image is mirrored left to right."""
    brightness: Float32[Tensor, "B"] | None = None
    """The number that is added to every pixel (0..1)."""
    contrast: Float32[Tensor, "B"] | None = None
    """The change of the distance of every pixel from the mean of its channel of the image, as a share of it."""

    def share(self, part: slice) -> Changes:
        """The changes of some of the images."""
        return Changes._make(None if each is None else each[part] for each in self)


@dataclass(frozen=True)
class Augmentation(Settings):
    """Random changes of training images.

    Images are turned and scaled first, about their centres; then moved, cropped, mirrored, and changed in contrast and
    brightness. The parts of an image with several objects go where it goes.

    Args:
        max_shift: Largest shift in pixels; each image's shifts down and to the right are uniform in
            -max_shift..max_shift.
        crop: Side in pixels of the squares to cut out of the images, at a random place; None for full images.
        flip: Whether to mirror an image left to right, with probability 1/2.
        brightness: Largest change of all pixels (0..1) of an image; the change is uniform in ± that, and the result
            clipped to 0..1.
        contrast: Largest change of the contrast: the distance of an image's pixels from the mean of their channel is
            multiplied by a factor uniform in 1 ± that, one an image, and the result clipped to 0..1.
        max_rotation: Largest angle that an image is turned by, degrees; the angle is uniform in ± that.
        max_scaling: Largest change of size; the factor is uniform in 1 ± that. Turned and scaled images are
            interpolated bilinearly.
        fill: What comes in from outside of an image that is moved, turned or scaled: ``"zeros"``, or the nearest pixel
            of its ``"edge"``.

    Raises:
        InputError: A number is out of the range in its field's type.
    """

    max_shift: int = 0
    crop: int | None = None
    flip: bool = False
    brightness: Share = 0.0
    contrast: Share = 0.0
    max_rotation: Degrees = 0.0
    max_scaling: ShareBelowOne = 0.0
    fill: Fill = "zeros"

    def check(self, in_shape: tuple[int, int, int], num_objects: int) -> None:
        """Raise InputError unless images of this shape, each with so many objects, can be changed like this."""
        smallest = min(in_shape[1:])
        if not 0 <= self.max_shift < smallest:
            raise InputError(
                f"max_shift is {self.max_shift} pixels, but images of {smallest} pixels can be moved by 0 to "
                f"{smallest - 1}"
            )
        if self.crop is not None:
            check_crop(in_shape, self.crop)
        if num_objects > 1 and (self.brightness or self.contrast):
            raise InputError(
                f"brightness and contrast are for images of one object, got {num_objects} an image: changed, the full "
                "image would not be the sum of its parts any more"
            )

    def draw(self, in_shape: tuple[int, int, int], n: int, key: Key) -> Changes:
        """The changes of the ``n`` images, of shape ``in_shape`` before the crop, of the batch (seed, epoch, batch)."""

        def uniform(which: int, most: float) -> Tensor | None:
            return (2 * torch.rand(n, generator=stream_of(which, key)) - 1) * most if most else None

        m, corners, linear, none = self.max_shift, torch.zeros(n, 2, dtype=torch.int64), None, torch.zeros(n)
        if m:  # from m - shift on the image is seen moved by the shift
            corners += m - torch.randint(-m, m + 1, (n, 2), generator=stream_of(SHIFTS, key))
        if self.crop is not None:
            generator, free = stream_of(CROPS, key), [length - self.crop + 1 for length in in_shape[1:]]
            corners += torch.stack([torch.randint(each, (n,), generator=generator) for each in free], 1)
        rotation, scaling = uniform(ROTATIONS, self.max_rotation), uniform(SCALINGS, self.max_scaling)
        if rotation is not None or scaling is not None:
            scale = (1 + (none if scaling is None else scaling)).clamp(min=_SMALLEST)
            linear = linear_maps(none if rotation is None else rotation, scale[:, None].expand(-1, 2))
        flips = torch.randint(2, (n,), generator=stream_of(FLIPS, key)) if self.flip else None
        return Changes(corners, linear, flips, uniform(BRIGHTNESS, self.brightness), uniform(CONTRAST, self.contrast))

    def apply(self, images: UInt8[Tensor, "B C H W"], changes: Changes) -> Float32[Tensor, "B C h w"]:
        """Change images and bring them to 0..1."""
        _, _, height, width = images.shape
        size = (height, width) if self.crop is None else (self.crop, self.crop)

        def here(numbers: Tensor) -> Tensor:
            return numbers.to(images.device, non_blocking=True)

        def each(numbers: Tensor) -> Tensor:
            return here(numbers)[:, None, None, None]

        if changes.linear is None:
            pixels = cut_windows(images, here(changes.corners), size, self.max_shift, self.fill).float()
        else:
            # from the centre of the image to that of the window, (down, right), turned round to (x, y)
            free = torch.tensor([size[0] - height, size[1] - width]) / 2
            offset = changes.corners - self.max_shift + free
            maps = inverse_maps(changes.linear, -offset.flip(1))
            pixels = warp(images, here(maps.float()), size, self.fill)
        if changes.flips is not None:
            pixels = torch.where(each(changes.flips).bool(), pixels.flip(-1), pixels)
        if changes.contrast is not None:
            mean = pixels.mean((2, 3), keepdim=True)
            pixels = (pixels - mean) * each(1 + changes.contrast) + mean
        pixels = pixels / 255
        if changes.brightness is not None:
            pixels = pixels + each(changes.brightness)
        recoloured = changes.brightness is not None or changes.contrast is not None
        return pixels.clamp(0, 1) if recoloured else pixels
