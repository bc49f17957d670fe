"""Open image files with Pillow: only the formats in `FORMATS`, and nothing that a file holds is left out silently."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from torchcaps.datasets.scaling import MAX_12_BIT, MAX_16_BIT
from torchcaps.errors import InputError
from torchcaps.files import one_sentence, require_file
from torchcaps.ranges import is_number

FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PNG": ("PNG", (".png",)),
    "JPEG": ("JPEG", (".jpg", ".jpeg")),
    "BMP": ("BMP", (".bmp",)),
    "GIF": ("GIF", (".gif",)),
    "WEBP": ("WebP", (".webp",)),
    "TIFF": ("TIFF", (".tif", ".tiff")),
    "PPM": ("PNM", (".pgm", ".ppm", ".pbm", ".pnm")),
}
"""Formats that are read: Pillow's name, the usual name and suffixes. Pillow knows more; some start other programs."""
MASK_FORMATS = ("PNG", "BMP", "GIF", "TIFF", "PPM")
"""Formats of masks, which keep every number: all but JPEG and WebP."""

MAX_MEGAPIXELS = 64.0
"""Default limit of the size of an image file."""
PILLOW_MAX_MEGAPIXELS = 178.0
"""Limit of Pillow itself (twice ``PIL.Image.MAX_IMAGE_PIXELS``)."""
MAX_PAGES = 2048
"""Largest number of pages of a file."""
WHITE = "white"
"""Key in ``info`` of a PNM image, whose numbers Pillow stretched: the number that is white in the file."""

_SUBFILE, _OLD_SUBFILE, _SAMPLES, _DESCRIPTION, _SAMPLE_FORMAT = 254, 255, 277, 270, 339  # tags of TIFF
_BITS, _PHOTOMETRIC, _PLANAR = 258, 262, 284
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # a tile may be larger than its image, and is decoded as a whole
_REDUCED_OR_MASK = 1 | 4  # bits of _SUBFILE
_OLD_REDUCED = 2  # value of _OLD_SUBFILE
_SIGNED = 2  # value of _SAMPLE_FORMAT
_WHITE_IS_0 = 0  # value of _PHOTOMETRIC
_SEPARATE = 2  # value of _PLANAR
_ENTRIES = 0xB002  # list of the pictures of an MPO file

# Pillow's decoders log the errors that they raise; without a handler Python would print these records
logging.getLogger("PIL").addHandler(logging.NullHandler())


class _Limit:
    megapixels = MAX_MEGAPIXELS


def set_max_megapixels(megapixels: float) -> None:
    """Set the largest size of an image file. Larger files are refused before they are decoded.

    A file of a few hundred kilobytes may decode to gigabytes. Reading an image takes up to 24 bytes of memory for each
    pixel. The limit applies to all threads, and to every reader of image files: `read_image`, ``folder:`` data sets,
    the command line and the explorer. The pages of a file count together.

    Args:
        megapixels: Height · width / 10⁶, above 0, at most 178 (the limit of Pillow). Default: 64.

    Raises:
        InputError: ``megapixels`` is out of that range.
    """
    if not is_number(megapixels) or not 0 < megapixels <= PILLOW_MAX_MEGAPIXELS:
        raise InputError(f"megapixels must be above 0 and at most {PILLOW_MAX_MEGAPIXELS:g}, got {megapixels}")
    _Limit.megapixels = float(megapixels)


def get_max_megapixels() -> float:
    """Return the largest size of an image file in megapixels; see `set_max_megapixels`."""
    return _Limit.megapixels


