"""Read and resize image files with Pillow and NumPy alone, so that an exported network needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped
from PIL import Image

from torchcaps.datasets.dicom import SUFFIXES as DICOM_SUFFIXES
from torchcaps.datasets.dicom import is_dicom, read_dicom
from torchcaps.datasets.image_files import FORMATS, WHITE, opened_pages
from torchcaps.datasets.preparation import Preparation, Prepared, prepare_image, resized
from torchcaps.datasets.scaling import MAX_16_BIT, Pixels, Scale, alike, as_bytes, as_pixels, inverted, note_dark
from torchcaps.errors import InputError
from torchcaps.files import composed
from torchcaps.ranges import Pages, image_shape
from torchcaps.words import counted

Fit = Literal["pad", "stretch"]

SUFFIXES = frozenset(suffix for _, suffixes in FORMATS.values() for suffix in suffixes) | frozenset(DICOM_SUFFIXES)
"""Suffixes of image files; other files in a folder are ignored."""


def is_hidden(path: Path) -> bool:
    """Return True for files and folders that every reader ignores: names that begin with a dot or __MACOSX."""
    return path.name.startswith((".", "__MACOSX"))


def subfolders(folder: Path) -> list[Path]:
    """Return the sub-folders of a folder, sorted, without hidden ones."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and not is_hidden(child))


def base_of(name: str) -> str:
    """Return the name of a file without its suffix, ``scan.1`` of scan.1.png and scan.1.nii.gz."""
    short = name.removesuffix(".gz")
    return short.rpartition(".")[0] or short


def stem_of(file: Path) -> str:
    """Return what the names of an image and of its mask share: :func:`base_of` a file; a folder has no suffix."""
    name = composed(file.name)
    return name if file.is_dir() else base_of(name)


def folders_below(folder: Path) -> list[Path]:
    """Return the sub-folders of a folder, and theirs, sorted, without hidden ones; links are not followed."""
    below, folders = list[Path](), [folder]
    while folders:
        inside = [child for child in subfolders(folders.pop()) if not child.is_symlink()]
        below, folders = below + inside, folders + inside
    return sorted(below)


def image_files_in(folder: Path, *, deep: bool = False) -> list[Path]:
    """Return the image files in a folder, sorted, without hidden ones; if ``deep``, also from sub-folders.

    Links to folders are not followed.
    """
    inside = [folder, *(folders_below(folder) if deep else ())]
    candidates = (file for each in inside for file in each.iterdir() if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in candidates if not is_hidden(file) and file.is_file())


