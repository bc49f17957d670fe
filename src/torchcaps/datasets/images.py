"""Image files, read and resized for a network by Pillow and NumPy: an exported network needs no torch for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from torchcaps.datasets.preparation import Preparation, Prepared, prepare_image, resized
from torchcaps.datasets.reading import one_sentence
from torchcaps.errors import InputError
from torchcaps.files import require_file
from torchcaps.ranges import image_shape, is_number

Fit = Literal["pad", "stretch"]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
"""The image files that are read; other files in a folder are ignored."""

MAX_MEGAPIXELS = 64.0
PILLOWS_MEGAPIXELS = 178.0
"""Pillow refuses larger images by itself (twice ``PIL.Image.MAX_IMAGE_PIXELS``)."""

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")  # Pillow knows more, some of which start other programs
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # of TIFF: a tile may be larger than its image, and is decoded as a whole


# Python prints records without a handler; Pillow's decoders log the errors that they raise
logging.getLogger("PIL").addHandler(logging.NullHandler())


class _Limit:
    megapixels = MAX_MEGAPIXELS


def set_max_megapixels(megapixels: float) -> None:
    """Set how large an image file may be; a larger one is refused before it is decoded.

    A few hundred kilobytes may decode to gigabytes. Reading an image takes up to 24 bytes of memory a pixel. The
    setting holds for all threads and for everything that reads image files: `read_image`, ``folder:`` data sets, the
    command line and the explorer.

    Args:
        megapixels: Height · width / 10⁶, above 0, at most 178 (Pillow reads none larger); 64 at the start.

    Raises:
        InputError: ``megapixels`` is out of that range.
    """
    if not is_number(megapixels) or not 0 < megapixels <= PILLOWS_MEGAPIXELS:
        raise InputError(f"megapixels must be above 0 and at most {PILLOWS_MEGAPIXELS:g}, got {megapixels}")
    _Limit.megapixels = float(megapixels)


def get_max_megapixels() -> float:
    """Megapixels of the largest image file that is read; see `set_max_megapixels`."""
    return _Limit.megapixels


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is left out by every reader: its name begins with a dot or with __MACOSX."""
    return path.name.startswith((".", "__MACOSX"))


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and not is_hidden(child))


def image_files_in(folder: Path, *, deep: bool = False) -> list[Path]:
    """The image files in a folder, sorted, without hidden ones; if ``deep``, also those in its sub-folders.

    Links to folders are not followed.
    """
    found, folders = list[Path](), [folder]
    while folders:
        inside = folders.pop()
        files = (file for file in inside.iterdir() if file.suffix.lower() in SUFFIXES and not is_hidden(file))
        found += [file for file in files if file.is_file()]
        folders += [child for child in subfolders(inside) if not child.is_symlink()] if deep else []
    return sorted(found)


@dataclass(frozen=True, eq=False)
class Photo:
    """An image file, and what a network is given of it.

    Args:
        pixels: The file's own, 0..255; C is 1 where all are grey, else 3.
        prepared: The image in the shape that the network takes, and what was changed.
    """

    pixels: UInt8[np.ndarray, "C h w"]
    prepared: Prepared

    def shrunk(self, side: int) -> Photo:
        """The same with at most so many pixels a side, the place of the ink with them."""
        _, height, width = self.pixels.shape
        scale = side / max(height, width)
        if scale >= 1:
            return self
        box = self.prepared.box
        if box is not None:
            top, left, bottom, right = (round(edge * scale) for edge in box)
            box = top, left, bottom, right
        return Photo(_scaled(self.pixels, scale), replace(self.prepared, box=box))


def read_photo(
    path: str | Path,
    in_shape: Sequence[int],
    *,
    preparation: Preparation | None = None,
    invert: bool = False,
    fit: Fit = "pad",
    name: str | None = None,
) -> Photo:
    """Read an image file of any size, bring it to the shape a network takes, and say what was changed.

    Without ``preparation``, colour becomes grey by ITU-R 601 luma where the network takes one channel; see
    :func:`read_pixels` for the rest. Resizing is bicubic, smoothed first where the image shrinks.

    Args:
        path: A PNG, JPEG, BMP, GIF, WebP or TIFF file.
        in_shape: (C, H, W), C being 1 or 3.
        preparation: How the network's data were made of drawings, such as ``Run.preparation``; a photo of a drawing is
            brought to that form by :func:`~torchcaps.datasets.prepare_image`, and ``fit`` is of no account.
        invert: Turn dark on light, such as pen on paper, into light on dark, as MNIST has it. With ``preparation`` that
            is found out; ``invert`` says that it is so.
        fit: ``"pad"`` keeps the aspect ratio: the image is resized to fit inside H×W, centred, and surrounded by the
            median colour of its own border. ``"stretch"`` resizes height and width each by its own factor, as images
            of a ``folder:`` data set are.
        name: The file's name in errors; its path if None.

    Raises:
        InputError: The file is missing, no image, a broken one or one of more than `get_max_megapixels`; C is neither 1
            nor 3; H is 1, as of networks for sequences; or an unknown ``fit``.
    """
    if fit not in ("pad", "stretch"):
        raise InputError(f'fit must be "pad" or "stretch", got {fit!r}')
    in_shape = image_shape(in_shape)
    if in_shape[1] == 1:
        raise InputError(
            f"an image file cannot be read as a sequence, which this network takes ({'×'.join(map(str, in_shape))}); "
            "give its numbers to torchcaps.analysis.predict"
        )
    pixels = read_pixels(Path(path), name)
    image = 255 - pixels if invert else pixels
    if preparation is not None:
        return Photo(pixels, prepare_image(image, in_shape, preparation, light_ink=invert))
    image = with_channels(image, in_shape[0])
    return Photo(pixels, Prepared(_resized(image, in_shape[1:]) if fit == "stretch" else _padded(image, in_shape[1:])))


