"""The ratios of docs/speed.md: torchcaps beside published code, its own plain ways, and other routings.

    python benchmarks/speed.py                          # all sections: about 45 minutes of an otherwise idle machine
    python benchmarks/speed.py step routing             # some of the sections, which --help lists
    python benchmarks/speed.py --isa avx2               # the same on this CPU without AVX-512
    python benchmarks/speed.py --out speed.jsonl        # appends a line for each ratio
    python benchmarks/speed.py --table speed.jsonl      # measures nothing; prints the table of a file, as Markdown
    python benchmarks/speed.py --quick                  # tiny sizes, to see that everything works

Each section first compares outputs, losses and gradients of its contenders; a difference stops the run with exit status
1. Then the contenders of a comparison run in turns. A ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import torch
import torch.nn.functional as F
from measuring import (
    AS_AVX2,
    Ratio,
    Work,
    environment,
    isolated,
    multiplies_bf16,
    peak_mib,
    ratio,
    times_in_turns,
)
from naive import Convolutions, NaiveCapsNet, einsum_routing, naive_routing
from naive_mixtures import naive_network
from torch import Tensor, nn

from torchcaps import fit, route, squash
from torchcaps.datasets import ImageSet
from torchcaps.export import Description, OnnxModel, export_onnx
from torchcaps.models import CapsNet, create_model
from torchcaps.nn import Capsules, ConvCapsules, DenseCapsules, DenseVotes
from torchcaps.ops.convolution import Backend, convolve
from torchcaps.training import Progress, Recipe

Layer = tuple[int, int, int, int]
"""I, K, J, D."""


class Sizes(NamedTuple):
    """What is measured, and how often."""

    batch: int = 128
    rounds: int = 7
    network: Mapping[str, Any] = {}
    """Differences from sabour2017 on MNIST's size."""
    layer: Layer = (1152, 8, 10, 16)
    """The layer that is routed alone."""
    large: Layer = (8192, 8, 100, 16)
    """A layer whose votes take 17 GiB in the naive formulation, at a batch of 16."""
    large_batch: int = 16
    many: int = 512
    choice_presets: tuple[str, ...] = (
        "sabour2017",
        "sabour2017-multimnist",
        "sabour2017-cifar10",
        "sabour2017-smallnorb",
        "sabour2017-svhn",
        "compact",
    )
    choice_batches: tuple[int, ...] = (1, 8, 128)
    seconds: float = 0.2
    """A measurement of a short piece of work repeats it for about so long."""
    export_presets: tuple[str, ...] = ("sabour2017", "compact")
    compiled_presets: Mapping[str, int] = {"compact": 64, "first": 64, "hinton2018-paper": 8}
    """Presets that are compiled besides sabour2017, and the images of their batches."""
    compiler: str = "inductor"
    """The backend of ``torch.compile``."""
    compile: bool = True
    """Whether plain formulations are also compiled, which takes minutes."""


QUICK = Sizes(
    batch=2,
    rounds=2,
    network={"in_shape": (1, 18, 18), "conv_channels": 8, "primary_types": 4, "decoder_hidden": (8,)},
    layer=(36, 8, 10, 16),
    large=(64, 8, 20, 16),
    large_batch=2,
    many=8,
    choice_presets=("compact",),
    choice_batches=(1,),
    seconds=0.0,
    export_presets=("compact",),
    compiled_presets={"first": 2},
    compiler="aot_eager",
    compile=False,
)


class Row(NamedTuple):
    """A ratio, with the median milliseconds of the contenders where there are such."""

    what: str
    ratio: Ratio | float
    times: Mapping[str, list[float]] = {}


class WrongResultError(Exception):
    """Contenders compute different things."""


