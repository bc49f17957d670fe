"""Routing on a CUDA GPU: the fused kernels against the naive formulation, in one interleaved run.

    python benchmarks/gpu.py                          # MNIST's layer at batch 128
    python benchmarks/gpu.py --batch 32 --csv gpu.csv
    python benchmarks/gpu.py --kernels                # and the time of every kernel of one pass
    python benchmarks/gpu.py --tune                   # and other sizes of the kernels' programs

Outputs and gradients are checked first, and a failure stops the run (exit status 1): against the reference in float64,
the kernels' error may be at most twice that of the reference in float32, two runs must give the same bits, and a
captured run those of an eager one. Then, round by round, every contender runs every case once, between two CUDA events;
the table shows medians and extremes over the rounds, and the ratio of the naive median to each. "captured" is Triton's
pass replayed from a CUDA graph, without the host's share. Inputs are the same in every round: a layer of this size
stays in the L2 cache of a large GPU, as it does in training. Peak memory is what a pass allocates beside its inputs.

On a machine without CUDA it says so and stops (exit status 2).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from naive import naive_routing
from routing import Size, environment, make
from torch import Tensor

from torchcaps import route
from torchcaps.ops.dynamic_routing import triton as backend

MIB = 2**20
CHECKED = (Size(B=5, I=63, J=7, D=5, K=3), Size(B=128))
WARM_UP = 3  # rounds

Step = Callable[[], tuple[Tensor, ...]]
Routing = Callable[[Tensor, Tensor, bool], Tensor]

ROUTINGS: dict[str, Routing] = {
    "triton": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="triton"),
    "recompute": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="recompute"),
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference"),
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
}
CASES = ("forward", "forward + backward, stopped", "forward + backward, full")


def inputs(size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Poses, weights and a gradient of the capsules, on the device."""
    poses, weight, grad = make(size, dtype)
    poses, weight = (tensor.detach().to(device).requires_grad_() for tensor in (poses, weight))
    return poses, weight, grad.to(device)


def step_of(routing: Routing, case: str, tensors: tuple[Tensor, Tensor, Tensor]) -> Step:
    """A pass of a case: capsules, and with a backward pass the gradients of poses and weights."""
    poses, weight, grad = tensors

    def step() -> tuple[Tensor, ...]:
        if case == "forward":
            with torch.no_grad():
                return (routing(poses, weight, False),)
        capsules = routing(poses, weight, case.endswith("stopped"))
        return (capsules.detach(), *torch.autograd.grad(capsules, (poses, weight), grad))

    return step


def capture(step: Step) -> Step:
    """The same pass, replayed from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):  # compiles the kernels, which cannot be done while capturing
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


# ---- correctness


def check(size: Size, device: torch.device) -> list[str]:
    """What is wrong with the kernels' results; empty if nothing is."""
    wrong = []
    for case in CASES[1:]:
        exact = step_of(ROUTINGS["reference"], case, inputs(size, device, torch.float64))()
        plain = step_of(ROUTINGS["reference"], case, inputs(size, device))()
        step = step_of(ROUTINGS["triton"], case, inputs(size, device))
        ours, again = step(), step()
        for n, name in enumerate(("capsules", "poses' gradient", "weights' gradient")):
            error, plain_error = (((x[n] - exact[n]).norm() / exact[n].norm()).item() for x in (ours, plain))
            if not error <= 2 * plain_error:
                wrong.append(f"{size}, {case}: {name} is {error:.2e} off, plain float32 {plain_error:.2e}")
        if not all(map(torch.equal, ours, again)):
            wrong.append(f"{size}, {case}: two runs differ")
        if device.type == "cuda" and not all(map(torch.equal, ours, capture(step)())):
            wrong.append(f"{size}, {case}: a captured run differs")
    return wrong


# ---- time


class Row(NamedTuple):
    """A line of the table."""

    case: str
    contender: str
    times_us: list[float]
    peak_mib: float

    @property
    def median_us(self) -> float:
        """Of the rounds."""
        return statistics.median(self.times_us)


def time_once(step: Step) -> float:
    """Microseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def peak_of(step: Step) -> float:
    """MiB that a pass allocates at once."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def time_all(size: Size, device: torch.device, rounds: int) -> list[Row]:
    tensors = inputs(size, device)
    steps: list[tuple[Row, Step]] = []
    for case, (contender, routing) in itertools.product(CASES, ROUTINGS.items()):
        step = step_of(routing, case, tensors)
        for _ in range(WARM_UP):
            step()
        row = Row(case, contender, [], peak_of(step))
        steps.append((row, step))
        if contender == "triton":
            steps.append((row._replace(contender="captured", times_us=[]), capture(step)))
    for _ in range(rounds):
        for row, step in steps:
            row.times_us.append(time_once(step))
    return [row for row, _ in steps]


