"""Volumes in NIfTI files: read with turned axes and bounds, written back with the affine map of the image."""

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pixel_support import discs
from support import assert_raises
from torchcaps.datasets import PatchSet, load_dataset
from torchcaps.datasets.nifti import read_volume
from torchcaps.datasets.scaling import as_bytes, as_pixels
from torchcaps.errors import InputError

nib = pytest.importorskip("nibabel")
AFFINE = np.array([[0, 0, -2.0, 5], [-0.5, 0, 0, 7], [0, 3.0, 0, -4], [0, 0, 0, 1]])
"""Axes of the file: from front to back, from bottom to top, from right to left."""


def save(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, affine), path)
    return path


def volumes(count: int, depth: int = 6) -> Any:
    images, masks = discs(count)
    return [
        (np.stack([each] * depth, 1).astype(dtype))
        for pair in zip(images, masks, strict=True)
        for each, dtype in zip(pair, (np.int16, np.uint8), strict=True)
    ]


def write_set(folder: Path, count: int = 8) -> Path:
    values = volumes(count)
    for number in range(count):
        save(folder / f"images/{number}.nii.gz", values[2 * number] * 10 - 1000)
        save(folder / f"masks/{number}.nii", values[2 * number + 1])
    return folder


def test_axes_are_those_of_the_body_and_go_back(tmp_path: Path) -> None:
    values = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    volume = read_volume(save(tmp_path / "a.nii.gz", values))
    assert volume.values.shape == (1, 5, 4, 6)  # from bottom to top, back to front, left to right
    assert volume.spacing == (3.0, 0.5, 2.0)
    assert volume.values[0, 2, 1, 3] == values[2, 2, 2]
    volume.write((volume.values[0] % 7).astype(np.uint8), tmp_path / "mask.nii.gz")
    back = nib.load(tmp_path / "mask.nii.gz")
    assert np.array_equal(np.asanyarray(back.dataobj), values % 7)
    assert np.allclose(back.affine, AFFINE)


def test_a_folder_of_volumes_is_a_data_set(tmp_path: Path) -> None:
    write_set(tmp_path)
    data = load_dataset(f"nifti:{tmp_path}")
    assert (data.task.name, data.num_classes, data.in_shape) == ("pixels", 3, (1, 6, 24, 20))
    assert isinstance(data.train, PatchSet)
    assert data.train.spacing is not None
    assert data.train.spacing[0] == (3.0, 0.5, 2.0)
    image, mask = data.train.images[0][0], data.train.labels[0]
    assert image[mask == 2].float().mean() > image[mask == 1].float().mean() > image[mask == 0].float().mean()
    clipped = load_dataset(f"nifti:{tmp_path}", scale=(-1000, 1400))
    assert clipped.train.images[0].max() == 255
    assert load_dataset(f"nifti:{tmp_path}", patch=4).in_shape == (1, 4, 4, 4)


MOVED = np.array([[1, 0, 0, 0], [0, 1, 0, 5], [0, 0, 1, 0], [0, 0, 0, 1.0]]) @ AFFINE
PLACES: dict[str, tuple[Any, str]] = {
    "moved by 5 mm": (MOVED, "lies up to 5 mm away from"),
    "other sizes of voxels": (AFFINE @ np.diag([1, 1, 1.2, 1]), "mm away from"),
    "rounded": (AFFINE + 1e-4, ""),
}


@pytest.mark.parametrize("name", PLACES)
def test_masks_lie_where_their_images_lie(tmp_path: Path, name: str) -> None:
    write_set(tmp_path)
    affine, words = PLACES[name]
    save(tmp_path / "masks/3.nii", np.asanyarray(nib.load(tmp_path / "masks/3.nii").dataobj), affine)
    if words:
        assert_raises(InputError, load_dataset, f"nifti:{tmp_path}", say=words)
    else:
        assert load_dataset(f"nifti:{tmp_path}").num_classes == 3


@pytest.mark.parametrize("part", ["images", "masks", "both"])
def test_files_without_a_place_are_matched_by_their_voxels(tmp_path: Path, part: str) -> None:
    """Also if the other file has turned axes."""
    write_set(tmp_path)
    expected = load_dataset(f"nifti:{tmp_path}")
    for folder in ("images", "masks") if part == "both" else (part,):
        for file in (tmp_path / folder).iterdir():
            image = nib.load(file)
            values, header = np.asanyarray(image.dataobj), image.header
            file.unlink()
            header["qform_code"] = header["sform_code"] = 0
            nib.save(nib.Nifti1Image(values, None, header), file)
    with pytest.warns(UserWarning, match="do not say where they lie"):
        data = load_dataset(f"nifti:{tmp_path}")
    for image, mask in zip(data.train.images, data.train.labels, strict=True):
        assert image[0][mask == 2].float().mean() > 150 > image[0][mask == 0].float().mean()
    if part != "both":
        assert all(map(np.array_equal, data.train.labels, expected.train.labels))


