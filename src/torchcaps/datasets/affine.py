"""Images moved by whole pixels, and read at other places under an affine map.

Positions are in pixels from the centre of an image, x to the right and y down.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from torchcaps.ranges import Fill


def cut_windows(
    images: UInt8[Tensor, "B C H W"],
    corners: Int64[Tensor, "B 2"],
    size: tuple[int, int],
    margin: int = 0,
    fill: Fill = "zeros",
) -> UInt8[Tensor, "B C h w"]:
    """Cut a window out of each image, with ``margin`` pixels around it.

    A window that begins at row y and column x, its ``corners``, shows what begins at row y - margin and column
    x - margin of the image: one of the image's own size shows it moved by margin - y down and margin - x to the right.
    """
    if margin and fill == "zeros":
        images = F.pad(images, (margin,) * 4)
    elif margin:  # which torch has for floats only
        images = F.pad(images.float(), (margin,) * 4, mode="replicate").to(torch.uint8)
    windows = images.unfold(2, size[0], 1).unfold(3, size[1], 1)
    return windows[torch.arange(len(images), device=images.device), :, corners[:, 0], corners[:, 1]]


def linear_maps(
    rotation: Float[Tensor, "B"], scale: Float[Tensor, "B 2"], shear: Float[Tensor, "B"] | None = None
) -> Float[Tensor, "B 2 2"]:
    """The matrices R·H·S that scale, then shear, then turn, in float64.

    R = [[cos r, sin r], [-sin r, cos r]] with the rotation r, H = [[1, h], [0, 1]] with the shear h, S = diag(scale).

    Args:
        rotation: Degrees, counterclockwise as one sees it.
        scale: Factors to the right and down, above 0.
        shear: Pixels to the right for each pixel down; None for none.
    """
    angle = rotation.double().deg2rad()
    cos, sin = angle.cos(), angle.sin()
    h = torch.zeros_like(cos) if shear is None else shear.double()
    turned = torch.stack([cos, cos * h + sin, -sin, cos - sin * h], 1).unflatten(1, (2, 2))
    return turned * scale.double()[:, None, :]


def inverse_maps(linear: Float[Tensor, "B 2 2"], shift: Float[Tensor, "B 2"]) -> Float[Tensor, "B 2 3"]:
    """The inverse maps that `warp` takes to show images under x ↦ linear·x + shift: [linear⁻¹ | -linear⁻¹·shift]."""
    back = torch.linalg.inv(linear.double())
    return torch.cat([back, -back @ shift.double()[:, :, None]], 2)


def warp(
    images: UInt8[Tensor, "B C H W"], maps: Float[Tensor, "B 2 3"], size: tuple[int, int], fill: Fill = "zeros"
) -> Float[Tensor, "B C h w"]:
    """Read images at other places: output(x, y) = image(map·(x, y, 1)), bilinear.

    Args:
        images: The images to read.
        maps: For each image the map from places of the output to places of the image, both counted from the centre.
        size: Height and width of the output, pixels.
        fill: What lies outside of the image.

    Returns:
        Values of 0..255, in the dtype of the maps.
    """
    if not len(images):  # a process may have no share of the last batch, which affine_grid does not take
        return maps.new_empty(0, images.shape[1], *size)
    inside, outside = (maps.new_tensor([width, height]) for height, width in (images.shape[2:], size))
    # the same map between coordinates of -1..1
    relative = torch.cat([maps[:, :, :2] * outside, 2 * maps[:, :, 2:]], 2) / inside[:, None]
    grid = F.affine_grid(relative, [*images.shape[:2], *size], align_corners=False)
    padding = "zeros" if fill == "zeros" else "border"
    return F.grid_sample(images.to(maps.dtype), grid, padding_mode=padding, align_corners=False)
