"""A whole CapsNet step, inference and peak memory: torchcaps, the naive formulation, and the convolutions alone.

    python benchmarks/training_step.py                     # sabour2017 on MNIST's size, batch 128
    python benchmarks/training_step.py --rounds 11 --csv training_step.csv

A step is forward, loss, backward and Adam on the whole network, decoder included. The floor is the same step of the
two convolutions alone (a mean of squares as its loss), in the same precision and memory format. The naive formulation
is the same network with `naive.py` in place of the library's routing. Inference stops at the lengths: no decoder.

The loss and the gradients of the contenders are compared first, and a difference stops the run (exit status 1). Then
every contender runs once a round, in turns; the table shows medians, extremes and ratios. Peak memory is the resident
high-water mark of a process of its own that runs three steps, less what was resident before the network was made.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from naive import naive_routing
from routing import environment, resident
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model
from torchcaps.nn import Routing

PEAK_OF = ("torchcaps fp32 full", "torchcaps fp32 stopped", "torchcaps bf16 full", "naive fp32 full", "cnn fp32")


class NaiveRouting(Routing):
    """``naive.py`` as a routing algorithm of a layer."""

    def __init__(self, stop_gradient: bool) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient

    def forward(
        self,
        poses: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        prior: Tensor | None = None,
        return_coupling: bool = False,
    ) -> tuple[Tensor, None]:
        """Capsules; the coupling is not kept."""
        return naive_routing(poses, weight, 3, self.stop_gradient), None


class Convolutions(nn.Module):
    """The two convolutions of a network: the floor of its cost."""

    def __init__(self, network: CapsNet) -> None:
        super().__init__()
        self.conv, self.primary = network.conv, network.primary_capsules.convs[0]

    def forward(self, images: Tensor) -> Tensor:
        """The primary capsules' map."""
        return self.primary(self.conv(images).relu())


class Contender:
    """A network with its optimizer, precision and memory format.

    Args:
        name: ``"torchcaps"``, ``"naive"`` or ``"cnn"``, the precision, and for the first two the gradient mode.
    """

    def __init__(self, name: str) -> None:
        kind, precision, *mode = name.split()
        torch.manual_seed(0)
        stop = mode == ["stopped"]
        self.name, self.kind, self.half = name, kind, precision == "bf16"
        self.network = create_model("sabour2017", stop_gradient=stop)
        assert isinstance(self.network, CapsNet)
        if kind == "naive":
            self.network.class_capsules.routing = NaiveRouting(stop)
        self.module: nn.Module = Convolutions(self.network) if kind == "cnn" else self.network
        if self.half:
            for module in self.module.modules():
                if isinstance(module, nn.Conv2d):  # as the trainer does
                    module.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.Adam(self.module.parameters(), fused=True)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Forward and loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            output = self.module(images) if self.kind == "cnn" else self.module(images, labels)
        if isinstance(output, Tensor):
            return output.float().square().mean()
        return self.network.loss(output, images, labels).total

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One update of the weights."""
        self.loss(images, labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def infer(self, images: Tensor, _: Tensor) -> None:
        """Class scores, or the floor's map."""
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            if self.kind == "cnn":
                self.module(images)
            else:
                self.network.class_capsules(self.network.primary_poses(images))


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(size, 1, 28, 28, generator=generator), torch.arange(size) % 10


def check() -> list[str]:
    """What is wrong with the contenders' losses and gradients; empty if nothing is."""
    wrong = []
    batch = batch_of(8)
    for mode in ("full", "stopped"):
        ours, naive, half = (Contender(f"{name} {mode}") for name in ("torchcaps fp32", "naive fp32", "torchcaps bf16"))
        losses = [contender.loss(*batch) for contender in (ours, naive, half)]
        for loss in losses:
            loss.backward()
        gradients = [torch.cat([p.grad.flatten() for p in c.network.parameters()]) for c in (ours, naive, half)]
        for n, tolerance in ((1, 1e-4), (2, 5e-2)):
            if not torch.allclose(losses[0], losses[n], rtol=tolerance):
                wrong.append(f"{mode}: losses {losses[0].item()} and {losses[n].item()}")
            distance = ((gradients[n] - gradients[0]).norm() / gradients[0].norm()).item()
            if not distance <= tolerance:
                wrong.append(f"{mode}: gradients differ by {distance:.1e}, {tolerance} allowed")
    return wrong