def expect(what: str, ours: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Raise `WrongResultError` if ours are further from the wanted numbers than this share of their norm."""
    off = ((ours.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not off <= tolerance:
        raise WrongResultError(f"{what}: off by {off:.1e}, {tolerance:.0e} allowed")


# ---- convolutions

Convolution = Callable[..., Tensor]


class ConvolutionCase(NamedTuple):
    """A convolution of a network with random features and a random gradient of its output."""

    features: Tensor
    weight: Tensor
    bias: Tensor
    stride: int

    def placed(self) -> ConvolutionCase:
        """The same numbers in the memory order of torchcaps' networks: features (H, W, B, C)."""
        features = self.features.detach().permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        return self._replace(features=features.requires_grad_(self.features.requires_grad))

    def forward(self, convolution: Convolution) -> Tensor:
        """The output alone; nothing is kept for a backward pass."""
        with torch.no_grad():
            return convolution(*self)

    def both(self, convolution: Convolution) -> tuple[Tensor, ...]:
        """The output and the gradients of weight, bias and, but for images, features."""
        output = convolution(*self)
        wanted = [each for each in self[:3] if each.requires_grad]
        return (output.detach(), *torch.autograd.grad(output, wanted, torch.cos(output.detach())))


def convolution_cases(network: CapsNet, batch: int) -> Iterator[ConvolutionCase]:
    """The convolutions of a network up to its primary capsules, one after the other."""
    found = [each for each in network.backbone.modules() if isinstance(each, nn.Conv2d)]
    shape = torch.Size((batch, *network.in_shape))
    for n, each in enumerate([*found, network.primary_capsules.convs[0]]):
        assert isinstance(each, nn.Conv2d)
        weight = each.weight.detach().clone().requires_grad_()
        bias = torch.zeros(len(weight)) if each.bias is None else each.bias.detach().clone()
        yield ConvolutionCase(
            torch.randn(shape).requires_grad_(n > 0), weight, bias.requires_grad_(), int(each.stride[0])
        )
        shape = F.conv2d(torch.empty(shape, device="meta"), weight.to("meta"), stride=each.stride).shape


def convolution(sizes: Sizes) -> Iterator[Row]:
    """The two convolutions of sabour2017, each alone, against `F.conv2d` in PyTorch's memory order."""
    torch.manual_seed(0)
    first, primary = convolution_cases(new_network(sizes), sizes.batch)
    for name, case in (("first", first), ("primary", primary)):
        small = case._replace(features=case.features.detach()[:8].requires_grad_(case.features.requires_grad))
        for ours, wanted in zip(small.placed().both(convolve), small.both(F.conv2d), strict=True):
            expect(f"{name} convolution", ours, wanted, 1e-4)
    for name, case, run, what in (
        ("primary", primary, ConvolutionCase.both, "forward + backward"),
        ("first", first, ConvolutionCase.both, "forward + backward"),
        ("primary", primary, ConvolutionCase.forward, "forward only, weights unchanged"),
    ):
        works = {"torchcaps": partial(run, case.placed(), convolve), "F.conv2d": partial(run, case, F.conv2d)}
        yield compare(f"{name} convolution, {what}: torchcaps ÷ F.conv2d", works, sizes.rounds)


def choice(sizes: Sizes) -> Iterator[Row]:
    """The way that `convolve` chooses against each way by force, on the convolutions of the presets."""
    ways: tuple[Backend, ...] = ("plain", "columns", "transform")
    auto: Backend = "auto"
    worst = Row("", 0.0)
    for preset, batch in itertools.product(sizes.choice_presets, sizes.choice_batches):
        network = create_model(preset)
        assert isinstance(network, CapsNet)
        for n, case in enumerate(convolution_cases(network, batch)):
            for way in (auto, *ways[1:]):
                both = case.both(partial(convolve, backend=way)), case.both(partial(convolve, backend="plain"))
                for ours, wanted in zip(*both, strict=True):
                    expect(f"{preset}, convolution {n + 1}, {way}", ours, wanted, 1e-4)
            for run in (ConvolutionCase.forward, ConvolutionCase.both):
                works: dict[str, Work] = {
                    way: partial(run, case.placed(), partial(convolve, backend=way)) for way in (auto, *ways)
                }
                times = times_in_turns(works, max(sizes.rounds // 2, 1), sizes.seconds / 4)
                best = max((ratio(times["auto"], times[way]) for way in ways), key=lambda found: found.value)
                if not isinstance(worst.ratio, Ratio) or best.value > worst.ratio.value:
                    worst = Row(f"{preset}, convolution {n + 1}, {run.__name__}, batch {batch}", best, times)
    print(f"the worst choice: {worst.what}")
    yield worst._replace(what="the way that is chosen ÷ the fastest way, worst of all shapes")


# ---- the whole step


class Contender:
    """A network with its optimizer and precision.

    Args:
        name: ``"torchcaps"``, ``"naive"``, ``"einsum"`` or ``"convolutions"``.
        network: The differences from sabour2017.
        stop_gradient: Take gradients through the last weighted sum only.
        bf16: Compute in bfloat16 by autocast.
    """

    def __init__(
        self,
        name: str,
        network: Mapping[str, Any],
        stop_gradient: bool = False,
        bf16: bool = False,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.network = new_network(Sizes(network=network), stop_gradient=stop_gradient).to(device)
        self.module: nn.Module = self.network
        if name in ("naive", "einsum"):
            routing = einsum_routing if name == "einsum" else naive_routing
            self.module = NaiveCapsNet(self.network, stop_gradient, routing)
        elif name == "convolutions":
            self.module = Convolutions(self.network)
        if name != "torchcaps":
            self.network.to("meta")  # its weights were copied, and its loss needs none
        if bf16:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=bf16)
        self.optimizer = torch.optim.Adam(self.module.parameters(), fused=True)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The margin and reconstruction loss; a mean of squares for the convolutions alone."""
        with self.autocast():
            if isinstance(self.module, Convolutions):
                maps: Tensor = self.module(images)
                return maps.float().square().mean()
            output = self.module(images, labels)
        return self.network.loss(output, images, labels).total

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Forward, loss, backward and Adam; returns the loss."""
        loss = self.loss(images, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def infer(self, images: Tensor, _: Tensor) -> None:
        """The class capsules, or the map of the convolutions alone."""
        with torch.inference_mode(), self.autocast():
            if isinstance(self.module, NaiveCapsNet):
                self.module.capsules(images)
            elif isinstance(self.module, CapsNet):
                self.module.class_capsules(self.module.primary(images))
            else:
                self.module(images)


def new_network(sizes: Sizes, **more: Any) -> CapsNet:
    """sabour2017, with what differs."""
    network = create_model("sabour2017", **sizes.network, **more)
    assert isinstance(network, CapsNet)
    return network


def new_batch(number: int, network: CapsNet, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random images and labels for a network."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(number, *network.in_shape, generator=generator)
    return images.to(device), torch.randint(network.num_classes, (number,), generator=generator).to(device)


def step(sizes: Sizes) -> Iterator[Row]:
    """Steps, peak memory, inference and an epoch of sabour2017 on MNIST's size."""
    ours, floor = Contender("torchcaps", sizes.network), Contender("convolutions", sizes.network)
    naive, batch = Contender("naive", sizes.network), new_batch(sizes.batch, ours.network)
    small = new_batch(8, ours.network)
    works: dict[str, Work]
    for stop in (True, False):
        pair = [Contender(name, sizes.network, stop) for name in ("torchcaps", "naive")]
        for _ in range(2):  # the second loss is equal where the gradients of all weights were
            expect("loss of a step", pair[0].step(*small), pair[1].step(*small), 1e-4)
        if not stop:
            works = {"torchcaps": partial(ours.step, *batch), "convolutions": partial(floor.step, *batch)}
            yield compare("step, full: torchcaps ÷ convolutions alone", works, sizes.rounds)
        works = {"naive": partial(pair[1].step, *batch), "torchcaps": partial(pair[0].step, *batch)}
        yield compare(f"step, {'stopped' if stop else 'full'}: naive ÷ torchcaps", works, sizes.rounds)
    if multiplies_bf16():
        half = Contender("torchcaps", sizes.network, bf16=True)
        expect("loss in bfloat16", half.loss(*small).detach(), Contender("torchcaps", sizes.network).loss(*small), 5e-2)
        works = {"bf16": partial(half.step, *batch), "float32": partial(ours.step, *batch)}
        yield compare("step, full: torchcaps (bf16) ÷ torchcaps (float32)", works, sizes.rounds)
    peaks = [isolated("speed", "step_peak", name, sizes.batch, sizes.network) for name in ("torchcaps", "naive")]
    yield Row("step, peak memory: torchcaps ÷ naive", peaks[0] / peaks[1])
    image, images = new_batch(1, ours.network), new_batch(sizes.many, ours.network)
    works = {"torchcaps": partial(ours.infer, *image), "convolutions": partial(floor.infer, *image)}
    yield compare("one image, inference: torchcaps ÷ convolutions alone", works, 5 * sizes.rounds, sizes.seconds)
    works = {"naive": partial(naive.infer, *images), "torchcaps": partial(ours.infer, *images)}
    yield compare("512 images, inference: naive ÷ torchcaps", works, sizes.rounds)
    data = (255 * torch.rand(10 * sizes.batch, *ours.network.in_shape)).to(torch.uint8)
    train = ImageSet(data, torch.randint(10, (len(data),)))
    recipe = Recipe(epochs=1, batch_size=sizes.batch, max_shift=2)
    pooled = nn.Sequential(floor.module, nn.AdaptiveAvgPool2d(1), nn.Flatten())  # scores, as fit asks for
    run = partial(fit, dataset=train, recipe=recipe, precision="32", progress=Progress())
    works = {
        "torchcaps": partial(run, ours.network),
        "convolutions": partial(run, pooled, loss=_mean_square),
    }
    yield compare("epoch of torchcaps.fit: torchcaps ÷ convolutions alone", works, max(sizes.rounds // 2, 1))


def compiled(sizes: Sizes) -> Iterator[Row]:
    """Steps compiled with torch.compile."""
    from compiling import compiled_steps  # which imports this module

    return compiled_steps(sizes)


def _mean_square(output: Tensor, _: Tensor) -> Tensor:
    return output.float().square().mean()


def step_peak(name: str, batch: int, network: dict[str, Any]) -> float:
    """Peak memory of three steps in this process, MiB, beyond Python, torch and what its optimizer imports."""
    torch.optim.Adam([torch.zeros(1, requires_grad=True)], fused=True)

    def make() -> Work:
        contender = Contender(name, network)
        return partial(contender.step, *new_batch(batch, contender.network))

    return peak_mib(make, 3)


# ---- routing alone

Routing = Callable[[Tensor, Tensor, bool], Tensor]


def own_routing(poses: Tensor, weight: Tensor, stop: bool) -> Tensor:
    """Dynamic routing as a user would write it: three lines over votes that are never built."""
    votes = DenseVotes(poses, weight)
    logits = votes.zeros()
    for iteration in range(3):
        coupling = votes.compete(logits)
        capsules = squash(votes.weighted_sum(coupling.detach() if stop else coupling))
        if iteration < 2:
            logits = logits + votes.agreement(capsules)
    return capsules


ROUTINGS: dict[str, Routing] = {
    "torchcaps": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop).poses,
    "reference": lambda poses, weight, stop: route(poses, weight, stop_gradient=stop, backend="reference").poses,
    "naive": lambda poses, weight, stop: naive_routing(poses, weight, 3, stop),
    "own": own_routing,
}
CASES = ("forward", "forward + backward, stopped", "forward + backward, full")


def new_layer(
    batch: int, I: int, K: int, J: int, D: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Poses (B, I, K) and weights (I, J, D, K) in the memory order of the library's layers."""
    generator = torch.Generator().manual_seed(0)
    poses = torch.randn(batch, K, I, generator=generator).mul_(0.2).to(device, dtype).transpose(1, 2)
    weight = torch.randn(J, D, K, I, generator=generator).mul_(0.1).to(device, dtype).permute(3, 0, 1, 2)
    return poses.requires_grad_(), weight.requires_grad_()


def run_routing(routing: Routing, case: str, poses: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The capsules, and the gradients of poses and weights where there is a backward pass."""
    if case == "forward":
        with torch.no_grad():
            return (routing(poses, weight, False),)
    capsules = routing(poses, weight, case.endswith("stopped"))
    return (capsules.detach(), *torch.autograd.grad(capsules, (poses, weight), torch.cos(capsules.detach())))


def check_routing(batch: int, layer: Layer, device: str = "cpu") -> None:
    """Compare all routings with the reference in float64: float32 may be off twice as far as the plain formulation."""
    exact_layer = new_layer(batch, *layer, dtype=torch.float64, device=device)
    for case, name in itertools.product(CASES, ROUTINGS):
        exact = run_routing(ROUTINGS["reference"], case, *exact_layer)
        plain = run_routing(ROUTINGS["reference"], case, *new_layer(batch, *layer, device=device))
        ours = run_routing(ROUTINGS[name], case, *new_layer(batch, *layer, device=device))
        for found, other, wanted in zip(ours, plain, exact, strict=True):
            error = ((other.double() - wanted).norm() / wanted.norm()).item()
            allowed = 2 * max(error, torch.finfo(torch.float32).eps) if name == "torchcaps" else 1e-4
            expect(f"routing, {name}, {case}, batch {batch}", found, wanted, allowed)


def routing(sizes: Sizes) -> Iterator[Row]:
    """MNIST's layer, and one whose votes do not fit into common memories, each in a process of its own."""
    for batch in (min(sizes.batch, 8), 1):
        check_routing(batch, sizes.layer)
    layer = new_layer(sizes.batch, *sizes.layer)
    for case in CASES:
        works = {name: partial(run_routing, each, case, *layer) for name, each in ROUTINGS.items()}
        times = times_in_turns(works, sizes.rounds, sizes.seconds)
        yield Row(f"routing, {case}: naive ÷ torchcaps", ratio(times["naive"], times["torchcaps"]), times)
        yield Row(f"routing, {case}: three lines of one's own ÷ torchcaps", ratio(times["own"], times["torchcaps"]))
    found = {
        name: isolated("speed", "large_layer", name, sizes.large_batch, sizes.large) for name in ("torchcaps", "naive")
    }
    (our_time, our_peak), (time, peak) = found.values()
    yield Row("large layer, peak memory: torchcaps ÷ naive", our_peak / peak)
    yield Row("large layer, time: torchcaps ÷ naive", our_time / time)


def large_layer(name: str, batch: int, layer: Layer) -> tuple[float, float]:
    """Milliseconds of a forward and backward pass in this process, and its peak memory in MiB."""
    work = partial(run_routing, ROUTINGS[name], CASES[2], *new_layer(batch, *layer))
    peak = peak_mib(lambda: work, 1)
    return times_in_turns({name: work}, 1)[name][0], peak


# ---- EM and variational Bayes

MIXTURES = {"em": "hinton2018-paper", "vb": "vb2020"}


def new_mixture(routing: str, batch: int, layer: Layer, over: str = "") -> tuple[nn.Module, Work]:
    """A network of matrix capsules, or MNIST's dense layer if ``over`` is empty, with its arguments in a list."""
    torch.manual_seed(0)
    if not over:
        I, K, J, D = layer
        capsules = Capsules(torch.randn(batch, I, K, requires_grad=True), torch.rand(batch, I))
        return DenseCapsules(I, K, J, D, routing=routing), lambda: capsules
    network = create_model(MIXTURES[routing], (1, 28, 28), 10)
    for module in network.modules():
        if isinstance(module, ConvCapsules):
            module.compete_over = over  # type: ignore[assignment]
    images = torch.rand(batch, 1, 28, 28)
    return network, lambda: images


def mixture_result(module: nn.Module, given: Work) -> tuple[Tensor, Tensor]:
    """Poses and activations of a layer, or the scores of a network, twice."""
    output = module(given())
    if not isinstance(output, Capsules):
        return output.scores, output.scores
    assert output.activations is not None
    return output.poses, output.activations


def run_mixture(module: nn.Module, given: Work, both: bool) -> None:
    """A forward pass, or that and a backward pass."""
    with torch.set_grad_enabled(both):
        poses, active = mixture_result(module, given)
        if both:
            (poses.square().sum() + active.sum()).backward()
            module.zero_grad()


def check_mixture(what: str, ours: nn.Module, plain: nn.Module, given: Work) -> None:
    """Compare results and the gradients of all weights."""
    for found, wanted in zip(mixture_result(ours, given), mixture_result(plain, given), strict=True):
        expect(what, found.detach(), wanted.detach(), 1e-3)
    for module in (ours, plain):
        poses, active = mixture_result(module, given)
        (poses.square().sum() + active.sum()).backward()
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        if own.ndim > 1 and own.grad is not None and other.grad is not None:
            expect(f"{what}, gradients", own.grad, other.grad, 5e-2)  # EM in float32 is about 1e-3 off itself
        own.grad = other.grad = None


def mixtures(sizes: Sizes) -> Iterator[Row]:
    """Steps of hinton2018-paper and vb2020 and MNIST's layer alone, against the plain formulation; memory."""
    batch = max(sizes.batch // 4, 2)
    for routing, over in itertools.product(MIXTURES, ("types", "types-and-positions", "")):
        what = f"{MIXTURES[routing]}, {over.replace('-', ' ')}" if over else f"MNIST's layer, {routing.upper()}"
        number = batch if over else 2 * batch
        ours, given = new_mixture(routing, number, sizes.layer, over)
        plain = naive_network(ours)
        check_mixture(what, ours, plain, given)
        modules = {"plain": plain, "torchcaps": ours}
        if sizes.compile:
            modules["compiled"] = naive_network(ours)
            modules["compiled"].compile()
        for both in (False, True):
            works = {name: partial(run_mixture, module, given, both) for name, module in modules.items()}
            times = times_in_turns(works, sizes.rounds)
            for name in [each for each in modules if each != "torchcaps"]:
                how = f"{what}, forward{' + backward' if both else ''}: {name} ÷ torchcaps"
                yield Row(how, ratio(times[name], times["torchcaps"]), times)
        if not over:
            peaks = [
                isolated("speed", "mixture_peak", name, routing, number, sizes.layer) for name in ("ours", "plain")
            ]
            yield Row(f"{what}, peak memory: torchcaps ÷ plain", peaks[0] / peaks[1])


def mixture_peak(name: str, routing: str, batch: int, layer: Layer) -> float:
    """Peak memory of two forward and backward passes of the dense layer in this process, MiB."""
    ours, given = new_mixture(routing, batch, layer)
    module = ours if name == "ours" else naive_network(ours)
    return peak_mib(lambda: partial(run_mixture, module, given, True), 2)


# ---- the other routings, and exported networks

COSTS: dict[str, dict[str, Any]] = {
    "dynamic, 3 iterations": {"routing": "dynamic"},
    "self-attention": {"routing": "self-attention"},
    "inverted attention, 2 iterations": {"routing": "inverted-attention"},
    "self-routing": {"routing": "self"},
    "EM, 3 iterations": {"routing": "em"},
    "EM as the code, 3 iterations": {"routing": "em-code"},
    "VB, 3 iterations": {"routing": "vb"},
    "shared votes, uniform coupling": {"routing": {"name": "dynamic", "num_iterations": 1}, "transform": "shared"},
}


def costs(sizes: Sizes) -> Iterator[Row]:
    """A layer with each routing, forward and backward, over the same layer with uniform coupling."""
    uniform: dict[str, Any] = {"routing": {"name": "dynamic", "num_iterations": 1}}
    for where, layer, batch in (
        ("MNIST's layer", sizes.layer, sizes.batch // 2),
        ("64×16 to 10×16", (64, 16, 10, 16), 128),
    ):
        works = {name: layer_step(options, batch, layer) for name, options in ({"uniform": uniform} | COSTS).items()}
        times = times_in_turns(works, sizes.rounds, sizes.seconds / 4)
        for name in COSTS:
            yield Row(f"{where}, {name} ÷ uniform coupling", ratio(times[name], times["uniform"]))


def layer_step(options: dict[str, Any], batch: int, layer: Layer) -> Work:
    """A forward and a backward pass of a dense layer."""
    I, K, J, D = layer
    torch.manual_seed(0)
    module = DenseCapsules(I, K, J, D, **options)
    capsules = Capsules(torch.randn(batch, I, K, requires_grad=True), torch.rand(batch, I))

    def work() -> None:
        out = module(capsules)
        loss = out.poses.square().sum()
        (loss if out.activations is None else loss + out.activations.sum()).backward()

    return work


def export(sizes: Sizes) -> Iterator[Row]:
    """Lengths and reconstructions of exported networks by onnxruntime against PyTorch, random weights."""
    for preset in sizes.export_presets:
        torch.manual_seed(0)
        model = create_model(preset).eval()
        names = tuple(str(j) for j in range(model.num_classes))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            export_onnx(model, path, Description(in_shape=model.in_shape, class_names=names, preset=preset))
            exported = OnnxModel(path, torch.get_num_threads())
            for batch in (1, 32):
                images = torch.rand(batch, *model.in_shape)
                plain = torch.inference_mode()(partial(model, images))
                expect(f"{preset}, exported", torch.from_numpy(exported(images.numpy()).scores), plain().scores, 1e-4)
                works = {"torch": plain, "onnxruntime": partial(exported, images.numpy())}
                yield compare(
                    f"{preset}, {batch} image{'s' * (batch > 1)}: torch ÷ onnxruntime",
                    works,
                    sizes.rounds,
                    sizes.seconds,
                )


# ---- the command

SECTIONS = {
    "convolution": convolution,
    "choice": choice,
    "step": step,
    "compile": compiled,
    "routing": routing,
    "mixtures": mixtures,
    "costs": costs,
    "export": export,
}


def compare(what: str, works: Mapping[str, Work], rounds: int, seconds: float = 0.0) -> Row:
    """The time of the first of two contenders over that of the second."""
    times = times_in_turns(works, rounds, seconds)
    return Row(what, ratio(*times.values()), times)


def as_json(row: Row, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the file of ratios."""
    value = row.ratio._asdict() if isinstance(row.ratio, Ratio) else {"value": row.ratio}
    numbers = {name: float(f"{number:.4g}") for name, number in value.items()}
    medians = {name: float(f"{sorted(each)[len(each) // 2]:.4g}") for name, each in row.times.items()}
    return {"ratio": row.what, **numbers, "milliseconds": medians, **facts}


def table(path: Path) -> str:
    """The latest value of each ratio, with the middle half of its rounds, a column for each instruction set."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sets = sorted({line["isa"] for line in lines})
    latest = {(line["ratio"], line["isa"]): line for line in lines}
    rows = [["ratio", *sets], ["---"] * (1 + len(sets))]
    for what in dict.fromkeys(line["ratio"] for line in lines):
        rows.append([what, *(_cell(latest.get((what, isa))) for isa in sets)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "not measured"
    spread = f" ({line['low']:.3g} to {line['high']:.3g})" if "low" in line else ""
    return f"{line['value']:.3g}{spread}"


def main(arguments: list[str] | None = None) -> int:
    """Measure some sections, or print a table."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native", help="compute as a CPU without AVX-512")
    parser.add_argument("--rounds", type=int, help=f"of each comparison ({Sizes().rounds})")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, for a machine that others use")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the numbers mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the ratios to this file, as lines of JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of such a file")
    options = parser.parse_args(given)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
    if options.table is not None:
        print(table(options.table))
        return 0
    if options.isa == "avx2" and any(os.environ.get(name) != value for name, value in AS_AVX2.items()):
        # torch reads these when it is loaded, so it takes another process
        return subprocess.run([sys.executable, __file__, *given], env=os.environ | AS_AVX2, check=False).returncode
    torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else Sizes()
    if options.rounds is not None:
        sizes = sizes._replace(rounds=options.rounds)
    facts = environment() | ({"quick": True} if options.quick else {})
    if options.cpu_time:
        measuring.CLOCK, facts["clock"] = time.process_time, "processor"
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for name in options.sections or SECTIONS:
        try:
            for row in SECTIONS[name](sizes):
                line = as_json(row, facts)
                print(f"{row.what:<82}{_cell(line)}", flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except WrongResultError as error:
            print(f"wrong results, the section {name} was not timed further: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    from speed import main as run  # so that sections in other files share this module

    sys.exit(run())
