"""Devices, precision and processes: as many as there are devices, the numbers of one, and nobody is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import processes
from support import assert_raises
from tiny_runs import go_on, rows, tiny_config
from torchcaps.errors import InputError
from torchcaps.machine import usable_cores
from torchcaps.training import Progress, devices, resume, train
from torchcaps.training.devices import PARENT, launch, pick_precision
from torchcaps.training.folder import lock_folder

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
}
"""What torchrun says to a process: the first one of three machines."""
needs_gloo = pytest.mark.skipif(
    sys.platform == "win32" or not torch.distributed.is_gloo_available(), reason="needs gloo, and libuv on Windows"
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "NODE_RANK", PARENT):
        monkeypatch.delenv(name, raising=False)


def test_auto_is_bf16_where_a_gpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, precision in ((True, "bf16"), (False, "32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert pick_precision("auto", CUDA) == precision
        for device in (CPU, CUDA, MPS):
            assert [pick_precision(name, device) for name in ("32", "bf16")] == ["32", "bf16"]
            assert device is CUDA or pick_precision("auto", device) == "32"
    assert_raises(InputError, pick_precision, "16", CPU, say='precision must be "auto", "32" or "bf16", got \'16\'')


def test_devices_that_are_not_there_are_refused_first(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setattr(devices.Fabric, "launch", lambda _: pytest.fail("processes are started"))
    many, words = usable_cores() + 1, f"devices must be at most {usable_cores()}, the number of processor cores for"
    assert_raises(InputError, go_on, out, devices=many, say=words)
    if not torch.cuda.is_available():
        assert_raises(InputError, launch, "cuda", say="this machine has no cuda device that PyTorch can use; it has ")


def test_the_summary_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(devices.versions(CUDA)) - set(devices.versions(CPU)) == {"cuda"}
    assert devices.hardware(CPU)["device"] == "cpu"
    assert devices.hardware(CPU)["processor"]
    assert (devices.peak_memory_mib(CPU) or 51) > 50

    def git(*words: str) -> None:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        subprocess.run(command, check=True, capture_output=True)

    source = tmp_path / "src" / "torchcaps" / "training" / "devices.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(devices, "__file__", str(source))
    assert devices.source_commit() is None, "an installed package has no commit"
    git("init")
    assert devices.source_commit() is None, "nor has a tree without one"
    git("add", ".")
    git("commit", "-m", "first")
    clean = devices.source_commit()
    assert re.fullmatch("[0-9a-f]{10}", str(clean))
    source.write_text("2")
    assert devices.source_commit() == f"{clean}-dirty"


def command_line(*arguments: str, launcher: tuple[str, ...] = ("-m", "torchcaps"), code: int = 0) -> str:
    """What a process said that ended with a code."""
    (said,) = command_lines(*arguments, launchers=[launcher], code=code)
    return said


def command_lines(*arguments: str, launchers: Sequence[tuple[str, ...]], code: int = 0) -> list[str]:
    """What processes said that ran at once and ended with a code."""
    started = [processes.start(*launcher, "train", *arguments) for launcher in launchers]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [code] * len(started), said
    return said


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def assert_close(one: Path, two: Path) -> None:
    """The same losses and accuracies up to rounding."""
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("train_loss", "train_classification_loss", "train_accuracy", "validation_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-4), name


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


@pytest.mark.slow
@needs_gloo
def test_two_processes_give_the_losses_of_one(bars: Path, config: Path, alone: Path, tmp_path: Path) -> None:
    two, changed = tmp_path / "two", tmp_path / "changed"
    shown = command_line("--config", str(config), "--no-figures", "--out", str(two), "--devices", "2")
    assert shown.count("epoch 3/3") == 1, "only one process speaks"
    summary = json.loads((two / "summary.json").read_text())
    assert summary["hardware"]["processes"] == 2
    assert summary["test"]["last"]["images"] == 30, "every image counts once"
    train(tiny_config(bars, validation_size=11, epochs=1), changed, progress=Progress(), figures=False)
    machine = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    machine += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "torchcaps")
    command_lines("--resume", str(changed), "--epochs", "2", "--no-figures", launchers=[machine, machine])
    resume(changed, overrides={"epochs": 3, "devices": 1}, progress=Progress(), figures=False)
    for out in (two, changed):
        assert_close(out, alone)


@pytest.mark.slow
@needs_gloo
def test_all_processes_end_where_another_run_has_the_folder(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=1), out, progress=Progress(), figures=False)
    before = (out / "metrics.csv").read_bytes()
    with lock_folder(out):
        said = command_line("--resume", str(out), "--epochs", "2", "--devices", "2", code=2)
    assert said.count(f"Error: {out} is in use: process {os.getpid()} on ") == 1
    assert (out / "metrics.csv").read_bytes() == before


IMPATIENT = """
import datetime
from torchcaps.cli import main
from torchcaps.training import devices

devices.MAX_WAIT = datetime.timedelta(seconds=2)
raise SystemExit(main())
"""


@pytest.mark.slow
@needs_gloo
def test_machines_that_do_not_come_are_given_up(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    for name, value in (TORCHRUN | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    arguments = ("--config", str(config), "--out", str(tmp_path / "run"))
    said = command_line(*arguments, launcher=(str(tmp_path / "impatient.py"),), code=2)
    assert "MEMBER: 1/3" in said
    assert "they did not find each other: " in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


LATE = """
import os, pathlib, sys, time
rank = os.environ.get("LOCAL_RANK", "0")
(pathlib.Path(__file__).parent / "seen" / f"{rank}-{os.getpid()}").touch()
from torchcaps.cli import main
if rank == "0":  # it starts the other one, and does not come to meet it
    from lightning_fabric.strategies.launchers import subprocess_script
    subprocess_script._set_num_threads_if_needed = lambda **_: time.sleep(300)
raise SystemExit(main())
"""


@pytest.mark.slow
@needs_gloo
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process in /proc")
def test_a_stop_while_the_processes_start_leaves_none_behind(config: Path, tmp_path: Path) -> None:
    script, seen = tmp_path / "script.py", tmp_path / "seen"
    seen.mkdir()
    script.write_text(LATE)
    process = processes.start(script, "train", "--config", config, "--devices", "2", "--out", tmp_path / "run")

    def wait_until(what: Callable[[], object], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not what() and time.monotonic() < end:
            time.sleep(0.05)
        return bool(what())

    assert wait_until(lambda: list(seen.glob("1-*")), 120)
    child = next(seen.glob("1-*")).name.removeprefix("1-")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # the other process is still importing; it ends when it would meet the first one
    assert wait_until(lambda: not Path("/proc", child).exists(), 60)