def print_table(rows: list[Row]) -> None:
    print(f"{'case':<30}{'':<11}{'median µs':>10}{'min to max':>20}{'naive ÷':>9}{'peak MiB':>10}")
    for row in rows:
        spread = f"{min(row.times_us):.0f} to {max(row.times_us):.0f}"
        ratio = naive_of(row, rows).median_us / row.median_us
        print(f"{row.case:<30}{row.contender:<11}{row.median_us:>10.1f}{spread:>20}{ratio:>9.1f}{row.peak_mib:>10.1f}")


def naive_of(row: Row, rows: list[Row]) -> Row:
    return next(other for other in rows if (other.case, other.contender) == (row.case, "naive"))


def write_csv(path: Path, rows: list[Row], size: Size, about: dict[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            numbers = {
                "median_us": round(row.median_us, 2),
                "min_us": round(min(row.times_us), 2),
                "max_us": round(max(row.times_us), 2),
                "rounds": len(row.times_us),
                "naive_over_this": round(naive_of(row, rows).median_us / row.median_us, 2),
                "peak_mib": round(row.peak_mib, 1),
            }
            record = {"case": row.case, "contender": row.contender, **size._asdict(), **numbers, **about}
            if writer is None:
                writer = csv.DictWriter(file, list(record))
                writer.writeheader()
            writer.writerow(record)


def gpu_environment() -> dict[str, Any]:
    import triton

    about = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}
    return about | environment()


# ---- where the time goes


def print_kernels(size: Size, device: torch.device) -> None:
    """Device time of every kernel in a full forward and backward pass."""
    step = step_of(ROUTINGS["triton"], CASES[2], inputs(size, device))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    print("\nkernels of 20 full passes:")
    print(profile.key_averages().table(sort_by="device_time_total", row_limit=20, max_name_column_width=40))


def tune(size: Size, device: torch.device, rounds: int) -> None:
    """Time the full pass, captured, with other sizes of the kernels' programs than those the backend chooses."""
    tensors = inputs(size, device)
    chosen = backend._choose_blocks(size.B, size.I, size.D, size.K)
    choose, programs = backend._choose_blocks, backend.PROGRAMS
    found = []
    try:
        for changes in (
            *({"warps": n} for n in (2, 4, 8)),
            *({"images": n} for n in (1, 2, 4, 8)),
            *({"warps_of_sum": n} for n in (2, 4, 8, 16)),
            *({"images_of_sum": n} for n in (1, 2, 4, 8)),
            *({"components": n} for n in (2, 4, 8, 16) if size.D % n == 0),
            *({"PROGRAMS": n} for n in (128, 256, 384, 512, 1024)),
        ):
            blocks = chosen._replace(**{name: n for name, n in changes.items() if name != "PROGRAMS"})
            backend._choose_blocks = lambda *_, blocks=blocks: blocks
            backend.PROGRAMS = changes.get("PROGRAMS", programs)
            step = capture(step_of(ROUTINGS["triton"], CASES[2], tensors))
            step()
            found.append((statistics.median(time_once(step) for _ in range(rounds)), changes))
    finally:
        backend._choose_blocks, backend.PROGRAMS = choose, programs
    print(f"\nfull pass, captured, with one thing changed in {chosen}, PROGRAMS={programs}:")
    for time_us, changes in sorted(found, key=lambda pair: pair[0]):
        print(f"{time_us:>10.1f} µs  {changes}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="images in a batch of MNIST's layer")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--kernels", action="store_true", help="print the time of every kernel of a pass")
    parser.add_argument("--tune", action="store_true", help="time other sizes of the kernels' programs")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA GPU, and torch sees none on this machine.", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference and the naive formulation in full float32

    device = torch.device("cuda")
    wrong = [message for size in CHECKED for message in check(size, device)]
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1
    size, about = Size(B=arguments.batch), gpu_environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{size}, L2 warm, {arguments.rounds} rounds")
    rows = time_all(size, device, arguments.rounds)
    print_table(rows)
    if arguments.csv:
        write_csv(arguments.csv, rows, size, about)
    if arguments.kernels:
        print_kernels(size, device)
    if arguments.tune:
        tune(size, device, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
