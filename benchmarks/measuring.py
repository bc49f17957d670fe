"""What the parts of `run.py` share: contenders in turns, processes of their own, the processor, what a part found."""

from __future__ import annotations

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
from torchcaps.ops.memory import get_working_memory, set_working_memory

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
    rounds: int = 11
    """Of the step, of routing alone and of each convolution."""
    naive_rounds: int = 5
    """Of whole steps with the naive formulation."""
    large_rounds: int = 2
    inference: tuple[tuple[int, int], ...] = ((1, 201), (32, 21), (512, 5))
    """Batch sizes, each with its rounds."""
    images: int = 5_120
    """Of the epoch, in all its rounds together."""
    epoch_rounds: int = 4
    choice_presets: tuple[str, ...] = (
        "sabour2017",
        "sabour2017-multimnist",
        "sabour2017-cifar10",
        "sabour2017-smallnorb",
        "sabour2017-svhn",
        "compact",
    )
    """Networks on whose convolutions the choice of a way to convolve is checked."""
    choice_batches: tuple[int, ...] = (1, 8, 32, 128)
    choice_seconds: float = 0.7
    """How long the rounds of one comparison of ways last, about."""


QUICK = Plan(
    layer=Size(B=2, I=36, J=10),
    large=Size(B=2, I=64, J=20),
    network={"in_shape": (1, 18, 18), "conv_channels": 8, "primary_types": 4, "decoder_hidden": (8,)},
    rounds=2,
    naive_rounds=1,
    large_rounds=1,
    inference=((1, 2), (512, 1)),
    images=8,
    epoch_rounds=2,
    choice_presets=("compact",),
    choice_batches=(1, 2),
    choice_seconds=0.0,
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


# ---- the processor


BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of processors that multiply bfloat16; the last one is ARM's."""
SHOWN_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
"""What the times depend on, x86's and ARM's."""
AS_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Environment in which torch and its libraries, loaded after it is set, use nothing beyond AVX2."""


def instruction_set() -> str:
    """What torch computes with here: ``"avx512"``, ``"avx2"``, ..."""
    return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")


def cpu_flags() -> list[str]:
    """Those of `SHOWN_FLAGS` that the processor has, whatever torch makes of them; none where /proc does not tell."""
    line = _cpuinfo("flags") or _cpuinfo("Features")
    return [flag for flag in SHOWN_FLAGS if flag in line.split()]


def multiplies_bf16() -> bool:
    """Whether bfloat16 is multiplied by instructions made for it, and not emulated."""
    kept_to_avx2 = os.environ.get("ONEDNN_MAX_CPU_ISA") == AS_AVX2["ONEDNN_MAX_CPU_ISA"]
    return not kept_to_avx2 and not BF16_FLAGS.isdisjoint(cpu_flags())


def _cpuinfo(name: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")


# ---- results


class Part(NamedTuple):
    """What a part of the benchmark found."""

    records: list[Record]
    """The lines of its CSV: a contender's times each."""
    figures: dict[str, float | Ratio]
    """By the names of `speed_page.ROWS`."""
    left_out: dict[str, str]
    """Rows that were not measured, each with the reason."""
    tables: dict[str, list[Record]]
    """Further CSVs by name."""


def new_part() -> Part:
    """A part that has found nothing yet."""
    return Part([], {}, {}, {})


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
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torchcaps": torchcaps.__version__,
        "commit": (commit or "unknown") + "+" * bool(changed),  # +: files were changed since
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpuinfo("model name") or platform.processor(),
        "flags": " ".join(cpu_flags()),
        "computes_with": instruction_set(),
        "threads": torch.get_num_threads(),
        "working_memory_mib": get_working_memory(),
        "load": load(),
    }
