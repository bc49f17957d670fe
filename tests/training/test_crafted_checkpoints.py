"""A last.ckpt that somebody made: one sentence, whatever it holds, and nothing of the run changes."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_runs import tiny_config
from torchcaps.cli import main
from torchcaps.errors import InputError
from torchcaps.training import load_run, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.progress import Silence
from torchcaps.training.step import SUMS

Checkpoint = dict[str, Any]
Change = Callable[[Checkpoint], object]

#: The first parameter of the network, and its number.
WEIGHT, FIRST = "backbone.conv.weight", 0


@pytest.fixture(scope="module")
def finished(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("crafted") / "run"
    train(tiny_config(bars, epochs=2), out, progress=Silence(), figures=False)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def put(*path: Any, value: Any) -> Change:
    """A change that puts a value, or what a function makes of the one that is there, at a place of the checkpoint."""

    def change(checkpoint: Checkpoint) -> None:
        *parents, last = path
        place: Any = checkpoint
        for name in parents:
            place = place[name]
        place[last] = value(place[last]) if callable(value) else value

    return change


def drop(*path: Any) -> Change:
    def change(checkpoint: Checkpoint) -> None:
        *parents, last = path
        place: Any = checkpoint
        for name in parents:
            place = place[name]
        del place[last]

    return change


def of_tensor(make: Callable[[torch.Tensor], Any]) -> dict[str, Change]:
    """The change to a weight, to a moment, and to Adam's count of steps."""
    return {
        "weight": put("model", WEIGHT, value=make),
        "moment": put("optimizer", "state", FIRST, "exp_avg_sq", value=make),
        "count": put("optimizer", "state", FIRST, "step", value=make),
    }


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """As many numbers as 4 TB hold, in the memory of one."""
    return torch.zeros(1).expand(10**6, 10**6)


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "no tensor": lambda tensor: tensor.tolist(),
    "none": lambda _: None,
    "integers": lambda tensor: tensor.to(torch.int64),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "of another shape": lambda tensor: torch.zeros(3, 3),
    "empty": lambda tensor: torch.zeros(0),
    "without end": expanded,
    "one number for all": lambda tensor: torch.zeros(()).expand(tensor.shape or (2, 2)),
    "not finite": lambda tensor: torch.full_like(tensor, torch.nan),
}

POSITION: dict[str, Any] = {
    "epoch": ["2", 2.0, True, None, -1, 10**30, torch.tensor(2), [2]],
    "batch": ["0", -1, 6, 10**12, torch.tensor(0)],
    "step": ["12", 13, -1, 10**30, torch.tensor(12)],
    "seconds": ["1", float("nan"), torch.tensor(1.0), None],
    "epoch_seconds": ["1", float("inf"), []],
    "sums": [
        None,
        1,
        torch.zeros(3),
        torch.zeros(()),
        {"loss": 1.0},
        {**dict.fromkeys(SUMS, 1.0), "loss": "1"},
        {**dict.fromkeys(SUMS, 1.0), "loss": torch.zeros(2)},
        {**dict.fromkeys(SUMS, 1.0), "correct": float("nan")},
    ],
    "history": [None, "rows", [], [{}, {}], {}, [1, 2], 3],
    "peak_memory_mib": ["1", torch.zeros(3), float("nan")],
    "commands": [None, "train", [1], {}],
    "commits": [None, [1], "abc"],
}