def read_image(path: str | Path, in_shape: Sequence[int], **options: Any) -> UInt8[np.ndarray, "C H W"]:
    """Read an image file as :func:`read_photo` does, with its options and errors; return what the network is given.

    Returns:
        Pixels of 0..255.
    """
    return read_photo(path, in_shape, **options).prepared.image


def read_pixels(path: Path, name: str | None = None) -> UInt8[np.ndarray, "C H W"]:
    """Read one image file at its own size: one channel where all pixels are grey, else three, of 0..255.

    The first of several frames is read; a photo is turned upright by its EXIF data; transparent parts become white, as
    on a page; 16-bit greys are scaled to 8 bit, and so are 32-bit integers, unless none of them is above 255. Errors
    are those of `read_photo`, and so is ``name``.
    """
    name = str(path) if name is None else name
    require_file(path, "image file", name)
    with one_sentence(f"{name} cannot be read as an image"):
        try:
            image = Image.open(path, formats=_FORMATS)
        except UnidentifiedImageError:
            raise InputError(
                f"{name} cannot be read as an image; PNG, JPEG, BMP, GIF, WebP and TIFF files can"
            ) from None
        with image:
            _check_size(image, name)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            pixels = pillow_pixels(image)
    # The pixels decide, not the file's mode: grey drawings are often saved as RGB.
    if pixels.ndim == 2 or all(np.array_equal(pixels[..., channel], pixels[..., 0]) for channel in (1, 2)):
        return pixels.reshape(*pixels.shape[:2], -1)[None, ..., 0].copy()
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _check_size(image: Image.Image, name: str) -> None:
    """Raise InputError if an image that is not decoded yet, or one of its tiles, has too many pixels."""
    sizes = {"": image.size}
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]  # of a TiffImageFile
        sizes[" in a tile"] = (int(tags.get(_TILE_WIDTH, 0)), int(tags.get(_TILE_LENGTH, 0)))
    for where, (width, height) in sizes.items():
        if width * height > 1e6 * _Limit.megapixels:
            raise InputError(
                f"{name} has {width}×{height} pixels{where}, {width * height / 1e6:.3g} megapixels, but at most "
                f"{_Limit.megapixels:g} megapixels are read; make it smaller, or raise the limit (--max-megapixels of "
                "commands that take image files, torchcaps.datasets.set_max_megapixels)"
            )


def pillow_pixels(image: Image.Image) -> UInt8[np.ndarray, "..."]:
    """Convert a Pillow image of any mode to uint8, (H, W) or (H, W, 3); transparent parts become white."""
    if image.mode.startswith("I") or image.mode == "F":
        values, white = np.asarray(image), 1 if image.mode == "F" else 65535
        if image.mode == "I" and image.format == "TIFF" and values.max() <= 255:  # bytes in 32 bits
            white = 255
        if not (values.min() >= 0 and values.max() <= white):
            raise ValueError(f"its values run from {values.min():g} to {values.max():g} instead of 0..{white}")
        return np.round(values * np.float64(255 / white)).astype(np.uint8)
    if image.has_transparency_data:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def with_channels(image: UInt8[np.ndarray, "c H W"], channels: int) -> UInt8[np.ndarray, "C H W"]:
    """Bring a grey or colour image to one or three channels: grey is repeated, colour becomes its luma."""
    if channels not in (1, 3):
        raise InputError(f"an image file gives 1 channel or 3, not {channels}")
    if len(image) == channels:
        return image
    if channels == 3:
        return image.repeat(3, axis=0)
    return np.array(Image.fromarray(image.transpose(1, 2, 0)).convert("L"))[None]


def _padded(image: UInt8[np.ndarray, "C h w"], size: tuple[int, int]) -> UInt8[np.ndarray, "C H W"]:
    """An image resized to fit inside another size, in the middle of the median colour of its border."""
    inner = _scaled(image, min(size[0] / image.shape[1], size[1] / image.shape[2]))
    border = np.concatenate([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], axis=1)
    colour = np.sort(border, axis=1)[:, (border.shape[1] - 1) // 2]
    canvas = np.broadcast_to(colour[:, None, None], (len(image), *size)).copy()
    top, left = (size[0] - inner.shape[1]) // 2, (size[1] - inner.shape[2]) // 2
    canvas[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
    return canvas


def _scaled(image: UInt8[np.ndarray, "C h w"], scale: float) -> UInt8[np.ndarray, "C H W"]:
    """An image with both sides changed by a factor, a pixel at least."""
    return _resized(image, (max(round(image.shape[1] * scale), 1), max(round(image.shape[2] * scale), 1)))


def _resized(image: UInt8[np.ndarray, "C h w"], size: tuple[int, int]) -> UInt8[np.ndarray, "C H W"]:
    """Resize an image as :func:`torchcaps.datasets.resize_images` does: in floats, not in Pillow's 8 bit."""
    if image.shape[1:] == size:
        return image
    planes = resized(image.astype(np.float32), size, Image.Resampling.BICUBIC)
    return planes.round().clip(0, 255).astype(np.uint8)
