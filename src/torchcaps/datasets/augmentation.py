"""Random changes of training images: they are moved, cropped, mirrored, turned, scaled, and changed in colour.

Every number is drawn on the CPU, for a whole batch at a time, from a stream of its own: a batch looks the same on any
device, in one process or in many, and each change is the same whatever else is done.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from torchcaps.checks import check
from torchcaps.datasets.affine import FARTHEST, inverse_maps, linear_maps, sample
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.rng import BRIGHTNESS, CONTRAST, CROPS, FLIPS, ROTATIONS, SCALINGS, SHIFTS, Key, stream_of
from torchcaps.errors import InputError
from torchcaps.ranges import Degrees, Fill, Share, ShareBelowOne


class Changes(NamedTuple):
    """The changes of each image of a batch; None for a change that is not made."""

    corners: Int64[Tensor, "B 2"]
    """Row and column at which the window onto the image begins, counted from the corner of the image's margin."""
    linear: Float[Tensor, "B 2 2"] | None = None
    """The matrix that turns and scales the image about its centre, before the window is cut out."""
    flips: Int64[Tensor, "B"] | None = None
    """1 where the image is mirrored left to right."""
    brightness: Float32[Tensor, "B"] | None = None
    """The number that is added to every pixel (0..1)."""
    contrast: Float32[Tensor, "B"] | None = None
    """The factor of the distance of every pixel from the mean of its channel of the image."""

    def share(self, part: slice) -> Changes:
        """The changes of some of the images."""
        return Changes._make(None if each is None else each[part] for each in self)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    Images are turned and scaled first, about their centres; then moved, cropped, mirrored, and changed in contrast and
    brightness. The parts of an image with several objects go where it goes.

    Args:
        max_shift: Largest shift in pixels; each image's shifts down and to the right are uniform in
            -max_shift..max_shift.
        crop: Side in pixels of the squares to cut out of the images, at a random place for training, else in the
            middle (of two middles the upper left one); None for whole images.
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

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            check(name, getattr(self, name), hint)

    def check(self, in_shape: tuple[int, int, int], num_objects: int) -> None:
        """Raise InputError unless images of this shape, each with so many objects, can be changed like this."""
        smallest = min(in_shape[1:])
        if not 0 <= self.max_shift < smallest:
            raise InputError(
                f"max_shift is {self.max_shift} pixels, but images of {smallest} pixels can be moved by 0 to "
                f"{smallest - 1}"
            )
        check_crop(in_shape, self.crop)
        # an image made very small is read very far from its centre
        farthest = math.hypot(*in_shape[1:]) / 2 + math.hypot(self.max_shift, self.max_shift)
        if farthest > FARTHEST * (1 - self.max_scaling):
            raise InputError(
                f"max_scaling is {self.max_scaling}, which makes images of {in_shape[1]}×{in_shape[2]} pixels vanish; "
                f"choose at most {math.floor((1 - farthest / FARTHEST) * 1000) / 1000}"
            )
        if num_objects > 1 and (self.brightness or self.contrast):
            raise InputError(
                f"brightness and contrast are for images of one object, got {num_objects} an image: changed, the whole "
                "would not be the sum of its parts any more"
            )

    @property
    def training_only(self) -> list[str]:
        """The names of the changes in use that only training images may have."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("crop", "fill"))
        return [name for name in names if getattr(self, name)]

    @property
    def turns(self) -> bool:
        """Whether images are turned or scaled, hence interpolated."""
        return self.max_rotation > 0 or self.max_scaling > 0

    def window(self, in_shape: tuple[int, int, int]) -> tuple[int, int]:
        """Height and width of the squares that are cut out of images of this shape, or of whole images."""
        return in_shape[1:] if self.crop is None else (self.crop, self.crop)

    def none(self, in_shape: tuple[int, int, int], n: int) -> Changes:
        """No change of ``n`` images but the crop, in the middle."""
        return Changes(torch.tensor(middle(in_shape, self.window(in_shape))).expand(n, 2))

    def draw(self, in_shape: tuple[int, int, int], n: int, key: Key) -> Changes:
        """The changes of the ``n`` images, of shape ``in_shape`` before the crop, of the batch (seed, epoch, batch)."""

        def uniform(which: int, most: float) -> Tensor | None:
            return (2 * torch.rand(n, generator=stream_of(which, key)) - 1) * most if most else None

        rotation, scaling = uniform(ROTATIONS, self.max_rotation), uniform(SCALINGS, self.max_scaling)
        contrast, linear = uniform(CONTRAST, self.contrast), None
        if self.turns:
            none = torch.zeros(n)
            scale = 1 + (none if scaling is None else scaling)
            linear = linear_maps(none if rotation is None else rotation, scale[:, None].expand(-1, 2))
        return Changes(
            self._corners(in_shape, n, key),
            linear=linear,
            flips=torch.randint(2, (n,), generator=stream_of(FLIPS, key)) if self.flip else None,
            brightness=uniform(BRIGHTNESS, self.brightness),
            contrast=None if contrast is None else 1 + contrast,
        )

    def _corners(self, in_shape: tuple[int, int, int], n: int, key: Key) -> Tensor:
        m = self.max_shift
        corners = torch.zeros(n, 2, dtype=torch.int64)
        if m:  # from m - shift on the image is seen moved by the shift
            corners += m - torch.randint(-m, m + 1, (n, 2), generator=stream_of(SHIFTS, key))
        if self.crop is not None:
            generator, free = stream_of(CROPS, key), [length - self.crop + 1 for length in in_shape[1:]]
            corners += torch.stack([torch.randint(each, (n,), generator=generator) for each in free], 1)
        return corners


def turned(
    images: UInt8[Tensor, "B C H W"], changes: Changes, max_shift: int, size: tuple[int, int], fill: Fill = "zeros"
) -> Float32[Tensor, "B C h w"]:
    """Turn and scale images about their centres and cut out their windows; pixels of 0..255."""
    assert changes.linear is not None
    lengths = torch.tensor(images.shape[2:])
    # from the centre of the image to that of the window, (down, right), turned round to (x, y)
    offset = (changes.corners - max_shift).double() + (torch.tensor(size) - lengths) / 2
    return sample(images, inverse_maps(changes.linear, -offset.flip(1)), size, fill)


def mirrored(pixels: Float32[Tensor, "B C H W"], changes: Changes) -> Float32[Tensor, "B C H W"]:
    """Mirror some of the images left to right."""
    if changes.flips is None:
        return pixels
    return torch.where(
        changes.flips.to(pixels.device, non_blocking=True).bool()[:, None, None, None], pixels.flip(-1), pixels
    )


def recoloured(pixels: Float32[Tensor, "B C H W"], changes: Changes) -> Float32[Tensor, "B C H W"]:
    """Bring pixels of 0..255 to 0..1, and change their contrast and brightness; the pixels are overwritten."""
    if changes.brightness is None and changes.contrast is None:
        return pixels.div_(255)
    if changes.contrast is not None:
        # float64 holds sums of such values exactly, so that the order of summation makes no difference
        wide = torch.float32 if pixels.device.type == "mps" else torch.float64
        mean = pixels.mean((2, 3), keepdim=True, dtype=wide).float()
        pixels.sub_(mean).mul_(changes.contrast.to(pixels.device, non_blocking=True)[:, None, None, None]).add_(mean)
    pixels.div_(255)
    if changes.brightness is not None:
        pixels.add_(changes.brightness.to(pixels.device, non_blocking=True)[:, None, None, None])
    return pixels.clamp_(0, 1)


def center_crop(image_set: ImageSet, size: int) -> ImageSet:
    """The squares of ``size`` pixels in the middle of images and parts; of two middles the upper left one.

    The pixels are shared with the given set.

    Raises:
        InputError: ``size`` is below 1 or larger than the images.
    """
    check_crop(image_set.in_shape, size)
    y, x = middle(image_set.in_shape, (size, size))
    square = (..., slice(y, y + size), slice(x, x + size))
    parts = None if image_set.parts is None else image_set.parts[square]
    return dataclasses.replace(image_set, images=image_set.images[square], parts=parts)


def check_crop(in_shape: tuple[int, int, int], size: int | None) -> None:
    """Raise InputError unless squares of ``size`` pixels can be cut out of images of this shape."""
    smallest = min(in_shape[1:])
    if size is not None and not 1 <= size <= smallest:
        raise InputError(f"crop is {size} pixels, but squares of 1 to {smallest} can be cut out of these images")


def middle(in_shape: tuple[int, int, int], size: tuple[int, int]) -> tuple[int, int]:
    """The corner of a window in the middle of an image; of two middles the one nearer to the upper left."""
    return (in_shape[1] - size[0]) // 2, (in_shape[2] - size[1]) // 2