@dataclass(frozen=True, eq=False)
class Photo:
    """Image file and the input that a network gets from it.

    Args:
        pixels: Pixels of the file (C, h, w); C is 1 if all are grey, else 3.
        prepared: Image in the shape of the network's input, with a list of changes.
    """

    pixels: Pixels
    prepared: Prepared

    def shrunk(self, side: int) -> Photo:
        """Return the photo shrunk to at most ``side`` pixels; the box of the ink is scaled with it."""
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
    scale: Scale | None = None,
    pages: Pages | None = None,
) -> Photo:
    """Read an image file of any size, convert it to the input shape of a network, and list the changes.

    Without ``preparation``, colour becomes grey by ITU-R 601 luma if the network takes one channel; for further rules
    see :func:`read_pixels`. Resizing is bicubic, with smoothing if the image shrinks.

    Args:
        path: PNG, JPEG, BMP, GIF, WebP, TIFF, PNM or DICOM file.
        in_shape: Input shape of the network (C, H, W); C is 1 or 3, or the channels of all ``pages``.
        preparation: Preprocessing that turned drawings into the network's training images, such as ``Run.preparation``.
            :func:`~torchcaps.datasets.prepare_image` applies it to the photo, and ``fit`` is ignored.
        invert: Invert the image, so that dark ink on light paper becomes light on dark, as in MNIST. With
            ``preparation``, the ink is detected; ``invert`` then declares that it is dark.
        fit: ``"pad"`` keeps the aspect ratio: the image is resized to fit inside H×W, centred, and surrounded by the
            median colour of its border. ``"stretch"`` resizes height and width separately, like the images of a
            ``folder:`` data set.
        name: Name of the file in errors; None: its path.
        scale: Numbers (low, high) that become 0 and 1, such as those of the network's training images; None: by the
            number of bits, see :func:`torchcaps.datasets.scaling.range_of`.
        pages: "channels": the pages of a TIFF file, or the frames of an animation, are channels. None: a file has one.

    Raises:
        InputError: The file is missing, damaged, no image or larger than `get_max_megapixels`; C is neither 1 nor 3;
            H is 1 (a network for sequences); or ``fit`` is unknown.
    """
    if fit not in ("pad", "stretch"):
        raise InputError(f'fit must be "pad" or "stretch", got {fit!r}')
    in_shape = image_shape(in_shape)
    if in_shape[1] == 1:
        raise InputError(
            f"an image file is no sequence, but this network takes sequences ({'×'.join(map(str, in_shape))}); "
            "give its numbers to torchcaps.analysis.predict"
        )
    if pages == "depth":
        raise InputError(f"{path if name is None else name} is a volume, but this network takes images; omit pages")
    pixels = read_pixels(Path(path), name, scale, pages)
    note_dark([pixels], "an image file", scale)
    image = inverted(pixels) if invert else pixels
    if preparation is not None:
        return Photo(pixels, prepare_image(as_bytes(image), in_shape, preparation, light_ink=invert))
    image = with_channels(image, in_shape[0], pages, str(path) if name is None else name)
    return Photo(pixels, Prepared(_resized(image, in_shape[1:]) if fit == "stretch" else _padded(image, in_shape[1:])))


def read_image(path: str | Path, in_shape: Sequence[int], **options: Any) -> Pixels:
    """Read an image file like :func:`read_photo`, with its options and errors, and return the network's input.

    Returns:
        Pixels (C, H, W): uint8 of 0..255; of files with more than 8 bits, or with ``scale``, float32 of 0..1.
    """
    return read_photo(path, in_shape, **options).prepared.image


def read_pixels(path: Path, name: str | None = None, scale: Scale | None = None, pages: Pages | None = None) -> Pixels:
    """Read an image file without resizing: pixels (1, H, W) if all are grey, else (3, H, W).

    - A file of several pages or frames is refused, but for ``pages`` "channels" the channels of all pages follow each
      other, (n·C, H, W), and for "depth" the pages are the slices of a volume, (C, n, H, W).
    - A photo is rotated upright by its EXIF data.
    - Transparent parts become white.
    - A DICOM file has the numbers of :func:`~torchcaps.datasets.dicom.read_dicom`.
    - Files with 8 bits give uint8. With more bits, or with ``scale``, :func:`~torchcaps.datasets.scaling.range_of`
      says which numbers become 0 and 1, and no level is lost.

    ``name``, ``scale`` and errors as in `read_photo`.
    """
    name, is_grey = str(path) if name is None else name, True
    if is_dicom(path):
        planes, scale = read_dicom(path, name, scale, several=pages is not None)
    else:
        with opened_pages(path, name, several=pages is not None) as opened:
            planes = [pillow_numbers(page) for page in opened]
            if len({each.dtype for each in planes}) > 1:
                raise ValueError("its pages hold numbers of different kinds")
            if WHITE in opened[0].info and scale is not None:
                raise InputError(
                    f"{name} names its own range, and Pillow applies it; save the numbers as PNG, or set no --scale"
                )
            # pages of a TIFF file in colour are never taken for fewer channels
            is_grey = not (pages == "channels" and any(each.format == "TIFF" and "RGB" in each.mode for each in opened))
    # The numbers decide, not the file's mode: grey drawings are often saved as RGB.
    is_grey &= all((each == each[..., :1]).all() for each in planes if each.ndim == 3)
    parts = [each[..., None] if each.ndim == 2 else each[..., :1] if is_grey else each for each in planes]
    if not is_grey:
        parts = [np.broadcast_to(each, (*each.shape[:2], 3)) for each in parts]
    numbers = np.stack(parts).transpose(3, 0, 1, 2)  # (C, n, H, W)
    if pages != "depth":
        numbers = numbers.swapaxes(0, 1).reshape(-1, *numbers.shape[2:])
    numbers = np.ascontiguousarray(numbers)
    return as_pixels(numbers, scale, name, "file")


