"""``predict``: by a run, by an ONNX file without torch, and by the network that comes with torchcaps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from torchcaps.analysis import Prediction
from torchcaps.analysis.calibration import Calibration
from torchcaps.cli.look import split_arguments
from torchcaps.cli.options import ImagesOf
from torchcaps.cli.runs import figure_path, open_images, open_run
from torchcaps.datasets import Preparation, get_max_megapixels
from torchcaps.errors import InputError
from torchcaps.export import Description, OnnxModel
from torchcaps.models import create_model, load_pretrained, pretrained
from torchcaps.training import load_run

Cli = Callable[..., Any]


@pytest.fixture
def wide_file(digit_file: Path, tmp_path: Path) -> Path:
    """The digit in another shape, as ink on paper, in colour."""
    with Image.open(digit_file) as image:
        wide = Image.fromarray(255 - np.asarray(image)).resize((90, 45)).convert("RGB")
    wide.save(tmp_path / "wide.png")
    return tmp_path / "wide.png"


@pytest.fixture
def shipped(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with the run's network in place of the one that comes with torchcaps."""
    names = [f"digit {n}" for n in range(10)]
    folder = tmp_path / "installed" / "compact"
    load_pretrained(run_folder / "best").save_pretrained(folder, class_names=names, dtype=torch.float16)
    monkeypatch.setitem(pretrained.SHIPPED, "compact", folder)
    return folder


# an ONNX file


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--invert"],
        ["--prepare", "none"],
        ["--prepare", "none", "--fit", "stretch"],
        ["--prepare", "none", "--invert", "--fit", "pad"],
    ],
)
def test_an_onnx_file_says_what_the_run_says(
    cli: Cli, run_folder: Path, onnx_file: Path, digit_file: Path, wide_file: Path, options: list[str]
) -> None:
    arguments = [digit_file, wide_file, *options]
    by_run, by_file = (cli("predict", network, *arguments) for network in (run_folder, onnx_file))
    assert (by_file.code, by_file.err) == (0, "")
    assert by_file == by_run
    by_run, by_file = (json.loads(cli("predict", n, *arguments, "--json").out) for n in (run_folder, onnx_file))
    for ours, theirs in zip(by_file, by_run, strict=True):
        assert [ours[key] for key in ("image", "class", "prepared")] == [
            theirs[key] for key in ("image", "class", "prepared")
        ]
        assert len(ours["unsure"]) == len(theirs["unsure"])
        assert ours["lengths"].keys() == theirs["lengths"].keys()
        np.testing.assert_allclose(list(ours["lengths"].values()), list(theirs["lengths"].values()), atol=1e-5)
    assert by_file[0]["lengths"] != by_file[1]["lengths"]


def test_an_onnx_file_needs_no_torch(cli: Cli, onnx_file: Path, digit_file: Path, environment: dict[str, str]) -> None:
    program = (
        "import sys\nfrom torchcaps.cli import main\n"
        f"code = main(['predict', {str(onnx_file)!r}, {str(digit_file)!r}])\n"
        "print(code, [name for name in ('torch', 'safetensors', 'huggingface_hub') if name in sys.modules])\n"
    )
    environment |= {"PYTHONIOENCODING": "utf-8"}  # bars are made of blocks
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=True)
    assert done.stdout == cli("predict", onnx_file, digit_file).out + "0 []\n"


