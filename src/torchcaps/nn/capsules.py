"""What flows between the layers of a capsule network: capsules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.ops.squash import safe_norm

Grid = tuple[int, int, int]
"""Types, height and width of the capsules of a map."""
Activations = Float[Tensor, "B I"] | None
"""How active input capsules are, 0..1; None where the length of a pose says so."""


class LayerSize(NamedTuple):
    """How many capsules of how many components go into a layer, and come out."""

    in_capsules: int
    """I; for a layer on a map, those of a window; 0 for a layer that takes any number."""
    in_dim: int
    """K."""
    out_capsules: int
    """J; for a layer on a map, the types."""
    out_dim: int
    """D."""

    def inputs(self, owner: object) -> int:
        """I, for what has weights of its own for each input capsule; an InputError where the number is not known."""
        if self.in_capsules == 0:
            raise InputError(
                f"{type(owner).__name__} has weights for each input capsule, so in_capsules must be a number"
            )
        return self.in_capsules


class Capsules(NamedTuple):
    """Capsules of a batch: their poses, and how active each is."""

    poses: Float[Tensor, "B N D"]
    """What each capsule says of its entity."""
    activations: Float[Tensor, "B N"] | None = None
    """How certain it is that the entity is there, 0..1; None where the length of a pose says so."""
    grid: Grid | None = None
    """Where capsules stand on a map: capsule ``(type · H + y) · W + x``; else None."""
    mask: Bool[Tensor, "B N"] | None = None
    """Which capsules are there; None if all are. What is written at the others, NaN too, is never read."""

    def scores(self, eps: float = 1e-7) -> Float[Tensor, "B N"]:
        """How present each capsule is: its activation, or the length of its pose where there is none.

        Args:
            eps: Added under the root of the length.
        """
        return safe_norm(self.poses, eps=eps) if self.activations is None else self.activations

    @classmethod
    def of(cls, given: Capsules | Tensor) -> Capsules:
        """Capsules from capsules, or from poses (B, N, D) alone."""
        return given if isinstance(given, Capsules) else cls(given)


class Routed(NamedTuple):
    """What every routing returns."""

    poses: Float[Tensor, "B J D"]
    """Output capsules v_j."""
    activations: Float[Tensor, "B J"] | None = None
    """How certain each is, 0..1; None where the length of a pose says so."""
    coupling: Float[Tensor, "B I J"] | None = None
    """Coupling c_ij that made them, where it was asked for and there is one."""

    def to(self, dtype: torch.dtype) -> Routed:
        """Return the same numbers in a dtype."""
        if self.poses.dtype == dtype:
            return self
        poses, *others = (None if each is None else each.to(dtype) for each in self)
        assert poses is not None
        return Routed(poses, *others)

    def within(self, mask: Bool[Tensor, "B I"] | None) -> Routed:
        """The same with a coupling of zero for input capsules that are not there, and zeros where none is there."""
        if mask is None:
            return self
        some = mask.any(1)
        return Routed(
            self.poses.where(some[:, None, None], 0),
            None if self.activations is None else self.activations.where(some[:, None], 0),
            None if self.coupling is None else self.coupling.where(mask.unsqueeze(2), 0),
        )


class RoutingRound(NamedTuple):
    """Every number of one iteration of routing; see :func:`torchcaps.routing_rounds`."""

    logits: Float[Tensor, "B I J"]
    """b_ij at the beginning of the iteration."""
    coupling: Float[Tensor, "B I J"]
    """c_ij, the softmax of the logits."""
    weighted_sum: Float[Tensor, "B J D"]
    """s_j = Σ_i c_ij û_j|i, and the bias where there is one."""
    capsules: Float[Tensor, "B J D"]
    """v_j = squash(s_j)."""
    agreement: Float[Tensor, "B I J"]
    """⟨û_j|i, v_j⟩; the next iteration begins with ``logits + agreement``."""
    activations: Float[Tensor, "B J"] | None = None
    """How certain each output capsule is; None where its length says so, as in dynamic routing."""
