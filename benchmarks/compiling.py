"""The section ``compile`` of speed.py: training steps with torch.compile beside eager ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from contenders import Contender, Row, Sizes, compare, expect, new_batch
from measuring import Work

from torchcaps import create_model
from torchcaps.models import Network


def compiled_steps(sizes: Sizes) -> Iterator[Row]:
    """Steps of sabour2017, in plain formulations and in ours, and of other presets."""
    eager = Contender("torchcaps", sizes.network)
    batch = new_batch(sizes.batch, eager.network)
    for name in ("naive", "einsum", "torchcaps"):
        other = Contender(name, sizes.network)
        _compile(other.module, sizes)
        for _ in range(2):  # the second loss is equal where the gradients of all weights were
            expect(f"loss of a compiled step, {name}", other.step(*batch), eager.step(*batch), 1e-3)
        works = {f"{name} (compiled)": partial(other.step, *batch), "torchcaps": partial(eager.step, *batch)}
        yield compare(f"step, full: {name} (compiled) ÷ torchcaps", works, sizes.rounds)
        eager = Contender("torchcaps", sizes.network)
    for preset, images in sizes.compiled_presets.items():
        yield compare(f"{preset}, step: torchcaps (compiled) ÷ torchcaps", _both(preset, images, sizes), sizes.rounds)


def _compile(module: torch.nn.Module, sizes: Sizes) -> None:
    torch._dynamo.reset()
    module.compile(fullgraph=True, backend=sizes.compiler)


def _both(preset: str, images: int, sizes: Sizes) -> dict[str, Work]:
    """Forward, loss and backward of a preset, compiled and eager."""
    works: dict[str, Work] = {}
    losses = []
    for name in ("compiled", "eager"):
        torch.manual_seed(0)
        network = create_model(preset)
        if name == "compiled":
            _compile(network, sizes)
        data = torch.rand(images, *network.in_shape), torch.arange(images) % network.num_classes
        works[name] = partial(_step, network, *data)
        with torch.no_grad():
            network.eval()
            losses.append(network.loss(network(data[0], data[1]), *data).classification)
        network.train()
    expect(f"loss of {preset}, compiled", losses[0], losses[1], 1e-3)
    return works


def _step(network: Network, images: torch.Tensor, labels: torch.Tensor) -> None:
    network.loss(network(images, network.decoder_targets(labels)), images, labels).total.backward()
    network.zero_grad()
