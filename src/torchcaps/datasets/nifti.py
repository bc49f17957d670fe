"""Read and write volumes in the NIfTI format, with nibabel."""

from __future__ import annotations

import gzip
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from torchcaps.datasets.images import is_hidden, read_pixels, with_channels
from torchcaps.datasets.reading import unpacked
from torchcaps.datasets.scaling import Pixels, as_bytes, as_pixels, note_dark
from torchcaps.errors import InputError, install
from torchcaps.files import atomic_path, one_sentence, require_file
from torchcaps.machine import check_memory
from torchcaps.ranges import Pages

SUFFIXES = (".nii", ".nii.gz")
MAX_SIDE = 2048
"""Largest side of a volume, voxels."""
MAX_EXTENSION_BYTES = 64 * 2**20
"""Bytes between the header and the voxels of a file that are read, at most."""


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume with its axes in the directions of the body: from bottom to top, from back to front, from left to right.

    Args:
        values: Numbers of the voxels.
        spacing: Distances of neighbouring voxels along the axes, usually in mm.
        source: Image of nibabel in the file's own order of axes, with its header and affine map but without voxels.
    """

    values: Float[np.ndarray, "D H W"]
    spacing: tuple[float, ...]
    source: Any

    def write(self, mask: UInt8[np.ndarray, "D H W"], path: Path) -> None:
        """Write a mask in the file's own order of axes, with its affine map, codes and units."""
        nib = import_nibabel()
        to_body = nib.orientations.io_orientation(self.source.affine)
        back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to_body)
        own = nib.orientations.apply_orientation(mask.T, back).astype(np.uint8)
        with atomic_path(path) as temporary:
            header = self.source.header.copy()  # with its units and the codes of its positions
            header.extensions.clear()
            header.set_data_dtype(np.uint8)
            header.set_slope_inter(1, 0)
            header["cal_min"] = header["cal_max"] = 0
            data = type(self.source)(own, self.source.affine, header).to_bytes()
            temporary.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def pixels(self, scale: tuple[float, float] | None, name: str) -> UInt8[np.ndarray, "1 D H W"]:
        """Return the voxels as pixels of one channel; ``name`` begins errors."""
        return as_bytes(as_pixels(self.values, scale, name, "volume"))[None]

    @property
    def has_place(self) -> bool:
        """True if the file says where its voxels lie: its qform or sform code is not 0."""
        return bool(self.source.header["qform_code"] or self.source.header["sform_code"])

    def distance(self, other: Volume) -> float:
        """Return the largest distance of a corner of the volume from the same corner of another volume."""
        corners = np.array(np.meshgrid(*([0, side - 1] for side in self.values.shape[::-1]), [1])).reshape(4, -1)
        return float(np.linalg.norm((self.affine - other.affine)[:3] @ corners, axis=0).max())

    @property
    def affine(self) -> Float[np.ndarray, "4 4"]:
        """Affine map from voxels in the directions of the body to positions."""
        nib = import_nibabel()
        with one_sentence("the place of a volume cannot be read"):
            affine: np.ndarray = nib.as_closest_canonical(self.source).affine
        return affine


def is_volume(path: Path) -> bool:
    """Return True for the name of a NIfTI file."""
    return path.name.lower().endswith(SUFFIXES)


def volumes_in(folder: Path) -> list[Path]:
    """Return the NIfTI files in a folder, sorted, without hidden ones."""
    return sorted(file for file in folder.iterdir() if is_volume(file) and file.is_file() and not is_hidden(file))


def import_nibabel() -> Any:
    """Return the package nibabel; raise InputError, which says how to install it, if it is missing."""
    try:
        import nibabel
    except ImportError:
        raise InputError(f"NIfTI files are read by nibabel: {install('nifti')}") from None
    return nibabel


def read_volume(path: Path, place: Float[np.ndarray, "4 4"] | None = None) -> Volume:
    """Read a NIfTI file of one volume, gzipped or not. The sizes in its header are checked before more is read.

    ``place`` is an affine map to use instead of the file's own.

    Raises:
        InputError: nibabel or the file is missing, the file is damaged, it goes on after its last voxel, or it holds
            several volumes or too large ones.
    """
    nib = import_nibabel()
    require_file(path, "NIfTI file")
    with one_sentence(f"{path} cannot be read as a NIfTI file"), _quiet(nib.imageglobals.logger):
        image = _read_image(path, nib)
        if place is not None:
            image = type(image)(image.dataobj, place, image.header)
        body = nib.as_closest_canonical(image)
        values = np.asanyarray(body.dataobj).reshape(body.shape[:3]).T
        spacing = tuple(float(each) for each in body.header.get_zooms()[:3])[::-1]
        source = type(image)(np.broadcast_to(np.uint8(0), image.shape), image.affine, image.header)
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise InputError(f"{path} has voxels that are no finite numbers")
    return Volume(values, spacing, source)


def read_input(
    path: Path, channels: int, scale: tuple[float, float] | None, pages: Pages | None
) -> tuple[Pixels, Volume | None]:
    """Read an image file or a volume as the input of a network for pixels: all of it, in this number of channels.

    Returns:
        The pixels, and the volume, with which its mask is written; None for an image file.
    """
    if is_volume(path):
        volume = read_volume(path)
        return volume.pixels(scale, str(path)), volume
    pixels = with_channels(read_pixels(path, scale=scale, pages=pages), channels, pages, str(path))
    note_dark([pixels], "an image file", scale)
    return pixels, None


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
        if len(shape) != 3:
            axes = {4: f"four-dimensional (T, {shape[-1]} volumes)"}.get(len(shape), f"an array of the shape {shape}")
            raise InputError(f"{path} is {axes}; give one volume a file")
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