def half(contents: bytes) -> bytes:
    return contents[: len(contents) // 2]


@pytest.mark.parametrize("name", ["gone.png", "text.png", "half.png", "folder"])
def test_errors_of_images_are_the_same(
    cli: Cli, run_folder: Path, onnx_file: Path, digit_file: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.png").write_text("seven")
    (tmp_path / "half.png").write_bytes(half(digit_file.read_bytes()))
    by_run, by_file = (cli("predict", network, digit_file, name) for network in (run_folder, onnx_file))
    assert (by_file.code, by_file.out, by_file.err.count("\n")) == (2, "", 1)
    assert name in by_file.err
    assert by_file == by_run


def test_a_damaged_onnx_file(cli: Cli, onnx_file: Path, digit_file: Path, tmp_path: Path) -> None:
    (tmp_path / "half.onnx").write_bytes(half(onnx_file.read_bytes()))
    result = cli("predict", "half.onnx", digit_file)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "half.onnx is damaged or no ONNX file" in result.err
    assert "there is no file gone.onnx" in cli("predict", "gone.onnx", digit_file).err


def test_an_epoch_is_not_chosen_from_a_file(cli: Cli, onnx_file: Path, digit_file: Path) -> None:
    result = cli("predict", onnx_file, digit_file, "--which", "last")
    assert (result.code, result.out) == (2, "")
    assert "--which is for a run folder, not for an ONNX file" in result.err


def test_a_file_is_no_run(cli: Cli, onnx_file: Path) -> None:
    result = cli("perturb", onnx_file)
    assert result.code == 2
    assert result.err == f"Error: {onnx_file} is a file; this command needs a run folder\n"


def test_several_objects_in_an_image(cli: Cli, digit_file: Path, tmp_path: Path) -> None:
    names = list("abcdefghij")
    torch.manual_seed(0)
    model = create_model("sabour2017", objects=2, conv_channels=8, primary_types=2, decoder=False)
    model.save_pretrained("net", class_names=names)
    (found,) = json.loads(cli("predict", "net", digit_file, "--json").out)
    longest = sorted(found["lengths"], key=lambda name: -found["lengths"][name])
    assert found["classes"] == longest[:2]
    assert "class" not in found
    assert cli("predict", "net", digit_file).out.splitlines()[0] == f"{digit_file}  {longest[0]} + {longest[1]}"


# the network that comes with torchcaps


def test_without_a_run_the_shipped_network_predicts(cli: Cli, shipped: Path, digit_file: Path, wide_file: Path) -> None:
    for images in ([digit_file], [digit_file, wide_file]):
        result = cli("predict", *images)
        assert (result.code, result.err) == (0, "")
        assert result == cli("predict", shipped, *images)
        assert result.out.count("  digit 3  ") >= len(images)


def test_what_other_commands_take_for_a_missing_run(shipped: Path) -> None:
    run = open_run(None, "best")
    assert (run.path, run.class_names[3]) == (shipped, "digit 3")
    images, dataset, words = open_images(run, ImagesOf())
    assert (len(images), dataset.name, words) == (360, "digits", "test images of digits")
    assert figure_path(None, None, "perturbation") == Path("perturbation.png")
    assert figure_path(None, shipped, "perturbation") == shipped / "figures" / "perturbation.png"
    assert figure_path(Path("x.pdf"), None, "perturbation") == Path("x.pdf")


# a network of the hub


@pytest.fixture
def on_hub(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's network as what was downloaded of the repository someone/letters; there is no other."""
    folder = tmp_path / "cache" / "0123456789abcdef"
    load_pretrained(run_folder / "best").save_pretrained(folder, class_names="abcdefghij")

    def download(repository: str, **_: Any) -> str:
        if repository != "someone/letters":
            raise LocalEntryNotFoundError("Offline.\nMore.")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return folder


def test_a_repository_of_the_hub_is_a_run(cli: Cli, on_hub: Path, digit_file: Path) -> None:
    result = cli("predict", "someone/letters", digit_file)
    assert result == cli("predict", on_hub, digit_file)
    assert (result.code, result.err) == (0, "")
    assert "  d  0." in result.out
    judged = cli("evaluate", "someone/letters")
    assert (judged.code, judged.out) == (2, "")
    assert "someone/letters does not say what it was trained on; name a data set with --data" in judged.err
    assert cli("evaluate", "someone/letters", "--data", "digits", "--json").code == 0


def test_what_is_made_of_it_goes_into_the_folder_one_is_in(cli: Cli, on_hub: Path, digit_file: Path) -> None:
    assert cli("perturb", "someone/letters", "--image", digit_file).code == 0
    assert cli("export", "someone/letters", "--format", "torch").code == 0
    assert Path("perturbation.png").exists()
    assert Path("model.pt2").exists()
    assert not Path("someone").exists()


@pytest.mark.parametrize("command", ["predict", "evaluate", "explore"])
def test_a_hub_that_cannot_be_reached(cli: Cli, on_hub: Path, digit_file: Path, command: str) -> None:
    result = cli(command, "someone/else", *([digit_file] if command == "predict" else []))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Error: there is no folder someone/else, and the hub has no repository someone/else")
    assert result.err.count("\n") == 1


def test_a_mistyped_run_is_asked_of_nobody(cli: Cli, on_hub: Path) -> None:
    Path("someone").mkdir()
    result = cli("evaluate", "someone/letters")
    assert (result.code, result.err) == (2, f"Error: there is no run folder {Path('someone/letters')}\n")


# what is a run and what an image


def test_the_first_argument_is_a_run_if_it_is_one(run_folder: Path, digit_file: Path) -> None:
    assert split_arguments([run_folder, digit_file, digit_file]) == (run_folder, [digit_file, digit_file])
    assert split_arguments([run_folder / "best", digit_file]) == (run_folder / "best", [digit_file])
    assert split_arguments([Path("gone.ONNX"), digit_file]) == (Path("gone.ONNX"), [digit_file])
    assert split_arguments([Path("someone/net-1.5"), digit_file]) == (Path("someone/net-1.5"), [digit_file])
    assert split_arguments([digit_file]) == (None, [digit_file])
    assert split_arguments([digit_file, run_folder]) == (None, [digit_file, run_folder])


def test_arguments_that_name_nothing(run_folder: Path, digit_file: Path) -> None:
    for arguments in ([], [run_folder], [Path("x.onnx")], [Path("someone/net")]):
        with pytest.raises(click.UsageError, match=r"Missing argument 'IMAGE\.\.\.'"):
            split_arguments(arguments)
    with pytest.raises(InputError, match=r"is no run folder: it holds no config\.json"):
        split_arguments([digit_file.parent, digit_file])
    for name in ("sabuor", "scans/seven.png", "a/b/c", "../sabuor", "/sabuor"):
        with pytest.raises(InputError, match=re.escape(f"no image file {Path(name)}")):
            split_arguments([Path(name), digit_file])


def test_a_description_gives_the_fit(
    cli: Cli, run_folder: Path, wide_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ONNX file of a run on folder: data stretches, as the run does."""

    class Stand:
        description = Description(in_shape=(1, 28, 28), class_names=("a", "b"), fit="stretch")

        def __init__(self, path: Path) -> None:
            pass

        def __call__(self, images: np.ndarray) -> Prediction:
            scores = np.stack([images.mean((1, 2, 3)), images.std((1, 2, 3))], 1)
            return Prediction(scores.argmax(1), scores, None, [()] * len(images))

    monkeypatch.setattr("torchcaps.export.OnnxModel", Stand)
    plain, stretched, padded = (
        cli("predict", "x.onnx", wide_file, "--json", *options).out
        for options in ([], ["--fit", "stretch"], ["--fit", "pad"])
    )
    assert plain == stretched != padded


# photos


@pytest.fixture
def photo_file(digit_file: Path, tmp_path: Path) -> Path:
    """The digit as ink on paper, in a corner, on a slope of light."""
    with Image.open(digit_file) as image:
        ink = np.asarray(image.convert("L").resize((90, 90))) / 255
    photo = np.full((200, 300, 3), 230.0)
    photo[100:190, 20:110] -= ink[:, :, None] * (200, 180, 60)
    photo *= np.linspace(0.6, 1, 300)[None, :, None]
    Image.fromarray(photo.astype(np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_a_photo_is_prepared_and_what_was_changed_is_said(
    cli: Cli, run_folder: Path, digit_file: Path, photo_file: Path
) -> None:
    photo, digit = json.loads(cli("predict", run_folder, photo_file, digit_file, "--json").out)
    assert digit["prepared"] == []
    changes = photo["prepared"]
    assert changes[0] == "dark ink turned light"
    assert changes[1].endswith("pixels cut out of 200×300")
    assert changes[2].startswith("uneven light flattened (1 to 1.")
    near, far = (abs(np.subtract(list(photo["lengths"].values()), list(digit["lengths"].values()))).max(), 0.05)
    assert near < far
    out = cli("predict", run_folder, photo_file).out.splitlines()
    assert out[1] == f"  prepared: {'; '.join(changes)}"
    (unprepared,) = json.loads(cli("predict", run_folder, photo_file, "--prepare", "none", "--json").out)
    assert unprepared["prepared"] == []
    assert unprepared["lengths"] != photo["lengths"]


def test_a_photo_without_a_drawing_is_unsure(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (60, 40), "white").save(tmp_path / "empty.png")
    (said,) = json.loads(cli("predict", run_folder, "empty.png", "--json").out)
    assert (said["prepared"], said["unsure"][0]) == (["no drawing found"], "no drawing found")


def test_networks_for_other_images_prepare_nothing(cli: Cli, photo_file: Path) -> None:
    create_model("sabour2017", conv_channels=8, primary_types=2, decoder=False).save_pretrained("net")
    plain, none = (cli("predict", "net", photo_file, *options) for options in ([], ["--prepare", "none"]))
    assert plain == none
    assert "prepared" not in plain.out
    assert cli("predict", "net", photo_file, "--fit", "stretch").code == 0


def test_a_fit_is_for_what_is_not_prepared(cli: Cli, run_folder: Path, photo_file: Path) -> None:
    done = cli("predict", run_folder, photo_file, "--fit", "stretch")
    assert (done.code, done.out) == (2, "")
    assert "--fit is for images that are not prepared; leave it out, or add --prepare none" in done.err


def test_other_commands_prepare_a_photo_too(cli: Cli, run_folder: Path, photo_file: Path) -> None:
    traces = [
        cli("routing", run_folder, "--image", photo_file, "--json", *options).out
        for options in ([], ["--prepare", "none"])
    ]
    assert traces[0] != traces[1]
    done = cli("routing", run_folder, "--prepare", "none")
    assert (done.code, "--prepare is for a file given with --image" in done.err) == (2, True)


def test_a_figure_shows_what_the_network_sees(
    cli: Cli, run_folder: Path, onnx_file: Path, photo_file: Path, digit_file: Path
) -> None:
    for network in (run_folder, onnx_file):
        done = cli("predict", network, photo_file, digit_file, "--figure", "seen.png")
        assert (done.code, done.out.splitlines()[-1]) == (0, "wrote seen.png")
        with Image.open("seen.png") as figure:
            assert figure.width > figure.height > 400
        Path("seen.png").unlink()
    done = cli("predict", run_folder, photo_file, "--figure", "seen.svg", "--json")
    assert (json.loads(done.out)[0]["image"], done.err) == (str(photo_file), "wrote seen.svg\n")
    done = cli("predict", run_folder, *[digit_file] * 101, "--figure", "seen.png")
    assert (done.code, done.out) == (2, "")
    assert "--figure draws at most 100 images, got 101" in done.err
    assert not Path("seen.png").exists()


def test_answers_beyond_what_is_usual_are_unsure(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    about = json.loads((run / "best/classes.json").read_text())
    for usual, number in (({"score": 1, "distance": 0}, 2), ({"score": 0, "distance": 0}, 1), ({"score": 0}, 0)):
        about["calibration"] = {"distance": 1000, "images": 100} | usual
        (run / "best/classes.json").write_text(json.dumps(about))
        (said,) = json.loads(cli("predict", run, digit_file, "--json").out)
        beyond = [reason for reason in said["unsure"] if reason.endswith("the bound of 99 % of the validation images")]
        assert len(beyond) == number
        near = [reason for reason in said["unsure"] if reason not in beyond]
        scores = sorted(said["lengths"].values())
        assert len(near) == (scores[-2] >= 0.9 * scores[-1])
        assert all(reason.startswith("another class has nearly the same score") for reason in near)
        out = cli("predict", run, digit_file).out
        assert (f"  unsure: {'; '.join(said['unsure'])}" in out.splitlines()) == bool(said["unsure"])


def test_what_is_usual_goes_with_the_network(
    cli: Cli, run_folder: Path, onnx_file: Path, photo_file: Path, tmp_path: Path
) -> None:
    assert cli("export", run_folder, "--format", "folder", "--out", tmp_path / "saved").code == 0
    run, saved = (load_run(folder) for folder in (run_folder, tmp_path / "saved"))
    assert run.images == saved.images
    assert run.images.preparation == Preparation(centre="box")
    assert run.images.calibration == OnnxModel(onnx_file).description.calibration
    assert run.images.calibration is not None
    assert run.images.calibration.images == 100
    assert "bring photos of a drawing to that form" in (tmp_path / "saved" / "README.md").read_text()
    assert cli("predict", tmp_path / "saved", photo_file) == cli("predict", run_folder, photo_file)


def test_runs_of_earlier_versions_are_known_by_their_data(run_folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    summary = json.loads((run / "summary.json").read_text())
    usual = Calibration(**summary["calibration"])
    (run / "best/classes.json").write_text(json.dumps({"class_names": list("0123456789")}))
    config = json.loads((run / "config.json").read_text())
    wanted = {
        ("digits", None): Preparation(centre="box"),
        ("mnist", None): Preparation(),
        ("mnist", 42): Preparation(box=30),
        ("affnist", None): Preparation(),
        ("fashion-mnist", None): None,
        ("multimnist", None): None,
        ("npz:gone.npz", None): None,
        ("of-a-plugin", None): None,
    }
    for (data, size), preparation in wanted.items():
        (run / "config.json").write_text(json.dumps(config | {"data": data, "image_size": size}))
        loaded = load_run(run)
        assert (loaded.images.preparation, loaded.images.calibration) == (preparation, usual), data


def test_what_is_known_of_the_images_lies_beside_the_weights(run_folder: Path, tmp_path: Path) -> None:
    """So a run whose data set comes from a plugin keeps it where the plugin is not loaded."""
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data": "of-a-plugin"}))
    assert load_run(run).images == load_run(run_folder).images


@pytest.mark.parametrize("entry", [{"preparation": 7}, {"preparation": {"box": 20}}, {"calibration": [1, 2]}])
def test_a_damaged_record_of_the_images_is_refused(
    cli: Cli, run_folder: Path, digit_file: Path, entry: dict[str, Any]
) -> None:
    load_pretrained(run_folder / "best").save_pretrained("net", class_names="abcdefghij")
    about = json.loads(Path("net/classes.json").read_text())
    Path("net/classes.json").write_text(json.dumps(about | entry))
    done = cli("predict", "net", digit_file)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"{Path('net/classes.json')} cannot be used: {next(iter(entry))} must have" in done.err


# image files


def test_an_image_too_large_for_the_limit(cli: Cli, onnx_file: Path, digit_file: Path, tmp_path: Path) -> None:
    Image.new("L", (200, 100)).save(tmp_path / "wide.png")
    done = cli("predict", onnx_file, digit_file, "wide.png", "--max-megapixels", "0.01")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "Error: wide.png has 200×100 pixels, 0.02 megapixels, but at most 0.01 megapixels are read"
    )
    assert cli("predict", onnx_file, "wide.png", "--max-megapixels", "0.02").code == 0
    assert get_max_megapixels() == 64  # for that command only
    for wrong in ("0", "-1", "nan", "179"):
        done = cli("predict", onnx_file, "wide.png", "--max-megapixels", wrong)
        assert (done.code, "--max-megapixels" in done.err, "at most 178" in done.err) == (2, True, True)


def test_a_fifo_is_refused_at_once(cli: Cli, onnx_file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "seven.png")
    done = cli("predict", onnx_file, "seven.png")
    assert (done.code, done.err) == (2, "Error: there is no image file seven.png: what is there is a FIFO\n")


def test_an_image_whose_name_is_not_utf8(cli: Cli, onnx_file: Path, digit_file: Path) -> None:
    name = os.fsdecode(b"sieben\xff.png")
    Path(name).write_bytes(digit_file.read_bytes())
    command = [sys.executable, "-m", "torchcaps", "predict", onnx_file, os.fsencode(name)]
    for options in ([], ["--json"]):
        done = subprocess.run([*command, *options], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"sieben" in done.stdout
