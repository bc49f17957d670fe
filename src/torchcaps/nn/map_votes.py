"""Votes of capsules on a map: with the same weights at all positions, and with their position added."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.nn.votes import IdentityVotes, Votes


class MapVotes(Votes):
    """Votes of the capsules of a map whose weights are the same at all positions.

    Args:
        votes: Those of each position, (B·L, T, J, D).
        poses: The capsules (B, T·L, K), type by type.
        positions: L.
    """

    def __init__(self, votes: Votes, poses: Float[Tensor, "B I K"], positions: int) -> None:
        super().__init__(poses, votes.size._replace(in_capsules=poses.shape[1]))
        self.votes, self.positions = votes, positions

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        each = None
        if coupling is not None:
            each = coupling.unflatten(1, (-1, self.positions)).transpose(1, 2).flatten(0, 1)  # (B·L, T, J)
        return self.votes.weighted_sum(each).unflatten(0, (-1, self.positions)).sum(1)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return by_type(self.votes.agreement(parents.repeat_interleave(self.positions, 0)), self.positions)

    def build(self) -> Float[Tensor, "B I J D"]:
        return by_type(self.votes.build(), self.positions)

    def _masked_votes(self, mask: Bool[Tensor, "B I"]) -> Votes:
        return self.votes.masked(mask.unflatten(1, (-1, self.positions)).transpose(1, 2).flatten(0, 1))


class PlacedVotes(Votes):
    """Votes to which the place of their capsule is added.

    Args:
        votes: Without the places.
        places: What is added, the same for all output capsules.
    """

    def __init__(self, votes: Votes, places: Float[Tensor, "I D"]) -> None:
        super().__init__(votes.poses, votes.size)
        self.votes, self.places = votes, places

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        total = self.votes.weighted_sum(coupling)
        return total + self._added(total.dtype).weighted_sum(coupling)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        agreement = self.votes.agreement(parents)
        return agreement + self._added(agreement.dtype).agreement(parents)

    def build(self) -> Float[Tensor, "B I J D"]:
        votes = self.votes.build()
        return votes + self._added(votes.dtype).build()

    def _added(self, dtype: torch.dtype) -> Votes:
        places = self.places.to(dtype).expand(self.poses.shape[0], -1, -1)
        return IdentityVotes(places, self.size.out_capsules).masked(self.mask)


def by_type(windows: Float[Tensor, "BL T *more"], positions: int) -> Float[Tensor, "B TL *more"]:
    """What was computed at each of a map's L ``positions``, in the order of :class:`torchcaps.nn.Capsules`."""
    return windows.unflatten(0, (-1, positions)).transpose(1, 2).flatten(1, 2)
