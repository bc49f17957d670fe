"""Shifts and crops of images by whole pixels: windows onto padded images, copied only when they are read."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor


def windows(images: UInt8[Tensor, "N C H W"], margin: int, size: tuple[int, int]) -> UInt8[Tensor, "N C y x h w"]:
    """All windows of ``size`` onto images with ``margin`` pixels of zeros around each.

    Window [..., y, x, :, :] begins at row y - margin and column x - margin of the image; if ``size`` is the image's
    own, it shows the image moved by margin - y down and margin - x to the right.

    Returns:
        A view (N, C, H + 2·margin - h + 1, W + 2·margin - w + 1, h, w) of the images, or of a copy with the zeros.
    """
    padded = F.pad(images, (margin,) * 4) if margin else images
    return padded.unfold(2, size[0], 1).unfold(3, size[1], 1)


def look_through(
    views: UInt8[Tensor, "N C y x h w"], index: Int64[Tensor, "B"], corners: Int64[Tensor, "B 2"]
) -> UInt8[Tensor, "B C h w"]:
    """Copy one window of each image at ``index``: the one at its (row, column) in ``corners``."""
    return views[index, :, corners[:, 0], corners[:, 1]]
