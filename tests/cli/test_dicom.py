"""Pictures in DICOM files: numbers equal pydicom's, and nothing about a person leaves a file."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.pixels import apply_modality_lut, pixel_array

from cli_support import Cli
from dicom_files import PATIENT, write_dicom
from support import assert_raises
from torchcaps.datasets import load_dataset, read_image
from torchcaps.datasets.images import read_pixels
from torchcaps.datasets.scaling import UnknownRange
from torchcaps.errors import InputError

RANDOM = np.random.default_rng(0)
CASES: list[tuple[str, int, dict[str, Any], tuple[float, float] | None]] = [
    ("8 bits", 8, {}, (0, 255)),
    ("10 bits", 10, {}, (0, 1023)),
    ("12 bits", 12, {}, (0, 4095)),
    ("16 bits", 16, {}, (0, 65535)),
    ("signed", 12, {"signed": True}, None),
    ("signed, 16 bits", 16, {"signed": True}, None),
    ("rescaled", 12, {"RescaleSlope": 1, "RescaleIntercept": -1024}, None),
    ("a slope with a fraction", 12, {"RescaleSlope": "0.25", "RescaleIntercept": "-3.5"}, None),
]


def drawn(bits: int, signed: bool = False) -> np.ndarray[Any, Any]:
    low = -(2 ** (bits - 1)) if signed else 0
    numbers = RANDOM.integers(low, low + 2**bits, (9, 7))
    numbers.flat[:2] = low, low + 2**bits - 1
    return numbers


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(("_name", "bits", "fields", "default"), CASES, ids=[case[0] for case in CASES])
def test_numbers_are_those_of_pydicom(
    _name: str, bits: int, fields: dict[str, Any], default: tuple[float, float] | None, inverted: bool, tmp_path: Path
) -> None:
    path, signed = tmp_path / "a.dcm", fields.get("signed", False)
    kind = {"PhotometricInterpretation": "MONOCHROME1"} if inverted else {}
    write_dicom(path, drawn(bits, signed), bits, **fields, **kind)
    file = pydicom.dcmread(path)
    stored = pixel_array(file).astype(np.int64)
    if inverted:
        low = -(2 ** (bits - 1)) if signed else 0
        stored = low + (low + 2**bits - 1) - stored
    expected = np.asarray(apply_modality_lut(stored, file), np.float64)
    if default is None:
        assert_raises(UnknownRange, read_pixels, path, say="say which numbers become 0 and 1, such as scale=")
    for scale in filter(None, (default, (-1024.0, 3071.0))):
        if bits == 8 and scale != default:
            continue
        pixels = read_pixels(path, scale=None if scale == default else scale)
        assert pixels.dtype == (np.uint8 if bits == 8 else np.float32)
        ours = pixels[0].astype(np.float64) / (255 if bits == 8 else 1)
        assert np.abs(ours - ((expected - scale[0]) / (scale[1] - scale[0])).clip(0, 1)).max() < 1e-6


def test_colours_and_frames(tmp_path: Path) -> None:
    colours, frames = RANDOM.integers(0, 256, (6, 5, 3)), RANDOM.integers(0, 256, (4, 6, 5))
    write_dicom(tmp_path / "a.dcm", colours, 8)
    write_dicom(tmp_path / "b.dcm", frames, 8)
    assert np.array_equal(read_pixels(tmp_path / "a.dcm"), colours.transpose(2, 0, 1))
    assert np.array_equal(read_pixels(tmp_path / "b.dcm", pages="channels"), frames)
    assert np.array_equal(read_pixels(tmp_path / "b.dcm", pages="depth"), frames[None])
    assert_raises(InputError, read_pixels, tmp_path / "b.dcm", say="has 4 frames, but one is read")
    assert read_image(tmp_path / "a.dcm", (1, 28, 28)).shape == (1, 28, 28)


def test_what_is_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.dcm"
    for fields, say in (
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "has the colours PALETTE COLOR"),
        ({"Rows": 60_000, "Columns": 60_000}, "megapixels together can be read"),
        ({"NumberOfFrames": 5_000}, "has 5000 frames"),
        ({"BitsStored": 32}, "its numbers have 32 bits"),
    ):
        write_dicom(path, drawn(12), **fields)
        assert_raises(InputError, read_pixels, path, say=say)
    write_dicom(path, drawn(12))
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = pydicom.uid.JPEG2000Lossless
    file.PixelData = pydicom.encaps.encapsulate([b"no picture"])
    file.save_as(path)
    assert_raises(InputError, read_pixels, path, say="its pixels are compressed as JPEG 2000")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert_raises(InputError, read_pixels, path, say='DICOM files are read by pydicom: pip install "torchcaps[dicom]"')


def test_a_missing_range_is_one_sentence(tmp_path: Path) -> None:
    """It is an option that lacks, not an image that is damaged, and it covers the numbers of all files."""
    for n in range(6):
        (tmp_path / "ab"[n % 2]).mkdir(exist_ok=True)
        write_dicom(tmp_path / "ab"[n % 2] / f"{n}.dcm", np.full((9, 7), 10 * n - 300), 12, signed=True)
    with pytest.raises(InputError, match=r"each of 6 files, such as .*got int16 from -300 to -250; say which") as error:
        load_dataset(f"folder:{tmp_path}")
    assert "skip-damaged" not in str(error.value)


def test_nothing_about_a_person_leaves_a_file(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, evaluate and predict on files with a name: it stands in no output, on the screen or in a file."""
    monkeypatch.chdir(tmp_path)
    for label, level in (("dark", 200), ("light", 3000)):
        (tmp_path / "scans" / label).mkdir(parents=True)
        for n in range(20):
            write_dicom(tmp_path / "scans" / label / f"{n}.dcm", level + RANDOM.integers(0, 900, (20, 20)))
    (tmp_path / "scans" / "dark" / "99.dcm").write_bytes((tmp_path / "scans" / "dark" / "0.dcm").read_bytes()[:700])
    assert len(load_dataset("folder:scans", image_size=20, skip_damaged=True).train) > 0
    small = ["--conv-channels", 4, "--primary-types", 2, "--decoder-hidden", 8, "--image-size", 20]
    run = ["--out", "run", "--epochs", 1, "--batch-size", 8, "--accelerator", "cpu", *small]
    said = [cli("train", "sabour2017", "--data", "folder:scans", *run)]  # refused for the damaged file
    said.append(cli("train", "sabour2017", "--data", "folder:scans", "--skip-damaged", *run))
    said.append(cli("evaluate", "run", "--json"))
    said.append(cli("predict", "run", "scans/light/3.dcm", "--out", "answers.csv"))
    said.append(cli("predict", "run", "scans/dark/99.dcm"))
    assert [each.code for each in said] == [2, 0, 0, 0, 2], [each.err for each in said]
    outputs = [f"{each.out}{each.err}".encode() for each in said]
    outputs += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".dcm"]
    for each in outputs:
        for words in PATIENT:
            assert not any(part.encode() in each for part in words.replace("^", " ").split())
