"""What the parts of `run.py` share: contenders in turns, figures with their goals, processes of their own, tables."""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import torchcaps
from torchcaps.ops.dynamic_routing import get_working_memory, set_working_memory

FOLDER = Path(__file__).resolve().parent
MIB = 2**20

Found = TypeVar("Found")
Record = dict[str, Any]


class Size(NamedTuple):
    """Sizes of a layer; those of MNIST's unless said."""

    B: int
    I: int = 1152
    J: int = 10
    D: int = 16
    K: int = 8


MNIST = Size(B=128)
LARGE = Size(B=16, I=8192, J=100)


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    layer: Size = MNIST
    """The layer that is routed alone; B is the batch of the whole step, too."""
    large: Size | None = LARGE
    """The layer whose votes do not fit into common memories; None leaves it out."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """What differs from sabour2017 on MNIST's size."""
    rounds: int = 21
    """Of the step, and of routing alone."""
    naive_rounds: int = 5
    """Of whole steps with the naive formulation."""
    large_rounds: int = 3
    inference: tuple[tuple[int, int], ...] = ((1, 201), (32, 21), (512, 5))
    """Batch sizes, each with its rounds."""
    images: int = 60_000
    """Of the epoch, in all its rounds together."""
    epoch_rounds: int = 5


QUICK = Plan(
    layer=Size(B=2, I=36, J=10),
    large=Size(B=2, I=64, J=20),
    network={"in_shape": (1, 18, 18), "conv_channels": 8, "primary_types": 4, "decoder_hidden": (8,)},
    rounds=2,
    naive_rounds=1,
    large_rounds=1,
    inference=((1, 2), (2, 1)),
    images=8,
    epoch_rounds=2,
)


# ---- time


def in_turns(contenders: Mapping[str, Callable[[], Found]], rounds: int, warm_up: int = 0) -> dict[str, list[Found]]:
    """What each contender gives in each round; the order turns round from one round to the next.

    So neighbours in the list are neighbours in time, and none is always the first after a heavy one.
    """
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for n in range(-warm_up, rounds):
        for name in list(contenders)[:: -1 if n % 2 else 1]:
            result = contenders[name]()
            if n >= 0:
                found[name].append(result)
    return found


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """The same work, giving the milliseconds it took."""

    def measure() -> float:
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)

    return measure


class Ratio(NamedTuple):
    """How two contenders of one run compare."""

    value: float
    """The median, over the rounds, of the ratio within a round: the figure.

    What slows the machine down for longer than a round slows both down, and drops out; what strikes one of the two
    makes an outlier, which a median does not see.
    """
    low: float
    """The lower quartile of the same ratios."""
    high: float
    """The upper one."""
    of_medians: float
    """The median time of one over that of the other, for comparison."""
    rounds: int


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """One contender's times over another's, round by round."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(middle, low, high, statistics.median(over) / statistics.median(under), len(each))


# ---- memory, and processes of their own


def isolated(function: Callable[..., Found], *arguments: Any) -> Found:
    """The result of a function of a benchmark's module, from a fresh process; all of it as JSON knows it."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(FOLDER)!r}); import measuring, {function.__module__} as module\n"
        f"measuring.set_up(*json.loads(sys.argv[2]))\n"
        f"print(json.dumps(module.{function.__name__}(*json.loads(sys.argv[1]))))"
    )
    settings = [torch.get_num_threads(), get_working_memory()]
    command = [sys.executable, "-c", code, json.dumps(arguments), json.dumps(settings)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: Found = json.loads(answer)
    return result


def set_up(threads: int, working_memory: float) -> None:
    """Make this process compute as the one that asked for it."""
    torch.set_num_threads(threads)
    set_working_memory(working_memory)


def resident(field: str) -> float:
    """MiB of this process now (VmRSS) or at its highest (VmHWM); NaN on Windows, which says neither."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024
    if sys.platform == "win32":
        return math.nan
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / MIB if sys.platform == "darwin" else highest / 1024


def load() -> float:
    """Processes that wanted to run in the minute before; NaN on Windows, which does not count them."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else math.nan


def available_gib() -> float:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**20


# ---- results


@dataclass(frozen=True)
class Figure:
    """One measured ratio beside its goal."""

    what: str
    measured: float | Ratio
    goal: float
    at_least: bool = False
    """The goal is a lower bound, else an upper one."""

    @property
    def value(self) -> float:
        """The number that is held against the goal."""
        return self.measured.value if isinstance(self.measured, Ratio) else self.measured

    @property
    def reached(self) -> bool:
        """Whether it keeps to the goal."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    @property
    def cells(self) -> list[str]:
        """A line of the table."""
        spread = of_medians = rounds = ""
        if isinstance(self.measured, Ratio):
            spread = f"{self.measured.low:.3g} to {self.measured.high:.3g}"
            of_medians, rounds = f"{self.measured.of_medians:.3g}", str(self.measured.rounds)
        goal, reached = f"{'≥' if self.at_least else '≤'} {self.goal:g}", "yes" if self.reached else "**no**"
        return [self.what, f"{self.value:.4g}", goal, reached, spread, of_medians, rounds]


HEADER = ["ratio", "measured", "goal", "reached", "middle half of the rounds", "ratio of medians", "rounds"]


class Part(NamedTuple):
    """What a part of the benchmark found."""

    records: list[Record]
    """The lines of its CSV: a contender's times each."""
    figures: list[Figure]


def summary(values: Sequence[float]) -> Record:
    """What a CSV tells of a contender's times."""
    return {
        "median_ms": round(statistics.median(values), 4),
        "min_ms": round(min(values), 4),
        "max_ms": round(max(values), 4),
        "rounds": len(values),
    }


def environment() -> Record:
    """What the times depend on."""
    git = ["git", "-C", str(FOLDER)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", ".", "../src"], capture_output=True, text=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torchcaps": torchcaps.__version__,
        "commit": (commit or "unknown") + "+" * bool(changed),  # +: files were changed since
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "working_memory_mib": get_working_memory(),
        "load": load(),
    }


def write_csv(path: Path, records: Sequence[Record]) -> None:
    columns = list(dict.fromkeys(name for record in records for name in record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def markdown(figures: Sequence[Figure], facts: Record) -> str:
    """The table of the figures, and under it what they depend on."""
    rows = [HEADER, ["---"] * len(HEADER), *(figure.cells for figure in figures)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n{', '.join(f'{name} {value}' for name, value in facts.items())}\n"


def replace_between(text: str, begin: str, end: str, new: str) -> str:
    """``text`` with ``new`` between two lines that mark the place."""
    before, found, rest = text.partition(f"{begin}\n")
    _, closed, after = rest.partition(f"{end}\n")
    if not found or not closed:
        raise SystemExit(f"the page has no place for the table: a line {begin} and, after it, a line {end}")
    return f"{before}{begin}\n\n{new}\n{end}\n{after}"
