"""torchcaps on a CUDA GPU: routing alone, the whole training step, an epoch of MNIST's size.

    python benchmarks/gpu.py --csv gpu.csv            # everything, at batch 128
    python benchmarks/gpu.py --batch 32 --no-compile  # without torch.compile, whose compiling takes minutes
    python benchmarks/gpu.py --kernels                # and the time of every kernel
    python benchmarks/gpu.py --dry-run                # every line of it on the CPU, tiny: the times mean nothing

Correctness comes first, and a failure stops the run (exit status 1).

Routing (`gpu_routing.py`): outputs and gradients of recompute against the reference in float64, where its error may be
at most twice that of the reference in float32; two runs must give the same bits. Then, round by round, every contender
runs every case once, between two CUDA events. Inputs are the same in every round: a layer of this size stays in the L2
cache of a large GPU, as it does in training.

The step (`gpu_steps.py`): forward, loss, backward and Adam of sabour2017, as `torchcaps train` makes them, on batches
that lie on the device: plain, by torch.compile, and with the naive routing. The losses of compiled steps must be the
plain ones, up to rounding. A time is that of 20 steps in a row, divided by 20, the host's share included. The epoch is
the training loop itself on 60,000 random images.

Peak memory is what a pass or a step allocates beside what was there before.

On a machine without CUDA it says so and stops (exit status 2).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_routing
import gpu_steps
import torch
from machine import Machine, Row
from measuring import Size, environment

#: Steps of the authors' code.
AUTHORS_STEPS = 300_000


def print_table(rows: Sequence[Row]) -> None:
    """Medians over the rounds, and the naive formulation's divided by each."""
    print(f"\n{'case':<36}{'':<20}{'median µs':>11}{'min to max':>22}{'naive ÷':>9}{'peak MiB':>10}")
    for row in rows:
        spread = f"{min(row.times_us):,.1f} to {max(row.times_us):,.1f}"
        ratio = naive_over(row, rows)
        shown = "" if ratio is None else f"{ratio:.1f}"
        print(f"{row.case:<36}{row.contender:<20}{row.median_us:>11,.1f}{spread:>22}{shown:>9}{row.peak_mib:>10,.1f}")


def naive_over(row: Row, rows: Sequence[Row]) -> float | None:
    """The naive formulation's median of the same case over this one's; None where it was not timed."""
    naive = next((other for other in rows if (other.case, other.contender) == (row.case, "naive")), None)
    return None if naive is None else naive.median_us / row.median_us


def print_goals(routing: Sequence[Row], steps: Sequence[Row], epoch: gpu_steps.Epoch) -> None:
    """What was wanted of an H200, and what was measured."""
    medians = {(row.case, row.contender): row.median_us for row in steps}
    best = min(time for (case, contender), time in medians.items() if "bf16" in case and contender != "naive")
    full = [row for row in routing if row.case == gpu_routing.CASES[-1]]
    ours = max((ratio for row in full if row.contender != "naive" and (ratio := naive_over(row, full))), default=0.0)
    epochs = AUTHORS_STEPS / epoch.steps / 60
    goals = [
        ("full step, bf16, ms", best / 1e3, "≤ 1.0"),
        ("epoch of MNIST, training steps, bf16, s", epoch.seconds, "≤ 0.6"),
        ("routing forward + backward, naive ÷ ours", ours, "≥ 30"),
        ("300,000 steps, minutes", epochs * epoch.seconds, "≤ 6"),
        ("300,000 steps, each epoch validated, minutes", epochs * (epoch.seconds + epoch.validation_seconds), "≤ 6"),
    ]
    print(f"\n{'':<52}{'measured':>9}   goal on an H200")
    for what, value, goal in goals:
        print(f"{what:<52}{value:>9.3g}   {goal}")


def write_csv(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            ratio = naive_over(row, rows)
            record = {
                "case": row.case,
                "contender": row.contender,
                "batch": row.batch,
                "median_us": round(row.median_us, 2),
                "min_us": round(min(row.times_us), 2),
                "max_us": round(max(row.times_us), 2),
                "rounds": len(row.times_us),
                "naive_over_this": "" if ratio is None else round(ratio, 2),
                "peak_mib": round(row.peak_mib, 1),
            } | facts
            if writer is None:
                writer = csv.DictWriter(file, list(record))
                writer.writeheader()
            writer.writerow(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="images a step, and in a batch of MNIST's layer")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--csv", type=Path, help="write all times to this file")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--kernels", action="store_true", help="print the time of every kernel of a pass and of a step")
    parser.add_argument("--dry-run", action="store_true", help="run all of it on the CPU, tiny")
    arguments = parser.parse_args()
    if not (arguments.dry_run or torch.cuda.is_available()):
        print("benchmarks/gpu.py needs a CUDA GPU, and torch sees none on this machine.", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference and the naive formulation in full float32
    machine = Machine(dry=arguments.dry_run)
    size = Size(B=2, I=6, J=3, D=4, K=2) if machine.dry else Size(B=arguments.batch)

    wrong = gpu_routing.check(machine, size) + (gpu_steps.check(machine, size.B) if arguments.compile else [])
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1
    facts = machine.facts() | environment()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    rounds = 2 if machine.dry else arguments.rounds
    routing = gpu_routing.time_all(machine, size, rounds)
    steps = gpu_steps.time_all(machine, size.B, rounds, compiled=arguments.compile)
    epoch = gpu_steps.time_epoch(machine, size.B)
    rows = [*routing, *steps, *epoch.rows]
    print_table(rows)
    print_goals(routing, steps, epoch)
    if arguments.csv:
        write_csv(arguments.csv, rows, facts)
    if arguments.kernels:
        gpu_routing.print_kernels(machine, size)
        gpu_steps.print_kernels(machine, size.B)
    return 0


if __name__ == "__main__":
    sys.exit(main())
