"""A tiny trained run, and files made of it."""

import os
from pathlib import Path

import pytest
from PIL import Image

from cli_support import Cli
from torchcaps.datasets import load_dataset
from torchcaps.models import create_model

TINY = ("--conv-channels", "8", "--primary-types", "2", "--decoder-hidden", "16", "--batch-size", "50")
SMALL_DATA = ("--limit-train", "200", "--limit-test", "100", "--validation-size", "100")


@pytest.fixture(scope="session")
def cli() -> Cli:
    return Cli()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, at a width of its own, with no variable of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "TORCHCAPS_DATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Options of a run that takes a second or two."""
    return (*TINY, *SMALL_DATA, "--data", "digits", "--epochs", "1", "--accelerator", "cpu", "--no-figures")


@pytest.fixture(scope="session")
def run_folder(cli: Cli, tmp_path_factory: pytest.TempPathFactory, tiny: tuple[str, ...]) -> Path:
    """A run of two epochs, not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    constant = ("--schedule", "constant", "--learning-rate", "0.01")  # so that it can be made longer
    cli.out("train", *tiny, *constant, "--epochs", "2", "--out", folder)
    return folder


@pytest.fixture(scope="session")
def cnn_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network without capsules, as save_pretrained writes it: nothing is known of its data."""
    folder = tmp_path_factory.mktemp("cli") / "cnn"
    create_model("baseline-cnn", channels=(2, 2), hidden=(4,), dropout=0.0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def digit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first test image of the digits."""
    path = tmp_path_factory.mktemp("cli") / "digit.png"
    Image.fromarray(load_dataset("digits").test.images[0, 0].numpy()).save(path)
    return path


@pytest.fixture
def environment() -> dict[str, str]:
    """For other processes: this one's variables, at one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(scope="session")
def onnx_file(cli: Cli, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as an ONNX file."""
    pytest.importorskip("onnxscript", reason="the extra torchcaps[export] is not installed")
    path = tmp_path_factory.mktemp("cli") / "model.onnx"
    cli.out("export", run_folder, "--out", path)
    return path
