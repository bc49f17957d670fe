"""Capsules, the data that flows between the layers, and the results of a routing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.ops.squash import safe_norm

Grid = tuple[int, ...]
"""Types of the capsules of a map, and its size along each of its one to three axes: types, height, width."""
Activations = Float[Tensor, "B I"] | None
"""Activations of the input capsules, 0..1. None: use the length of the pose."""


class LayerSize(NamedTuple):
    """Numbers and components of the input and output capsules of a layer."""

    in_capsules: int
    """Number of input capsules (I). A layer on a map counts one window. 0: the layer takes any number."""
    in_dim: int
    """Components of an input capsule (K)."""
    out_capsules: int
    """Number of output capsules (J). A layer on a map counts its types."""
    out_dim: int
    """Components of an output capsule (D)."""

    def inputs(self, owner: object) -> int:
        """Return I for an ``owner`` with separate weights for each input capsule.

        Raises:
            InputError: The layer takes any number of input capsules, so I is unknown.
        """
        if self.in_capsules == 0:
            raise InputError(
                f"{type(owner).__name__} has weights for each input capsule, so in_capsules must be a number"
            )
        return self.in_capsules


class Capsules(NamedTuple):
    """Capsules of a batch: poses, activations, positions on a map, and a mask."""

    poses: Float[Tensor, "B N D"]
    """Pose vector of each capsule: the properties of its entity."""
    activations: Float[Tensor, "B N"] | None = None
    """Probability that the entity is present, 0..1. None: use the length of the pose."""
    grid: Grid | None = None
    """Types and size of the map. On a plane, a capsule has the index ``(type · H + y) · W + x``. None: no map."""
    mask: Bool[Tensor, "B N"] | None = None
    """True for each capsule that is present; None if all are. Values of masked capsules are never read, even NaN."""

    def scores(self, eps: float = 1e-7) -> Float[Tensor, "B N"]:
        """Return the activations, or the lengths of the poses if the capsules have no activations.

        Args:
            eps: Added under the root of the length.
        """
        return safe_norm(self.poses, eps=eps) if self.activations is None else self.activations

    @classmethod
    def of(cls, capsules: Capsules | Tensor) -> Capsules:
        """Return capsules unchanged, or wrap a tensor of poses (B, N, D)."""
        return capsules if isinstance(capsules, Capsules) else cls(capsules)


class Routed(NamedTuple):
    """Result of a routing."""

    poses: Float[Tensor, "B J D"]
    """Output capsules v_j."""
    activations: Float[Tensor, "B J"] | None = None
    """Activations of the output capsules, 0..1. None: use the length of the pose."""
    coupling: Float[Tensor, "B I J"] | None = None
    """Coupling c_ij of the last iteration. None if it was not requested, or if the routing has none."""

    def to(self, dtype: torch.dtype) -> Routed:
        """Convert all tensors to a dtype."""
        if self.poses.dtype == dtype:
            return self
        poses, *others = (None if each is None else each.to(dtype) for each in self)
        assert poses is not None
        return Routed(poses, *others)

    def masked(self, mask: Bool[Tensor, "B I"] | None) -> Routed:
        """Set the coupling of masked input capsules to zero, and all results of a row without any input capsule."""
        if mask is None:
            return self
        has_inputs = mask.any(1)
        return Routed(
            self.poses.where(has_inputs[:, None, None], 0),
            None if self.activations is None else self.activations.where(has_inputs[:, None], 0),
            None if self.coupling is None else self.coupling.where(mask.unsqueeze(2), 0),
        )


class RoutingRound(NamedTuple):
    """All intermediate results of one routing iteration; see :func:`torchcaps.routing_rounds`."""

    logits: Float[Tensor, "B I J"]
    """b_ij at the beginning of the iteration."""
    coupling: Float[Tensor, "B I J"]
    """c_ij, the softmax of the logits."""
    weighted_sum: Float[Tensor, "B J D"]
    """s_j = Σ_i c_ij û_j|i, plus the bias if the routing has one."""
    capsules: Float[Tensor, "B J D"]
    """v_j = squash(s_j)."""
    agreement: Float[Tensor, "B I J"]
    """⟨û_j|i, v_j⟩; the next iteration begins with ``logits + agreement``."""
    activations: Float[Tensor, "B J"] | None = None
    """Activations of the output capsules. None: use their lengths, as in dynamic routing."""
