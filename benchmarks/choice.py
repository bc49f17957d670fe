"""The choice among the ways to convolve, checked on the convolutions of the library's networks. A part of `run.py`.

`convolve(..., backend="auto")` chooses by a rule. Here it is timed, in turns with each way by force, on every
convolution of some presets at several batch sizes, forward (nothing is learned, the weights are those of the call
before) and forward + backward. The figure is the worst of all: auto's time over that of the fastest way, each ratio the
median over rounds of that within a round. A way that took over three times as long as the fastest one in the warm-up is
not timed further; the CSV has its time there, with 0 rounds. Among over a hundred cases some are struck by other users
of the machine: a case that exceeds the goal is timed once more, three times as long, and that counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from measuring import Part, Plan, Record, in_turns, new_part, ratio, summary, timed
from speed_page import BY_NAME, CHOICE
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model
from torchcaps.ops.convolution import convolve

WAYS = ("plain", "columns", "transform")
PASSES = ("forward", "forward + backward")
#: Rounds at least and at most; how many times slower than the fastest way one may be to stay in.
LEAST, MOST, SLOWER = 3, 51, 3.0


class Shape(NamedTuple):
    """A convolution of a network."""

    name: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    height: int
    width: int
    images: bool
    """It reads images, whose gradient nobody asks for."""

    def make(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random features, weight and bias; channels come last in memory, as in networks."""
        generator = torch.Generator().manual_seed(0)
        features = torch.rand(batch, self.in_channels, self.height, self.width, generator=generator)
        weight = torch.randn(self.out_channels, self.in_channels, self.kernel, self.kernel, generator=generator)
        weight *= (self.in_channels * self.kernel**2) ** -0.5
        bias = torch.randn(self.out_channels, generator=generator)
        features, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (features, weight))
        return features.requires_grad_(not self.images), weight.requires_grad_(), bias.requires_grad_()


def shapes_of(preset: str) -> list[Shape]:
    """The convolutions of a preset at the size of its data, one after the other."""
    network = create_model(preset)
    assert isinstance(network, CapsNet)
    modules = [*network.backbone.modules(), network.primary_capsules.convs[0]]
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    names = [*(f"stem {n}" for n in range(1, len(convolutions) - 1)), "first", "primary"]
    _, height, width = network.in_shape
    found = []
    for n, (name, each) in enumerate(zip(names, convolutions, strict=True)):
        kernel, stride = each.kernel_size[0], each.stride[0]
        sizes = (each.in_channels, each.out_channels, kernel, stride, height, width)
        found.append(Shape(f"{preset}, {name}", *sizes, images=n == 0))
        height, width = ((size - kernel) // stride + 1 for size in (height, width))
    return found


def work(shape: Shape, tensors: tuple[Tensor, Tensor, Tensor], what: str, backend: str) -> tuple[Tensor, ...]:
    """The output, and with a backward pass the gradients."""
    features, weight, bias = tensors
    if what == "forward":
        with torch.no_grad():
            return (convolve(features, weight, bias, shape.stride, backend=backend),)
    output = convolve(features, weight, bias, shape.stride, backend=backend)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return (output.detach(), *torch.autograd.grad(output, wanted, torch.ones_like(output)))


def check(plan: Plan) -> list[str]:
    """Which ways compute something else than the plain one; empty if none does."""
    wrong = []
    for shape in itertools.chain.from_iterable(map(shapes_of, plan.choice_presets)):
        tensors = shape.make(2)
        plain = work(shape, tensors, PASSES[1], "plain")
        for backend in ("auto", *WAYS[1:]):
            for ours, wanted in zip(work(shape, tensors, PASSES[1], backend), plain, strict=True):
                off = ((ours - wanted).norm() / wanted.norm()).item()
                if not off <= 1e-4:
                    wrong.append(f"{shape.name}: {backend} is {off:.1e} off, 1e-4 allowed")
    return wrong


def measure(plan: Plan) -> Part:
    """The times of all ways, and the worst choice."""
    part = new_part()
    shapes = [shape for preset in plan.choice_presets for shape in shapes_of(preset)]
    goal = BY_NAME[CHOICE].goal
    assert goal is not None
    worst = 0.0
    for shape, what, batch in itertools.product(shapes, PASSES, plan.choice_batches):
        value, records = _compare(shape, what, batch, plan.choice_seconds)
        if value > goal:
            value, records = _compare(shape, what, batch, 3 * plan.choice_seconds)
        part.records.extend(records)
        worst = max(worst, value)
    part.figures[CHOICE] = worst
    return part


def _compare(shape: Shape, what: str, batch: int, seconds: float) -> tuple[float, list[Record]]:
    """Auto's time over that of the fastest way, and the lines of the CSV."""
    tensors = shape.make(batch)
    works: dict[str, Callable[[], float]] = {
        backend: timed(partial(work, shape, tensors, what, backend)) for backend in ("auto", *WAYS)
    }
    warm = {name: values[-1] for name, values in in_turns(works, 1).items()}
    if sum(warm.values()) < 1e3 * seconds:  # the first call prepares more than the later ones
        warm = {name: values[-1] for name, values in in_turns(works, 1).items()}
    fastest = min(warm.values())
    left = {name: each for name, each in works.items() if name == "auto" or warm[name] <= SLOWER * fastest}
    rounds = int(1e3 * seconds / sum(warm[name] for name in left))
    times = in_turns(left, min(max(rounds, LEAST), MOST))
    ratios = {name: ratio(times["auto"], values).value for name, values in times.items() if name != "auto"}
    # of a rule that chooses a way that is not timed further, the warm-up tells
    ratios |= {name: warm["auto"] / warm[name] for name in WAYS if name not in left and not ratios}
    best = max(ratios, key=lambda name: ratios[name])
    sizes = {"convolution": shape.name, **shape._asdict()}
    del sizes["name"], sizes["images"]
    records: list[Record] = []
    for name in works:
        record: Record = {**sizes, "batch": batch, "pass": what, "backend": name}
        record |= summary(times[name]) if name in times else summary([warm[name]]) | {"rounds": 0}
        record |= {"auto_over_best": round(ratios[best], 4), "best": best} if name == "auto" else {}
        records.append(record)
    return ratios[best], records
