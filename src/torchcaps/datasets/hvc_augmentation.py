"""The augmentation of Byerly, Kalganova and Dear 2021: images are rotated, shifted, squeezed and partly erased."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Float64, Shaped
from torch import Tensor

from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.datasets.rng import PUBLISHED, Key, stream_of

MAX_ANGLE = 30.0
"""Degrees for a normal number of 1. Angles are drawn with standard deviation 0.33."""
ERASED = 4
"""Side of the erased square, and its smallest distance from the top and left edge, pixels."""
MIN_SIDE = 2 * ERASED + 1
"""Smallest side of an image that a square can be erased from, pixels."""


def draw(n: int, key: Key) -> Float64[Tensor, "B 10"]:
    """Draw the numbers that determine the changes of each image: 6 normal and 4 uniform ones."""
    generator = stream_of(PUBLISHED, key)
    normal = 0.33 * torch.randn(n, 6, generator=generator, dtype=torch.float64)
    uniform = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    return torch.cat([normal.clamp(-0.9999, 0.9999), uniform], 1)


def apply(images: Shaped[Tensor, "B C H W"], numbers: Float64[Tensor, "B 10"]) -> Float32[Tensor, "B C H W"]:
    """Change images as the authors' code does, in four steps.

    1. Half of the images are rotated by up to ±30°, bilinearly.
    2. Each image is shifted left or right, and up or down, at most to the end of its empty margin.
    3. Its width is reduced by 1 pixel up to a quarter (Lanczos, radius 3, whose values can exceed the range slightly).
    4. A square of 4×4 pixels is set to zero.

    Args:
        images: Images, at least ``MIN_SIDE`` pixels high and wide.
        numbers: Numbers from :func:`draw`.

    Source: ``python/input`` of the code of "No Routing Needed Between Capsules" (arXiv:2001.09136).
    """
    angle, is_rotated, down, right, squeeze, offset, *rest = numbers.unbind(1)
    pixels = _rotated(images.float(), angle * MAX_ANGLE * (is_rotated <= 0))
    pixels = _shifted(pixels, torch.stack([down, right], 1).abs(), torch.stack(rest[:2], 1) < 0.5)
    pixels = _squeezed(pixels, squeeze.abs(), offset.abs())
    return _erased(pixels, torch.stack(rest[2:], 1))


def _rotated(images: Float32[Tensor, "B C H W"], angle: Float64[Tensor, "B"]) -> Float32[Tensor, "B C H W"]:
    """Rotate images about the pixel (H/2, W/2), which is half a pixel below and right of the centre."""
    linear = linear_maps(angle, torch.ones(len(angle), 2, dtype=torch.float64))
    centre = torch.full((2,), 0.5, dtype=torch.float64)
    maps = inverse_maps(linear, centre - linear @ centre).float()
    return warp(images, maps.to(images.device), (images.shape[2], images.shape[3]))


def _shifted(
    images: Float32[Tensor, "B C H W"], amounts: Float64[Tensor, "B 2"], is_back: Bool[Tensor, "B 2"]
) -> Float32[Tensor, "B C H W"]:
    """Shift images by a share of their empty margins: up or down, left or right."""
    drawn = images.sum(1) > 0
    for axis, side in enumerate(images.shape[2:]):
        lines = drawn.any(2 - axis).to(torch.int64)  # (B, side), 1 if a pixel of the row or column is above 0
        before, after = lines.argmax(1), lines.flip(1).argmax(1)
        amount, back = amounts[:, axis].to(images.device), is_back[:, axis].to(images.device)
        shift = torch.where(back, (-amount * before).floor(), (amount * (1 + after)).floor()).long()
        places = (torch.arange(side, device=images.device) - shift[:, None]) % side
        index = places[:, None, :, None] if axis == 0 else places[:, None, None, :]
        images = images.gather(2 + axis, index.expand_as(images))
    return images


def _squeezed(
    images: Float32[Tensor, "B C H W"], amounts: Float64[Tensor, "B"], offsets: Float64[Tensor, "B"]
) -> Float32[Tensor, "B C H W"]:
    """Make images narrower by 1 to W/4 pixels, within their width."""
    width = images.shape[3]
    fewer = (amounts * (width / 4) + 1).floor().long()
    right = (offsets * 2).floor().long()
    matrices = {pair: _squeeze(width, *pair) for pair in set(zip(fewer.tolist(), right.tolist(), strict=True))}
    each = torch.stack([matrices[pair] for pair in zip(fewer.tolist(), right.tolist(), strict=True)])
    return images @ each.to(images)[:, None]


def _squeeze(width: int, fewer: int, right: int) -> Float64[Tensor, "W W"]:
    """Return the matrix that squeezes a row to ``width - fewer`` pixels, as TensorFlow's resize with antialiasing."""
    narrow, start = width - fewer, fewer // 2 + right
    scale = width / narrow
    centres = (torch.arange(narrow, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(width, dtype=torch.float64)[:, None] + 0.5 - centres) / scale
    weights = torch.where(distance.abs() < 3, distance.sinc() * (distance / 3).sinc(), 0.0)
    placed = torch.zeros(width, width + max(0, start - fewer), dtype=torch.float64)
    placed[:, start : start + narrow] = weights / weights.sum(0)
    return placed[:, :width]


def _erased(images: Float32[Tensor, "B C H W"], places: Float64[Tensor, "B 2"]) -> Float32[Tensor, "B C H W"]:
    """Set a square of each image to zero."""
    erased = []
    for axis, side in enumerate(images.shape[2:]):
        first = (places[:, axis] * (side - MIN_SIDE)).floor().long() + ERASED
        steps = torch.arange(side) - first[:, None]
        erased.append((steps >= 0) & (steps < ERASED))
    rows, columns = erased
    inside = (rows[:, :, None] & columns[:, None, :]).to(images.device)
    return images.masked_fill(inside[:, None], 0.0)
