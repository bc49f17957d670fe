"""The slices of a DICOM series become a volume, sorted by their positions, or one sentence without a person's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from dicom_files import PATIENT, write_series
from support import assert_raises
from torchcaps.datasets.dicom import slices_in
from torchcaps.datasets.nifti import read_volume
from torchcaps.errors import InputError

pytest.importorskip("nibabel")
NUMBERS = np.random.default_rng(0).integers(0, 4096, (5, 7, 6))
STEP = 3.0


def turned(angle: float) -> dict[str, Any]:
    """Directions of slices that lie as in a head that is turned about the axis from right to left."""
    sine, cosine = np.sin(angle), np.cos(angle)
    return {
        "ImageOrientationPatient": [1, 0, 0, 0, round(cosine, 8), round(sine, 8)],
        "ImagePositionPatient": lambda n: [10.0, -20 - round(STEP * n * sine, 6), 5 + round(STEP * n * cosine, 6)],
    }


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"bits": 8},
    "from the top": {"ImagePositionPatient": lambda n: [10.0, -20.0, 5 - n * STEP]},
    "sagittal": {
        "ImageOrientationPatient": [0, 1, 0, 0, 0, -1],
        "ImagePositionPatient": lambda n: [5 + n * STEP, 0.0, 0.0],
    },
    "turned": turned(0.2),
    "rounded": {"ImagePositionPatient": lambda n: [10.0, -20.0, 5 + n * STEP + 0.02 * (n % 2)]},
    "rescaled": {"RescaleSlope": 2, "RescaleIntercept": -1024},
    "rescaled by slice": {"RescaleSlope": lambda n: 1 + n, "RescaleIntercept": -1024},
    "monochrome 1": {"PhotometricInterpretation": "MONOCHROME1"},
}


def position(file: Any, row: int, column: int) -> np.ndarray[Any, Any]:
    """Return the place of a pixel by the formula of the DICOM standard (PS3.3, C.7.6.2.1.1), as NIfTI counts axes."""
    along, down = np.reshape([float(each) for each in file.ImageOrientationPatient], (2, 3))
    start = np.array([float(each) for each in file.ImagePositionPatient])
    height, width = (float(each) for each in file.PixelSpacing)
    return (start + along * width * column + down * height * row) * [-1, -1, 1]


@pytest.mark.parametrize("name", CASES)
def test_each_number_lies_where_its_slice_lies(name: str, tmp_path: Path) -> None:
    fields = CASES[name]
    numbers = NUMBERS % 256 if fields.get("bits") == 8 else NUMBERS
    files = write_series(tmp_path / "a", numbers, **fields)
    volume = read_volume(tmp_path / "a")
    assert volume.values.shape[0] == 1
    assert sorted(volume.spacing) == pytest.approx([0.5, 2.0, STEP], rel=2e-3)
    back = np.linalg.inv(volume.affine)
    assert volume.has_place
    for n, path in enumerate(files):
        file = pydicom.dcmread(path)
        slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
        stored = 4095 - numbers[n] if name == "monochrome 1" else numbers[n]
        for row, column in np.ndindex(numbers[n].shape):
            place = back @ [*position(file, row, column), 1]
            voxel = tuple(place[:3].round().astype(int))
            assert np.abs(place[:3] - voxel).max() < 0.02
            assert volume.values[0][voxel[::-1]] == stored[row, column] * slope + intercept


def test_files_are_dicom_by_their_first_bytes(tmp_path: Path) -> None:
    """As from a disc of a hospital: without a suffix, or named by a number with dots."""
    files = write_series(tmp_path / "a", NUMBERS)
    plain = read_volume(tmp_path / "a").values
    for n, file in enumerate(files):
        file.rename(file.with_name(f"IM{n}" if n % 2 else f"1.2.840.{n}"))
    (tmp_path / "a/DICOMDIR").write_bytes(bytes(128) + b"DICM")
    (tmp_path / "a/notes.txt").write_text("text")
    (tmp_path / "a/.hidden.dcm").write_bytes(b"no")
    assert len(slices_in(tmp_path / "a")) == len(files)
    assert np.array_equal(read_volume(tmp_path / "a").values, plain)


def test_masks_go_back_to_the_grid_of_the_series(tmp_path: Path) -> None:
    import nibabel as nib

    files = write_series(tmp_path / "a", NUMBERS)
    volume = read_volume(tmp_path / "a").resampled((1.0, 1.0, 1.0), "a")
    seen = (volume.values[0] > 2000).astype(np.uint8)
    volume.write(volume.restored(seen), tmp_path / "mask.nii.gz")
    mask = nib.load(tmp_path / "mask.nii.gz")
    assert mask.shape == NUMBERS.T.shape
    assert mask.header.get_xyzt_units()[0] == "mm"
    for n, path in enumerate(files):
        expected = position(pydicom.dcmread(path), 3, 2)
        np.testing.assert_allclose((mask.affine @ [2, 3, n, 1])[:3], expected, atol=1e-4)


def change(number: int, **fields: Any) -> Callable[[list[Path]], None]:
    """Return a function that sets fields of one slice."""

    def edit(files: list[Path]) -> None:
        file = pydicom.dcmread(files[number])
        for name, value in fields.items():
            if value is None:
                delattr(file, name)
            else:
                setattr(file, name, value)
        file.save_as(files[number])

    return edit


FAULTS: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "missing slice": (lambda files: files[2].unlink(), "slices are missing between"),
    "one slice": (lambda files: [each.unlink() for each in files[1:]], "has 1 DICOM file, but a series has two slices"),
    "another series": (
        change(2, SeriesInstanceUID="1.2.9"),
        "holds slices of 2 series; put each series into a separate",
    ),
    "other direction": (change(2, ImageOrientationPatient=[0, 1, 0, 0, 0, -1]), "differ in size, direction, colours"),
    "other distances": (change(2, PixelSpacing=[1.0, 1.0]), "differ in size, direction, colours"),
    "other colours": (change(2, PhotometricInterpretation="MONOCHROME1"), "differ in size, direction, colours"),
    "one position": (
        change(2, ImagePositionPatient=[10.0, -20.0, 5.0]),
        "lie at one position; leave the slices of one",
    ),
    "tilted": (change(4, ImagePositionPatient=[10.0, -18.0, 17.0]), "are shifted, as by a tilted scanner"),
    "no position": (change(2, ImagePositionPatient=None), "it does not say where it lies (ImagePositionPatient"),
    "no directions": (change(2, ImageOrientationPatient=[0] * 6), "it does not say where it lies"),
    "no distances": (change(2, PixelSpacing=[0.0, 1.0]), "it does not say where it lies"),
    "several frames": (change(2, NumberOfFrames=4), "it has 4 frames; convert it"),
    "damaged": (lambda files: files[2].write_bytes(files[2].read_bytes()[:-9]), "it is damaged"),
    "no DICOM": (lambda files: files[2].write_bytes(b"text"), "it is damaged, or it has no picture"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_series_is_one_sentence(name: str, tmp_path: Path) -> None:
    break_it, words = FAULTS[name]
    break_it(write_series(tmp_path / "a", NUMBERS))
    with pytest.raises(InputError) as caught:
        read_volume(tmp_path / "a")
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(part in str(caught.value) for words in PATIENT for part in words.replace("^", " ").split())


def test_slices_of_other_sizes(tmp_path: Path) -> None:
    write_series(tmp_path / "a", NUMBERS)
    other = write_series(tmp_path / "b", NUMBERS[:, :5])
    other[2].rename(tmp_path / "a" / other[2].name)
    assert_raises(InputError, read_volume, tmp_path / "a", say="differ in size, direction, colours")
