"""Read volumes from NIfTI files and DICOM series, resample them, and write masks as NIfTI files, with nibabel."""

from __future__ import annotations

import gzip
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from torchcaps.datasets.dicom import read_series
from torchcaps.datasets.reading import unpacked
from torchcaps.datasets.scaling import as_bytes, as_pixels
from torchcaps.errors import InputError, install
from torchcaps.files import atomic_path, one_sentence, require_file
from torchcaps.machine import check_memory

MAX_SIDE = 2048
"""Largest side of a volume, voxels."""
MAX_EXTENSION_BYTES = 64 * 2**20
"""Bytes between the header and the voxels of a file that are read, at most."""
MILLIMETRES = {"meter": 1000.0, "micron": 0.001}
"""Millimetres of a unit of lengths in a header; other units are taken for millimetres."""


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume with its axes in the directions of the body: from bottom to top, from back to front, from left to right.

    Args:
        values: Numbers of the voxels, in one channel or several.
        spacing: Distances of neighbouring voxels along the axes, mm.
        source: Image of nibabel in the file's own order of axes, with its header and affine map but without voxels.
        size: Sides of the volume in its file, before it is resampled.
    """

    values: Float[np.ndarray, "C D H W"]
    spacing: tuple[float, ...]
    source: Any
    size: tuple[int, ...]

    def resampled(self, spacing: Sequence[float] | None, name: str) -> Volume:
        """Return the volume with about these distances of neighbouring voxels; None: its own. `write` goes back.

        Its extent stays, so the distances are exact up to the rounding of the sides. ``name`` begins errors.
        """
        if spacing is None:
            return self
        extent = [side * own for side, own in zip(self.size, self.spacing, strict=True)]
        size = tuple(max(round(length / step), 1) for length, step in zip(extent, spacing, strict=True))
        if max(size) > MAX_SIDE:
            raise InputError(
                f"{name} would have {'×'.join(map(str, size))} voxels with the spacing (--spacing) "
                f"{','.join(f'{step:g}' for step in spacing)}, but at most {MAX_SIDE} a side can be read"
            )
        check_memory(3 * 4 * len(self.values) * math.prod(size), f"the resampled voxels of {name}")
        exact = tuple(length / side for length, side in zip(extent, size, strict=True))
        return replace(self, values=resample(self.values, size), spacing=exact)

    def restored(self, mask: UInt8[np.ndarray, "D H W"]) -> UInt8[np.ndarray, "d h w"]:
        """Return a mask of the resampled volume on the grid of the file."""
        return resample(mask, self.size, nearest=True)

    def write(self, mask: UInt8[np.ndarray, "d h w"], path: Path, *, new: bool = False) -> None:
        """Write a mask on the grid of the file, in its order of axes, with its affine map, codes and units."""
        nib = import_nibabel()
        to_body = nib.orientations.io_orientation(self.source.affine)
        back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to_body)
        own = nib.orientations.apply_orientation(mask.T, back).astype(np.uint8)
        with atomic_path(path, new=new) as temporary:
            header = self.source.header.copy()  # with its units and the codes of its positions
            header.extensions.clear()
            header.set_data_dtype(np.uint8)
            header.set_slope_inter(1, 0)
            header["cal_min"] = header["cal_max"] = 0
            data = type(self.source)(own, self.source.affine, header).to_bytes()
            temporary.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def pixels(self, scale: tuple[float, float] | None, name: str) -> UInt8[np.ndarray, "C D H W"]:
        """Return the voxels as pixels, each channel by its own percentiles; ``name`` begins errors."""
        return np.stack([as_bytes(as_pixels(channel, scale, name, "volume")) for channel in self.values])

    @property
    def has_place(self) -> bool:
        """True if the file says where its voxels lie: its qform or sform code is not 0."""
        return bool(self.source.header["qform_code"] or self.source.header["sform_code"])

    def distance(self, other: Volume) -> float:
        """Return the largest distance of a corner of the volume from the same corner of another volume, mm."""
        corners = np.array(np.meshgrid(*([0, side - 1] for side in self.size[::-1]), [1])).reshape(4, -1)
        return float(np.linalg.norm((self.affine - other.affine)[:3] @ corners, axis=0).max())

    @property
    def affine(self) -> Float[np.ndarray, "4 4"]:
        """Affine map from voxels in the directions of the body to positions, mm."""
        nib = import_nibabel()
        with one_sentence("the place of a volume cannot be read"):
            affine: np.ndarray = nib.as_closest_canonical(self.source).affine
            return _millimetres(self.source.header) * affine


def resample(
    values: Shaped[np.ndarray, "*C D H W"], size: Sequence[int], *, nearest: bool = False
) -> Shaped[np.ndarray, "*C d h w"]:
    """Return numbers on another grid of the same extent: interpolated linearly, or those of the nearest voxel.

    Axes whose side stays are not changed.
    """
    for axis, side in zip((-3, -2, -1), size, strict=True):
        if (old := values.shape[axis]) == side:
            continue
        places = (np.arange(side) + 0.5) * old / side
        if nearest:
            values = values.take(places.astype(int), axis)
            continue
        places = (places - 0.5).clip(0, old - 1)
        below = places.astype(int)
        share = np.expand_dims((places - below).astype(np.float32), tuple(range(axis + 1, 0)))
        low, high = (values.take(each, axis).astype(np.float32) for each in (below, np.minimum(below + 1, old - 1)))
        values = low + share * (high - low)
    return values


def import_nibabel() -> Any:
    """Return the package nibabel; raise InputError, which says how to install it, if it is missing."""
    try:
        import nibabel
    except ImportError:
        raise InputError(f"NIfTI files are read by nibabel: {install('nifti')}") from None
    return nibabel


def read_volume(path: Path, place: Float[np.ndarray, "4 4"] | None = None) -> Volume:
    """Read a NIfTI file, gzipped or not, or a folder of the slices of a DICOM series.

    The volumes of a four-dimensional file are channels. The sizes in a header are checked before more is read.
    ``place`` is an affine map to use instead of the file's own.

    Raises:
        InputError: nibabel or the file is missing, the file is damaged, it goes on after its last voxel, or its volumes
            are too large; or slices are no series.
    """
    nib, kind = import_nibabel(), "DICOM series" if path.is_dir() else "NIfTI file"
    if not path.is_dir():
        require_file(path, kind)
    with one_sentence(f"{path} cannot be read as a {kind}"), _quiet(nib.imageglobals.logger):
        image = _read_slices(path, nib) if path.is_dir() else _read_image(path, nib)
        if place is not None:
            image = type(image)(image.dataobj, place, image.header)
        if not np.isfinite(image.affine).all():
            raise ValueError("its place in the body (qform or sform) has numbers that are not finite")
        body = nib.as_closest_canonical(image)
        values = np.asanyarray(body.dataobj).reshape(*body.shape[:3], -1).T
        spacing = tuple(_millimetres(image.header) * float(each) for each in body.header.get_zooms()[:3])[::-1]
        source = type(image)(np.broadcast_to(np.uint8(0), image.shape[:3]), image.affine, image.header)
    if values.dtype.kind not in "iuf":
        kind = "complex numbers" if values.dtype.kind == "c" else "colours"
        raise InputError(f"{path} has voxels that are {kind}; save numbers, and channels as the last axis")
    if not np.isfinite(values).all():
        raise InputError(f"{path} has voxels that are no finite numbers")
    return Volume(values, spacing, source, values.shape[1:])


def _millimetres(header: Any) -> float:
    """Return the millimetres of a unit of lengths in a header."""
    return MILLIMETRES.get(header.get_xyzt_units()[0], 1.0)


def _read_slices(folder: Path, nib: Any) -> Any:
    """Return nibabel's image of a DICOM series."""
    numbers, affine = read_series(folder)
    image = nib.Nifti1Image(numbers.T, affine)
    image.header.set_xyzt_units("mm")
    return image


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Hide the records of a logger, which nibabel writes about headers that it then refuses or corrects."""
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _read_image(path: Path, nib: Any) -> Any:
    """Return nibabel's image of a file, whose bytes were all read, up to a checksum at their end."""
    with unpacked(path) as file:
        start = file.read(4)
        sizes = {size: kind for kind, size in ((nib.Nifti1Image, 348), (nib.Nifti2Image, 540))}
        size = next((each for each in sizes if start in (each.to_bytes(4, "little"), each.to_bytes(4, "big"))), None)
        if size is None:
            raise ValueError("it does not begin with the header of a NIfTI file")
        start += file.read(size - 4)
        header = sizes[size].header_class(start)
        shape = tuple(map(int, header.get_data_shape()))
        while len(shape) > 3 and shape[-1] == 1:
            shape = shape[:-1]
        if len(shape) not in (3, 4):
            raise InputError(
                f"{path} is an array of the shape {shape}; give one volume a file, or channels as its last axis"
            )
        if not all(1 <= side <= MAX_SIDE for side in shape):
            raise InputError(f"{path} has sides of {shape} voxels, but 1 to {MAX_SIDE} can be read")
        first = int(header.get_data_offset())
        if first > size + MAX_EXTENSION_BYTES:
            limit = MAX_EXTENSION_BYTES // 2**20
            raise ValueError(f"its voxels begin at byte {first}, but extensions of its header may have {limit} MiB")
        check_memory(3 * 8 * math.prod(shape), f"the voxels of {path}")
        end = first + math.prod(shape) * header.get_data_dtype().itemsize
        contents = start + file.read(end - size + 1)
    if len(contents) != end:
        raise ValueError("it ends too early" if len(contents) < end else "it goes on after its last voxel")
    return sizes[size].from_bytes(contents)
