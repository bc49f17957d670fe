"""Routing alone: torchcaps against its own reference and against the naive formulation, in one interleaved run.

    python benchmarks/routing.py                      # MNIST's layer at batch 128, and a large layer
    python benchmarks/routing.py --batch 32 --no-large --csv routing.csv

Outputs and gradients are checked first, and a failure stops the run (exit status 1): against the reference in float64,
torchcaps's error may be at most twice that of the plain formulation in float32. Then, round by round, every contender
runs every case once; the table shows medians and extremes over the rounds, and the ratio of the naive median to each.

The large layer (forward and backward once more, then timed) runs in processes of its own, one a contender and round,
in turns. Its peak memory is the process's resident high-water mark (VmHWM in /proc/self/status on Linux, ru_maxrss
elsewhere) less what was resident before the tensors were made: weights and gradients are in, Python and torch not.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from naive import naive_routing
from torch import Tensor

import torchcaps
from torchcaps import route
from torchcaps.ops.dynamic_routing import get_working_memory, set_working_memory

MIB = 2**20
LARGE_NEEDS_GIB = 17  # the naive formulation's


class Size(NamedTuple):
    """Sizes of a layer."""

    B: int
    I: int = 1152
    J: int = 10
    D: int = 16
    K: int = 8


LARGE = Size(B=16, I=8192, J=100)

Routing = Callable[[Tensor, Tensor, bool], Tensor]

CONTENDERS: dict[str, Routing] = {
    "torchcaps": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop),
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference"),
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
}


def make(size: Size, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Poses, weights (both in the memory order of the library's layers) and a gradient of the capsules."""
    generator = torch.Generator().manual_seed(0)
    poses = torch.randn(size.B, size.K, size.I, generator=generator).mul_(0.2)
    weight = torch.randn(size.J, size.D, size.K, size.I, generator=generator).mul_(0.1)
    grad = torch.randn(size.B, size.J, size.D, generator=generator)
    poses, weight = poses.to(dtype).transpose(1, 2), weight.to(dtype).permute(3, 0, 1, 2)
    return poses.requires_grad_(), weight.requires_grad_(), grad.to(dtype)


def forward(routing: Routing, poses: Tensor, weight: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        routing(poses, weight, False)


def forward_backward(routing: Routing, poses: Tensor, weight: Tensor, grad: Tensor, stop: bool = False) -> None:
    poses.grad = weight.grad = None
    routing(poses, weight, stop).backward(grad)


def forward_backward_stopped(routing: Routing, poses: Tensor, weight: Tensor, grad: Tensor) -> None:
    forward_backward(routing, poses, weight, grad, stop=True)


CASES: dict[str, Callable[..., None]] = {
    "forward": forward,
    "forward + backward, stopped": forward_backward_stopped,
    "forward + backward, full": forward_backward,
}


# ---- correctness


def check(size: Size) -> list[str]:
    """What is wrong with the contenders' outputs and gradients; empty if nothing is."""
    wrong = []
    for stop in (False, True):
        exact = results("reference", size, torch.float64, stop)
        plain = results("reference", size, torch.float32, stop)
        ours = results("torchcaps", size, torch.float32, stop)
        naive = results("naive", size, torch.float64, stop)
        for n, name in enumerate(("capsules", "poses' gradient", "weights' gradient")):
            error, plain_error = ((x[n].double() - exact[n]).norm().item() for x in (ours, plain))
            if not error <= 2 * plain_error:
                wrong.append(f"{name} ({stop=}): torchcaps is {error:.2e} off, plain float32 {plain_error:.2e}")
            if not torch.allclose(naive[n], exact[n], rtol=1e-8, atol=1e-10):
                wrong.append(f"{name} ({stop=}): the naive formulation computes something else")
    return wrong


def results(contender: str, size: Size, dtype: torch.dtype, stop: bool) -> tuple[Tensor, Tensor, Tensor]:
    poses, weight, grad = make(size, dtype)
    capsules = CONTENDERS[contender](poses, weight, stop)
    grad_poses, grad_weight = torch.autograd.grad(capsules, (poses, weight), grad)
    return capsules.detach(), grad_poses, grad_weight


# ---- MNIST's layer


class Row(NamedTuple):
    """A line of the table."""

    layer: Size
    case: str
    contender: str
    times_ms: list[float]
    peak_mib: float | None = None

    @property
    def median_ms(self) -> float:
        """Middle of the rounds."""
        return statistics.median(self.times_ms)


def time_layer(size: Size, rounds: int) -> list[Row]:
    tensors = make(size)
    rows = [Row(size, case, contender, []) for case in CASES for contender in CONTENDERS]
    for n in range(rounds + 1):
        for row in rows:
            elapsed = time_once(CASES[row.case], row.contender, tensors)
            if n > 0:  # the first round warms up
                row.times_ms.append(elapsed)
    return rows


def time_once(case: Callable[..., None], contender: str, tensors: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    case(CONTENDERS[contender], *tensors)
    return 1e3 * (time.perf_counter() - start)


# ---- the large layer


def time_large(rounds: int, contenders: list[str]) -> list[Row]:
    rows = []
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            found[contender].append(run_probe(contender))
    for contender, probes in found.items():
        times, peaks = ([probe[key] for probe in probes] for key in ("time_ms", "peak_mib"))
        rows.append(Row(LARGE, "forward + backward, full", contender, times, statistics.median(peaks)))
    return rows


def run_probe(contender: str) -> dict[str, float]:
    options = [f"--threads={torch.get_num_threads()}", f"--working-memory={get_working_memory()}"]
    command = [sys.executable, str(Path(__file__).resolve()), f"--probe={contender}", *options]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer))


