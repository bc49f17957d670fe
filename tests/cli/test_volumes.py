"""From volumes of subjects to masks on the grid of each file, and no name of a patient leaves a DICOM series."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli_support import Cli
from dicom_files import PATIENT
from support import registered_for_now
from torchcaps.files import read_json
from torchcaps.models import register_preset
from volume_files import AFFINE, COUNT, FLAIR, SIZE, T1, files, numbered, save, series, write

nib = pytest.importorskip("nibabel")
TRAIN = "train unet-tiny --spacing 1.5,1,1 --scale 0,4095 --patch 4 --epochs 1 --batch-size 8 --learning-rate 0.01"
TRAIN += " --no-figures --accelerator cpu --data DATA --out RUN"


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with registered_for_now():
        register_preset("unet-tiny", "", base="unet-twin", network={"parameters_of": None, "channels": (2, 2)})
        yield


def train(cli: Cli, data: str, run: Path | str) -> None:
    result = cli(*(data if word == "DATA" else str(run) if word == "RUN" else word for word in TRAIN.split()))
    assert result.code == 0, result.err


@pytest.mark.parametrize("layout", [files, series, numbered])
@pytest.mark.slow
def test_subjects_become_masks_on_their_own_grid(layout: object, tmp_path: Path, cli: Cli) -> None:
    channels = ["0000", "0001"] if layout is numbered else ["flair", "t1"]
    scans, one = ("data/imagesTr", "P1_0000.nii.gz") if layout is numbered else ("data", "P1")
    train(cli, write(tmp_path / "data", layout), "run")  # type: ignore[arg-type]
    about = read_json(Path("run/best/classes.json"), "list of classes")
    assert (about["spacing"], about["channels"], about["in_shape"]) == ([1.5, 1.0, 1.0], channels, [2, 4, 4, 4])
    found = cli.json("evaluate", "run")
    assert found["hausdorff95_unit"] == "mm"
    assert cli("evaluate", "run", "--out", "answers.csv").code == 0

    assert "of 10 images" in cli.out("predict", "run", tmp_path / scans, "--out", "masks")
    for n in range(COUNT):
        mask = nib.load(f"masks/P{n}.nii.gz")
        assert mask.shape == SIZE[::-1]
        np.testing.assert_allclose(mask.affine, AFFINE, atol=1e-5)
        assert mask.header.get_xyzt_units()[0] == "mm"
    shown = cli.json("predict", "run", tmp_path / scans / one)
    assert [(each["image"], each["size"]) for each in shown] == [(str(tmp_path / scans / one), [*SIZE])]
    pytest.importorskip("onnxruntime")
    assert cli("export", "run", "--format", "onnx", "--out", "m.onnx").code == 0
    assert cli("predict", "m.onnx", tmp_path / scans, "--out", "exported").code == 0
    for file in Path("masks").iterdir():
        assert (Path("exported") / file.name).read_bytes() == file.read_bytes()
    other = cli.json("evaluate", "run", "--data", f"nifti:{tmp_path / 'data'}", "--split", "all")
    assert other["num_images"] == COUNT


def test_what_a_network_of_subjects_refuses(tmp_path: Path, cli: Cli) -> None:
    train(cli, write(tmp_path / "data"), "run")
    for n in range(COUNT):
        save(tmp_path / f"more/P{n}/t2.nii.gz", T1[n])
        for name in ("flair", "t1", "seg"):
            save(tmp_path / f"more/P{n}/{name}.nii.gz", FLAIR[n] if name != "seg" else FLAIR[n] % 3)
    said = "has the channels flair, t1, t2; the network of run was made for flair, t1"
    result = cli("evaluate", "run", "--data", f"nifti:{tmp_path / 'more'}", "--split", "all")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert said in result.err
    assert cli("predict", "run", tmp_path / "more/P1", "--out", "masks").code == 0  # t2 and seg are not read
    (tmp_path / "more/P2/t1.nii.gz").unlink()
    for words, said in (
        ((tmp_path / "more/P2",), "P2 has no t1, but flair, seg, t2; the network takes one file for each of flair, t1"),
        ((tmp_path / "more/P1/t1.nii.gz",), "the image is 1×8×3×10 (channels first), but the network takes patches"),
        ((tmp_path / "more/P1", "--out", tmp_path / "more/P1/t1.nii.gz"), "t1.nii.gz is a file, but masks are written"),
    ):
        result = cli("predict", "run", *words)
        assert (result.code, len(result.err.splitlines())) == (2, 1), result.err
        assert said in result.err


def test_a_mask_never_replaces_a_channel(tmp_path: Path, cli: Cli) -> None:
    train(cli, write(tmp_path / "data"), "run")
    (tmp_path / "data/P1").rename(tmp_path / "data/t1")
    before = (tmp_path / "data/t1/t1.nii.gz").read_bytes()
    result = cli("predict", "run", tmp_path / "data/t1", "--out", tmp_path / "data/t1", "--overwrite")
    assert result.code == 2
    assert "t1.nii.gz is an input of this command; choose another --out" in result.err
    assert (tmp_path / "data/t1/t1.nii.gz").read_bytes() == before


def test_nothing_about_a_person_leaves_a_series(tmp_path: Path, cli: Cli) -> None:
    """It stands in no output, on the screen or in a file, whether a slice is damaged or not."""
    spec = write(tmp_path / "data", series)
    whole = (tmp_path / "data/P1/t1/000.dcm").read_bytes()
    (tmp_path / "data/P1/t1/000.dcm").write_bytes(whole[:-30])
    words = [spec if word == "DATA" else word.replace("RUN", "run") for word in TRAIN.split()]
    said = [cli(*words), cli(*words, "--skip-damaged"), cli("evaluate", "run", "--out", "answers.csv")]
    (tmp_path / "data/P1/t1/000.dcm").write_bytes(whole)
    said.append(cli("predict", "run", tmp_path / "data", "--out", "masks", "--figure", "seen.png"))
    said.append(cli("predict", "run", tmp_path / "data/P1/t1/000.dcm"))
    said.append(cli("datasets", spec, "--json"))
    assert [each.code for each in said] == [2, 0, 0, 0, 2, 0], [each.err for each in said]
    outputs = [f"{each.out}{each.err}".encode() for each in said]
    written = [path for path in Path().rglob("*") if path.is_file() and path.suffix != ".dcm"]
    assert any(path.suffix == ".gz" for path in written)
    for path in written:
        contents = path.read_bytes()
        outputs += [contents, gzip.decompress(contents) if path.suffix == ".gz" else b""]
    for each in outputs:
        for name in PATIENT:
            assert not any(part.encode() in each for part in name.replace("^", " ").split())
