"""A whole CapsNet step, inference and peak memory: torchcaps, the naive formulation, the convolutions alone.

A part of `run.py`. A step is forward, loss, backward and Adam on the whole network (sabour2017), decoder included.
"Naive" is the same network as published code writes it (`naive.py`): `nn.Conv2d` on the whole batch, votes by
broadcasting, the same decoder and loss. "The convolutions alone" is the same step of nothing but two `nn.Conv2d` with a
ReLU between them, a mean of squares its loss. Both hold copies of the same weights and nothing of the library's faster
ways. Inference stops at the lengths: no decoder.

The loss and the gradients of the contenders are compared first. Contenders that are compared run next to each other in
time. Peak memory is the resident high-water mark of a process of its own that makes three steps, less what was
resident before the network was made.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from measuring import (
    Part,
    Plan,
    in_turns,
    isolated,
    multiplies_bf16,
    new_part,
    ratio,
    resident,
    summary,
    timed,
)
from naive import Convolutions, NaiveCapsNet, convolutions_of, weight_of
from speed_page import MANY_IMAGES, ONE_IMAGE, STEP, STEP_BF16, STEP_MEMORY, STEP_NAIVE
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model

OURS, NAIVE, FLOOR, HALF = "torchcaps fp32 full", "naive fp32 full", "cnn fp32", "torchcaps bf16 full"
EMULATED = "left out: bfloat16 is emulated here"


class Contender:
    """A network with its optimizer and precision.

    Args:
        name: ``"torchcaps"``, ``"naive"`` or ``"cnn"``, the precision, and for the first two the gradient mode.
        overrides: What differs from sabour2017 on MNIST's size.
    """

    def __init__(self, name: str, overrides: dict[str, Any]) -> None:
        kind, precision, *mode = name.split()
        torch.manual_seed(0)
        stop = mode == ["stopped"]
        self.kind, self.half = kind, precision == "bf16"
        self.network = new_network(overrides, stop_gradient=stop)
        self.module: nn.Module = self.network
        if kind == "naive":
            self.module = NaiveCapsNet(self.network, stop)
        elif kind == "cnn":
            self.module = Convolutions(self.network)
        if kind != "torchcaps":
            self.network.to("meta")  # its weights were copied, its loss needs none
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
        """Class capsules, or the map of the convolutions alone."""
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            if isinstance(self.module, NaiveCapsNet):
                self.module.capsules(images)
            elif isinstance(self.module, CapsNet):
                self.module.class_capsules(self.module.primary(images))
            else:
                self.module(images)

    def gradient(self) -> Tensor:
        """Of all weights, in one order for torchcaps and naive."""
        if isinstance(self.module, NaiveCapsNet):
            parameters = list(self.module.parameters())
            parameters = [self.module.weight, *(p for p in parameters if p is not self.module.weight)]
        else:
            first, primary = convolutions_of(self.network)
            parts = [first, primary, *([] if self.network.decoder is None else [self.network.decoder])]
            parameters = [weight_of(self.network), *(p for part in parts for p in part.parameters())]
        return torch.cat([math.nan * p.flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def new_network(overrides: dict[str, Any], **more: Any) -> CapsNet:
    """sabour2017 with fields that differ."""
    network = create_model("sabour2017", **overrides, **more)
    assert isinstance(network, CapsNet)
    return network


def new_batch(size: int, overrides: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(1)
    in_shape = overrides.get("in_shape", (1, 28, 28))
    return torch.rand(size, *in_shape, generator=generator), torch.randint(10, (size,), generator=generator)


def check(plan: Plan) -> list[str]:
    """What is wrong with losses and gradients of a small batch; empty if nothing is."""
    wrong = []
    overrides, batch = dict(plan.network), new_batch(8, dict(plan.network))
    for mode in ("stopped", "full"):
        tolerances = {f"naive fp32 {mode}": 1e-4}
        if multiplies_bf16():
            tolerances[f"torchcaps bf16 {mode}"] = 5e-2
        ours = _run(f"torchcaps fp32 {mode}", overrides, batch)
        for name, tolerance in tolerances.items():
            other = _run(name, overrides, batch)
            if not torch.allclose(ours[0], other[0], rtol=tolerance):
                wrong.append(f"step, {mode}: losses {ours[0].item()} of torchcaps and {other[0].item()} of {name}")
            distance = ((other[1] - ours[1]).norm() / ours[1].norm()).item()
            if not distance <= tolerance:
                wrong.append(f"step, {mode}: {name}'s gradients are {distance:.1e} off, {tolerance} allowed")
    return wrong


def _run(name: str, overrides: dict[str, Any], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    contender = Contender(name, overrides)
    loss = contender.loss(*batch)
    loss.backward()
    return loss.detach(), contender.gradient()


def measure(plan: Plan) -> Part:
    """Times of steps and of inference, and peak memory."""
    bench = _Bench(plan)
    figures = bench.part.figures
    times = bench.run("step", plan.layer.B, plan.rounds, [FLOOR, OURS])
    figures[STEP] = ratio(times[OURS], times[FLOOR])
    for mode, what in STEP_NAIVE.items():
        naive, ours = f"naive fp32 {mode}", f"torchcaps fp32 {mode}"
        times = bench.run("step", plan.layer.B, plan.naive_rounds, [naive, ours])
        figures[what] = ratio(times[naive], times[ours])
    if multiplies_bf16():
        times = bench.run("step", plan.layer.B, plan.rounds, [HALF, OURS])
        figures[STEP_BF16] = ratio(times[HALF], times[OURS])
    else:
        bench.part.left_out[STEP_BF16] = EMULATED
    _measure_peaks(plan, bench.part)
    for size, rounds in plan.inference:
        times = bench.run("infer", size, rounds, [FLOOR, OURS])
        if size == 1:
            figures[ONE_IMAGE] = ratio(times[OURS], times[FLOOR])
        if size == 512:
            times = bench.run("infer", size, rounds, [NAIVE, OURS])
            figures[MANY_IMAGES] = ratio(times[NAIVE], times[OURS])
    return bench.part


def _measure_peaks(plan: Plan, part: Part) -> None:
    peaks = {name: isolated(probe, name, plan.layer.B, dict(plan.network)) for name in (OURS, NAIVE)}
    for name, peak in peaks.items():
        part.records.append({"what": "step", "batch": plan.layer.B, "contender": name, "peak_mib": round(peak, 1)})
    part.figures[STEP_MEMORY] = peaks[OURS] / peaks[NAIVE]


def probe(name: str, size: int, overrides: dict[str, Any]) -> float:
    """Peak of three steps in this process, MiB, beyond Python and torch with all that its optimizer imports."""
    torch.optim.Adam([torch.zeros(1, requires_grad=True)], fused=True)
    before = resident("VmRSS")
    contender, batch = Contender(name, overrides), new_batch(size, overrides)
    for _ in range(3):
        contender.step(*batch)
    return resident("VmHWM") - before


class _Bench:
    """Contenders, made when they are first asked for, and what was found."""

    def __init__(self, plan: Plan) -> None:
        self.overrides = dict(plan.network)
        self.contenders: dict[str, Contender] = {}
        self.part = new_part()

    def run(self, what: str, size: int, rounds: int, names: list[str]) -> dict[str, list[float]]:
        """Milliseconds of ``what`` (``"step"`` or ``"infer"``) of some contenders in turns."""
        batch = new_batch(size, self.overrides)
        for name in names:
            if name not in self.contenders:
                self.contenders[name] = Contender(name, self.overrides)
        works = {name: timed(partial(getattr(self.contenders[name], what), *batch)) for name in names}
        times = in_turns(works, rounds, warm_up=1 if what == "step" or size > 32 else 2)
        for name, values in times.items():
            self.part.records.append(
                {"what": what, "batch": size, "beside": ", ".join(names), "contender": name, **summary(values)}
            )
        return times
