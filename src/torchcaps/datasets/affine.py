"""Images moved by whole pixels, as windows that are copied only when they are read, and by any affine map.

Under an affine map images are turned, scaled, sheared and moved, with bilinear interpolation. Positions are in pixels
from the centre of an image, x to the right and y down. A map is rounded to 65,536ths, and the place where a pixel is
read to 256ths of a pixel; float32 holds all numbers after that exactly. So the same map gives the same values on every
device, and a map that only moves pixels does not change them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32, Int64, UInt8
from torch import Tensor

from torchcaps.ranges import Fill

FARTHEST = 8000
"""How far from the centre, in pixels, an image may be read: farther places would not fit 32 bits."""

_MAP_BITS = 16  # maps are rounded to 2^-16
_PLACE_BITS = 8  # images are read at multiples of 2^-8 pixels
_BORDER = 2  # pixels around an image: one to blend with at its edge, one for all that is farther away


def _framed(images: UInt8[Tensor, "N C H W"], margin: int, fill: Fill) -> UInt8[Tensor, "N C Y X"]:
    """Images with so many pixels around each."""
    if margin == 0:
        return images
    if fill == "zeros":
        return F.pad(images, (margin,) * 4)
    row, column = (
        torch.arange(-margin, length + margin, device=images.device).clamp_(0, length - 1)
        for length in images.shape[2:]
    )
    return images[:, :, row[:, None], column]


def windows(
    images: UInt8[Tensor, "N C H W"], margin: int, size: tuple[int, int], fill: Fill = "zeros"
) -> UInt8[Tensor, "N C y x h w"]:
    """All windows of ``size`` onto images with ``margin`` pixels around each, as ``fill`` says.

    Window [..., y, x, :, :] begins at row y - margin and column x - margin of the image; if ``size`` is the image's
    own, it shows the image moved by margin - y down and margin - x to the right.

    Returns:
        A view (N, C, H + 2·margin - h + 1, W + 2·margin - w + 1, h, w) of the images, or of a copy with these
        pixels.
    """
    return _framed(images, margin, fill).unfold(2, size[0], 1).unfold(3, size[1], 1)


def look_through(
    views: UInt8[Tensor, "N C y x h w"], index: Int64[Tensor, "B"], corners: Int64[Tensor, "B 2"]
) -> UInt8[Tensor, "B C h w"]:
    """Copy one window of each image at ``index``: the one at its (row, column) in ``corners``."""
    return views[index, :, corners[:, 0], corners[:, 1]]


def linear_maps(
    rotation: Float[Tensor, "B"],
    scale: Float[Tensor, "B 2"],
    shear: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, "B 2 2"]:
    """The matrices R·H·S that scale, then shear, then turn.

    R = [[cos r, sin r], [-sin r, cos r]] with the rotation r, H = [[1, h], [0, 1]] with the shear h, S = diag(scale).

    Args:
        rotation: Degrees, counterclockwise as one sees it.
        scale: Factors to the right and down, above 0.
        shear: Pixels to the right for each pixel down; None for none.
    """
    angle = rotation.double().deg2rad()
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)
    skew = torch.eye(2, dtype=torch.float64, device=turn.device).repeat(len(turn), 1, 1)
    if shear is not None:
        skew[:, 0, 1] = shear
    return turn @ skew * scale.double()[:, None, :]


def inverse_maps(linear: Float[Tensor, "B 2 2"], shift: Float[Tensor, "B 2"]) -> Float[Tensor, "B 2 3"]:
    """The inverse maps that `sample` takes to show images under x ↦ linear·x + shift: [linear⁻¹ | -linear⁻¹·shift]."""
    back = torch.linalg.inv(linear.double())
    return torch.cat([back, -back @ shift.double()[:, :, None]], 2)


def sample(
    images: UInt8[Tensor, "B C H W"], maps: Float[Tensor, "B 2 3"], size: tuple[int, int], fill: Fill = "zeros"
) -> Float32[Tensor, "B C h w"]:
    """Read images at other places: output(x, y) = image(map·(x, y, 1)), bilinear.

    Args:
        images: The images to read.
        maps: For each image the map from places of the output to places of the image, both counted from the centre; on
            the CPU. No place may be farther than `FARTHEST` from the centre.
        size: Height and width of the output, pixels.
        fill: What lies outside of the image.

    Returns:
        Values of 0..255, whole multiples of 1/65,536, the same on every device.
    """
    batch, channels, height, width = images.shape
    rounded = (maps.double() * 2**_MAP_BITS).round().to(torch.int32)
    x, y = _places(rounded.to(images.device, non_blocking=True), (height, width), size)
    padded = _framed(images, _BORDER, fill).float().flatten(2)
    row = width + 2 * _BORDER
    corner = _pixel(y, height) * row + _pixel(x, width)
    index = corner.flatten(1).long()[:, None].expand(batch, channels, -1)
    right, down = (_share(place).flatten(1)[:, None] for place in (x, y))
    upper = torch.lerp(padded.gather(2, index), padded.gather(2, index + 1), right)
    lower = torch.lerp(padded.gather(2, index + row), padded.gather(2, index + row + 1), right)
    return torch.lerp(upper, lower, down).view(batch, channels, *size)


def _places(
    maps: Int32[Tensor, "B 2 3"], source: tuple[int, int], size: tuple[int, int]
) -> tuple[Int32[Tensor, "B h w"], Int32[Tensor, "B h w"]]:
    """The place where each output pixel is read, x and y, in 256ths of a pixel from the middle of the first one."""
    # twice the place is computed, as twice the position from the centre is whole for even and odd sizes
    height, width = size
    right = 2 * torch.arange(width, dtype=torch.int32, device=maps.device) - (width - 1)
    down = 2 * torch.arange(height, dtype=torch.int32, device=maps.device) - (height - 1)
    drop = 1 + _MAP_BITS - _PLACE_BITS
    half = 1 << (drop - 1)  # rounds to the nearest

    def along(axis: int, length: int) -> Tensor:
        columns = maps[:, axis, 0, None] * right
        rows = maps[:, axis, 1, None] * down + 2 * maps[:, axis, 2, None] + ((length - 1) << _MAP_BITS) + half
        return (columns[:, None, :] + rows[:, :, None]) >> drop

    return along(0, source[1]), along(1, source[0])


def _pixel(place: Int32[Tensor, "B h w"], length: int) -> Int32[Tensor, "B h w"]:
    """The pixel at or before a place, counted from the first one of the border."""
    return (place >> _PLACE_BITS).clamp_(-_BORDER, length) + _BORDER


def _share(place: Int32[Tensor, "B h w"]) -> Float32[Tensor, "B h w"]:
    """The weight of the next pixel at a place, 0 to below 1."""
    return (place & ((1 << _PLACE_BITS) - 1)).float() / (1 << _PLACE_BITS)
