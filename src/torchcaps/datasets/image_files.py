"""Image files as a network takes them, with Pillow and NumPy alone: an exported network needs no torch to read them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from torchcaps.errors import InputError

Fit = Literal["pad", "stretch"]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
"""The image files that are read; others in a folder are passed over."""

# What Pillow's decoders raise on bytes that are no image, or half of one.
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def read_image(
    path: str | Path, in_shape: Sequence[int], *, invert: bool = False, fit: Fit = "pad"
) -> UInt8[np.ndarray, "C H W"]:
    """Read an image file of any size and bring it to the shape a network takes.

    Colour becomes grey by ITU-R 601 luma where the network takes one channel; see :func:`read_pixels` for the rest.

    Args:
        path: A PNG, JPEG, BMP, GIF, WebP or TIFF file.
        in_shape: (C, H, W), C being 1 or 3.
        invert: Turn dark on light, such as pen on paper, into light on dark, as MNIST has it.
        fit: ``"pad"`` keeps the aspect ratio: the image is resized to fit inside H×W, centred, and surrounded by the
            median colour of its own border. ``"stretch"`` resizes height and width each by its own factor, as images
            of a ``folder:`` data set are.

    Returns:
        Pixels of 0..255. Resizing is bicubic, smoothed first where the image shrinks.

    Raises:
        InputError: The file is missing, no image or a broken one; C is neither 1 nor 3; or an unknown ``fit``.
    """
    if fit not in ("pad", "stretch"):
        raise InputError(f'fit must be "pad" or "stretch", got {fit!r}')
    channels, height, width = in_shape
    image = with_channels(read_pixels(Path(path)), channels)
    if invert:
        image = 255 - image
    if fit == "stretch":
        return _resize(image, height, width)
    scale = min(height / image.shape[1], width / image.shape[2])
    inner = _resize(image, max(round(image.shape[1] * scale), 1), max(round(image.shape[2] * scale), 1))
    canvas = np.empty((channels, height, width), np.uint8)
    canvas[:] = _border_colour(image)[:, None, None]
    top, left = (height - inner.shape[1]) // 2, (width - inner.shape[2]) // 2
    canvas[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
    return canvas


def read_pixels(path: Path) -> UInt8[np.ndarray, "C H W"]:
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
        return pixels[None]
    # The pixels decide, not the file's mode: grey drawings are often saved as RGB.
    if (pixels == pixels[..., :1]).all():
        return pixels[None, ..., 0].copy()
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def with_channels(image: UInt8[np.ndarray, "c H W"], channels: int) -> UInt8[np.ndarray, "C H W"]:
    """A grey or colour image with one channel or three; a grey one is repeated, a colour one becomes its luma.

    Raises:
        InputError: When ``channels`` is neither 1 nor 3.
    """
    if channels not in (1, 3):
        raise InputError(f"an image file gives 1 channel or 3, not {channels}")
    if len(image) == channels:
        return image
    if channels == 3:
        return image.repeat(3, axis=0)
    return np.array(Image.fromarray(image.transpose(1, 2, 0)).convert("L"))[None]


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


def _resize(image: UInt8[np.ndarray, "C h w"], height: int, width: int) -> UInt8[np.ndarray, "C H W"]:
    """As :func:`torchcaps.datasets.resize_images` resizes many: rounded once, at the end, so not in Pillow's 8 bit."""
    if image.shape[1:] == (height, width):
        return image
    planes = [
        np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC))
        for plane in image.astype(np.float32)
    ]
    return np.stack(planes).round().clip(0, 255).astype(np.uint8)


def _border_colour(image: UInt8[np.ndarray, "C H W"]) -> UInt8[np.ndarray, "C"]:
    border = np.concatenate([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], axis=1)
    return np.sort(border, axis=1)[:, (border.shape[1] - 1) // 2]
