"""Volumes as labs store them: one folder a subject, 4-D files and DICOM series, resampled, and back on their grid."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support import assert_raises
from torchcaps.analysis import evaluate
from torchcaps.datasets import PatchSet, load_dataset
from torchcaps.datasets.loading import load_part
from torchcaps.datasets.nifti import read_volume, resample
from torchcaps.datasets.volumes import files_of, inputs_in, read_input
from torchcaps.errors import InputError
from torchcaps.models import create_model
from volume_files import (
    COUNT,
    FLAIR,
    LAYOUTS,
    SEG,
    SIZE,
    SPACING,
    T1,
    files,
    numbered,
    one_file,
    one_file_a_subject,
    one_file_and_one_hot,
    save,
    series,
    write,
)

nib = pytest.importorskip("nibabel")
SCALED: Any = {"scale": (0, 4095)}


def subjects(images: Any) -> list[int]:
    """Numbers of the subjects, by the first voxel of T1, which lies in the corner of the body that the axes leave."""
    return [round(float(image[1, 0, -1, -1]) / 255 * 4095 / 400) for image in images.images]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_volumes_in_every_layout(layout: Callable[[Path, int], None], tmp_path: Path) -> None:
    data = load_dataset(write(tmp_path, layout), **SCALED)
    assert (data.in_shape, data.num_classes) == ((2, *SIZE), 3)
    assert data.channels == {
        **dict.fromkeys((one_file, one_file_and_one_hot), None),
        one_file_a_subject: ("both",),
        numbered: ("0000", "0001"),
    }.get(layout, ("flair", "t1"))
    seen = list[str]()
    for images in data.parts.values():
        assert isinstance(images, PatchSet)
        assert images.spacing == (SPACING,) * len(images)
        for image, mask, file in zip(images.images, images.labels, images.names["file"], strict=True):
            n = next(n for n in range(COUNT) if f"P{n}" in file)
            seen.append(file)
            body = (slice(None), slice(None, None, -1), slice(None, None, -1))  # back to front, left to right
            for channel, values in zip(image, (FLAIR[n], T1[n]), strict=True):
                np.testing.assert_array_equal(channel, (values / 4095 * 255).round()[body])
            np.testing.assert_array_equal(mask, SEG[n][body])
    assert len(set(seen)) == COUNT
    if layout in (files, series):
        assert set(seen) == {f"P{n}" for n in range(COUNT)}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["subject", r"(P\d+)/"])
def test_no_subject_is_in_two_parts(group: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for n in range(COUNT):
        for day in ("day1", "day2", "day3"):
            for name, values in (("t1", T1), ("flair", FLAIR), ("seg", SEG)):
                save(tmp_path / f"P{n}/{day}/{name}.nii.gz", values[n])
    spec, tested = f"nifti:{tmp_path}", set[int]()
    for fold in (None, "1/4", "2/4", "3/4", "4/4"):
        data = load_dataset(spec, group=group, fold=fold, **SCALED)
        parts = {part: set(subjects(images)) for part, images in data.parts.items()}
        assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == COUNT
        assert sum(map(len, data.parts.values())) == 3 * COUNT
        again = load_part(spec, "validation", group=group, fold=fold, **SCALED)
        assert set(subjects(again.images)) == parts["validation"]
        if fold is not None:
            assert tested.isdisjoint(parts["test"])
            tested |= parts["test"]
    assert tested == set(range(COUNT))
    assert not [each for each in recwarn if "split by it" in str(each.message)]
    with pytest.warns(UserWarning, match=r"has subject, but images of one subject may be .* group='subject'"):
        load_dataset(spec)


@pytest.mark.parametrize("fault", ["lacks", "more"])
def test_an_image_has_all_numbered_channels(fault: str, tmp_path: Path) -> None:
    spec, file = write(tmp_path, numbered), tmp_path / "imagesTr/P3_0001.nii.gz"
    if fault == "lacks":
        file.unlink()
    else:
        file.rename(file.with_name("P3_0002.nii.gz"))
    with pytest.raises(InputError, match=r"P3_0000.nii.gz has the channels 0000.*, but most images have 0000, 0001;"):
        load_dataset(spec)
    with pytest.raises(InputError, match=r"P3_0001.nii.gz"):
        read_input(tmp_path / "imagesTr/P3_0000.nii.gz", 2, None, None, ("0000", "0001"))


def test_a_subject_of_one_image_needs_no_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write(tmp_path)
    load_dataset(f"nifti:{tmp_path}")
    assert not list(recwarn)


def test_parts_of_subjects(tmp_path: Path) -> None:
    for n in range(COUNT):
        files(tmp_path / ("test" if n < 2 else "train"), n)
    data = load_dataset(f"nifti:{tmp_path}", **SCALED)
    assert sorted(subjects(data.test)) == [0, 1]
    assert set(data.test.names["file"]) == {"test/P0", "test/P1"}


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: (root / "P3" / name).unlink()


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no channel": (remove("flair.nii.gz"), "P3 has no flair, but seg, t1; put all channels there"),
    "no mask": (remove("seg.nii.gz"), "P3 has no mask; put seg.nii.gz there"),
    "one channel more": (lambda root: save(root / "P3/t2.nii", T1[3]), "P3 has t2, which most other subjects lack"),
    "two masks": (
        lambda root: save(root / "P3/label.nii", SEG[3]),
        "P3 has label.nii and seg.nii.gz; keep one of them",
    ),
    "twice": (lambda root: save(root / "P3/t1.nii", T1[3]), "P3 has t1.nii and t1.nii.gz; keep one of them"),
    "other size": (
        lambda root: save(root / "P3/t1.nii.gz", T1[3][1:]),
        "P3/t1.nii.gz is 3×6×5, but {}/P3/flair.nii.gz 4×6×5; a mask has the size of its image, and so has a channel",
    ),
    "other place": (
        lambda root: save(root / "P3/t1.nii.gz", T1[3], np.diag([1, 1, 1, 1.0])),
        "mm away from {}/P3/flair.nii.gz, by the positions in both files; resample it to the grid of flair.nii.gz",
    ),
    "channels in one file": (
        lambda root: save(root / "P3/t1.nii.gz", np.stack([T1[3]] * 2)),
        "channels; all must have the same",
    ),
    "only masks": (lambda root: [path.unlink() for path in root.rglob("[tf]*.gz")], "has no image, but seg; put all"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_subject_is_one_sentence(tmp_path: Path, name: str) -> None:
    break_it, words = FAULTS[name]
    spec = write(tmp_path)
    break_it(tmp_path)
    with pytest.raises(InputError) as caught:
        load_dataset(spec)
    assert words.format(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value) or name == "only masks"
    if name not in ("channels in one file", "only masks"):
        data = load_dataset(spec, skip_damaged=True)
        assert (sum(map(len, data.parts.values())), len(data.skipped)) == (COUNT - 1, 1)


@pytest.mark.parametrize("layout", [files, one_file])
def test_volumes_in_a_folder_of_pictures_are_named(layout: Callable[[Path, int], None], tmp_path: Path) -> None:
    write(tmp_path, layout)
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", say=f"; for its volumes write nifti:{tmp_path}")


# ---- the inputs of a network


def test_inputs_of_a_network_of_subjects(tmp_path: Path) -> None:
    write(tmp_path)
    names = ("flair", "t1")
    folders = [tmp_path / f"P{n}" for n in range(COUNT)]
    assert inputs_in(tmp_path, names) == folders
    assert inputs_in(folders[1], names) == folders[1:2]
    assert files_of(folders[1], names) == [folders[1] / "flair.nii.gz", folders[1] / "t1.nii.gz"]
    assert inputs_in(tmp_path, ("t1",)) == folders  # the mask and other channels are no images
    assert inputs_in(folders[1], None) == sorted(folders[1].iterdir())
    assert inputs_in(folders[1], ("t2", "adc")) == folders[1:2]
    say = "P1 has no t2, but flair, seg, t1; the network takes one file for each of t1, t2"
    assert_raises(InputError, files_of, folders[1], ("t1", "t2"), say=say)
    (tmp_path / "bare").mkdir()
    for n in range(3):
        shutil.copy(folders[n] / "t1.nii.gz", tmp_path / f"bare/{n}.nii.gz")
    assert len(inputs_in(tmp_path / "bare", ("t1",))) == 3
    data = load_dataset(write(tmp_path / "more"), **SCALED)
    image = data.test.images[0]
    pixels, volume = read_input(tmp_path / "more" / f"P{subjects(data.test)[0]}", 2, (0, 4095), None, names)
    assert np.array_equal(pixels, image)
    assert volume is not None


# ---- other distances of voxels


@pytest.mark.parametrize("size", [(4, 6, 5), (7, 3, 9), (1, 12, 5), (2, 2, 2)])
def test_numbers_are_interpolated_as_by_torch(size: tuple[int, int, int]) -> None:
    values = T1[:2].astype(np.float32)
    theirs = F.interpolate(torch.from_numpy(values)[:, None], size, mode="trilinear")[:, 0]
    np.testing.assert_allclose(resample(T1[:2], size), theirs, atol=2e-3)
    theirs = F.interpolate(torch.from_numpy(SEG[:2])[:, None].float(), size, mode="nearest-exact")[:, 0]
    ours = resample(SEG[:2], size, nearest=True)
    assert np.array_equal(ours, theirs)
    assert ours.dtype == SEG.dtype


@settings(max_examples=60, deadline=None)
@given(size=st.tuples(*[st.integers(1, 9)] * 3), other=st.tuples(*[st.integers(1, 20)] * 3))
def test_masks_go_back_to_their_grid(size: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    mask = np.arange(np.prod(size)).reshape(size)
    there = resample(mask, other, nearest=True)
    back = resample(there, size, nearest=True)
    assert (there.shape, back.shape) == (other, size)
    assert set(back.flat) <= set(there.flat) <= set(mask.flat)
    if all(new >= old for new, old in zip(other, size, strict=True)):
        assert np.array_equal(back, mask)
    assert np.array_equal(resample(np.full(size, 7), other), np.full(other, 7))


def test_a_data_set_is_resampled(tmp_path: Path) -> None:
    spec = write(tmp_path)
    data, plain = load_dataset(spec, spacing=(1.5, 1.0, 1.0), **SCALED), load_dataset(spec, **SCALED)
    assert data.in_shape == (2, 8, 3, 10)
    assert data.train.spacing is not None  # type: ignore[attr-defined]
    assert data.train.spacing[0] == (1.5, 1.0, 1.0)  # type: ignore[attr-defined]
    exact = load_dataset(spec, spacing=(2.0, 0.7, 2.0)).train
    assert exact.in_shape == (2, 6, 4, 5)
    assert exact.spacing[0] == (2.0, 0.75, 2.0)  # type: ignore[attr-defined]  # the extent stays
    for image, mask, own, own_mask in zip(
        data.test.images, data.test.labels, plain.test.images, plain.test.labels, strict=True
    ):
        expected = F.interpolate(own[None].float(), (8, 3, 10), mode="trilinear")[0]
        assert (image.float() - expected).abs().max() <= 1
        assert torch.equal(
            mask.float(), F.interpolate(own_mask[None, None].float(), (8, 3, 10), mode="nearest-exact")[0, 0]
        )
    assert torch.equal(load_dataset(spec, spacing=SPACING, **SCALED).train.images[0], plain.train.images[0])


@pytest.mark.parametrize(
    ("spacing", "said"),
    [
        ((1.0, 1.0), "spacing"),
        ((1.0, 0.0, 1.0), "spacing"),
        ((1.0, -1.0, 1.0), "spacing"),
        (
            (0.004, 1.0, 1.0),
            "would have 3000×3×10 voxels with the spacing (--spacing) 0.004,1,1, but at most 2048 a side",
        ),
    ],
)
def test_spacings_that_cannot_be(spacing: Any, said: str, tmp_path: Path) -> None:
    assert_raises(InputError, load_dataset, write(tmp_path), spacing=spacing, say=said)


def test_data_without_volumes_take_no_spacing(tmp_path: Path) -> None:
    said = "digits takes no spacing (--spacing), which is for nifti:PATH"
    assert_raises(InputError, load_dataset, "digits", spacing=(1.0, 1.0, 1.0), say=said)


@pytest.mark.parametrize(("units", "factor"), [("mm", 1.0), ("micron", 0.001), ("meter", 1000.0), ("unknown", 1.0)])
def test_units_of_a_header_become_millimetres(units: str, factor: float, tmp_path: Path) -> None:
    volume = read_volume(save(tmp_path / "a.nii", T1[0], units=units))
    assert volume.spacing == tuple(factor * each for each in SPACING)
    np.testing.assert_allclose(volume.affine, factor * nib.as_closest_canonical(nib.load(tmp_path / "a.nii")).affine)


def test_distances_have_their_unit(tmp_path: Path) -> None:
    """A mask moved by one voxel along the height is 0.5 mm away, or 1 mm after resampling to 1 mm."""
    model = create_model("unet-twin", (2, *SIZE), 3, parameters_of=None, channels=(2,))
    images = load_dataset(write(tmp_path), **SCALED).test
    evaluation: Any = evaluate(model, images)
    assert evaluation.unit == evaluation.to_dict()["hausdorff95_unit"] == "mm"
    assert "Hausdorff 95, mm" in evaluation.tables()[1].columns
    bare: Any = PatchSet(tuple(images.images), tuple(images.labels), patch=SIZE)
    evaluation = evaluate(model, bare)
    assert evaluation.to_dict()["hausdorff95_unit"] == "pixels"
    assert "Hausdorff 95, pixels" in evaluation.tables()[1].columns
