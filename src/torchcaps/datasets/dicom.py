"""Read the picture of a DICOM file with pydicom. No field about a person is ever read.

Only the fields in `_FIELDS` are parsed, so a name or an identifier cannot reach a message, a file or a network.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from torchcaps.datasets.image_files import MAX_PAGES, get_max_megapixels
from torchcaps.datasets.scaling import Scale
from torchcaps.errors import InputError, install
from torchcaps.files import one_sentence, require_file

SUFFIXES = (".dcm", ".dicom")
"""Suffixes of DICOM files."""
_FIELDS = ["SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"]
_FIELDS += ["BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleIntercept", "RescaleSlope"]
_FIELDS += ["PixelData"]


def is_dicom(path: Path) -> bool:
    """Return True for the name of a DICOM file."""
    return path.suffix.lower() in SUFFIXES


def read_dicom(
    path: Path, name: str, scale: Scale | None, *, several: bool
) -> tuple[list[Shaped[np.ndarray, "..."]], Scale | None]:
    """Read the frames of a DICOM file, (H, W) or (H, W, 3), and the range of its numbers.

    Stored numbers are multiplied by the rescale slope, and the intercept is added. In MONOCHROME1, small numbers are
    light; they are inverted within the range of the stored bits. Unsigned numbers without rescaling have the range of
    their stored bits. The range of other numbers must be set, such as ``scale=(-1024, 3071)`` for Hounsfield units.

    Args:
        path: The file.
        name: Name of the file in errors.
        scale: Range set by the user or kept by a run.
        several: Several frames are allowed.

    Raises:
        InputError: pydicom or the file is missing, the file is damaged, too large, compressed in a way that pydicom
            cannot decode, in colours of a palette, or of several frames.
    """
    try:
        import pydicom
        from pydicom.pixels.utils import pixel_array
    except ImportError:
        raise InputError(f"DICOM files are read by pydicom: {install('dicom')}") from None
    require_file(path, "DICOM file", name)
    with one_sentence(f"{name} cannot be read as a DICOM picture"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they may quote the file
        try:
            file = pydicom.dcmread(path, specific_tags=_FIELDS)
            count, shape = int(file.get("NumberOfFrames") or 1), (int(file.Rows), int(file.Columns))
            kind, bits = str(file.PhotometricInterpretation), int(file.BitsStored)
            signed, samples = bool(file.PixelRepresentation), int(file.SamplesPerPixel)
            slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
            syntax = file.file_meta.TransferSyntaxUID
        except Exception:  # the text of an error may quote the file
            raise ValueError("it is damaged, or it has no picture") from None
        _check(name, count, shape, kind, several)
        if not 1 <= bits <= 16 or samples not in (1, 3):
            raise ValueError(f"its numbers have {bits} bits and {samples} channels; 1 to 16 and 1 or 3 can be read")
        try:
            numbers = np.asarray(pixel_array(file))
        except Exception:
            how = f"its pixels are compressed as {syntax.name}, or damaged" if syntax.is_compressed else "it is damaged"
            raise ValueError(f"{how}; decompress it, for example with dcmdjpeg or gdcmconv --raw") from None
    frames = list(numbers) if count > 1 else [numbers]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if kind == "MONOCHROME1":
        frames = [(low + high - each.astype(np.int32)).astype(each.dtype) for each in frames]
    if (slope, intercept) != (1, 0):
        rescaled = [each * slope + intercept for each in frames]
        frames = [each.astype(np.int32) if (each == each.round()).all() else each for each in rescaled]
    elif not signed and bits != 8 and scale in (None, "auto"):
        scale = (low, high)
    elif bits == 8 and not signed:
        frames = [each.astype(np.uint8) for each in frames]
    return frames, scale


def _check(name: str, count: int, shape: tuple[int, int], kind: str, several: bool) -> None:
    """Raise InputError for sizes and colours that are not read, before the pixels are."""
    height, width = shape
    pixels = count * height * width
    if not 1 <= count <= MAX_PAGES or not pixels or pixels > 1e6 * get_max_megapixels():
        raise InputError(
            f"{name} has {count} frames of {width}×{height} pixels, but 1 to {MAX_PAGES:,} frames with at most "
            f"{get_max_megapixels():g} megapixels together can be read (--max-megapixels)"
        )
    if count > 1 and not several:
        raise InputError(
            f"{name} has {count:,} frames, but one is read; load or train with --pages channels, or, for volumes with "
            "masks, --pages depth (in Python pages=)"
        )
    if kind not in ("MONOCHROME1", "MONOCHROME2", "RGB", "YBR_FULL", "YBR_FULL_422"):
        raise InputError(f"{name} has the colours {kind[:16]}, but grey, RGB and YBR_FULL can be read; convert it")
