"""Votes of capsules on a map: with weights shared by all positions, and with the position added."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.kernels.mixtures import VoteFactors
from torchcaps.nn.votes.base import Votes
from torchcaps.nn.votes.built import BuiltVotes
from torchcaps.nn.votes.dense import DenseVotes, MatrixVotes, SharedVotes


def at_all_positions(votes: Votes, poses: Float[Tensor, "B I K"], positions: int) -> Votes:
    """Return the votes of the capsules of a map with weights that all positions share.

    Args:
        votes: Votes of the T capsules at each position (B·L, T, J, D).
        poses: Capsules of the whole map (B, T·L, K), type by type.
        positions: Number of positions (L).
    """
    factors = votes.factors()
    weight = None if factors is None else factors.weight
    if factors is None or weight is None or factors.bias is not None:
        on_map: Votes = BuiltVotes(by_type(votes.build(), positions), poses)
    elif factors.kind == "shared":
        on_map = SharedVotes(poses, weight)
    else:  # the weights of a type, repeated for its positions
        kind = DenseVotes if factors.kind == "dense" else MatrixVotes
        on_map = kind(poses, weight.repeat_interleave(positions, 0))
    on_map.dtype = votes.dtype
    return on_map


class PlacedVotes(Votes):
    """Votes plus the coordinates of their capsule on the map.

    Args:
        votes: Votes without coordinates.
        places: Coordinates to add, the same for all output capsules.
    """

    def __init__(self, votes: Votes, places: Float[Tensor, "I D"]) -> None:
        super().__init__(votes.poses, votes.size, votes.dtype)
        self.votes, self.places = votes, places

    def _of_images(self, images: slice) -> Votes:
        return PlacedVotes(self.votes[images], self.places)

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

    def factors(self) -> VoteFactors | None:
        each = self.votes.factors()
        if each is None:
            return None
        places = self.places.to(self.poses).unsqueeze(1)  # (I, 1, D)
        return each._replace(bias=places if each.bias is None else each.bias + places)

    def _places(self) -> Float[Tensor, "B I D"]:
        """Return the coordinates of each image's capsules, zero for masked ones."""
        return self.present(self.places.to(self.poses).expand(self.poses.shape[0], -1, -1))


def by_type(windows: Float[Tensor, "BL T *more"], positions: int) -> Float[Tensor, "B TL *more"]:
    """Reorder results of each of the L ``positions`` of a map to the order of :class:`torchcaps.nn.Capsules`."""
    return windows.unflatten(0, (-1, positions)).transpose(1, 2).flatten(1, 2)