CASES: dict[str, Change] = {
    "no data": drop("data"),
    "data of another type": put("data", value=torch.zeros(4, dtype=torch.int64)),
    "data of tensors": put("data", value=[torch.zeros(2)] * 4),
    "data in text": put("data", value="1, 2, 3, 4"),
    "model in a list": put("model", value=[1]),
    "model with numbers for names": put("model", value=lambda model: dict(enumerate(model.values()))),
    "a weight too few": drop("model", WEIGHT),
    "a weight too many": put("model", "more", value=torch.zeros(2)),
    "optimizer in a list": put("optimizer", value=[]),
    "state in a list": put("optimizer", "state", value=[]),
    "state of no parameter": put("optimizer", "state", 10**6, value={}),
    "state by names": put("optimizer", "state", value=lambda state: {str(key): each for key, each in state.items()}),
    "state by floats": put("optimizer", "state", value=lambda state: {float(key): each for key, each in state.items()}),
    "state that is none": put("optimizer", "state", FIRST, value=None),
    "state without a moment": drop("optimizer", "state", FIRST, "exp_avg"),
    "state with something else": put("optimizer", "state", FIRST, "more", value=torch.zeros(1)),
    "groups in a dict": put("optimizer", "param_groups", value={}),
    "progress in a list": put("progress", value=[]),
    "progress by numbers": put("progress", value={1: 2}),
    "no sums": drop("progress", "sums"),
    "row with a text": put("progress", "history", 0, "validation_loss", value="0.1"),
    "row with a tensor": put("progress", "history", 1, "validation_accuracy", value=torch.zeros(2)),
    "row with none": put("progress", "history", 1, "images_per_second", value=None),
    "row that is not finite": put("progress", "history", 1, "validation_loss", value=float("nan")),
    "row without a column": drop("progress", "history", 1, "seconds"),
    "row with a column more": put("progress", "history", 1, "more", value=1.0),
    "row with a number beyond floats": put("progress", "history", 1, "seconds", value=10**400),
    "row of another epoch": put("progress", "history", 1, "epoch", value=7),
    "row of an epoch in a tensor": put("progress", "history", 1, "epoch", value=torch.zeros(2)),
    **{f"{place}: {name}": change for name, make in TENSORS.items() for place, change in of_tensor(make).items()},
    **{
        f"{name} = {value!r}": put("progress", name, value=value)
        for name, values in POSITION.items()
        for value in values
    },
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.filterwarnings("error:TypedStorage")
@pytest.mark.parametrize("case", CASES)
def test_a_crafted_checkpoint_is_one_sentence(run: Path, case: str) -> None:
    path = run / "last.ckpt"
    checkpoint = copy.deepcopy(read_checkpoint(path))
    CASES[case](checkpoint)
    torch.save(checkpoint, path)
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    with pytest.raises(InputError) as caught:
        resume(run, overrides={"epochs": 3}, progress=Silence(), figures=False)
    assert "checkpoint" in str(caught.value) or "last.ckpt" in str(caught.value) or "the images of" in str(caught.value)
    assert "\n" not in str(caught.value)
    with contextlib.suppress(InputError):  # what another command needs of it may be whole
        load_run(run, which="last")
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before


def test_the_cases_start_from_a_checkpoint_that_is_taken(run: Path) -> None:
    torch.save(copy.deepcopy(read_checkpoint(run / "last.ckpt")), run / "last.ckpt")
    assert resume(run, overrides={"epochs": 3}, progress=Silence(), figures=False)["epochs"] == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.parametrize("name", ["last.ckpt", "best/model.safetensors"])
def test_a_fifo_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(InputError, match="what is there is a FIFO"):
        load_run(run, which="last")


def test_what_decompresses_without_end_is_not_decompressed(run: Path) -> None:
    with zipfile.ZipFile(run / "last.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    assert (run / "last.ckpt").stat().st_size < 10**5
    with pytest.raises(InputError, match="is not one of torchcaps, which compresses none of its parts"):
        read_checkpoint(run / "last.ckpt")


def test_the_command_line_says_it_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sparse", "meta"):
        checkpoint = read_checkpoint(run / "last.ckpt")
        of_tensor(TENSORS[name])["weight"](checkpoint)
        torch.save(checkpoint, run.parent / "last.ckpt")
        whole = (run / "last.ckpt").rename(run.parent / "whole.ckpt")
        (run.parent / "last.ckpt").rename(run / "last.ckpt")
        for arguments in (["train", "--resume", str(run), "--epochs", "3"], ["evaluate", str(run), "--which", "last"]):
            assert main(arguments) == 2
            said = capsys.readouterr().err
            assert said.startswith("Error: ")
            assert said.count("\n") == 1
        whole.rename(run / "last.ckpt")
