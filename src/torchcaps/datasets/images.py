"""Image files to uint8 tensors, and tensors to another size."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from torchcaps.errors import InputError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
"""The image files that are read; others in a folder are passed over."""

# What Pillow's decoders raise on bytes that are no image, or half of one.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)

_CHUNK = 1024  # images resized at once: bounds the float copy to a few MiB at the sizes used here


def read_pixels(path: Path) -> UInt8[Tensor, "C H W"]:
    """Read one image file at its own size.

    Of several frames the first counts; a photo is turned upright as its EXIF data say; transparent parts show white,
    as on a page; 16-bit greys are scaled to 8 bit.

    Args:
        path: A PNG, JPEG, BMP, GIF, WebP or TIFF file.

    Returns:
        Pixels of 0..255: one channel where all of them are grey, else three.

    Raises:
        InputError: When the file is missing, or no image or a broken one.
    """
    try:
        with Image.open(path) as image:
            pixels = _to_uint8(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise InputError(f"there is no image file {path}") from None
    except _DECODER_ERRORS as error:
        raise InputError(f"{path} cannot be read as an image: {error}") from error
    if pixels.ndim == 2:
        return torch.from_numpy(pixels)[None]
    # The pixels decide, not the file's mode: grey drawings are often saved as RGB.
    if (pixels == pixels[..., :1]).all():
        return torch.from_numpy(pixels[..., 0].copy())[None]
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _to_uint8(image: Image.Image) -> np.ndarray:
    """Any mode of Pillow to uint8, (H, W) or (H, W, 3)."""
    if image.mode.startswith("I"):
        return _scaled(np.asarray(image).astype(np.float64), 65535)
    if image.mode == "F":
        return _scaled(np.asarray(image).astype(np.float64), 1)
    if image.has_transparency_data:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def _scaled(values: np.ndarray, white: int) -> np.ndarray:
    """Values of 0..white to uint8."""
    if not (values.min() >= 0 and values.max() <= white):
        raise ValueError(f"its values run from {values.min():g} to {values.max():g} instead of 0..{white}")
    return np.round(values * (255 / white)).astype(np.uint8)


def with_channels(image: UInt8[Tensor, "c H W"], channels: int) -> UInt8[Tensor, "C H W"]:
    """A grey or colour image with one channel or three; a grey one is repeated, a colour one becomes its luma.

    Raises:
        InputError: When ``channels`` is neither 1 nor 3.
    """
    if channels not in (1, 3):
        raise InputError(f"an image file gives 1 channel or 3, not {channels}")
    if len(image) == channels:
        return image
    if channels == 3:
        return image.expand(3, -1, -1)
    grey = Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")
    return torch.from_numpy(np.array(grey))[None]


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
