"""Votes from a tensor."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.votes.base import Votes
from torchcaps.ops.precision import in_full_precision


class BuiltVotes(Votes):
    """Votes from a tensor.

    Args:
        votes: Votes û_j|i.
        poses: Input capsules behind the votes. None: use the votes for the first output capsule.
        dtype: Dtype of the results. None: the dtype of the votes.
    """

    @checked
    def __init__(
        self,
        votes: Float[Tensor, "B I J D"],
        poses: Float[Tensor, "B I K"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _, I, J, D = votes.shape
        if min(I, J, D) == 0:
            raise InputError(f"votes must be of at least one capsule and component, got I={I}, J={J}, D={D}")
        poses = votes[:, :, 0] if poses is None else poses
        super().__init__(poses, LayerSize(I, poses.shape[2], J, D), votes.dtype if dtype is None else dtype)
        self.votes = in_full_precision(votes)

    @classmethod
    def of(cls, votes: Votes | Float[Tensor, "B I J D"], mask: Bool[Tensor, "B I"] | None = None) -> Votes:
        """Return votes unchanged or wrap a tensor of votes, and apply the mask."""
        return (votes if isinstance(votes, Votes) else cls(votes)).masked(mask)

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        present = mask.unsqueeze(2)
        return BuiltVotes(self.votes.where(present.unsqueeze(3), 0), self.poses.where(present, 0))

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        if coupling is None:
            return self.votes.sum(1)
        return torch.einsum("bij,bijd->bjd", coupling.to(self.votes), self.votes)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return torch.einsum("bijd,bjd->bij", self.votes, parents.to(self.votes))

    def build(self) -> Float[Tensor, "B I J D"]:
        return self.votes