@contextmanager
def opened_pages(
    path: Path, name: str, *, several: bool = False, what: str = "an image", formats: tuple[str, ...] = tuple(FORMATS)
) -> Iterator[list[Image.Image]]:
    """Open an image file, and yield its pages, decoded and rotated upright by their EXIF data.

    Pages are the images of a TIFF file, and the frames of an animated GIF, PNG or WebP. Reduced copies and masks inside
    a TIFF file, and the previews inside a JPEG file of a phone, are no pages. All have one size. Without ``several``, a
    file of more than one is refused. Errors of the block become an InputError, too; ``name`` and ``what`` are the words
    for the file in errors.

    Raises:
        InputError: The file is missing, damaged or too large, a checksum is wrong, or the file holds pages, channels or
            bits that would not be read.
    """
    require_file(path, "image file", name)
    with one_sentence(f"{name} cannot be read as {what}"), _opened(path, name, what, formats) as image:
        check_size(image, name)
        numbers = _pages_of(image)
        if len(numbers) > 1 and not several:
            raise InputError(
                f"{name} has {len(numbers):,} pages, but one is read; load or train with --pages channels, or, for "
                "volumes with masks, --pages depth (in Python pages=), or save one page a file"
            )
        if len(numbers) > MAX_PAGES:
            raise InputError(f"{name} has {len(numbers):,} pages, but {MAX_PAGES:,} can be read")
        pages, count = list[Image.Image](), 0
        for number in numbers:
            if number != image.tell():
                image.seek(number)
            count += check_size(image, name, count)
            _decode(image, path, name)
            if len(numbers) > 1:
                pages.append(ImageOps.exif_transpose(image))
                pages[-1].format = image.format
            else:
                ImageOps.exif_transpose(image, in_place=True)
                pages.append(image)
            if pages[0].size != pages[-1].size:
                sizes = " and of ".join("×".join(map(str, each.size)) for each in (pages[0], pages[-1]))
                raise InputError(f"{name} has pages of {sizes} pixels; all must have one size")
        yield pages


@contextmanager
def _opened(path: Path, name: str, what: str, formats: tuple[str, ...]) -> Iterator[ImageFile.ImageFile]:
    """Open a file in one of these formats, after a comparison of the checksums of a PNG file."""
    try:
        image = Image.open(path, formats=formats)
        if image.format == "PNG":  # Pillow decodes pixels without a look at their checksums
            with image:
                image.verify()
            image = Image.open(path, formats=formats)
    except UnidentifiedImageError:
        *most, last = [FORMATS[each][0] for each in formats]
        with path.open("rb") as file:
            is_tiff = file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
        unusual = ", but this TIFF file is damaged or has unusual pixels, such as 64-bit floats or 5 channels on a page"
        raise InputError(
            f"{name} cannot be read as {what}; {', '.join(most)} and {last} files can{unusual * is_tiff}"
        ) from None
    with image:
        yield image


def _pages_of(image: ImageFile.ImageFile) -> list[int]:
    """Return the positions of the pages in an open image file; see `opened_pages`."""
    count: int = getattr(image, "n_frames", 1)
    if image.format == "TIFF" and count > 1:
        return [n for n in range(count) if not _is_copy_or_mask(image, n)] or [0]
    if image.format == "MPO":
        kinds = [str(entry["Attribute"]["MPType"]) for entry in image.mpinfo[_ENTRIES]]  # type: ignore[attr-defined]
        return [0, *(n for n in range(1, count) if kinds[n].startswith("Multi-Frame"))]
    return list(range(count))


def _is_copy_or_mask(image: ImageFile.ImageFile, number: int) -> bool:
    """Return True if an image inside a TIFF file is marked as a reduced copy or a mask of another one."""
    image.seek(number)
    tags = image.tag_v2  # type: ignore[attr-defined]  # of a TiffImageFile
    return bool(tags.get(_SUBFILE, 0) & _REDUCED_OR_MASK) or tags.get(_OLD_SUBFILE) == _OLD_REDUCED


def check_size(image: ImageFile.ImageFile, name: str, before: int = 0) -> int:
    """Return the number of pixels of an image that is not yet decoded; ``before`` is that of earlier pages.

    Raises:
        InputError: All pages together, or a tile of the image, have too many pixels.
    """
    sizes = {"": image.size}
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]  # of a TiffImageFile
        sizes[" in a tile"] = (int(tags.get(_TILE_WIDTH, 0)), int(tags.get(_TILE_LENGTH, 0)))
    for where, (width, height) in sizes.items():
        if width * height + before > 1e6 * _Limit.megapixels:
            total = f"pages of more than {before} pixels" if before else f"{width}×{height} pixels{where}"
            raise InputError(
                f"{name} has {total}, {(width * height + before) / 1e6:.3g} megapixels, but the "
                f"limit is {_Limit.megapixels:g} megapixels; make it smaller, or raise the limit (--max-megapixels of "
                "commands that take image files, torchcaps.datasets.set_max_megapixels)"
            )
    return image.width * image.height


