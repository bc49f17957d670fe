"""Volumes of drawn subjects in every layout that is read: two channels, t1 and flair, and a mask."""

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np

from dicom_files import write_series

COUNT, SIZE, SPACING = 10, (4, 6, 5), (3.0, 0.5, 2.0)
RANDOM = np.random.default_rng(0)
T1, FLAIR = RANDOM.integers(0, 4096, (2, COUNT, *SIZE))
SEG = (T1 > 2048).astype(np.uint8) + (FLAIR > 3000)
T1[:, 0, 0, 0], T1[:, 0, 0, 1], FLAIR[:, 0, 0, 0] = 400 * np.arange(COUNT), 4095, 4095
"""The first voxel of T1 names the subject."""
AFFINE = np.array([[-2.0, 0, 0, -10], [0, -0.5, 0, 20], [0, 0, 3, 5], [0, 0, 0, 1]])
"""Of volumes as the slices of `write_series` lie."""


def save(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE, units: str = "mm") -> Path:
    """Write voxels (D, H, W) or (C, D, H, W)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(values.T.astype(np.uint8 if values.max() < 9 else np.int16), affine)
    image.header.set_xyzt_units(units)
    nib.save(image, path)
    return path


def files(root: Path, n: int) -> None:
    for name, values in (("t1", T1), ("flair", FLAIR), ("seg", SEG)):
        save(root / f"P{n}/{name}.nii.gz", values[n])


def named_files(root: Path, n: int) -> None:
    for name, values in (("_T1.nii", T1), ("_FLAIR.nii", FLAIR), ("_seg.nii.gz", SEG)):
        save(root / f"P{n}/P{n}{name}", values[n])


def sessions(root: Path, n: int) -> None:
    for name, values in (("t1", T1), ("flair", FLAIR), ("label", SEG)):
        save(root / f"P{n}/day1/{name}.nii.gz", values[n])


def one_file(root: Path, n: int) -> None:
    save(root / f"images/P{n}.nii.gz", np.stack([FLAIR[n], T1[n]]))
    save(root / f"masks/P{n}.nii.gz", SEG[n])


def one_file_and_one_hot(root: Path, n: int) -> None:
    save(root / f"images/P{n}.nii.gz", np.stack([FLAIR[n], T1[n]]))
    save(root / f"masks/P{n}.nii.gz", np.stack([SEG[n] == j for j in range(3)]).astype(np.uint8))


def one_file_a_subject(root: Path, n: int) -> None:
    save(root / f"P{n}/both.nii.gz", np.stack([FLAIR[n], T1[n]]))
    save(root / f"P{n}/mask.nii.gz", SEG[n])


def numbered(root: Path, n: int) -> None:
    """As nnU-Net names them."""
    for number, values in enumerate((FLAIR, T1)):
        save(root / f"imagesTr/P{n}_000{number}.nii.gz", values[n])
    save(root / f"labelsTr/P{n}.nii.gz", SEG[n])


def series(root: Path, n: int) -> None:
    write_series(root / f"P{n}/t1", T1[n])
    write_series(root / f"P{n}/flair", FLAIR[n])
    save(root / f"P{n}/seg.nii.gz", SEG[n])


def turned_mask(root: Path, n: int) -> None:
    files(root, n)
    turn = np.array([[1, 0, 0, 0], [0, -1, 0, SIZE[1] - 1], [0, 0, 1, 0], [0, 0, 0, 1]])
    save(root / f"P{n}/seg.nii.gz", SEG[n, :, ::-1], AFFINE @ turn)


LAYOUTS = [files, named_files, sessions, one_file, one_file_and_one_hot, one_file_a_subject, numbered]
LAYOUTS += [series, turned_mask]


def write(root: Path, layout: Callable[[Path, int], None] = files) -> str:
    for n in range(COUNT):
        layout(root, n)
    return f"nifti:{root}"
