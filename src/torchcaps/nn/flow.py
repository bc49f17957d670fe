"""What flows between the layers of a capsule network: capsules."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.squash import safe_norm


class Capsules(NamedTuple):
    """Capsules of a batch: their poses, and how active each is."""

    poses: Float[Tensor, "B N D"]
    """What each capsule says of its entity."""
    activations: Float[Tensor, "B N"] | None = None
    """How certain it is that the entity is there, 0..1; None where the length of a pose says so."""
    grid: tuple[int, int, int] | None = None
    """Types, height and width, where capsules stand on a map: capsule ``(type · H + y) · W + x``; else None."""

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


class LayerSize(NamedTuple):
    """How many capsules of how many components go into a layer, and come out."""

    in_capsules: int
    """I; for a layer on a map, those of a window."""
    in_dim: int
    """K."""
    out_capsules: int
    """J; for a layer on a map, the types."""
    out_dim: int
    """D."""
