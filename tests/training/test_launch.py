"""As many processes as there are devices, and several machines only where they know where to meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_runs import tiny_config
from torchcaps.errors import InputError
from torchcaps.machine import usable_cores
from torchcaps.training import launch as module
from torchcaps.training import make_config, resume, train
from torchcaps.training.launch import check_processes, count_processes, launch
from torchcaps.training.progress import Silence

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "0"}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *MEETING, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_no_more_processes_than_cores(monkeypatch: pytest.MonkeyPatch, bars: Path, tmp_path: Path) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module, "Fabric", start)
    many = usable_cores() + 1
    words = f"devices must be at most {usable_cores()}, the processor cores that this process may use, got {many}"
    config = tiny_config(bars, devices=many)
    for refuse in (check_processes, launch, lambda config: train(config, tmp_path / "run", progress=Silence())):
        with pytest.raises(InputError, match=words):
            refuse(config)
    assert not (tmp_path / "run").exists()

    (tmp_path / "run").mkdir()  # a foreign one
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(InputError, match=words):
        resume(tmp_path / "run", progress=Silence())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux limits a process to some cores so")
def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
        with pytest.raises(InputError, match="devices must be at most 1, "):
            check_processes(make_config(devices=2, accelerator="cpu"))
    finally:
        os.sched_setaffinity(0, allowed)


def test_no_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_processes(make_config(devices=4))
    with pytest.raises(InputError, match="devices must be at most 4, the CUDA devices of this machine, got 5"):
        check_processes(make_config(devices=5))


def test_what_torchrun_has_started_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    check_processes(make_config(devices=4000, num_nodes=4000))
    assert count_processes(make_config()) == (2, 3)
    for name, value in (("LOCAL_WORLD_SIZE", "0"), ("WORLD_SIZE", "many"), ("WORLD_SIZE", "9" * 5000)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(InputError, match=f"the environment variable {name} must be 1 to "):
                count_processes(make_config())


def test_machines_that_do_not_know_where_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_nodes=3, accelerator="cpu")
    with pytest.raises(InputError, match="set MASTER_ADDR, MASTER_PORT, NODE_RANK on each of them, or start with torc"):
        check_processes(config)
    set_all(monkeypatch, MEETING)
    check_processes(config)
    for name, value, words in (
        ("MASTER_PORT", "x", "1 to 65535, got 'x'"),
        ("MASTER_PORT", "65536", "1 to 65535, got '65536'"),
        ("NODE_RANK", "3", "0 to 2, got '3'"),
        ("NODE_RANK", "-1", "0 to 2, got '-1'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(InputError, match=f"the environment variable {name} must be {words}"):
                check_processes(config)


IMPATIENT = """
import datetime
from torchcaps.cli import main
from torchcaps.training import launch

launch.PATIENCE = datetime.timedelta(seconds=2)
raise SystemExit(main())
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
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
    waiting = f"Machine 0 of 0 to 2: waiting for all 3 machines, 3 processes together, to meet at 127.0.0.1:{port}, "
    assert waiting in done.stderr
    assert "Error: the 3 processes of the run did not find each other: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not out.exists()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
