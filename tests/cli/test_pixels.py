"""Commands for networks of pixels: from a folder of images of different sizes to masks."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli
from pixel_support import TinyPixels, discs, register_tiny_pixels, write_folder
from support import registered_for_now
from tiny_runs import save_image
from torchcaps.files import read_json
from torchcaps.models import register_preset

SIZES = ((24, 20), (40, 37), (33, 60))
TRAIN = "train tiny-pixels --task pixels --patch 16 --loss dice-cross-entropy --epochs 12 --batch-size 8"
TRAIN += " --learning-rate 0.02"
REFUSED = {
    "routing": "routing RUN",
    "perturb": "perturb RUN",
    "reconstruct": "reconstruct RUN",
    "robustness": "robustness RUN",
    "probe": "probe RUN",
    "detect": "detect RUN",
    "explore": "explore RUN --save site",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on images of three sizes and three classes."""
    folder = tmp_path_factory.mktemp("leaves")
    write_folder(folder / "leaves", 30, sizes=SIZES)
    (folder / "leaves/classes.txt").write_text("ground\ndisc\n$square$\n")
    with registered_for_now():
        register_tiny_pixels()
        result = Cli()(*TRAIN.split(), "--data", f"folder:{folder / 'leaves'}", "--out", folder / "run")
        assert result.code == 0, result.err
        (folder / "said.txt").write_text(result.out)
        yield folder / "run"


def test_a_run_is_trained_and_evaluated(run: Path, cli: Cli) -> None:
    summary = read_json(run / "summary.json", "summary")
    assert (summary["task"], summary["classes"], summary["in_shape"]) == ("pixels", 3, [1, 16, 16])
    assert summary["test"]["best"]["accuracy"] > 0.6
    said = (run.parent / "said.txt").read_text()
    assert "1×16×16, 3 classes" in said
    assert "Dice" in said
    assert {each.stem for each in (run / "figures").glob("*.png")} == {"curves", "samples", "masks"}
    found = cli.json("evaluate", run)
    assert found["accuracy"] == pytest.approx(summary["test"]["best"]["accuracy"])
    assert [row["name"] for row in found["per_class"]] == ["ground", "disc", "$square$"]
    assert cli("evaluate", run, "--figure", "e.png").code == 0
    table = cli.out("evaluate", run, "--split", "validation")
    assert "Hausdorff 95" in table
    assert "±" in table


def test_masks_are_written_for_images_of_any_size(run: Path, cli: Cli, tmp_path: Path) -> None:
    images, masks = discs(4, (50, 30), seed=9)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"new{number}.png")
    (tmp_path / "damaged.png").write_bytes(b"no")
    result = cli("predict", run, tmp_path, "--out", "masks")
    assert result.code == 2
    assert "damaged.png cannot be read as an image" in result.err
    assert result.out == "wrote masks, a mask for each of 4 images\n"
    for number, mask in enumerate(masks):
        with Image.open(f"masks/new{number}.png") as found:
            assert found.mode == "P"
            assert (np.asarray(found) == mask).mean() > 0.9
    (said,) = json.loads(cli.out("predict", run, tmp_path / "new0.png", "--json"))
    assert said["size"] == [50, 30]
    assert sum(said["shares"].values()) == pytest.approx(1)
    assert cli("predict", run, tmp_path / "new0.png", "--figure", "p.png").code == 0
    result = cli("predict", run, tmp_path / "new0.png", "--fit", "pad")
    assert result.code == 2
    assert "--fit is for networks that give one answer for each image" in result.err


@pytest.fixture(scope="module")
def onnx_file(run: Path) -> Path:
    pytest.importorskip("onnxruntime")
    file = run.parent / "m.onnx"
    assert Cli()("export", run, "--format", "onnx", "--out", file).code == 0
    return file


def test_masks_of_subjects_keep_the_sub_folders_of_their_images(run: Path, cli: Cli, tmp_path: Path) -> None:
    images, _ = discs(3, (24, 24), seed=9)
    places = ("subject 1/visit/scan", "subject 2/scan", "scan")
    for place, image in zip(places, images, strict=True):
        save_image(tmp_path / "in" / f"{place}.png", image)
    assert cli("predict", run, tmp_path / "in", "--out", "out").code == 0
    assert {str(each) for each in Path("out").rglob("*.png")} == {str(Path("out", f"{place}.png")) for place in places}
    assert cli.out("predict", run, tmp_path / "in", "--out", "out", "--missing").startswith("out has the masks of 3")
    assert cli("predict", run, tmp_path / "in/subject 2/scan.png", "--out", "alone").code == 0
    assert Path("alone/scan.png").read_bytes() == Path("out/subject 2/scan.png").read_bytes()
    named = [tmp_path / "in" / f"{place}.png" for place in places]
    assert "would both be" in cli("predict", run, *named, "--out", "flat").err


@pytest.mark.parametrize("size", [(16, 16), (50, 30), (33, 17), (9, 40)])
def test_an_onnx_file_gives_the_masks_of_the_run(run: Path, onnx_file: Path, cli: Cli, size: tuple[int, int]) -> None:
    for number in range(2):
        large = discs(1, (60, 60), seed=number)[0][0]
        Image.fromarray(large[: size[0], : size[1]]).save(f"new{number}.png")
    words = ("new0.png", "new1.png")
    assert cli.out("predict", onnx_file, *words) == cli.out("predict", run, *words)
    assert cli.json("predict", onnx_file, *words) == cli.json("predict", run, *words)
    assert cli("predict", onnx_file, *words, "--out", "masks").code == 0
    assert cli("predict", run, *words, "--out", "others").code == 0
    for each in words:
        assert Path("masks", each).read_bytes() == Path("others", each).read_bytes()


