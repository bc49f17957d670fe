"""Move images by whole pixels, or resample them under an affine map.

Positions are in pixels from the centre of an image, x to the right and y down.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from torchcaps.ranges import Fill

Interpolation = Literal["bilinear", "nearest"]
"""Values between pixels: weighted means of four neighbours, or the nearest pixel."""


def cut_windows(
    images: Shaped[Tensor, "B C H W"],
    corners: Int64[Tensor, "B 2"],
    size: tuple[int, int],
    margin: int = 0,
    fill: Fill = "zeros",
) -> Shaped[Tensor, "B C h w"]:
    """Cut a window of ``size`` (height, width) out of each image, with ``margin`` pixels of ``fill`` around it.

    A window with the corner (y, x) begins at row y - margin and column x - margin of the image. So a window as large as
    the image shows the image moved by margin - y pixels down and margin - x pixels to the right. Corners are 0 or more.
    """
    if margin and fill == "zeros":
        images = F.pad(images, (margin,) * 4)
    elif margin:  # torch replicates edges of floats only
        images = F.pad(images.float(), (margin,) * 4, mode="replicate").to(images.dtype)
    windows = images.unfold(2, size[0], 1).unfold(3, size[1], 1)
    return windows[torch.arange(len(images), device=images.device), :, corners[:, 0], corners[:, 1]]


def linear_maps(
    rotation: Float[Tensor, "B"], scale: Float[Tensor, "B 2"], shear: Float[Tensor, "B"] | None = None
) -> Float[Tensor, "B 2 2"]:
    """Return the matrices R·H·S, float64, that scale, then shear, then rotate.

    R = [[cos r, sin r], [-sin r, cos r]] with the rotation r, H = [[1, h], [0, 1]] with the shear h, S = diag(scale).

    Args:
        rotation: Angle in degrees, counterclockwise on the screen.
        scale: Factors of width and height, above 0.
        shear: Pixels to the right for each pixel down; None: no shear.
    """
    angle = rotation.double().deg2rad()
    cos, sin = angle.cos(), angle.sin()
    h = torch.zeros_like(cos) if shear is None else shear.double()
    turned = torch.stack([cos, cos * h + sin, -sin, cos - sin * h], 1).unflatten(1, (2, 2))
    return turned * scale.double()[:, None, :]


def inverse_maps(linear: Float[Tensor, "B 2 2"], shift: Float[Tensor, "B 2"]) -> Float[Tensor, "B 2 3"]:
    """Return the inverse of x ↦ linear·x + shift, as `warp` takes it: [linear⁻¹ | -linear⁻¹·shift]."""
    back = torch.linalg.inv(linear.double())
    return torch.cat([back, -back @ shift.double()[:, :, None]], 2)


def warp(
    images: Shaped[Tensor, "B C H W"],
    maps: Float[Tensor, "B 2 3"],
    size: tuple[int, int],
    fill: Fill = "zeros",
    mode: Interpolation = "bilinear",
) -> Float[Tensor, "B C h w"]:
    """Resample images: output(x, y) = image(map·(x, y, 1)).

    A map takes positions of the output to positions of the image, both relative to the centre. ``size`` is height and
    width of the output, ``fill`` the value outside of the image. Masks need the ``mode`` ``"nearest"``.

    Returns:
        Values in the range of the images, in the dtype of the maps.
    """
    if not len(images):  # a process without a share of the last batch; affine_grid refuses it
        return maps.new_empty(0, images.shape[1], *size)
    inside, outside = (maps.new_tensor([width, height]) for height, width in (images.shape[2:], size))
    # the same map between coordinates of -1..1
    relative = torch.cat([maps[:, :, :2] * outside, 2 * maps[:, :, 2:]], 2) / inside[:, None]
    grid = F.affine_grid(relative, [*images.shape[:2], *size], align_corners=False)
    padding = "zeros" if fill == "zeros" else "border"
    return F.grid_sample(images.to(maps.dtype), grid, mode, padding, align_corners=False)
