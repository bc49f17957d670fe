"""Read the picture of a DICOM file, or the slices of a series, with pydicom. No field about a person is ever read.

Only the fields in `_FIELDS` and `_PLACE` are parsed, so a name or an identifier of a person cannot reach a message, a
file or a network. The identifier of a series is only compared.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from torchcaps.datasets.image_files import MAX_PAGES, get_max_megapixels
from torchcaps.datasets.scaling import Scale
from torchcaps.errors import InputError, install
from torchcaps.files import one_sentence, require_file
from torchcaps.machine import check_memory
from torchcaps.words import counted

SUFFIXES = (".dcm", ".dicom")
"""Suffixes of DICOM files."""
_FIELDS = ["SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"]
_FIELDS += ["BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleIntercept", "RescaleSlope"]
_FIELDS += ["PixelData"]
_PLACE = ["SeriesInstanceUID", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "NumberOfFrames"]
_PLACE += ["Rows", "Columns", "PhotometricInterpretation"]
_MAGIC = b"DICM"
"""Bytes 128 to 131 of a DICOM file."""
STEP_TOLERANCE, SHIFT_TOLERANCE = 0.05, 0.1
"""Largest difference of the distances of two slices, as a share, and largest shift of a slice, in sides of a pixel."""


def is_dicom(path: Path) -> bool:
    """Return True for the name of a DICOM file."""
    return path.suffix.lower() in SUFFIXES


def import_pydicom() -> Any:
    """Return the package pydicom; raise InputError, which says how to install it, if it is missing."""
    try:
        import pydicom
        import pydicom.pixels.utils
    except ImportError:
        raise InputError(f"DICOM files are read by pydicom: {install('dicom')}") from None
    return pydicom


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
    pydicom = import_pydicom()
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
            numbers = np.asarray(pydicom.pixels.utils.pixel_array(file))
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


def slices_in(folder: Path) -> list[Path]:
    """Return the DICOM files in a folder, with any suffix or none, sorted, without hidden ones."""
    files = (each for each in folder.iterdir() if each.is_file() and not each.name.startswith((".", "DICOMDIR")))
    return sorted(each for each in files if is_dicom(each) or _has_magic(each))


def _has_magic(path: Path) -> bool:
    """Return True for a file without a usual suffix that begins like a DICOM file; UIDs end like a suffix."""
    if path.suffix and not path.suffix[1:].isdecimal():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == _MAGIC


class _Slice(NamedTuple):
    """Place of a slice, in mm."""

    series: str
    grid: tuple[float, ...]
    """Size, colours, directions of rows and columns, and distances of pixels, which are those of all slices."""
    position: Float[np.ndarray, "3"]

    @property
    def axes(self) -> Float[np.ndarray, "3 3"]:
        """Unit vectors along a row, along a column, and across the slice."""
        along, down = np.reshape(self.grid[3:9], (2, 3))
        return np.stack([along, down, np.cross(along, down)])


def read_series(folder: Path) -> tuple[Shaped[np.ndarray, "D H W"], Float[np.ndarray, "4 4"]]:
    """Read the slices of a DICOM series, sorted by their positions, with the numbers of `read_dicom`.

    Returns:
        The numbers, and the affine map from voxels (column, row, slice) to positions as in NIfTI files, mm.

    Raises:
        InputError: There are no slices or one, a slice is damaged or has no position, slices are of several series or
            differ in size or direction, two lie at one position, some are missing, or they are shifted.
    """
    places = {file: _place_of(file) for file in slices_in(folder)}
    if len(places) < 2:
        raise InputError(f"{folder} has {counted(len(places), 'DICOM file')}, but a series has two slices at least")
    first, *others = places
    if (count := len({place.series for place in places.values()})) > 1:
        raise InputError(f"{folder} holds slices of {count} series; put each series into a separate folder")
    for file in others:
        if not np.allclose(places[file].grid, places[first].grid, atol=1e-3):
            raise InputError(
                f"{file} and {first} differ in size, direction, colours or distances of pixels, so they are no "
                "slices of one volume; move the others away"
            )
    along, down, across = places[first].axes
    files = sorted(places, key=lambda file: float(places[file].position @ across))
    positions = np.stack([places[file].position for file in files])
    steps = np.diff(positions @ across)
    usual = float(np.sort(steps)[(len(steps) - 1) // 2])
    for before, after, step in zip(files, files[1:], steps, strict=False):
        if step < 1e-3:
            raise InputError(
                f"{before} and {after} lie at one position; leave the slices of one time, or of one echo, in the folder"
            )
        if abs(step - usual) > STEP_TOLERANCE * usual:
            raise InputError(
                f"slices are missing between {before} and {after}, or their distances differ: these are {step:.4g} mm "
                f"apart, others {usual:.4g} mm"
            )
    down_step, along_step = places[first].grid[9:]
    sides = (positions - positions[0]) @ np.stack([along, down]).T
    if np.abs(sides).max() > SHIFT_TOLERANCE * min(down_step, along_step):
        raise InputError(
            f"the slices of {folder} are shifted, as by a tilted scanner; convert them, such as by dcm2niix"
        )
    height, width = places[first].grid[:2]
    check_memory(int(3 * 8 * len(files) * height * width), f"the voxels of {folder}")
    slices = [read_dicom(file, str(file), "none", several=False)[0][0] for file in files]
    if slices[0].ndim == 3:
        raise InputError(f"the slices of {folder} are in colour, but a series is grey")
    affine = np.eye(4)
    affine[:3, :3] = np.stack([along * along_step, down * down_step, across * steps.mean()], 1)
    affine[:3, 3] = positions[0]
    affine[:2] *= -1  # DICOM's axes point left and back, those of NIfTI right and forward
    return np.stack(slices), affine


def _place_of(path: Path) -> _Slice:
    """Return the place of a slice.

    Raises:
        InputError: The file is damaged, has no position, or has several frames.
    """
    pydicom = import_pydicom()
    require_file(path, "DICOM file")
    with one_sentence(f"{path} cannot be read as a slice of a DICOM series"):
        try:
            file = pydicom.dcmread(path, specific_tags=_PLACE, stop_before_pixels=True)
            frames, size = int(file.get("NumberOfFrames") or 1), (float(file.Rows), float(file.Columns))
            colours = float(str(file.PhotometricInterpretation) == "MONOCHROME1")
        except Exception:  # the text of an error may quote the file
            raise ValueError("it is damaged, or it has no picture") from None
        if frames > 1:
            raise ValueError(f"it has {frames} frames; convert it, such as by dcm2niix, or read it with --pages depth")
        try:
            directions, spacing, position = (
                [float(each) for each in file[name].value]
                for name in ("ImageOrientationPatient", "PixelSpacing", "ImagePositionPatient")
            )
            series = str(file.get("SeriesInstanceUID", ""))
            axes = np.reshape(directions, (2, 3))
            are_units = np.allclose(axes @ axes.T, np.eye(2), atol=1e-3)
            if len(spacing) != 2 or not min(spacing) > 0 or len(position) != 3 or not are_units:
                raise ValueError
            if not np.isfinite([*spacing, *position]).all():
                raise ValueError
        except Exception:
            raise ValueError("it does not say where it lies (ImagePositionPatient and the like)") from None
    return _Slice(series, (*size, colours, *directions, *spacing), np.array(position))
