"""The section ``mixtures`` of speed.py: EM and variational Bayes beside the plain formulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from contenders import Layer, Row, Sizes, expect
from measuring import Work, isolated, peak_mib, ratio, times_in_turns
from naive_mixtures import naive_network
from torch import Tensor, nn

from torchcaps.models import create_model
from torchcaps.nn import Capsules, ConvCapsules, DenseCapsules

MIXTURES = {"em": "hinton2018-paper", "vb": "vb2020"}
CASES = (("em", "types"), ("em", "types-and-positions"), ("vb", "types-and-positions"), ("em", ""), ("vb", ""))
"""Routings, and what the capsules of the networks' maps compete over; empty for MNIST's layer."""


def new_mixture(
    routing: str, batch: int, layer: Layer, over: str = "", device: str = "cpu", **options: Any
) -> tuple[nn.Module, Work]:
    """A network of matrix capsules, or MNIST's dense layer if ``over`` is empty, and a function that returns its input.

    ``options`` are changes to the network.
    """
    torch.manual_seed(0)
    if not over:
        I, K, J, D = layer
        capsules = Capsules(
            torch.randn(batch, I, K, device=device, requires_grad=True), torch.rand(batch, I, device=device)
        )
        return DenseCapsules(I, K, J, D, routing=routing).to(device), lambda: capsules
    network = create_model(MIXTURES[routing], (1, 28, 28), 10, **options).to(device)
    for module in network.modules():
        if isinstance(module, ConvCapsules):
            module.compete_over = over  # type: ignore[assignment]
    images = torch.rand(batch, 1, 28, 28, device=device)
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
    for routing, over in CASES:
        what = f"{MIXTURES[routing]}, {over.replace('-', ' ')}" if over else f"MNIST's layer, {routing.upper()}"
        number = batch if over else 2 * batch
        ours, given = new_mixture(routing, number, sizes.layer, over)
        plain = naive_network(ours)
        check_mixture(what, ours, plain, given)
        for both in (False, True):
            modules = {"plain": plain, "torchcaps": ours}
            if both and over and sizes.compile:  # a compilation takes about a minute
                torch._dynamo.reset()
                modules["compiled"] = naive_network(ours)
                modules["compiled"].compile(fullgraph=True)
            works = {name: partial(run_mixture, module, given, both) for name, module in modules.items()}
            times = times_in_turns(works, max(sizes.rounds // 2, 1))  # the plain step takes seconds
            for name in [each for each in modules if each != "torchcaps"]:
                how = f"{what}, forward{' + backward' if both else ''}: {name} ÷ torchcaps"
                yield Row(how, ratio(times[name], times["torchcaps"]), times)
        if not over:
            peaks = [
                isolated("mixtures", "mixture_peak", name, routing, number, sizes.layer) for name in ("ours", "plain")
            ]
            yield Row(f"{what}, peak memory: torchcaps ÷ plain", peaks[0] / peaks[1])


def mixture_peak(name: str, routing: str, batch: int, layer: Layer) -> float:
    """Peak memory of two forward and backward passes of the dense layer in this process, MiB."""
    ours, given = new_mixture(routing, batch, layer)
    module = ours if name == "ours" else naive_network(ours)
    return peak_mib(lambda: partial(run_mixture, module, given, True), 2)
