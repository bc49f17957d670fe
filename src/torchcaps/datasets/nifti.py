"""Read and write volumes in the NIfTI format, with nibabel."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from torchcaps.datasets.images import is_hidden
from torchcaps.errors import InputError, install, reason_of
from torchcaps.files import atomic_path, require_file
from torchcaps.machine import check_memory

SUFFIXES = (".nii", ".nii.gz")
RANGE = (0.5, 99.5)
"""Percentiles of a volume that become 0 and 1, if no range is given."""
MAX_SIDE = 2048
"""Largest side of a volume, voxels."""


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume with its axes in the directions of the body: from bottom to top, from back to front, from left to right.

    Args:
        values: Numbers of the voxels.
        spacing: Distances of neighbouring voxels along the axes, usually in mm.
        source: Image of nibabel, in the file's own order of axes.
    """

    values: Float[np.ndarray, "D H W"]
    spacing: tuple[float, ...]
    source: Any

    def write(self, mask: UInt8[np.ndarray, "D H W"], path: Path) -> None:
        """Write a mask in the file's own order of axes, with its affine map."""
        nib = import_nibabel()
        to_body = nib.orientations.io_orientation(self.source.affine)
        back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to_body)
        own = nib.orientations.apply_orientation(mask.T, back).astype(np.uint8)
        with atomic_path(path) as temporary:
            data = nib.Nifti1Image(own, self.source.affine).to_bytes()
            temporary.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


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


def read_volume(path: Path) -> Volume:
    """Read a NIfTI file of one volume. The size in its header is checked before the voxels are read.

    Raises:
        InputError: nibabel or the file is missing, the file is damaged, or it holds several volumes or too large ones.
    """
    nib = import_nibabel()
    require_file(path, "NIfTI file")
    with _one_sentence(path, nib):
        image = nib.load(path)
        shape = tuple(map(int, image.shape))
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        axes = {4: f"four-dimensional (T, {shape[-1]} volumes)"}.get(len(shape), f"an array of the shape {shape}")
        raise InputError(f"{path.name} is {axes}; give one volume a file")
    if not all(1 <= side <= MAX_SIDE for side in shape):
        raise InputError(f"{path} has sides of {shape} voxels, but 1 to {MAX_SIDE} can be read")
    check_memory(2 * 8 * math.prod(shape), f"the voxels of {path}")
    with _one_sentence(path, nib):
        body = nib.as_closest_canonical(image)
        values = np.asanyarray(body.dataobj).reshape(body.shape[:3]).T
        spacing = tuple(float(each) for each in body.header.get_zooms()[:3])[::-1]
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise InputError(f"{path} has voxels that are no finite numbers")
    return Volume(values, spacing, image)


def to_uint8(values: Float[np.ndarray, "..."], scale: tuple[float, float] | None) -> UInt8[np.ndarray, "..."]:
    """Scale the numbers of a volume to 0..255; values beyond the range are clipped.

    Args:
        values: The numbers.
        scale: Numbers that become 0 and 255; None: the 0.5th and the 99.5th percentile of the volume.
    """
    low, high = np.percentile(values, RANGE) if scale is None else scale
    shares = (values.astype(np.float32) - low) / max(high - low, np.finfo(np.float32).tiny)
    return (shares.clip(0, 1) * 255).round().astype(np.uint8)


@contextmanager
def _one_sentence(path: Path, nib: Any) -> Iterator[None]:
    """Turn nibabel's errors about a file into an InputError of one sentence."""
    broken = (nib.filebasedimages.ImageFileError, nib.spatialimages.HeaderDataError, OSError, EOFError, ValueError)
    try:
        yield
    except broken as error:
        raise InputError(f"{path} cannot be read as a NIfTI file: {reason_of(error)}") from None
