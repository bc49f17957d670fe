"""Stacks of images to another size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.errors import InputError, shown
from torchcaps.machine import check_memory
from torchcaps.ranges import PIXELS

_CHUNK = 2**20  # numbers resized at once: bounds the float copies to a few MiB, or to those of one image


def resize_images(images: UInt8[Tensor, "N C h w"], size: tuple[int, int]) -> UInt8[Tensor, "N C H W"]:
    """Bring images to ``size`` (height, width in pixels), bicubic, smoothed first where they shrink.

    Height and width have each its own factor, so a differing aspect ratio is stretched, not cropped.

    Raises:
        TypeError: Images that are no uint8 tensor.
        InputError: Images of another shape, a size that is not two numbers of pixels, or images that do not fit into
            memory at that size.
    """
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be uint8 pixels of 0..255, got {got}")
    if images.ndim != 4:
        raise InputError(f"images must have the shape (N, C, H, W), got {tuple(images.shape)}")
    if not isinstance(size, Sequence) or len(size) != 2 or not all(side in PIXELS for side in size):
        raise InputError(f"size must be a height and a width, {PIXELS} pixels each, got {shown(size)}")
    if images.shape[2:] == torch.Size(size):
        return images
    count, channels = images.shape[:2]
    resized = count * channels * math.prod(size)
    check_memory(2 * resized, f"{count:,} images of {size[0]}×{size[1]} pixels")  # chunks, and these together
    at_once = max(1, _CHUNK // (channels * max(math.prod(images.shape[2:]), math.prod(size))))
    return torch.cat([_resize(chunk, size) for chunk in images.split(at_once)])


def _resize(images: UInt8[Tensor, "N C h w"], size: tuple[int, int]) -> UInt8[Tensor, "N C H W"]:
    resized = F.interpolate(images.float(), size, mode="bicubic", align_corners=False, antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)