def test_mirrored_masks_are_put_right(tmp_path: Path) -> None:
    write_set(tmp_path)
    expected = load_dataset(f"nifti:{tmp_path}")
    for file in (tmp_path / "masks").iterdir():
        values = np.asanyarray(nib.load(file).dataobj)
        turned = AFFINE @ np.array([[-1, 0, 0, len(values) - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
        save(file, values[::-1].copy(), turned)
    data = load_dataset(f"nifti:{tmp_path}")
    assert all(map(np.array_equal, data.train.labels, expected.train.labels))


def test_codes_and_units_are_kept_in_predicted_masks(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6), AFFINE)
    image.set_qform(AFFINE, code=1)
    image.set_sform(AFFINE, code=4)
    image.header.set_xyzt_units("mm", "sec")
    nib.save(image, tmp_path / "scan.nii.gz")
    volume = read_volume(tmp_path / "scan.nii.gz")
    volume.write((volume.values[0] % 3).astype(np.uint8), tmp_path / "mask.nii.gz")
    header = nib.load(tmp_path / "mask.nii.gz").header
    assert (int(header["qform_code"]), int(header["sform_code"])) == (1, 4)
    assert header.get_xyzt_units() == ("mm", "sec")
    assert header.get_data_dtype() == np.uint8


def test_volumes_that_cannot_be_used_are_left_out(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "images/1.nii.gz").write_bytes(b"no")
    (tmp_path / "masks/2.nii").unlink()
    save(tmp_path / "masks/3.nii", np.zeros((2, 2, 2), np.uint8))
    save(tmp_path / "masks/4.nii", np.full((24, 6, 20), 0.5))
    with pytest.raises(InputError) as caught:
        load_dataset(f"nifti:{tmp_path}")
    first, *reasons = str(caught.value).split("\n  ")
    assert first.startswith("4 of 8 images cannot be used")
    data = load_dataset(f"nifti:{tmp_path}", skip_damaged=True)
    assert list(data.skipped) == reasons
    assert sum(map(len, (data.train, data.validation, data.test))) == 4


def test_usual_names_are_read_as_they_are(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "images").rename(tmp_path / "imagesTr")
    (tmp_path / "masks").rename(tmp_path / "labelsTr")
    assert load_dataset(f"nifti:{tmp_path}").num_classes == 3


def test_numbers_become_bytes() -> None:
    pixels = as_pixels(np.array([-5, 0, 50, 100, 200]), (0, 100), "scan.nii", "volume")
    assert as_bytes(pixels).tolist() == [0, 0, 128, 255, 255]
    assert as_pixels(np.full(4, 7.0), None, "scan.nii", "volume").tolist() == [0] * 4


FAULTS: dict[str, tuple[Any, str]] = {
    "five axes": (
        lambda folder: save(folder / "images/3.nii.gz", np.zeros((4, 4, 4, 4, 2), np.int16)),
        "3.nii.gz is an array of the shape (4, 4, 4, 4, 2); give one volume a file, or channels as its last axis",
    ),
    "channels in one file": (
        lambda folder: save(folder / "images/3.nii.gz", np.zeros((24, 6, 20, 4), np.int16)),
        "channel",
    ),
    "cut off": (
        lambda folder: (folder / "images/3.nii.gz").write_bytes((folder / "images/3.nii.gz").read_bytes()[:200]),
        "3.nii.gz cannot be read as a NIfTI file",
    ),
    "no file of it": (lambda folder: (folder / "masks/3.nii").write_bytes(b"no"), "cannot be read as a NIfTI file"),
    "size": (
        lambda folder: save(folder / "masks/3.nii", np.zeros((4, 5, 6), np.uint8)),
        "a mask has the size of its image",
    ),
    "no mask": (lambda folder: (folder / "masks/3.nii").unlink(), "has no mask; put "),
    "fractions": (
        lambda folder: save(folder / "masks/3.nii", np.full((24, 6, 20), 0.5, np.float32)),
        "holds fractions or no numbers; a mask holds the number of a class in each pixel",
    ),
    "NaN": (
        lambda folder: save(folder / "images/3.nii.gz", np.full((24, 6, 20), np.nan, np.float32)),
        "has voxels that are no finite numbers",
    ),
    "colours": (
        lambda folder: save(folder / "images/3.nii.gz", np.zeros((24, 6, 20), [(c, "u1") for c in "RGB"])),
        "has voxels that are colours; save numbers, and channels as the last axis",
    ),
    "complex": (lambda folder: save(folder / "masks/3.nii", np.ones((24, 6, 20), np.complex64)), "are complex numbers"),
    "no folders": (lambda folder: (folder / "masks").rename(folder / "other"), "must have images/ and masks/"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence(tmp_path: Path, name: str) -> None:
    break_it, words = FAULTS[name]
    break_it(write_set(tmp_path))
    with pytest.raises(InputError) as caught:
        load_dataset(f"nifti:{tmp_path}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_of_a_huge_volume_is_refused_before_its_voxels_are_read(tmp_path: Path) -> None:
    path = save(tmp_path / "huge.nii", np.zeros((4, 4, 4), np.uint8))
    header = bytearray(path.read_bytes())
    header[42:48] = np.array([30_000] * 3, "<i2").tobytes()
    path.write_bytes(bytes(header))
    assert_raises(InputError, read_volume, path, say="has sides of (30000, 30000, 30000) voxels, but 1 to 2048")


def test_without_nibabel_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    assert_raises(
        InputError,
        load_dataset,
        f"nifti:{tmp_path}",
        say='NIfTI files are read by nibabel: pip install "torchcaps[nifti]"',
    )


def test_predicted_masks_have_the_axes_of_their_volume(tmp_path: Path) -> None:
    from torchcaps.analysis.mask_answers import output_files, write_mask

    values = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    path = save(tmp_path / "scan.nii", values)
    volume = read_volume(path)
    target = output_files(tmp_path / "masks", {path: Path(path.name)})[path]
    assert target == tmp_path / "masks/scan.nii.gz"
    write_mask((volume.values[0] % 3).astype(np.uint8), target, volume)
    back = nib.load(target)
    assert np.array_equal(np.asanyarray(back.dataobj), values % 3)
    assert np.allclose(back.affine, AFFINE)
    twice = {path: Path(path.name), tmp_path / "scan.nii.gz": Path("scan.nii.gz")}
    assert_raises(InputError, output_files, tmp_path, twice, say=f"would both be {tmp_path / 'scan.nii.gz'}; predict")


def with_bytes(path: Path, change: Any) -> Path:
    """Write a file again after a change of its bytes, unpacked if it is gzipped."""
    packed = path.suffix == ".gz"
    whole = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    contents = change(whole) or whole
    path.write_bytes(gzip.compress(bytes(contents), mtime=0) if packed else bytes(contents))
    return path


def long_extension(whole: bytearray) -> None:
    """Say that a header has an extension of 1 GiB."""
    whole[108:112] = np.float32(2**30 + 352).tobytes()
    whole[348:356] = bytes([1, 0, 0, 0]) + np.int32(2**30).tobytes()


BEYOND: dict[str, tuple[Any, str]] = {
    "trailing": (lambda whole: whole + b"more", "it goes on after its last voxel"),
    "truncated": (lambda whole: whole[:-1], "it ends too early"),
    "extension": (long_extension, "but extensions of its header may have 64 MiB"),
    "no header": (lambda whole: b"\0" * len(whole), "it does not begin with the header of a NIfTI file"),
    "axes that are no directions": (
        lambda whole: whole.__setitem__(slice(280, 328), np.full(12, np.nan, "<f4").tobytes()),
        "its place in the body (qform or sform) has numbers that are not finite",
    ),
}


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize("name", BEYOND)
def test_what_a_file_holds_beyond_its_voxels_is_refused(
    tmp_path: Path, name: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = BEYOND[name]
    path = with_bytes(save(tmp_path / f"a.{suffix}", np.arange(60, dtype=np.int16).reshape(3, 4, 5)), change)
    tracemalloc.start()
    try:
        assert_raises(InputError, read_volume, path, say=words)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert capsys.readouterr() == ("", "")


def test_extensions_other_headers_and_wrong_suffixes_are_read(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    image = nib.Nifti1Image(values, np.diag([1, 2, 3, 1.0]))
    image.header.extensions.append(nib.nifti1.Nifti1Extension(6, b"a comment of a scanner"))
    nib.save(image, tmp_path / "extended.nii")
    nib.save(nib.Nifti2Image(values, image.affine), tmp_path / "two.nii.gz")
    (tmp_path / "packed.nii").write_bytes((tmp_path / "two.nii.gz").read_bytes())
    for name in ("extended.nii", "two.nii.gz", "packed.nii"):
        assert np.array_equal(read_volume(tmp_path / name).values[0], values.T)
        assert read_volume(tmp_path / name).spacing == (3.0, 2.0, 1.0)


def test_a_flipped_bit_of_a_packed_volume_never_gives_other_voxels(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "a.nii.gz"
    values = random.integers(-1000, 1000, (12, 14, 12)).astype(np.int16)
    whole = save(path, values, np.diag([1, 2, 3, 1.0])).read_bytes()
    outcomes = {"refused": 0, "same": 0}
    for place in np.linspace(0, len(whole) - 1, 2003).astype(int):
        bad = bytearray(whole)
        bad[place] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        try:
            read = read_volume(path).values
        except InputError:
            outcomes["refused"] += 1
        else:  # the bit lies in the name or the time that gzip keeps
            assert np.array_equal(read[0], values.T)
            outcomes["same"] += 1
    assert outcomes["refused"] > 1980