def probe(contender: str) -> None:
    """Run the large layer twice; print the time of the second run and the peak of both."""
    before = resident("VmRSS")
    tensors = make(LARGE)
    forward_backward(CONTENDERS[contender], *tensors)
    elapsed = time_once(forward_backward, contender, tensors)
    print(json.dumps({"time_ms": elapsed, "peak_mib": resident("VmHWM") - before}))


def resident(field: str) -> float:
    """MiB of this process now (VmRSS) or at its highest (VmHWM)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / MIB if sys.platform == "darwin" else highest / 1024


def available_gib() -> float:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**20


# ---- the table


def environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torchcaps": torchcaps.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "working_memory_mib": get_working_memory(),
    }


def print_table(rows: list[Row]) -> None:
    print(f"{'layer, case':<50}{'':<11}{'median ms':>10}{'min to max':>20}{'naive ÷':>9}{'peak MiB':>10}{'÷ naive':>9}")
    for row in rows:
        naive = naive_of(row, rows)
        label = f"B={row.layer.B} I={row.layer.I} J={row.layer.J} {row.case}"
        spread = f"{min(row.times_ms):.1f} to {max(row.times_ms):.1f}"
        ratio = f"{naive.median_ms / row.median_ms:.1f}" if naive else ""
        peak, share = "", ""
        if row.peak_mib is not None:
            peak = f"{row.peak_mib:.0f}"
            share = f"{row.peak_mib / naive.peak_mib:.3f}" if naive and naive.peak_mib else ""
        print(f"{label:<50}{row.contender:<11}{row.median_ms:>10.1f}{spread:>20}{ratio:>9}{peak:>10}{share:>9}")


def naive_of(row: Row, rows: list[Row]) -> Row | None:
    return next((r for r in rows if (r.layer, r.case, r.contender) == (row.layer, row.case, "naive")), None)


def write_csv(path: Path, rows: list[Row]) -> None:
    records = []
    for row in rows:
        naive = naive_of(row, rows)
        numbers = {
            "median_ms": round(row.median_ms, 3),
            "min_ms": round(min(row.times_ms), 3),
            "max_ms": round(max(row.times_ms), 3),
            "rounds": len(row.times_ms),
            "naive_over_this": round(naive.median_ms / row.median_ms, 3) if naive else "",
            "peak_mib": "" if row.peak_mib is None else round(row.peak_mib, 1),
        }
        names = {"case": row.case, "contender": row.contender, **row.layer._asdict()}
        records.append(names | numbers | environment())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="images in a batch of MNIST's layer")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--working-memory", type=float, default=get_working_memory(), help="MiB, see set_working_memory"
    )
    parser.add_argument("--no-large", dest="large", action="store_false", help="leave the large layer out")
    parser.add_argument("--large-rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--probe", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_working_memory(arguments.working_memory)
    if arguments.probe:
        probe(arguments.probe)
        return 0

    wrong = check(Size(B=min(arguments.batch, 8)))
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    rows = time_layer(Size(B=arguments.batch), arguments.rounds)
    if arguments.large:
        contenders = ["torchcaps", "naive"]
        if available_gib() < LARGE_NEEDS_GIB:
            print(f"less than {LARGE_NEEDS_GIB} GiB are free: the large layer runs without the naive formulation")
            contenders.remove("naive")
        rows += time_large(arguments.large_rounds, contenders)
    print_table(rows)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
