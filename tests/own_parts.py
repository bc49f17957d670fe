"""Parts of a user's own, as small as they can be: three routings, a backbone, and a network of two layers of them.

They are known only until the end of a test that calls :func:`register`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from torchcaps.nn import Routed, Routing, Votes
from torchcaps.ops.squash import safe_norm, squash
from torchcaps.parts import PARTS, part_of
from torchcaps.ranges import PositiveFactor, Size, Width


@torchcaps.register("routing", "cosine")
class Cosine(Routing):
    """One step: coupling by the cosine of the votes' mean.

    Args:
        temperature: What the cosine is divided by.
    """

    def __init__(self, temperature: PositiveFactor = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        mean = votes.weighted_sum(None)
        coupling = votes.compete(votes.agreement(mean / safe_norm(mean, keepdim=True)) / self.temperature)
        return Routed(squash(votes.weighted_sum(coupling)), coupling=coupling if return_coupling else None)


@torchcaps.register("routing", "silent")
class Silent(Routing):
    """The squashed sum of the votes: there is no coupling."""

    softmax_over = None

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        return Routed(squash(votes.weighted_sum(None)))


@torchcaps.register("routing", "active")
class Active(Routing):
    """Poses that all have the same length, and activations that say which of them is there: the last one the most."""

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        coupling = votes.compete(votes.zeros())
        mean = votes.weighted_sum(coupling)
        order = torch.arange(mean.shape[1], dtype=mean.dtype, device=mean.device)
        active = ((order + mean.mean(2).sigmoid()) / mean.shape[1]).clamp(0, 1)
        poses = 3 * mean / safe_norm(mean, keepdim=True)
        return Routed(poses, active, coupling if return_coupling else None)


@torchcaps.register("backbone", "pooled")
class Pooled(nn.Module):
    """A convolution and pooling.

    Args:
        in_channels: Channels of the images.
        pooled_channels: Channels of its convolution.
    """

    def __init__(self, in_channels: Size, *, pooled_channels: Width = 6) -> None:
        super().__init__()
        self.pooled_channels = pooled_channels
        self.conv, self.pool = nn.Conv2d(in_channels, pooled_channels, 3), nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.pool(self.conv(images).relu())
        return maps


OWN = {part: PARTS[part[0]].pop(part[1]) for part in map(part_of, (Cosine, Silent, Active, Pooled))}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register all of them until the end of a test."""
    for (kind, name), part in OWN.items():
        monkeypatch.setitem(PARTS[kind], name, part)


def two_layers(conv: dict[str, Any] | None = None, dense: dict[str, Any] | None = None) -> tuple[dict[str, Any], ...]:
    """A layer of three types on a map, and one of the classes.

    Args:
        conv: Other values for options of the first.
        dense: Other values for options of the second.
    """
    first = {"name": "conv", "layer_types": 3, "capsule_dim": 4} | (conv or {})
    return first, {"name": "dense", "capsule_dim": 5} | (dense or {})
