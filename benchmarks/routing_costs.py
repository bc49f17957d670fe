"""What each routing algorithm costs: time of a layer, forward and backward, and its peak memory.

    python benchmarks/routing_costs.py

Times are ratios to uniform coupling, measured by turns in one process: the median over the rounds. Memory is the peak
of the resident set above what it was before, in a process of its own, divided by the size of the votes, which are
B·I·J·D numbers of 4 bytes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from measuring import resident

from torchcaps.nn import (
    Capsules,
    DenseCapsules,
    DynamicRouting,
    EMCodeRouting,
    EMRouting,
    InvertedAttentionRouting,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    VBRouting,
)

ROWS: dict[str, Callable[[], Routing]] = {
    "uniform": lambda: DynamicRouting(1),
    "dynamic, 3 iterations": DynamicRouting,
    "self-attention": SelfAttentionRouting,
    "inverted attention, 2 iterations": InvertedAttentionRouting,
    "self-routing": SelfRouting,
    "EM, 3 iterations": EMRouting,
    "EM as the code, 3 iterations": EMCodeRouting,
    "VB, 3 iterations": VBRouting,
    "shared, uniform": lambda: DynamicRouting(1),
}
LAYERS = {"MNIST's": (1152, 8, 10, 16, 64), "small": (64, 16, 10, 16, 128)}
"""I, K, J, D, batch."""


def step_of(row: str, layer: str) -> Callable[[], None]:
    """A call of a layer, forward and backward."""
    I, K, J, D, batch = LAYERS[layer]
    torch.manual_seed(0)
    module = DenseCapsules(I, K, J, D, transform="shared" if row.startswith("shared") else "dense", routing=ROWS[row]())
    capsules = Capsules(torch.randn(batch, I, K, requires_grad=True), torch.rand(batch, I))

    def step() -> None:
        out = module(capsules)
        loss = out.poses.square().sum()
        (loss if out.activations is None else loss + out.activations.sum()).backward()

    return step


def ratios(layer: str, rounds: int) -> dict[str, float]:
    """Time of each row over that of uniform coupling."""
    steps = {row: step_of(row, layer) for row in ROWS}
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    for _ in range(rounds + 1):
        for row, step in steps.items():
            begin = time.perf_counter()
            step()
            times[row].append(time.perf_counter() - begin)
    medians = {row: statistics.median(measured[1:]) for row, measured in times.items()}
    return {row: median / medians["uniform"] for row, median in medians.items()}


def peak(row: str, layer: str) -> float:
    """Peak of memory over that before, in votes."""
    command = [sys.executable, __file__, "--peak", row, layer]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.peak:
        row, layer = given.peak
        step = step_of(row, layer)
        before = resident("VmRSS")
        step()
        I, _, J, D, batch = LAYERS[layer]
        print(2**20 * (resident("VmHWM") - before) / (4 * batch * I * J * D))
        return
    for layer, (I, K, J, D, batch) in LAYERS.items():
        print(
            f"\n{layer} layer: {I}×{K} → {J}×{D}, batch {batch}\n\n| | time ÷ uniform | peak ÷ votes |\n|---|---|---|"
        )
        measured = ratios(layer, given.rounds)
        for row, ratio in measured.items():
            print(f"| {row} | {ratio:.2f} | {peak(row, layer):.2f} |")


if __name__ == "__main__":
    main()
