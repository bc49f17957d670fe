"""Runs on the embedded digits that are killed at random moments, and end as if nobody had touched them.

A release asks for more kills than every commit does: ``TORCHCAPS_KILLS=60 pytest -s tests/training/test_kills.py``.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import processes
from tiny_runs import is_same
from torchcaps.training.folder import HOLDER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill -9"),
]

KILLS = int(os.environ.get("TORCHCAPS_KILLS", "2"))

#: A checkpoint is due after each step, so that many a kill comes while one is written.
OPTIONS = (
    *("--conv-channels=8", "--primary-types=2", "--decoder-hidden=16", "--batch-size=50", "--limit-train=300"),
    *("--limit-test=100", "--validation-size=100", "--epochs=6", "--learning-rate=0.01", "--max-shift=1"),
    *("--accelerator=cpu", "--checkpoint-minutes=1e-9"),
)


def start(*arguments: object) -> processes.Forked:
    return processes.start("-m", "torchcaps", "train", *arguments, "--no-figures")


def finish(process: processes.Forked) -> None:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


def wait_for(happened: Callable[[], bool], process: processes.Forked) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.002)


def is_held_by(out: Path, process: processes.Forked) -> bool:
    """Whether a process has locked a run folder; from then on it writes there."""
    try:
        return bool(json.loads((out / HOLDER).read_text())["process"] == process.pid)
    except (OSError, ValueError):
        return False


def test_runs_that_are_killed_again_and_again_end_as_others(tmp_path: Path) -> None:
    wanted = tmp_path / "whole"
    process = start(*OPTIONS, "--out", wanted)
    wait_for(partial(is_held_by, wanted, process), process)
    begin = time.monotonic()
    wait_for((wanted / "summary.json").exists, process)
    seconds = time.monotonic() - begin  # from its first file to its last
    finish(process)
    dice, kills, number = random.Random(16), 0, 0
    while kills < KILLS:
        number += 1
        out = tmp_path / f"run-{number}"
        for sitting in range(min(dice.randint(1, 4), KILLS - kills)):  # as often as this run is killed
            begun = (out / "config.json").exists()
            process = start("--resume", out) if begun else start(*OPTIONS, "--out", out)
            wait_for(partial(is_held_by, out, process), process)
            time.sleep(dice.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += process.returncode == -signal.SIGKILL
            assert process.returncode in (0, -signal.SIGKILL), f"sitting {sitting}: {process.communicate(9)[0]}"
        finish(start("--resume", out) if (out / "config.json").exists() else start(*OPTIONS, "--out", out))
        assert is_same(out, wanted)
    print(f"{number} runs, killed {kills} times in all, are the same as the one that nobody stopped")
