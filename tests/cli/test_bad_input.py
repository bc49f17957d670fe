"""Bad input: one sentence that names it, exit code 2, no traceback, and nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@dataclass(frozen=True)
class Places:
    """What the cases below speak of."""

    run: Path
    cnn: Path
    digit: Path
    tiny: tuple[str, ...]
    broken_run: Callable[..., Path]
    write: Callable[[str, bytes], Path]


@pytest.fixture
def places(run_folder: Path, cnn_folder: Path, digit_file: Path, tiny: tuple[str, ...], tmp_path: Path) -> Places:
    def broken_run(part: str, change: Callable[[bytes], bytes] | None) -> Path:
        """A copy of the run in which a file is changed, or missing."""
        copy = shutil.copytree(run_folder, tmp_path / "broken")
        if change is None:
            (copy / part).unlink()
        else:
            (copy / part).write_bytes(change((copy / part).read_bytes()))
        return copy

    def write(name: str, contents: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
        return path

    return Places(run_folder, cnn_folder, digit_file, tiny, broken_run, write)


def half(contents: bytes) -> bytes:
    return contents[: len(contents) // 2]


def one_wrong_bit(contents: bytes) -> bytes:
    return contents[:-100] + bytes([contents[-100] ^ 1]) + contents[-99:]


def without_end(contents: bytes) -> bytes:
    return contents.replace(b"}", b"")


def misspelt(contents: bytes) -> bytes:
    return contents.replace(b"num_iterations", b"num_iteration", 1)


FOLDER = ("--format", "folder", "--out", "new")

Arguments = Callable[[Places], list[Any]]

# what is typed, and what the error must say
CASES: dict[str, tuple[Arguments, list[str]]] = {
    # the command line itself
    "unknown command": (lambda p: ["trian"], ['"trian"', '"train"']),
    "unknown option": (lambda p: ["train", "--epoch", "2"], ["--epoch", "--epochs"]),
    "unknown option elsewhere": (lambda p: ["evaluate", p.run, "--splt", "test"], ["--splt", "--split"]),
    "no run": (lambda p: ["share", "--repo", "you/net"], ["RUN"]),
    "no image": (lambda p: ["predict", p.run], ["IMAGE"]),
    "too many arguments": (lambda p: ["train", "sabour2017", "mnist"], ["mnist"]),
    # names
    "unknown preset": (lambda p: ["train", "sabour2071"], ['"sabour2071"', '"sabour2017"']),
    "unknown preset to show": (lambda p: ["presets", "tf-notbook"], ['"tf-notbook"', '"tf-notebook"']),
    "unknown data set": (lambda p: ["train", *p.tiny, "--data", "mnits"], ['"mnits"', '"mnist"']),
    "unknown data set to show": (lambda p: ["datasets", "mnits"], ['"mnits"', '"mnist"']),
    "unknown data set to judge": (lambda p: ["evaluate", p.run, "--data", "digit"], ['"digit"', '"digits"']),
    "unknown class": (lambda p: ["perturb", p.run, "--capsule", "ten"], ['"ten"']),
    "class beyond the last": (lambda p: ["perturb", p.run, "--capsule", "10"], ['"10"']),
    "field of a capsule network for a CNN": (
        lambda p: ["train", "baseline-cnn", "--conv-kernel", "5"],
        ["--conv-kernel is an option of --backbone conv, which is not chosen"],
    ),
    "field of a CNN for a capsule network": (
        lambda p: ["train", "tf-notebook", "--kernel", "5"],
        ["--kernel is an option of the network cnn, which is not chosen"],
    ),
    # values
    "no number": (lambda p: ["train", "--epochs", "two"], ["--epochs", "two"]),
    "no choice": (lambda p: ["train", "--softmax-over", "rows"], ["--softmax-over", "rows", "outputs", "inputs"]),
    "no list": (lambda p: ["train", "--decoder-hidden", "512;1024"], ["--decoder-hidden", "512;1024"]),
    "no value": (lambda p: ["train", "--epochs"], ["--epochs"]),
    "zero epochs": (lambda p: ["train", "--epochs", "0"], ["epochs", "1", "0"]),
    "negative seed": (lambda p: ["train", "--seed", "-1"], ["seed", "-1"]),
    "learning rate nan": (lambda p: ["train", "--learning-rate", "nan"], ["learning_rate", "nan"]),
    "dropout of one": (lambda p: ["train", "baseline-cnn", "--dropout", "1"], ["dropout", "1"]),
    "even kernel": (lambda p: ["train", "baseline-cnn", "--kernel", "4"], ["kernel", "odd", "4"]),
    "fields that exclude each other": (lambda p: ["train", "--learn-prior", "--stop-gradient"], ["learn_prior"]),
    "one step": (lambda p: ["perturb", p.run, "--steps", "1"], ["steps", "1"]),
    "no range": (lambda p: ["perturb", p.run, "--range", "0"], ["amplitude", "0"]),
    "range beyond all capsules": (lambda p: ["perturb", p.run, "--range", "1e308"], ["amplitude", "1,000", "1e+308"]),
    "range that is no number": (lambda p: ["perturb", p.run, "--range", "x"], ["--range", "'x'", "0.5"]),
    "range of three numbers": (lambda p: ["perturb", p.run, "--range", "1,2,3"], ["--range", "'1,2,3'", "or two"]),
    "range downwards": (lambda p: ["perturb", p.run, "--range", "1,-1"], ["amplitude", "lower", "(1.0, -1.0)"]),
    "more steps than a figure holds": (lambda p: ["perturb", p.run, "--steps", "1000"], ["steps", "500", "1000"]),
    "no such component": (lambda p: ["perturb", p.run, "--component", "16"], ["components", "15", "16"]),
    "images of all components": (lambda p: ["perturb", p.run, "--index", "1", "--index", "2"], ["--component"]),
    "two capsules": (lambda p: ["perturb", p.run, "--capsule", "2", "--follow", "label"], ["--follow", "--capsule"]),
    "label of a file": (
        lambda p: ["perturb", p.run, "--image", p.digit, "--follow", "label"],
        ["--follow", "digit.png"],
    ),
    "second of the images missing": (
        lambda p: ["perturb", p.run, "--component", "1", "--index", "0", "--index", "100"],
        ["--index", "100", "digits"],
    ),
    "no such input capsule": (
        lambda p: ["routing", p.run, "--input-capsule", "0", "--input-capsule", "72"],
        ["--input-capsule", "below 72", "got 72"],
    ),
    "more iterations than a figure holds": (
        lambda p: ["routing", p.run, "--num-iterations", "101"],
        ["--num-iterations", "100", "101"],
    ),
    "no such image": (lambda p: ["perturb", p.run, "--index", "100"], ["--index", "100", "digits"]),
    "negative image": (lambda p: ["routing", p.run, "--index", "-1"], ["--index", "-1"]),
    "no iteration": (lambda p: ["routing", p.run, "--num-iterations", "0"], ["--num-iterations", "0"]),
    "iterations without end": (lambda p: ["train", "--num-iterations", str(10**12)], ["num_iterations", "0 to 1000"]),
    "iterations to follow without end": (
        lambda p: ["routing", p.run, "--num-iterations", str(10**12)],
        ["--num-iterations", "100"],
    ),
    "processes without end": (lambda p: ["train", "--devices", "1000000"], ["devices", "1 to 4096", "1000000"]),
    "more processes than cores": (lambda p: ["train", *p.tiny, "--devices", "4096"], ["devices", "cores", "4096"]),
    "processes without end in a file": (
        lambda p: ["train", "--config", p.write("c.json", b'{"devices": 1000000}')],
        ["c.json", "devices", "1 to 4096"],
    ),
    "machines that do not know of each other": (
        lambda p: ["train", *p.tiny, "--num-nodes", "3"],
        ["num_nodes is 3", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "torchrun"],
    ),
    "more channels than int64": (lambda p: ["train", "--conv-channels", "9" * 30], ["conv_channels", "1 to 65536"]),
    "a number of thousands of digits": (lambda p: ["train", "--conv-channels", "9" * 4000], ["conv_channels", "…"]),
    "images larger than int64": (lambda p: ["train", "--image-size", "9" * 30], ["image_size", "1 to 4096"]),
    "images too large to show": (lambda p: ["datasets", "digits", "--image-size", "9" * 30], ["--image-size", "4096"]),
    "shift larger than int64": (lambda p: ["train", "--max-shift", "9" * 30], ["max_shift", "0 to 4096"]),
    "batch larger than int64": (lambda p: ["train", "--batch-size", "9" * 30], ["batch_size", "1 to 1000000000"]),
    "judged batch larger than int64": (lambda p: ["evaluate", p.run, "--batch-size", "9" * 30], ["--batch-size"]),
    "too many layers": (lambda p: ["train", "--decoder-hidden", ",".join("1" * 101)], ["decoder_hidden", "100", "101"]),
    "network larger than memory": (
        lambda p: ["train", *p.tiny, "--conv-channels", "65536", "--primary-types", "65536"],
        ["parameters", "MiB"],
    ),
    "decay that grows": (lambda p: ["train", "--decay", "1e10"], ["decay", "at most 1"]),
    "seed beyond numpy's": (lambda p: ["train", "--seed", str(2**32)], ["seed", "4294967295"]),
    "PGD without end": (lambda p: ["robustness", p.run, "--steps", str(10**12)], ["--steps", "10000"]),
    "steps beyond all measure": (lambda p: ["perturb", p.run, "--steps", str(10**12)], ["steps", "2 to 500"]),
    "class of thousands of digits": (lambda p: ["perturb", p.run, "--capsule", "9" * 5000], ["class"]),
    # what does not fit together
    "batch larger than the data": (lambda p: ["train", *p.tiny, "--batch-size", "201"], ["201", "200"]),
    "fewer images than classes": (lambda p: ["train", *p.tiny, "--limit-train", "3"], ["first 3 training", '"']),
    "no validation images": (lambda p: ["train", *p.tiny, "--validation-size", "9999"], ["validation_size", "9999"]),
    "images too small": (lambda p: ["train", *p.tiny, "--image-size", "12"], ["12×12", "17×17"]),
    "shift beyond the image": (lambda p: ["train", *p.tiny, "--max-shift", "28"], ["max_shift", "28"]),
    "data folder for the digits": (lambda p: ["train", *p.tiny, "--data-dir", "."], ["digits", "--data-dir"]),
    "resume into another folder": (lambda p: ["train", "--resume", p.run, "--out", "new"], ["--resume", "--out"]),
    "resume with a file": (lambda p: ["train", "--resume", p.run, "--config", "x"], ["--resume", "--config"]),
    "resume with another preset": (
        lambda p: ["train", "tf-notebook", "--resume", p.run],
        ["sabour2017", "tf-notebook"],
    ),
    "resume with another network": (
        lambda p: ["train", "--resume", p.run, "--num-iterations", "1"],
        ["num_iterations"],
    ),
    "resume with a field of a CNN": (lambda p: ["train", "--resume", p.run, "--dropout", "0.1"], ["dropout"]),
    "file of another preset": (
        lambda p: ["train", "tf-notebook", "--config", p.run / "config.json"],
        ["sabour2017", "tf-notebook", "--config"],
    ),
    "data set and file": (lambda p: ["perturb", p.run, "--image", p.digit, "--index", "1"], ["--index", "--image"]),
    "part and file": (lambda p: ["routing", p.run, "--image", p.digit, "--split", "train"], ["--split", "--image"]),
    "count and file": (lambda p: ["routing", p.run, "--image", p.digit, "--count", "9"], ["--count", "--image"]),
    "inverted data set": (lambda p: ["routing", p.run, "--invert"], ["--invert", "--image"]),
    "fitted data set": (lambda p: ["perturb", p.run, "--fit", "pad"], ["--fit", "--image"]),
    "drawing of no preset": (lambda p: ["presets", "--figure", "x.png"], ["--figure", "sabour2017"]),
    "drawing of an unknown format": (lambda p: ["presets", "compact", "--figure", "x.bmp"], ["x.bmp", ".png"]),
    "sample of no data set": (lambda p: ["datasets", "--sample", "3"], ["--sample"]),
    "sample of no images": (lambda p: ["datasets", "digits", "--sample", "0"], ["--sample", "0", "1000"]),
    "sample of too many images": (lambda p: ["datasets", "digits", "--sample", "1001"], ["--sample", "1001"]),
    "figure of no sample": (lambda p: ["datasets", "digits", "--figure", "x.png"], ["--figure", "--sample"]),
    "part of no sample": (lambda p: ["datasets", "digits", "--split", "test"], ["--split", "--sample"]),
    "sample that is no figure": (
        lambda p: ["datasets", "digits", "--sample", "3", "--figure", "x.txt"],
        ["--figure", "x.txt", ".png"],
    ),
    "data with other shapes": (lambda p: ["evaluate", p.run, "--data", f"npz:{_npz(p)}"], ["(1, 28, 28)"]),
    "coupling of a CNN": (lambda p: ["routing", p.cnn, "--image", p.digit], ["BaselineCNN"]),
    "reconstruction by a CNN": (lambda p: ["reconstruct", p.cnn, "--data", "digits"], ["BaselineCNN", "sabour2017"]),
    "capsule of a CNN": (lambda p: ["perturb", p.cnn, "--image", p.digit], ["BaselineCNN"]),
    "network that knows no data": (lambda p: ["evaluate", p.cnn], ["--data"]),
    # files
    "missing configuration": (lambda p: ["train", "--config", "nowhere.json"], ["nowhere.json"]),
    "configuration that is no JSON": (
        lambda p: ["train", "--config", p.write("c.json", b"{")],
        ["c.json", "no configuration"],
    ),
    "configuration that is a list": (lambda p: ["train", "--config", p.write("c.json", b"[1]")], ["c.json", "object"]),
    "configuration with an unknown field": (
        lambda p: ["train", "--config", p.write("c.json", b'{"epoch": 1}')],
        ["c.json", '"epoch"'],
    ),
    "configuration with a wrong value": (
        lambda p: ["train", "--config", p.write("c.json", b'{"recipe": {"epochs": "two"}}')],
        ["c.json", "epochs", "two"],
    ),
    "configuration of brackets": (
        lambda p: ["train", "--config", p.write("c.json", b"[" * 100_000)],
        ["c.json", "recursion"],
    ),
    "configuration of digits": (
        lambda p: ["train", "--config", p.write("c.json", b'{"seed": ' + b"9" * 5000 + b"}")],
        ["c.json", "digits"],
    ),
    "configuration in a pipe": (lambda p: ["train", "--config", _pipe(p)], ["pipe"]),
    "configuration from a device": (lambda p: ["train", "--config", os.devnull], ["device"]),
    "configuration in a folder": (lambda p: ["train", "--config", p.run], ["folder"]),
    "configuration with NUL": (lambda p: ["train", "--config", "a\0b"], ["NUL"]),
    "data with NUL": (
        lambda p: ["train", "--config", p.write("c.json", b'{"data": "folder:a\\u0000b"}')],
        ["NUL", "a\\x00b"],
    ),
    "run folder with NUL": (lambda p: ["evaluate", "a\0b"], ["NUL"]),
    "run folder without a name": (lambda p: ["train", *p.tiny, "--out", ""], ["--out", "empty"]),
    "resume without a name": (lambda p: ["train", "--resume", ""], ["--resume", "empty"]),
    "data folder without a name": (lambda p: ["train", "--data", "mnist", "--data-dir", ""], ["empty"]),
    "figure without a name": (lambda p: ["evaluate", p.run, "--figure", ""], ["--figure", "empty"]),
    "figure that is this folder": (lambda p: ["evaluate", p.run, "--figure", "."], ["--figure", "is a folder"]),
    "figure that is the root": (lambda p: ["robustness", p.run, "--figure", "/"], ["--figure", "is a folder"]),
    "figure that is a folder": (lambda p: ["routing", p.run, "--figure", p.run], ["--figure", "is a folder"]),
    "sample above": (lambda p: ["datasets", "digits", "--sample", "3", "--figure", ".."], ["--figure", "is a folder"]),
    "figure with NUL": (lambda p: ["curves", p.run, "--figure", "a\0.png"], ["NUL"]),
    "summary without a key": (
        lambda p: ["export", p.broken_run("summary.json", lambda c: c.replace(b'"best_epoch"', b'"b"')), *FOLDER],
        ["summary.json", "damaged", "best_epoch"],
    ),
    "summary of another kind": (
        lambda p: ["export", p.broken_run("summary.json", lambda _: b'{"seed": "one"}'), *FOLDER],
        ["summary.json", "damaged"],
    ),
    "metrics with an endless cell": (
        lambda p: ["curves", p.broken_run("metrics.csv", lambda c: c.replace(b"\n1,", b"\n" + b"1" * 200_000 + b","))],
        ["metrics.csv", "damaged", "limit"],
    ),
    "missing data folder": (lambda p: ["train", "--data", "mnist", "--data-dir", "nowhere"], ["nowhere"]),
    "empty data folder": (lambda p: ["datasets", "mnist", "--data-dir", p.run, "--sample", "3"], ["train-"]),
    "missing image folder": (lambda p: ["train", *p.tiny, "--data", "folder:nowhere"], ["nowhere"]),
    "corrupt arrays": (
        lambda p: ["train", *p.tiny, "--data", f"npz:{p.write('x.npz', b'PK not really')}"],
        ["x.npz"],
    ),
    "folder of a run in use": (lambda p: ["train", *p.tiny, "--out", p.run], ["--resume", "--out"]),
    "run folder that is a file": (lambda p: ["train", *p.tiny, "--out", p.digit], ["digit.png"]),
    "run folder under a file": (lambda p: ["train", *p.tiny, "--out", p.digit / "run"], ["digit.png"]),
    "resume of nothing": (lambda p: ["train", "--resume", "nowhere"], ["nowhere"]),
    "resume from a damaged checkpoint": (
        lambda p: ["train", "--resume", p.broken_run("last.ckpt", half), "--epochs", "3"],
        ["last.ckpt"],
    ),
    "resume from a checkpoint of zeros": (
        lambda p: ["train", "--resume", p.broken_run("last.ckpt", lambda c: bytes(len(c))), "--epochs", "3"],
        ["last.ckpt"],
    ),
    "missing run": (lambda p: ["evaluate", "nowhere"], ["nowhere"]),
    "folder that is no run": (lambda p: ["evaluate", p.digit.parent], ["config.json"]),
    "run with a damaged configuration": (
        lambda p: ["evaluate", p.broken_run("config.json", without_end)],
        ["config.json", "is damaged"],
    ),
    "run with a misspelt field": (
        lambda p: ["evaluate", p.broken_run("config.json", misspelt)],
        ["config.json", '"num_iteration"', '"num_iterations"'],
    ),
    "network with a misspelt field": (
        lambda p: ["evaluate", p.broken_run("best/config.json", misspelt)],
        ["best/config.json", '"num_iteration"'],
    ),
    "run with damaged weights": (
        lambda p: ["evaluate", p.broken_run("best/model.safetensors", half)],
        ["model.safetensors"],
    ),
    "run with one wrong bit in its weights": (
        lambda p: ["evaluate", p.broken_run("best/model.safetensors", one_wrong_bit)],
        ["model.safetensors", "changed since they were written"],
    ),
    "start from nowhere": (lambda p: ["train", *p.tiny, "--init-from", "nowhere"], ["nowhere"]),
    "start from another network": (lambda p: ["train", *p.tiny, "--init-from", p.cnn], ["cnn", "do not fit"]),
    "validation in another order": (
        lambda p: ["train", *p.tiny, "--validation", "middle"],
        ["--validation", "middle", "first"],
    ),
    "run without weights": (
        lambda p: ["evaluate", p.broken_run("best/model.safetensors", None)],
        ["model.safetensors"],
    ),
    "run without class names": (lambda p: ["evaluate", p.broken_run("best/classes.json", None)], ["classes.json"]),
    "run with another list of classes": (
        lambda p: ["predict", p.broken_run("best/classes.json", lambda _: b"{}"), p.digit],
        ["classes.json"],
    ),
    "run without its last checkpoint": (
        lambda p: ["evaluate", p.broken_run("last.ckpt", None), "--which", "last"],
        ["last.ckpt"],
    ),
    "curves of nothing": (lambda p: ["curves", "nowhere"], ["nowhere"]),
    "curves of a run without metrics": (lambda p: ["curves", p.broken_run("metrics.csv", None)], ["metrics.csv"]),
    "curves of damaged metrics": (
        lambda p: ["curves", p.broken_run("metrics.csv", lambda _: b"\x00\xff\n")],
        ["metrics.csv"],
    ),
    "missing image": (lambda p: ["predict", p.run, "nowhere.png"], ["nowhere.png"]),
    "damaged image": (
        lambda p: ["predict", p.run, p.digit, p.write("half.png", half(p.digit.read_bytes()))],
        ["half.png"],
    ),
    "text for an image": (lambda p: ["predict", p.run, p.write("text.png", b"seven")], ["text.png"]),
    "link to itself for a run": (lambda p: ["explore", _circle(p)], ["there is no run folder"]),
    "link to itself for runs": (lambda p: ["curves", _circle(p), p.run], ["does not exist"]),
    "link to itself for images": (lambda p: ["train", "--data", f"npz:{_circle(p)}"], ["cannot be read"]),
    "folder for an image": (lambda p: ["perturb", p.run, "--image", p.run], ["image"]),
    "figure of an unknown format": (lambda p: ["reconstruct", p.run, "--figure", "x.bmp"], ["x.bmp", ".png"]),
    "figure under a file": (lambda p: ["curves", p.run, "--figure", p.digit / "x.png"], ["x.png"]),
}


def _pipe(places: Places) -> Path:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    path = places.run.parent / "pipe"  # which the test does not read
    if not path.exists():
        os.mkfifo(path)
    return path


def _circle(places: Places) -> Path:
    path = places.run.parent / "circle"  # which the test does not read
    if not path.is_symlink():
        path.symlink_to(path)
    return path


def _npz(places: Places) -> Path:
    import io

    import numpy as np

    contents = io.BytesIO()
    np.savez(contents, x=np.zeros((60, 28, 28, 3), np.uint8), y=np.arange(60) % 3)
    return places.write("colour.npz", contents.getvalue())


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folders_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_dir()}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_nothing_left_behind(cli: Cli, places: Places, tmp_path: Path, case: str) -> None:
    make, fragments = CASES[case]
    arguments = make(places)
    before = [(contents_of(folder), folders_in(folder)) for folder in (tmp_path, places.run)]

    result = cli(*arguments)

    assert result.code == 2, result.err
    assert_one_sentence(result.err)
    assert result.out == ""
    for fragment in fragments:
        assert fragment in result.err
    assert [(contents_of(folder), folders_in(folder)) for folder in (tmp_path, places.run)] == before


def assert_one_sentence(err: str) -> None:
    assert err.startswith("Error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, "more than a line"
    assert "Traceback" not in err
    assert "InputError" not in err


@pytest.mark.parametrize("wrong", ["", "Error: a\nb\n", "Error: a", "a\n", "Error: Traceback\n"])
def test_the_assertion_can_fail(wrong: str) -> None:
    with pytest.raises(AssertionError):
        assert_one_sentence(wrong)


def test_an_accelerator_that_is_not_there(cli: Cli, places: Places) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for arguments in (["train", *places.tiny], ["evaluate", places.run]):
        result = cli(*arguments, "--accelerator", "cuda")
        assert result.code == 2
        assert_one_sentence(result.err)
        assert "cuda" in result.err
