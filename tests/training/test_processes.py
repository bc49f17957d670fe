"""Two gloo processes on this machine against one."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_runs import tiny_config
from torchcaps.training import Progress, resume, train
from torchcaps.training.checkpoint import lock_folder, read_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(sys.platform == "win32", reason="torch's wheels for Windows lack the libuv that this needs"),
]


def command_line(*arguments: str, launcher: tuple[str, ...] = ("-m", "torchcaps")) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "metrics.csv").open()))


def assert_close(one: list[dict[str, str]], two: list[dict[str, str]]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        for name in ("train_loss", "train_classification_loss", "train_accuracy", "validation_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-4), name


def test_assert_close_sees_a_difference() -> None:
    row = {"train_loss": "1", "train_classification_loss": "1", "train_accuracy": "1", "validation_loss": "1"}
    with pytest.raises(AssertionError):
        assert_close([row], [row | {"validation_loss": "1.001"}])


@pytest.fixture(scope="module")
def config(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 11 validation images: the two shares of a batch differ in size
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(tiny_config(bars, validation_size=11).to_dict()))
    return path


@pytest.fixture(scope="module")
def alone(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_config(bars, validation_size=11), out, progress=Progress(), figures=False)
    return out


def test_two_processes_give_the_losses_of_one(config: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = command_line("train", "--config", str(config), "--devices", "2", "--out", str(out), "--no-figures")
    assert shown.count("epoch 3/3") == 1, "only one process speaks"
    assert_close(rows(out), rows(alone))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["hardware"]["processes"] == 2
    assert summary["test"]["last"]["images"] == 30, "every image counts once"


def test_torchrun_gives_the_same(config: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "torchcaps")
    command_line("train", "--config", str(config), "--out", str(out), "--no-figures", launcher=launcher)
    assert_close(rows(out), rows(alone))


def test_a_run_goes_on_with_another_number_of_processes(bars: Path, config: Path, alone: Path, tmp_path: Path) -> None:
    two_then_one, one_then_two = tmp_path / "two-then-one", tmp_path / "one-then-two"
    shared = ("--config", str(config), "--epochs", "2", "--no-figures")
    command_line("train", *shared, "--devices", "2", "--out", str(two_then_one))
    resume(two_then_one, overrides={"epochs": 3, "devices": 1}, progress=Progress(), figures=False)
    assert_close(rows(two_then_one), rows(alone))

    train(tiny_config(bars, validation_size=11, epochs=2), one_then_two, progress=Progress(), figures=False)
    command_line("train", "--resume", str(one_then_two), "--epochs", "3", "--devices", "2", "--no-figures")
    assert_close(rows(one_then_two), rows(alone))
    assert read_checkpoint(one_then_two / "last.ckpt")["progress"]["epoch"] == 3


def test_all_processes_end_where_another_run_has_the_folder(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command_line("train", "--config", str(config), "--epochs", "1", "--out", str(out), "--no-figures")
    command = [sys.executable, "-m", "torchcaps", "train", "--resume", str(out), "--epochs", "2", "--devices", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with lock_folder(out):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.count(f"Error: {out} is in use: process {os.getpid()} on ") == 1
    assert [row["epoch"] for row in rows(out)] == ["1"]


SLOW_TO_PUBLISH = """
import time
from torchcaps.cli import main
from torchcaps.models import Network

own = Network.save_files

def save_files(*arguments, **named):
    time.sleep(2)
    own(*arguments, **named)

Network.save_files = save_files
main()
"""


def test_no_process_tests_the_best_weights_before_they_are_there(config: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_PUBLISH)
    out = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(tmp_path / "slow.py"))
    command_line(
        "train", "--config", str(config), "--epochs", "1", "--out", str(out), "--no-figures", launcher=launcher
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test"]["best"]["images"] == 30
    assert (out / "best" / "model.safetensors").exists()
