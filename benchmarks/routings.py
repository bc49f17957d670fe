"""The sections ``routing`` and ``costs`` of speed.py: layers alone, with dynamic and with other routings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from contenders import Layer, Row, Sizes, expect
from measuring import Work, isolated, peak_mib, ratio, times_in_turns
from naive import naive_routing
from torch import Tensor

from torchcaps import create_model, route, squash
from torchcaps.nn import Capsules, DenseCapsules, DenseVotes

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
    """Compare all routings with the reference in float64.

    float32 may be off twice as far as the plain formulation. On a GPU it may be off by 1e-5, because matrix products
    add 9,216 products in a row there, where the plain formulation adds them in a tree.
    """
    least = torch.finfo(torch.float32).eps if device == "cpu" else 5e-6
    exact_layer = new_layer(batch, *layer, dtype=torch.float64, device=device)
    for case, name in itertools.product(CASES, ROUTINGS):
        exact = run_routing(ROUTINGS["reference"], case, *exact_layer)
        plain = run_routing(ROUTINGS["reference"], case, *new_layer(batch, *layer, device=device))
        ours = run_routing(ROUTINGS[name], case, *new_layer(batch, *layer, device=device))
        for found, other, wanted in zip(ours, plain, exact, strict=True):
            error = ((other.double() - wanted).norm() / wanted.norm()).item()
            allowed = 2 * max(error, least) if name == "torchcaps" else 1e-4
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
        name: isolated("routings", "large_layer", name, sizes.large_batch, sizes.large)
        for name in ("torchcaps", "naive")
    }
    (our_time, our_peak), (time, peak) = found.values()
    yield Row("large layer, peak memory: torchcaps ÷ naive", our_peak / peak)
    yield Row("large layer, time: torchcaps ÷ naive", our_time / time)


def large_layer(name: str, batch: int, layer: Layer) -> tuple[float, float]:
    """Milliseconds of a forward and backward pass in this process, and its peak memory in MiB."""
    work = partial(run_routing, ROUTINGS[name], CASES[2], *new_layer(batch, *layer))
    peak = peak_mib(lambda: work, 1)
    return times_in_turns({name: work}, 1)[name][0], peak


# ---- other routings

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
    """A layer, and a network, with each routing, forward and backward, over the same with uniform coupling."""
    uniform: dict[str, Any] = {"routing": {"name": "dynamic", "num_iterations": 1}}
    steps: dict[str, Callable[[dict[str, Any]], Work]] = {
        "MNIST's layer": partial(layer_step, batch=sizes.batch // 2, layer=sizes.layer),
        "64×16 to 10×16": partial(layer_step, batch=128, layer=(64, 16, 10, 16)),
        "step of compact": partial(network_step, batch=sizes.batch),
    }
    for where, new_step in steps.items():
        works = {name: new_step(options) for name, options in ({"uniform": uniform} | COSTS).items()}
        times = times_in_turns(works, sizes.rounds, sizes.seconds / 4)
        for name in COSTS:
            both = {each: times[each] for each in (name, "uniform")}
            yield Row(f"{where}, {name} ÷ uniform coupling", ratio(times[name], times["uniform"]), both)


def network_step(options: dict[str, Any], batch: int) -> Work:
    """A training step of ``compact`` with Adam."""
    torch.manual_seed(0)
    network = create_model("compact", **options)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    images, labels = torch.rand(batch, *network.in_shape), torch.arange(batch) % network.num_classes

    def work() -> None:
        network.loss(network(images, network.decoder_targets(labels)), images, labels).total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


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
