"""What the benchmarks share: contenders that run in turns, processes of their own, and a description of the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer, timer

import torchcaps

FOLDER = Path(__file__).resolve().parent
AS_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Environment in which torch and its libraries, loaded after it is set, use nothing beyond AVX2."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

Work = Callable[[], object]
CLOCK: Callable[[], float] = timer
"""Seconds, by which contenders are timed, after a GPU has done its work: ``time.process_time`` leaves out what other
programs take."""


class Ratio(NamedTuple):
    """The time of one contender over that of another."""

    value: float
    """The median over the rounds of the ratio within a round. What slows the machine down for longer than a round slows
    both contenders and cancels out; what strikes one of them is an outlier, which does not move a median."""
    low: float
    """The lower quartile of the rounds' ratios."""
    high: float
    """The upper quartile."""


def times_in_turns(contenders: Mapping[str, Work], rounds: int, seconds: float = 0.0) -> dict[str, list[float]]:
    """Milliseconds that a call of each contender takes, round by round.

    The order is reversed from one round to the next. Each measurement begins with calls that are not timed. A contender
    is called as often in one measurement as fits into ``seconds``, and at least once.
    """
    timers = {
        name: Timer("work()", timer=CLOCK, globals={"work": work}, num_threads=torch.get_num_threads())
        for name, work in contenders.items()
    }
    calls = {name: max(int(seconds / timer.timeit(1).mean), 1) for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for n in range(rounds):
        for name in list(contenders)[:: -1 if n % 2 else 1]:
            times[name].append(1e3 * timers[name].timeit(calls[name]).mean)
    return times


def ratio(over: list[float], under: list[float]) -> Ratio:
    """One contender's times over another's, round by round."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(middle, low, high)


def isolated(module: str, function: str, *arguments: Any) -> Any:
    """The result of a function of a benchmark, called in a process of its own; JSON carries arguments and result."""
    code = (
        "import sys, json, torch; torch.set_num_threads(int(sys.argv[2]))\n"
        f"import {module}; print(json.dumps({module}.{function}(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments), str(torch.get_num_threads())]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=FOLDER)  # imports look there
    return json.loads(answer.stdout)


def peak_mib(make: Callable[[], Work], calls: int) -> float:
    """The most memory that this process takes for what ``make`` returns and some calls of it, in MiB; Linux only."""
    before = _resident("VmRSS")
    work = make()
    for _ in range(calls):
        work()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1024


def instruction_set() -> str:
    """The instructions that torch computes with here: ``"avx512"``, ``"avx2"``, ..."""
    return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bfloat16 by instructions made for it."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2" and not _BF16_FLAGS.isdisjoint(flags)


def environment() -> dict[str, Any]:
    """The facts on which times depend."""
    git = ["git", "-C", str(FOLDER)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", ".", "../src"], capture_output=True, text=True).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torchcaps": torchcaps.__version__,
        "commit": (commit or "unknown") + "+" * bool(changed),  # +: files have changed since
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpuinfo("model name") or platform.processor(),
        "isa": instruction_set(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def _cpuinfo(name: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")
