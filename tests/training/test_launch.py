"""As many processes as there are devices; several machines meet or say why not; nobody is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiny_runs import tiny_config
from torchcaps.errors import InputError
from torchcaps.machine import usable_cores
from torchcaps.training import Progress, devices, resume, train
from torchcaps.training.devices import PARENT, check_devices, launch

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "0"}
gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "WORLD_SIZE", *MEETING, "LOCAL_RANK", PARENT):
        monkeypatch.delenv(name, raising=False)


def test_no_more_processes_than_cores(monkeypatch: pytest.MonkeyPatch, bars: Path, tmp_path: Path) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(devices, "Fabric", start)
    many = usable_cores() + 1
    words = f"devices must be at most {usable_cores()}, the processor cores that this process may use, got {many}"
    config = tiny_config(bars, devices=many)
    with pytest.raises(InputError, match=words):
        launch("cpu", many)
    with pytest.raises(InputError, match=words):
        train(config, tmp_path / "run", progress=Progress())
    assert not (tmp_path / "run").exists()

    (tmp_path / "run").mkdir()  # a foreign one
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(InputError, match=words):
        resume(tmp_path / "run", progress=Progress())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux limits a process to some cores so")
def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
        with pytest.raises(InputError, match="devices must be at most 1, "):
            check_devices("cpu", 2)
    finally:
        os.sched_setaffinity(0, allowed)


def test_no_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_devices("auto", 4)
    with pytest.raises(InputError, match="devices must be at most 4, the CUDA devices of this machine, got 5"):
        check_devices("auto", 5)


def test_what_torchrun_has_started_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    check_devices("auto", 4000)


IMPATIENT = """
import datetime
from torchcaps.cli import main
from torchcaps.training import devices

devices.PATIENCE = datetime.timedelta(seconds=2)
raise SystemExit(main())
"""


@gloo
def test_a_machine_says_what_it_waits_for_and_does_not_wait_for_ever(bars: Path, tmp_path: Path) -> None:
    config, script, out = tmp_path / "config.json", tmp_path / "impatient.py", tmp_path / "run"
    config.write_text(json.dumps(tiny_config(bars, num_nodes=3).to_dict()))
    script.write_text(IMPATIENT)
    port = str(free_port())
    done = subprocess.run(
        [sys.executable, str(script), "train", "--config", str(config), "--out", str(out)],
        capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | MEETING | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert f"Waiting for all 3 machines, 3 processes together, to meet at 127.0.0.1:{port}, " in done.stderr
    assert "Error: the 3 processes of the run did not find each other: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not out.exists()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


#: The first process starts the other one, and does not come to meet it.
LATE = """
import os, pathlib, sys, time
rank = os.environ.get("LOCAL_RANK", "0")
(pathlib.Path(__file__).parent / "seen" / f"{rank}-{os.getpid()}").touch()
from torchcaps.cli import main
if rank == "0":
    from lightning_fabric.strategies.launchers import subprocess_script
    subprocess_script._set_num_threads_if_needed = lambda **_: time.sleep(300)
raise SystemExit(main())
"""


@gloo
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process in /proc")
@pytest.mark.parametrize("number", [15, 9], ids=["SIGTERM", "SIGKILL"])  # Windows has no name for the second
def test_a_stop_while_the_processes_start_leaves_none_behind(bars: Path, tmp_path: Path, number: int) -> None:
    config, script, seen = tmp_path / "config.json", tmp_path / "script.py", tmp_path / "seen"
    seen.mkdir()
    config.write_text(json.dumps(tiny_config(bars).to_dict()))
    script.write_text(LATE)
    command = [sys.executable, str(script), "train", "--config", str(config), "--devices", "2"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )

    def wait_until(what: Callable[[], object], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not what() and time.monotonic() < end:
            time.sleep(0.05)
        return bool(what())

    assert wait_until(lambda: list(seen.glob("1-*")), 120)
    child = next(seen.glob("1-*")).name.removeprefix("1-")
    process.send_signal(number)
    assert process.wait() == -number
    # the other process is still importing; it ends when it would meet the first one
    assert wait_until(lambda: not Path("/proc", child).exists(), 60)
