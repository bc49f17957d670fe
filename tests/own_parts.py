"""Parts of a user's own, as small as they can be: three routings, a backbone, and a network of two layers of them.

Nothing here is registered for good: :func:`register` does it for a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from torchcaps.models import BackboneConfig, LayerConfig, RoutingConfig
from torchcaps.models.config import ConvLayerConfig, DenseLayerConfig
from torchcaps.models.fields import PARTS
from torchcaps.nn import Routed, Routing, Votes
from torchcaps.ops.squash import safe_norm, squash
from torchcaps.ranges import PositiveFactor, Width


class Cosine(Routing):
    """One step: coupling by the cosine of the votes' mean."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(
        self, votes: Votes, activations: torch.Tensor | None = None, *, return_coupling: bool = False
    ) -> Routed:
        mean = votes.weighted_sum(None)
        coupling = votes.compete(votes.agreement(mean / safe_norm(mean, keepdim=True)) / self.temperature)
        return Routed(squash(votes.weighted_sum(coupling)), coupling=coupling if return_coupling else None)


class Silent(Routing):
    """The squashed sum of the votes: there is no coupling."""

    softmax_over = None

    def forward(
        self, votes: Votes, activations: torch.Tensor | None = None, *, return_coupling: bool = False
    ) -> Routed:
        return Routed(squash(votes.weighted_sum(None)))


class Active(Routing):
    """Poses that all have the same length, and activations that say which of them is there: the last one the most."""

    def forward(
        self, votes: Votes, activations: torch.Tensor | None = None, *, return_coupling: bool = False
    ) -> Routed:
        coupling = votes.compete(votes.zeros())
        mean = votes.weighted_sum(coupling)
        order = torch.arange(mean.shape[1], dtype=mean.dtype, device=mean.device)
        active = ((order + mean.mean(2).sigmoid()) / mean.shape[1]).clamp(0, 1)
        poses = 3 * mean / safe_norm(mean, keepdim=True)
        return Routed(poses, active, coupling if return_coupling else None)


@dataclass(frozen=True, kw_only=True)
class CosineConfig(RoutingConfig):
    name: ClassVar[str] = "cosine"

    temperature: PositiveFactor = 1.0
    """What the cosine is divided by."""

    def build(self) -> Routing:
        return Cosine(self.temperature)


@dataclass(frozen=True, kw_only=True)
class SilentConfig(RoutingConfig):
    name: ClassVar[str] = "silent"

    def build(self) -> Routing:
        return Silent()


@dataclass(frozen=True, kw_only=True)
class ActiveConfig(RoutingConfig):
    name: ClassVar[str] = "active"

    def build(self) -> Routing:
        return Active()


class Pooled(nn.Module):
    """A convolution and pooling."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(in_channels, channels, 3), nn.MaxPool2d(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.pool(self.conv(images).relu())
        return maps


@dataclass(frozen=True, kw_only=True)
class PooledConfig(BackboneConfig):
    name: ClassVar[str] = "pooled"

    pooled_channels: Width = 6
    """Channels of its convolution."""

    def build(self, in_shape: tuple[int, int, int]) -> nn.Module:
        return Pooled(in_shape[0], self.pooled_channels)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register all of them until the end of a test."""
    for part in (CosineConfig, SilentConfig, ActiveConfig, PooledConfig):
        monkeypatch.setitem(PARTS[part.choice], part.name, part)


def two_layers(conv: dict[str, Any] | None = None, dense: dict[str, Any] | None = None) -> tuple[LayerConfig, ...]:
    """A layer of three types on a map, and one of the classes.

    Args:
        conv: Other values for fields of the first.
        dense: Other values for fields of the second.
    """
    first: dict[str, Any] = {"layer_types": 3, "capsule_dim": 4} | (conv or {})
    second: dict[str, Any] = {"capsule_dim": 5} | (dense or {})
    return ConvLayerConfig(**first), DenseLayerConfig(**second)
