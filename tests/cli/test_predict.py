"""``predict``: by a run, by an ONNX file without torch, by a network of the hub, and by that which comes along."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from cli_support import Cli
from torchcaps.analysis import load_image, predict
from torchcaps.datasets import Preparation, get_max_megapixels
from torchcaps.export import OnnxModel
from torchcaps.files import read_json, write_json
from torchcaps.models import create_model, load_pretrained
from torchcaps.models.files import SHIPPED
from torchcaps.training import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTO = EXAMPLES / "photo.jpg"
"""A 4 in ink on paper, in a corner, on a slope of light."""


@pytest.fixture
def wide_file(digit_file: Path, tmp_path: Path) -> Path:
    """The digit in another shape, as ink on paper, in colour."""
    with Image.open(digit_file) as image:
        wide = Image.fromarray(255 - np.asarray(image)).resize((90, 45)).convert("RGB")
    wide.save(tmp_path / "wide.png")
    return tmp_path / "wide.png"


def test_class_and_lengths_of_each_file(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    run = load_run(run_folder)
    expected = predict(run.model, torch.stack([load_image(digit_file, run.model.in_shape)]))
    found = cli.json("predict", run_folder, digit_file, digit_file)[1]
    assert found["image"] == str(digit_file)
    assert list(found["lengths"]) == list(run.class_names)
    np.testing.assert_allclose(list(found["lengths"].values()), expected.lengths[0], rtol=1e-6)
    assert found["class"] == run.class_names[expected.classes[0]]
    assert cli("predict", run_folder, digit_file).out.startswith(f"{digit_file}  {found['class']}\n")


def test_image_files_are_brought_to_size_as_the_runs(
    cli: Cli, run_folder: Path, wide_file: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    about = read_json(copy / "best/classes.json", "list of classes")
    for words in (["predict", copy, wide_file], ["perturb", copy, "--image", wide_file, "--figure", "x.png"]):
        said = {}
        for fit in ("pad", "stretch"):
            write_json(copy / "best/classes.json", about | {"fit": fit})
            said[fit] = cli(*words, "--json", "--prepare", "none").out
            assert said[fit] == cli(*words, "--json", "--prepare", "none", "--fit", fit).out
        assert said["pad"] != said["stretch"]


def test_a_folder_becomes_a_table_and_a_bad_file_spoils_no_other(
    cli: Cli, run_folder: Path, digit_file: Path, wide_file: Path
) -> None:
    Path("scans/sub").mkdir(parents=True)
    for name, file in (("b.png", digit_file), ("sub/a.png", wide_file)):
        shutil.copy(file, Path("scans", name))
    whole = cli.json("predict", run_folder, "scans")
    assert [each["image"] for each in whole] == [str(Path("scans", "b.png")), str(Path("scans", "sub", "a.png"))]
    said = cli("predict", run_folder, "scans", "--out", "found.csv").out
    assert said == "wrote found.csv, a line for each of 2 images\n"
    with Path("found.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["image"], row["class"]) for row in table] == [(each["image"], each["class"]) for each in whole]
    assert [f"{score:.4f}" for score in whole[1]["lengths"].values()] == list(table[1].values())[3:]
    assert "found.csv exists already" in cli("predict", run_folder, "scans", "--out", "found.csv").err

    Path("scans/a.png").write_text("no image")
    Path("scans/.c.png").write_text("hidden")
    done = cli("predict", run_folder, "scans", "--json")
    assert (done.code, json.loads(done.out)) == (2, whole)
    assert done.err.startswith(f"Error: {Path('scans', 'a.png')} cannot be read as an image")
    Path("scans/c.gif").write_text("nor this")
    assert cli("predict", run_folder, "scans").err.startswith("Error: 2 of 4 images cannot be read:\n  ")


@pytest.mark.slow
def test_files_of_a_group_have_one_answer_by_the_mean_of_their_scores(
    cli: Cli, run_folder: Path, onnx_file: Path, digit_file: Path, wide_file: Path
) -> None:
    Path("scans/x").mkdir(parents=True)
    for name, file in (("x/1_a.png", digit_file), ("x/1_b.png", wide_file), ("x/2_a.png", digit_file)):
        shutil.copy(file, Path("scans", name))
    single = cli.json("predict", run_folder, "scans")
    scores = np.array([list(each["lengths"].values()) for each in single])
    for network in (run_folder, onnx_file):
        grouped = cli.json("predict", network, "scans", "--group", r"(\d)_[^/]*$")
        assert [each["group"] for each in grouped] == ["1", "2"]
        assert [each["images"] for each in grouped] == [[each["image"] for each in single[:2]], [single[2]["image"]]]
        mean = np.array([list(each["lengths"].values()) for each in grouped])
        np.testing.assert_allclose(mean, [scores[:2].mean(0), scores[2]], atol=1e-5)
        assert [int(each["class"]) for each in grouped] == mean.argmax(1).tolist()
    said = cli.out("predict", run_folder, "scans", "--group", "x")
    assert said.startswith(f"x  {scores.mean(0).argmax()}  (mean of 3 images)\n")
    said = cli("predict", run_folder, "scans", "--group", r"\d_", "--out", "found.csv").out
    assert said == "wrote found.csv, a line for each of 2 groups of 3 images\n"
    with Path("found.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["group"], row["images"], row["class"]) for row in table] == [
        ("1_", "2", grouped[0]["class"]),
        ("2_", "1", grouped[1]["class"]),
    ]
    for pattern, words in (
        ("(", "--group must be a regular expression, got '(': missing )"),
        ("2", "--group '2' does not match scans/x/1_a.png; it must match the path of every image"),
    ):
        done = cli("predict", run_folder, "scans", "--group", pattern)
        assert done.code == 2
        assert words in done.err.replace("\\", "/")
    done = cli("predict", run_folder, "scans", "--group", "x", "--figure", "a.png")
    assert (done.code, "--figure is for single images, but --group averages their scores" in done.err) == (2, True)


def test_an_onnx_file_says_the_same(
    cli: Cli, run_folder: Path, onnx_file: Path, digit_file: Path, wide_file: Path
) -> None:
    for options in ([], ["--prepare", "none", "--invert", "--fit", "stretch"]):
        words = [digit_file, wide_file, *options]
        assert cli.out("predict", onnx_file, *words) == cli.out("predict", run_folder, *words)
        pair = [cli.json("predict", network, *words) for network in (onnx_file, run_folder)]
        for ours, theirs in zip(*pair, strict=True):
            assert ours["prepared"] == theirs["prepared"]
            np.testing.assert_allclose(list(ours["lengths"].values()), list(theirs["lengths"].values()), atol=1e-5)
        assert pair[0][0]["lengths"] != pair[0][1]["lengths"]


def test_an_onnx_file_needs_no_torch_and_an_image_no_utf8_in_its_name(
    cli: Cli, onnx_file: Path, digit_file: Path, environment: dict[str, str]
) -> None:
    name = os.fsdecode(b"sieben\xff.png" if sys.platform.startswith("linux") else b"sieben.png")
    shutil.copy(digit_file, name)
    program = (
        "import sys\nfrom torchcaps.cli import main\ncode = main(['predict', *sys.argv[1:]])\n"
        "print(code, [name for name in ('torch', 'safetensors', 'huggingface_hub') if name in sys.modules])\n"
    )
    environment |= {"PYTHONIOENCODING": "utf-8"}  # bars are made of blocks
    command = [sys.executable, "-c", program, onnx_file, os.fsencode(name)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=True)
    assert "sieben" in done.stdout
    assert done.stdout == cli("predict", onnx_file, name).out + "0 []\n"


def test_errors_of_an_onnx_file_and_its_images(cli: Cli, run_folder: Path, onnx_file: Path, digit_file: Path) -> None:
    Path("folder").mkdir()
    Path("half.png").write_bytes(digit_file.read_bytes()[:90])
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe.png")  # is not waited for
    for name in ("gone.png", "half.png", "folder", *map(str, Path().glob("pipe.png"))):
        by_run, by_file = (cli("predict", network, name) for network in (run_folder, onnx_file))
        assert (by_file.code, by_file.out, by_file.err.count("\n"), name in by_file.err) == (2, "", 1, True)
        assert by_file == by_run
    said = cli("predict", onnx_file, digit_file, "--which", "last").err
    assert "--which is for a run folder, not for an ONNX file" in said


def test_without_a_run_the_shipped_network_predicts(cli: Cli, digit_file: Path, wide_file: Path) -> None:
    words = (digit_file, wide_file)
    assert cli.out("predict", *words) == cli.out("predict", SHIPPED["compact"], *words)
    assert cli.out("perturb", "--image", digit_file).endswith("wrote perturbation.png\n")


def test_a_repository_of_the_hub_is_a_run(
    cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "0123456789abcdef"
    load_pretrained(run_folder / "best").save_pretrained(folder, class_names="abcdefghij")

    def download(repository: str, **_: Any) -> str:
        if repository != "someone/letters":
            raise LocalEntryNotFoundError("Offline.\nMore.")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert cli.out("predict", "someone/letters", digit_file) == cli.out("predict", folder, digit_file)
    judged = cli("evaluate", "someone/letters")
    assert "someone/letters does not say what it was trained on; name a data set with --data" in judged.err
    assert cli("perturb", "someone/letters", "--image", digit_file).code == 0
    assert Path("perturbation.png").exists(), "what is made of it goes into the folder one is in"
    result = cli("explore", "someone/else")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "there is no folder someone/else, and the hub has no repository someone/else" in result.err
    Path("someone").mkdir()  # of a mistyped run the hub is not asked
    assert cli("evaluate", "someone/letters").err == f"Error: there is no run folder {Path('someone/letters')}\n"


def test_a_photo_is_prepared_and_it_is_said(cli: Cli, run_folder: Path) -> None:
    photo, digit = cli.json("predict", PHOTO, EXAMPLES / "digit.png")
    assert (photo["class"], digit["class"], digit["prepared"]) == ("4", "7", [])
    changes = photo["prepared"]
    assert changes[0] == "dark ink turned light"
    assert changes[1].endswith("pixels cut out of 770×864")
    told = cli("predict", run_folder, PHOTO, "--figure", "seen.png").out.splitlines()
    assert f"  prepared: {'; '.join(changes)}" in told
    (unprepared,) = cli.json("predict", PHOTO, "--prepare", "none")
    assert unprepared["prepared"] == []
    assert unprepared["lengths"]["4"] < photo["lengths"]["4"] / 2
    words = ("routing", run_folder, "--image", PHOTO, "--json", "--figure", "x.png")
    assert cli(*words).out != cli(*words, "--prepare", "none").out


def test_no_drawing_is_unsure_and_other_networks_prepare_nothing(cli: Cli, run_folder: Path) -> None:
    Image.new("RGB", (60, 40), "white").save("empty.png")
    (said,) = cli.json("predict", run_folder, "empty.png")
    assert (said["prepared"], said["unsure"][0]) == (["no drawing found"], "no drawing found")
    create_model("sabour2017", conv_channels=8, primary_types=2, decoder=False).save_pretrained("net")
    plain, none = (cli("predict", "net", PHOTO, *options) for options in ([], ["--prepare", "none"]))
    assert (plain, "prepared" in plain.out) == (none, False)
    assert cli("predict", "net", PHOTO, "--fit", "stretch").code == 0


def test_what_is_known_of_the_images_goes_with_the_network(
    cli: Cli, run_folder: Path, onnx_file: Path, tmp_path: Path
) -> None:
    assert cli("export", run_folder, "--format", "folder", "--out", "saved").code == 0
    run, saved = load_run(run_folder), load_run(tmp_path / "saved")
    assert run.images == saved.images
    assert run.images.preparation == Preparation(centre="box")
    assert run.images.calibration == OnnxModel(onnx_file).description.calibration
    assert cli("predict", "saved", PHOTO) == cli("predict", run_folder, PHOTO)
    # and is kept where the plugin of the run's data set is not loaded
    copy = Path(shutil.copytree(run_folder, tmp_path / "copy"))
    config = read_json(copy / "config.json", "configuration")
    write_json(copy / "config.json", config | {"data": "of-a-plugin"})
    assert load_run(copy).images == run.images


def test_an_image_too_large_for_the_limit(cli: Cli, onnx_file: Path, tmp_path: Path) -> None:
    Image.new("L", (200, 100)).save(tmp_path / "wide.png")
    done = cli("predict", onnx_file, "wide.png", "--max-megapixels", "0.01")
    assert (done.code, "but the limit is 0.01 megapixels" in done.err) == (2, True)
    assert cli("predict", onnx_file, "wide.png", "--max-megapixels", "0.02").code == 0
    assert get_max_megapixels() == 64  # for that command only