def pillow_numbers(image: Image.Image) -> Shaped[np.ndarray, "..."]:
    """Return the numbers of a Pillow image of any mode, (H, W) or (H, W, 3); transparent parts become white.

    Numbers of more than 8 bits keep their values.
    """
    if image.mode[0] in "IF":
        numbers = np.asarray(image)
        is_16_bit = image.mode == "I" and image.format in ("PNG", "PPM")
        if (clear := image.info.get("transparency")) is not None:
            numbers = np.where(numbers == clear, MAX_16_BIT, numbers)
        return numbers.astype(np.uint16 if is_16_bit else numbers.dtype.newbyteorder("="))
    if image.has_transparency_data:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))


def with_channels(image: Pixels, channels: int, pages: Pages | None = None, name: str = "the image") -> Pixels:
    """Convert an image (c, *S) to one or three channels: grey is repeated, colour becomes its luma.

    Raises:
        InputError: That is impossible, or ``pages`` are channels and their number differs; errors begin with ``name``.
    """
    if len(image) == channels:
        return image
    if pages == "channels":
        raise InputError(f"{name} has {counted(len(image), 'channel')} in its pages, but {channels} are needed")
    if channels not in (1, 3):
        raise InputError(f"an image file gives 1 channel or 3, not {channels}")
    if channels == 3:
        return image.repeat(3, axis=0)
    if image.dtype != np.uint8:
        return np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), image, 1)[None]
    flat = image.reshape(3, -1, image.shape[-1]).transpose(1, 2, 0)
    return np.array(Image.fromarray(flat).convert("L")).reshape(1, *image.shape[1:])


def in_one_form(
    images: Mapping[Path, Pixels], where: str, scale: Scale | None = None, pages: Pages | None = None
) -> dict[Path, Pixels]:
    """Return the images of a data set with one dtype and one number of channels: grey if all are grey, else colour.

    A warning that begins with ``where`` says if all are dark.
    """
    note_dark([*images.values()], f"all images of {where}", scale, any_bits=True)
    channels = max(map(len, images.values()), default=1)
    pixels = zip(images, alike([*images.values()]), strict=True)
    return {file: with_channels(image, channels, pages, str(file)) for file, image in pixels}


def _padded(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize an image to fit inside ``size``, centred on the median colour of its border."""
    inner = _scaled(image, min(size[0] / image.shape[1], size[1] / image.shape[2]))
    border = np.concatenate([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], axis=1)
    colour = np.sort(border, axis=1)[:, (border.shape[1] - 1) // 2]
    canvas = np.broadcast_to(colour[:, None, None], (len(image), *size)).copy()
    top, left = (size[0] - inner.shape[1]) // 2, (size[1] - inner.shape[2]) // 2
    canvas[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
    return canvas


def _scaled(image: Pixels, scale: float) -> Pixels:
    """Scale both sides of an image by a factor, to at least one pixel."""
    return _resized(image, (max(round(image.shape[1] * scale), 1), max(round(image.shape[2] * scale), 1)))


def _resized(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize an image in floats, like :func:`torchcaps.datasets.resize_images`, not in 8 bits."""
    if image.shape[1:] == size:
        return image
    planes = resized(image.astype(np.float32), size, Image.Resampling.BICUBIC)
    return planes.clip(0, 1) if image.dtype != np.uint8 else planes.round().clip(0, 255).astype(np.uint8)
