"""A whole CapsNet step, inference and peak memory: torchcaps, the naive formulation, the convolutions alone.

A part of `run.py`. A step is forward, loss, backward and Adam on the whole network (sabour2017), decoder included. The
floor is the same step of the two convolutions alone (a mean of squares as its loss), in the same precision and memory
format. The naive formulation is the same network with `naive.py` in place of the library's routing. Inference stops at
the lengths: no decoder.

The loss and the gradients of the contenders are compared first. Contenders that are compared run next to each other in
time. Peak memory is the resident high-water mark of a process of its own that makes three steps, less what was
resident before the network was made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measuring import Figure, Part, Plan, in_turns, isolated, ratio, resident, summary, timed
from naive import naive_routing
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model
from torchcaps.nn import Routing

PEAK_OF = ("torchcaps fp32 full", "naive fp32 full")
STEP_GOALS = {("fp32", "stopped"): 1.06, ("fp32", "full"): 1.15, ("bf16", "stopped"): 1.20, ("bf16", "full"): 1.35}


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
        overrides: What differs from sabour2017 on MNIST's size.
    """

    def __init__(self, name: str, overrides: dict[str, Any]) -> None:
        kind, precision, *mode = name.split()
        torch.manual_seed(0)
        stop = mode == ["stopped"]
        self.kind, self.half = kind, precision == "bf16"
        self.network = new_network(overrides, stop_gradient=stop)
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
            elif self.kind == "naive":  # published code convolves the whole batch at once
                self.network.class_capsules(self.network.primary_capsules(self.network.conv(images).relu()))
            else:
                self.network.class_capsules(self.network.primary_poses(images))


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
        names = (f"torchcaps fp32 {mode}", f"naive fp32 {mode}", f"torchcaps bf16 {mode}")
        contenders = [Contender(name, overrides) for name in names]
        losses = [contender.loss(*batch) for contender in contenders]
        for loss in losses:
            loss.backward()
        gradients = [torch.cat([p.grad.flatten() for p in c.network.parameters()]) for c in contenders]
        for n, tolerance in ((1, 1e-4), (2, 5e-2)):
            if not torch.allclose(losses[0], losses[n], rtol=tolerance):
                wrong.append(
                    f"step, {mode}: losses {losses[0].item()} of {names[0]} and {losses[n].item()} of {names[n]}"
                )
            distance = ((gradients[n] - gradients[0]).norm() / gradients[0].norm()).item()
            if not distance <= tolerance:
                wrong.append(f"step, {mode}: {names[n]}'s gradients are {distance:.1e} off, {tolerance} allowed")
    return wrong


def measure(plan: Plan) -> Part:
    """Times of steps and of inference, and peak memory."""
    bench = _Bench(plan)
    for precision in ("fp32", "bf16"):
        modes = [f"torchcaps {precision} {mode}" for mode in ("stopped", "full")]
        floor = f"cnn {precision}"
        times = bench.run("step", plan.layer.B, plan.rounds, [modes[0], floor, modes[1]])
        for mode, name in zip(("stopped", "full"), modes, strict=True):
            what = f"step, {precision} {mode}: torchcaps ÷ convolutions alone"
            bench.part.figures.append(Figure(what, ratio(times[name], times[floor]), STEP_GOALS[precision, mode]))
    for mode, goal in (("stopped", 4.2), ("full", 3.8)):
        naive, ours = f"naive fp32 {mode}", f"torchcaps bf16 {mode}"
        times = bench.run("step", plan.layer.B, plan.naive_rounds, [naive, ours])
        what = f"step, {mode}: naive (fp32) ÷ torchcaps (bf16)"
        bench.part.figures.append(Figure(what, ratio(times[naive], times[ours]), goal, at_least=True))
    _measure_peaks(plan, bench.part)
    for size, rounds in plan.inference:
        _measure_inference(bench, size, rounds)
    return bench.part


def _measure_inference(bench: _Bench, size: int, rounds: int) -> None:
    floor, ours, half, naive = "cnn fp32", "torchcaps fp32 full", "torchcaps bf16 full", "naive fp32 full"
    times = bench.run("infer", size, rounds, [floor, ours])
    if size == 1:
        what = "one-image inference, fp32: torchcaps ÷ convolutions alone"
        bench.part.figures.append(Figure(what, ratio(times[ours], times[floor]), 1.2))
    times = bench.run("infer", size, rounds, [ours, naive, half])
    if size == 512:
        for name, goal in ((ours, 3.0), (half, 6.0)):
            what = f"512-image inference: naive (fp32) ÷ torchcaps ({name.split()[1]})"
            bench.part.figures.append(Figure(what, ratio(times[naive], times[name]), goal, at_least=True))


def _measure_peaks(plan: Plan, part: Part) -> None:
    peaks = {name: isolated(probe, name, plan.layer.B, dict(plan.network)) for name in PEAK_OF}
    for name, peak in peaks.items():
        part.records.append({"what": "step", "batch": plan.layer.B, "contender": name, "peak_mib": round(peak, 1)})
    ours, naive = (peaks[name] for name in PEAK_OF)
    part.figures.append(Figure("step, peak memory: torchcaps ÷ naive", ours / naive, 0.33))


def probe(name: str, size: int, overrides: dict[str, Any]) -> float:
    """Peak of three steps in this process, MiB."""
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
        self.part = Part([], [])

    def run(self, what: str, size: int, rounds: int, names: list[str]) -> dict[str, list[float]]:
        """Milliseconds of ``what`` (``"step"`` or ``"infer"``) of some contenders in turns."""
        batch = new_batch(size, self.overrides)
        for name in names:
            if name not in self.contenders:
                self.contenders[name] = Contender(name, self.overrides)
        works = {name: timed(partial(getattr(self.contenders[name], what), *batch)) for name in names}
        times = in_turns(works, rounds, warm_up=2)
        for name, values in times.items():
            self.part.records.append(
                {"what": what, "batch": size, "beside": ", ".join(names), "contender": name, **summary(values)}
            )
        return times
