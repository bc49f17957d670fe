"""Votes of capsules on a map: with weights shared by all positions, and with the position added."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.kernels.mixtures import VoteFactors
from torchcaps.nn.votes.base import Votes


class MapVotes(Votes):
    """Votes of the capsules of a map with weights shared by all positions.

    Args:
        votes: Votes of the T capsules at each position (B·L, T, J, D).
        poses: Capsules of the whole map (B, T·L, K), type by type.
        positions: Number of positions (L).
    """

    def __init__(self, votes: Votes, poses: Float[Tensor, "B I K"], positions: int) -> None:
        super().__init__(poses, votes.size._replace(in_capsules=poses.shape[1]), votes.dtype)
        self.votes, self.positions = votes, positions

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        by_position = mask.unflatten(1, (-1, self.positions)).transpose(1, 2).flatten(0, 1)  # (B·L, T)
        return MapVotes(self.votes.masked(by_position), self.poses.where(mask.unsqueeze(2), 0), self.positions)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        each = None
        if coupling is not None:
            each = coupling.unflatten(1, (-1, self.positions)).transpose(1, 2).flatten(0, 1)  # (B·L, T, J)
        return self.votes.weighted_sum(each).unflatten(0, (-1, self.positions)).sum(1)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return by_type(self.votes.agreement(parents.repeat_interleave(self.positions, 0)), self.positions)

    def build(self) -> Float[Tensor, "B I J D"]:
        return by_type(self.votes.build(), self.positions)

    def factors(self) -> VoteFactors:
        each = self.votes.factors()
        poses, weight, bias = by_type(each.poses, self.positions), each.weight, each.bias
        if weight is not None and each.kind != "shared":  # the weights of a type, repeated for its positions
            weight = weight.repeat_interleave(self.positions, 0)
        if bias is not None:
            bias = bias.repeat_interleave(self.positions, 0)
        return VoteFactors(each.kind, poses, weight, bias)


class PlacedVotes(Votes):
    """Votes plus the coordinates of their capsule on the map.

    Args:
        votes: Votes without coordinates.
        places: Coordinates to add, the same for all output capsules.
    """

    def __init__(self, votes: Votes, places: Float[Tensor, "I D"]) -> None:
        super().__init__(votes.poses, votes.size, votes.dtype)
        self.votes, self.places = votes, places

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        return PlacedVotes(self.votes.masked(mask), self.places)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        places = self._places()
        added = places.sum(1, keepdim=True) if coupling is None else coupling.to(places).mT @ places
        return self.votes.weighted_sum(coupling) + added

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        places = self._places()
        return self.votes.agreement(parents) + places @ parents.to(places).mT

    def build(self) -> Float[Tensor, "B I J D"]:
        return self.votes.build() + self._places().unsqueeze(2)

    def factors(self) -> VoteFactors:
        each = self.votes.factors()
        places = self.places.to(self.poses).unsqueeze(1)  # (I, 1, D)
        return each._replace(bias=places if each.bias is None else each.bias + places)

    def _places(self) -> Float[Tensor, "B I D"]:
        """Return the coordinates of each image's capsules, zero for masked ones."""
        return self.present(self.places.to(self.poses).expand(self.poses.shape[0], -1, -1))


def by_type(windows: Float[Tensor, "BL T *more"], positions: int) -> Float[Tensor, "B TL *more"]:
    """Reorder results of each of the L ``positions`` of a map to the order of :class:`torchcaps.nn.Capsules`."""
    return windows.unflatten(0, (-1, positions)).transpose(1, 2).flatten(1, 2)
