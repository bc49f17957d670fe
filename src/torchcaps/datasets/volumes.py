"""Volumes as users store them: a NIfTI file, a folder of a DICOM series, or a folder of a subject with its channels."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchcaps.datasets.dicom import slices_in
from torchcaps.datasets.images import is_hidden, read_pixels, stem_of, subfolders, with_channels
from torchcaps.datasets.masks import size_fault
from torchcaps.datasets.matching import note_order
from torchcaps.datasets.nifti import Volume, read_volume
from torchcaps.datasets.scaling import Pixels, note_dark
from torchcaps.errors import InputError
from torchcaps.ranges import Pages

SUFFIXES = (".nii", ".nii.gz")
MAX_OFF = 0.1
"""Largest distance between the voxels of two volumes on one grid, in sides of a voxel: a difference by rounding."""


def is_volume(path: Path) -> bool:
    """Return True for the name of a NIfTI file, and for a folder, which holds a series or a subject."""
    return path.name.lower().endswith(SUFFIXES) or path.is_dir()


def volumes_in(folder: Path) -> list[Path]:
    """Return the NIfTI files in a folder and its sub-folders of a DICOM series, sorted, without hidden ones."""
    files = [each for each in folder.iterdir() if each.is_file() and is_volume(each) and not is_hidden(each)]
    return sorted([*files, *(each for each in subfolders(folder) if slices_in(each))])


def advice_for(folder: Path, root: Path) -> str:
    """Return the end of an error about a folder without image files: how to read its volumes, if it holds any."""
    return f"; for its volumes write nifti:{root}" if volumes_in(folder) else ""


def channel_of(file: Path) -> str:
    """Return the number of the channel at the end of a name, as in nnU-Net's case_0000.nii.gz, or an empty text."""
    match = re.search(r"_(\d{4})$", stem_of(file))
    return match[1] if match else ""


def channels_in(folder: Path) -> dict[str, list[Path]]:
    """Return the volumes in the folder of a subject by their names, in small letters: ``t1`` for t1.nii.gz.

    The name of the folder may stand before them, as in BraTS_001/BraTS_001_t1.nii.gz.
    """
    named: dict[str, list[Path]] = {}
    for file in volumes_in(folder):
        name, subject = stem_of(file).lower(), folder.name.lower()
        if name.startswith(subject) and name[len(subject) :][:1] in ("_", "-", "."):
            name = name[len(subject) + 1 :]
        named.setdefault(name, []).append(file)
    return named


def inputs_in(path: Path, channels: Sequence[str] | None) -> list[Path]:
    """Return the inputs that a path names for a network of volumes.

    Args:
        path: A NIfTI file, a folder of a series, a folder of a subject, or a folder that holds such files or folders.
        channels: Names of the files of a subject; None: a file or a series is an input.
    """
    if not path.is_dir() or slices_in(path):
        return [path]
    inside = volumes_in(path)
    if channels is not None and not channels_in(path).keys().isdisjoint(channels):
        return [path]
    if inside and (channels is None or len(channels) == 1):
        return inside
    if inside and channels and any(channel_of(file) == channels[0] for file in inside):  # one file for all channels
        return [file for file in inside if channel_of(file) == channels[0]]
    if inside:  # reading it raises the error
        return [path]
    folders = (each for each in subfolders(path) if not each.is_symlink())
    return [each for folder in folders for each in inputs_in(folder, channels)]


def files_of(path: Path, channels: Sequence[str] | None) -> list[Path]:
    """Return the file or series of each channel of an input.

    Raises:
        InputError: The folder of a subject lacks a channel, or has two files for it.
    """
    if channels is not None and channel_of(path) in channels and not path.is_dir():
        base, end = path.name.rsplit(f"_{channel_of(path)}", 1)
        return [path.with_name(f"{base}_{channel}{end}") for channel in channels]
    if channels is None or not path.is_dir() or slices_in(path):
        return [path]
    named = channels_in(path)
    for name in channels:
        if len(files := named.get(name, [])) != 1:
            has = " and ".join(each.name for each in files) or f"no {name}, but {', '.join(named)}"
            raise InputError(f"{path} has {has}; the network takes one file for each of {', '.join(channels)}")
    return [named[name][0] for name in channels]


def read_aligned(files: Sequence[Path]) -> list[Volume]:
    """Read volumes whose voxels lie at the same positions, such as the channels of a subject and its mask.

    Raises:
        InputError: A volume has another size than the first one, or lies at other positions.
    """
    volumes = [read_volume(file) for file in files]
    first, placed = volumes[0], next((each for each in volumes if each.has_place), None)
    if not all(each.has_place for each in volumes) and len(volumes) > 1:
        warnings.warn(
            "Some volumes or masks do not say where they lie (their qform and sform codes are 0); their voxels are "
            "matched in the order of the files.",
            stacklevel=2,
        )
        if placed is not None:
            volumes = [
                each if each.has_place else read_volume(file, placed.source.affine)
                for file, each in zip(files, volumes, strict=True)
            ]
            first = volumes[0]
    for file, each in zip(files, volumes, strict=True):
        if each.size != first.size:
            raise InputError(size_fault(file, each.size, files[0], first.size))
        if placed is not None and (off := first.distance(each)) > MAX_OFF * min(first.spacing):
            raise InputError(
                f"{file} lies up to {off:.3g} mm away from {files[0]}, by the positions in both files; resample it to "
                f"the grid of {files[0].name}, or copy the header of that file"
            )
    return volumes


def joined(volumes: Sequence[Volume]) -> Volume:
    """Return the channels of volumes on one grid as one volume."""
    return replace(volumes[0], values=np.concatenate([each.values for each in volumes]))


def read_input(
    path: Path,
    channels: int,
    scale: tuple[float, float] | None,
    pages: Pages | None,
    names: Sequence[str] | None = None,
    spacing: Sequence[float] | None = None,
) -> tuple[Pixels, Volume | None]:
    """Read an image file or a volume as the input of a network for pixels: all of it, in this number of channels.

    Args:
        path: The file, a folder of a series, or the folder of a subject.
        channels: Channels of the network.
        scale: Numbers that become 0 and 1; None: by their dtype, or the percentiles of a volume.
        pages: Meaning of the pages of an image file.
        names: Names of the files of a subject; None: a volume is one file.
        spacing: Distances of voxels to which volumes are resampled, mm; None: their own.

    Returns:
        The pixels, and the volume, with which its mask is written; None for an image file.
    """
    if is_volume(path):
        files = files_of(path, names)
        volume = joined(read_aligned(files)).resampled(spacing, str(path))
        if len(files) == 1 and not path.is_dir() and len(volume.values) == channels:
            note_order(None, names, str(path))
        return volume.pixels(scale, str(path)), volume
    pixels = with_channels(read_pixels(path, scale=scale, pages=pages), channels, pages, str(path))
    note_dark([pixels], "an image file", scale)
    return pixels, None