@pytest.mark.parametrize("name", REFUSED)
def test_other_commands_refuse_the_task_in_one_sentence(run: Path, cli: Cli, name: str) -> None:
    result = cli(*REFUSED[name].replace("RUN", str(run)).split())
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    able = "classes or ordinal or objects" if name == "explore" else "classes or ordinal"
    assert f"works for the task {able}; this network was trained for the task pixels" in result.err


def test_an_uneven_patch_is_refused_before_training(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyPixels, "stride", 8, raising=False)
    words = TRAIN.replace("--patch 16", "--patch 20").split()
    result = cli(*words, "--data", f"folder:{run.parent / 'leaves'}", "--out", "r")
    assert result.code == 2
    assert "a patch of 20 does not divide by 8, the strides of this network; take 16 or 24" in result.err
    assert not Path("r/config.json").exists()


def test_further_commands_work(run: Path, cli: Cli) -> None:
    assert cli("curves", run, "--figure", "c.png").code == 0
    resumed = cli("train", "--resume", run, "--no-figures", "--epochs", "13")
    assert resumed.code == 0, resumed.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "export RUN --format folder --out folder",
        "export RUN --format torch --out m.pt2",
        "evaluate RUN --figure e.png --json",
        "evaluate RUN --data folder:RUN/../leaves --batch-size 3 --precision bf16",
        "curves RUN --json --figure c.png",
        f"{TRAIN} --data folder:RUN/../leaves --init-from RUN --out again --no-figures",
        "train tiny-pixels --task pixels --patch 16 --batch-size 8 --data folder:RUN/../leaves --find-learning-rate",
        f"{TRAIN} --data folder:RUN/../leaves --class-weights balanced --max-rotation 30 --flip --out weighted",
    ],
)
def test_a_command_works_or_says_in_a_sentence_that_it_does_not(run: Path, cli: Cli, line: str) -> None:
    result = cli(*(word.replace("RUN", str(run)) for word in line.split()))
    assert result.code == 0 or (result.code, len(result.err.splitlines())) == (2, 1), result.err
    assert result.code == 0, result.err


def test_the_model_card_has_the_words_of_pixels(run: Path, cli: Cli) -> None:
    assert cli("export", run, "--format", "folder", "--out", "folder").code == 0
    card = Path("folder/README.md").read_text()
    for words in (
        "with 3 classes of pixels",
        "| test 1 − Dice | test Dice |",
        "type: dice",
        "its 3 classes for any image",
    ):
        assert words in card


def test_a_folder_with_masks_is_counted_and_drawn(run: Path, cli: Cli) -> None:
    result = cli("datasets", f"folder:{run.parent / 'leaves'}", "--patch", "16", "--sample", "4", "--figure", "s.png")
    assert result.code == 0, result.err
    assert "% of pixels" in result.out
    assert "ground + disc" in result.out
    assert Path("s.png").exists()


@pytest.mark.slow
def test_volumes_in_nifti_files_become_masks_with_their_axes(cli: Cli, tmp_path: Path) -> None:
    nib = pytest.importorskip("nibabel")
    affine = np.diag([-1.0, 2.0, 3.0, 1.0])
    for number in range(8):
        image, mask = (np.stack([each[0]] * 12, 1) for each in discs(1, seed=number))
        for name, values in (("images", image.astype(np.int16) * 4 - 500), ("masks", mask)):
            (tmp_path / f"scans/{name}").mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, affine), tmp_path / f"scans/{name}/{number}.nii.gz")
    with registered_for_now():
        small = {"parameters_of": None, "channels": (4, 8)}
        register_preset("unet-small", "A small U-Net.", base="unet-twin", network=small)
        words = "train unet-small --scale -500,300 --patch 12 --epochs 2 --batch-size 4 --learning-rate 0.01"
        words += " --out run --no-figures"
        result = cli(*words.split(), "--data", f"nifti:{tmp_path / 'scans'}")
        assert result.code == 0, result.err
        assert "1×12×12×12, 3 classes" in result.out
        found = cli.json("evaluate", "run")
        assert found["num_images"] == 2
        assert cli.out("predict", "run", tmp_path / "scans/images", "--out", "masks").endswith("of 8 images\n")
        pytest.importorskip("onnxruntime")
        assert cli("export", "run", "--format", "onnx", "--out", "m.onnx").code == 0
        assert cli("predict", "m.onnx", tmp_path / "scans/images", "--out", "exported").code == 0
        for name in sorted(each.name for each in Path("masks").iterdir()):
            assert Path("exported", name).read_bytes() == Path("masks", name).read_bytes()
        result = cli("predict", "run", tmp_path / "scans/images/0.nii.gz", "--figure", "p.png")
        assert result.code == 0, result.err
        Image.fromarray(discs(1)[0][0]).save("plane.png")
        result = cli("predict", "run", "plane.png")
        assert (result.code, len(result.err.splitlines())) == (2, 1)
        assert (
            "plane.png: the image is 1×24×20 (channels first), but the network takes patches of 1×12×12×12"
            in result.err
        )
    mask = nib.load("masks/3.nii.gz")
    assert mask.shape == (24, 12, 20)
    assert np.allclose(mask.affine, affine)
    assert set(np.unique(np.asanyarray(mask.dataobj))) <= {0, 1, 2}
