"""Sizes of the measurements, rows of the table, and networks that train beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring import Ratio, Work, ratio, times_in_turns
from naive import Convolutions, NaiveCapsNet, einsum_routing, naive_routing
from torch import Tensor, nn

from torchcaps.models import CapsNet, create_model

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
    rounds=1,
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


def compare(what: str, works: Mapping[str, Work], rounds: int, seconds: float = 0.0) -> Row:
    """The time of the first of two contenders over that of the second."""
    times = times_in_turns(works, rounds, seconds)
    return Row(what, ratio(*times.values()), times)


# ---- networks


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
            self.module.to(device)
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