def _decode(image: ImageFile.ImageFile, path: Path, name: str) -> None:
    """Decode a page; raise InputError if Pillow would leave out channels, pages or bits, or misread the numbers."""
    raw = str(image.tile)  # with Pillow's name of the pixels in the file
    fault, advice, is_deep = "", "save each channel as a page, or all as an array in an .npz file", ";16" in raw
    is_unsigned = False
    if image.format == "TIFF":
        image.filename = ""  # with a name, Pillow maps the file into memory and scrambles pictures on their side
        tags = image.tag_v2  # type: ignore[attr-defined]  # of a TiffImageFile
        samples, bands, described = int(tags.get(_SAMPLES, 1)), len(image.getbands()), str(tags.get(_DESCRIPTION, ""))
        listed = re.match(r"ImageJ=.*?^images=(\d{1,9})$", described, re.DOTALL | re.MULTILINE)
        is_unsigned = _SIGNED not in tags.get(_SAMPLE_FORMAT, ())
        if samples > bands and image.mode != "P":
            fault = f"has {samples} channels, of which {bands} would be read"
        elif not is_unsigned and image.mode != "I":
            fault, advice = "has signed numbers of 8 bits", "save it with unsigned numbers"
        elif "'libtiff'" not in raw and tags.get(_PLANAR) == _SEPARATE and max(tags.get(_BITS, (1,))) > 8:
            fault = "has more than 8 bits in separate planes, uncompressed"
        elif image.mode[0] in "IF" and tags.get(_PHOTOMETRIC) == _WHITE_IS_0:
            fault, advice = "has more than 8 bits, of which 0 is white", "save it with 0 as black"
        elif "'libtiff'" in raw and re.search(r"'[IF];\d\dB", raw):
            fault, advice = "has big-endian numbers, compressed", "save it without compression, or little-endian"
        elif '"truncated": true' in described or (listed and int(listed[1]) > getattr(image, "n_frames", 1)):
            fault, advice = "lists fewer pages than it holds", "save it again as a TIFF file that lists all its pages"
    elif image.format == "PPM":
        decoder, _, _, args = image.tile[0]
        largest = args[-1] if decoder.startswith("ppm") and isinstance(args, tuple) else 0
        is_deep = largest > 255
        if largest not in (0, 255, MAX_16_BIT):
            image.info[WHITE] = largest
        if _goes_on(image, path):
            fault, advice = "goes on after its pixels", "save one image a file"
    image.load()
    colours = {"RGB": 3, "RGBA": 3, "LA": 1}.get(image.mode)
    highest = round(MAX_12_BIT / 257) if image.format == "PPM" else MAX_12_BIT >> 8  # Pillow rounds, or cuts off
    if is_deep and colours and np.asarray(image)[..., :colours].max() <= highest:
        fault = "has 16 bits a channel and numbers below 4,096, but the upper 8 bits of colours are read"
        advice = "save its channels as grey pages, or as an array in an .npz file"
    elif is_unsigned and image.mode == "I" and np.asarray(image).min() < 0:
        fault, advice = "has numbers above 2,147,483,647, half of the range of its 32 bits", "save smaller numbers"
    if fault:
        raise InputError(f"{name} {fault}; {advice}")


def _goes_on(image: ImageFile.ImageFile, path: Path) -> bool:
    """Return True if a PNM file holds more than one image."""
    decoder, _, offset, args = image.tile[0]
    largest = args[-1] if decoder == "ppm" and isinstance(args, tuple) else 0
    if decoder == "ppm_plain":
        numbers = re.sub(rb"#[^\r\n]*", b"", path.read_bytes()[offset:]).split()
        count = image.width * image.height * len(image.getbands())
        return (len(b"".join(numbers)) if image.mode == "1" else len(numbers)) > count
    depth = {"1": 1, "F": 32}.get(image.mode, 8)
    if depth == 8 and (";16" in str(args) or largest > 255):
        depth = 16
    with path.open("rb") as file:
        file.seek(offset + (image.width * len(image.getbands()) * depth + 7) // 8 * image.height)
        return bool(file.read(64).strip())