def time_in_turns(names: list[str], what: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round after two that warm up."""
    contenders, batch = [Contender(name) for name in names], batch_of(size)
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(rounds + 2):
        for contender in contenders:
            call: Callable[[Tensor, Tensor], None] = getattr(contender, what)
            start = time.perf_counter()
            call(*batch)
            if n > 1:
                times[contender.name].append(1e3 * (time.perf_counter() - start))
    return times


def peak_of(name: str, size: int) -> float:
    """MiB, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), f"--probe={name}", f"--batch={size}"]
    command.append(f"--threads={torch.get_num_threads()}")
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def probe(name: str, size: int) -> None:
    before = resident("VmRSS")
    contender, batch = Contender(name), batch_of(size)
    for _ in range(3):
        contender.step(*batch)
    print(json.dumps(resident("VmHWM") - before))


def ratio_lines(step: dict[str, float], infer: dict[int, dict[str, float]], peak: dict[str, float]) -> list[list[Any]]:
    """The figures: what, measured, goal."""
    ours = {(p, m): step[f"torchcaps {p} {m}"] for p in ("fp32", "bf16") for m in ("stopped", "full")}
    lines: list[list[Any]] = []
    for (precision, mode), goal in zip(ours, (1.06, 1.15, 1.20, 1.35), strict=True):
        measured = ours[precision, mode] / step[f"cnn {precision}"]
        lines.append([f"step ÷ convolutions alone, {precision} {mode}", measured, f"≤ {goal:.2f}"])
    for mode, goal in (("stopped", 4.2), ("full", 3.8)):
        measured = step[f"naive fp32 {mode}"] / ours["bf16", mode]
        lines.append([f"naive step (fp32) ÷ ours (bf16), {mode}", measured, f"≥ {goal}"])
    lines.append(["peak memory of a step ÷ naive's", peak["torchcaps fp32 full"] / peak["naive fp32 full"], "≤ 0.33"])
    for precision, goal in (("fp32", 3.0), ("bf16", 6.0)):
        measured = infer[512]["naive fp32 full"] / infer[512][f"torchcaps {precision} full"]
        lines.append([f"512-image inference, naive ÷ ours {precision}", measured, f"≥ {goal}"])
    measured = infer[1]["torchcaps fp32 full"] / infer[1]["cnn fp32"]
    lines.append(["one-image inference, fp32, ÷ convolutions alone", measured, "≤ 1.2"])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="write all times to this file")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.probe:
        probe(arguments.probe, arguments.batch)
        return 0
    wrong = check()
    if wrong:
        print("\n".join(["wrong results, nothing was timed:", *wrong]), file=sys.stderr)
        return 1

    facts = environment()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    capsnets = [f"torchcaps {p} {m}" for p in ("fp32", "bf16") for m in ("stopped", "full")]
    steppers = [*capsnets, "naive fp32 stopped", "naive fp32 full", "cnn fp32", "cnn bf16"]
    inferrers = ["torchcaps fp32 full", "torchcaps bf16 full", "naive fp32 full", "cnn fp32", "cnn bf16"]
    measured = {("step", arguments.batch): time_in_turns(steppers, "step", arguments.batch, arguments.rounds)}
    for size, rounds in ((1, 51), (32, arguments.rounds), (512, 3)):
        measured["inference", size] = time_in_turns(inferrers, "infer", size, rounds)
    peaks = {name: peak_of(name, arguments.batch) for name in PEAK_OF}

    records = []
    print(f"\n{'':<12}{'batch':>6}  {'':<26}{'median ms':>11}{'min to max':>22}{'peak MiB':>10}")
    for (what, size), times in measured.items():
        for name, values in times.items():
            peak = peaks.get(name) if what == "step" else None
            median, low, high = statistics.median(values), min(values), max(values)
            spread, shown = f"{low:.1f} to {high:.1f}", "" if peak is None else f"{peak:.0f}"
            print(f"{what:<12}{size:>6}  {name:<26}{median:>11.1f}{spread:>22}{shown:>10}")
            numbers = {"median_ms": median, "min_ms": low, "max_ms": high, "rounds": len(values), "peak_mib": peak}
            records.append({"what": what, "batch": size, "contender": name} | numbers | facts)

    medians = {key: {n: statistics.median(v) for n, v in times.items()} for key, times in measured.items()}
    inference = {size: values for (what, size), values in medians.items() if what == "inference"}
    print(f"\n{'ratio of medians':<52}{'measured':>9}   goal")
    for what, value, goal in ratio_lines(medians["step", arguments.batch], inference, peaks):
        print(f"{what:<52}{value:>9.2f}   {goal}")
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
