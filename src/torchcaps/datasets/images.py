"""Stacks of images to another size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

_CHUNK = 1024  # images resized at once: bounds the float copy to a few MiB at the sizes used here


def resize_images(images: UInt8[Tensor, "N C h w"], size: tuple[int, int]) -> UInt8[Tensor, "N C H W"]:
    """Bring images to ``size`` (height, width in pixels), bicubic, smoothed first where they shrink.

    Height and width have each its own factor, so a differing aspect ratio is stretched, not cropped.
    """
    if images.shape[2:] == torch.Size(size):
        return images
    return torch.cat([_resize(chunk, size) for chunk in images.split(_CHUNK)])


def _resize(images: UInt8[Tensor, "N C h w"], size: tuple[int, int]) -> UInt8[Tensor, "N C H W"]:
    resized = F.interpolate(images.float(), size, mode="bicubic", align_corners=False, antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)
