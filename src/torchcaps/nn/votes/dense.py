"""Votes computed from poses and matrices: a matrix for each pair of capsules, or one for each output capsule."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.kernels.mixtures import VoteFactors
from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.votes.base import Votes
from torchcaps.ops.contractions import agreement, weighted_sum


class VotesOfPoses(Votes):
    """Votes computed from poses with weights that all images share."""

    @abstractmethod
    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """Return the votes of other poses with the same weights."""

    @abstractmethod
    def factors(self) -> VoteFactors: ...

    def build(self) -> Float[Tensor, "B I J D"]:
        return self.factors().build().permute(0, 3, 1, 2)

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        return self._of(self.poses.where(mask.unsqueeze(2), 0))


class DenseVotes(VotesOfPoses):
    """Votes W_ij u_i with a matrix for each pair of an input and an output capsule.

    Args:
        poses: Input capsules u_i.
        weight: Matrices W_ij.
    """

    @checked
    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> None:
        size = LayerSize(weight.shape[0], poses.shape[2], *weight.shape[1:3])
        super().__init__(poses, size, torch.promote_types(poses.dtype, weight.dtype))
        self.weight = weight.to(self.poses.dtype)  # converted once, so that its gradients are summed in this dtype

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return DenseVotes(poses, self.weight)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        return weighted_sum(self.poses, self.weight, coupling)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return agreement(self.poses, self.weight, parents)

    def factors(self) -> VoteFactors:
        return VoteFactors("dense", self.poses, self.weight)


class DiagonalVotes(DenseVotes):
    """Votes w_ij∘u_i: the matrices are diagonal. They are built only for sums with a coupling, and for agreement.

    Args:
        poses: Input capsules u_i.
        diagonals: Diagonals w_ij.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], diagonals: Float[Tensor, "I J K"]) -> None:
        I, J, K = diagonals.shape
        VotesOfPoses.__init__(self, poses, LayerSize(I, K, J, K), torch.promote_types(poses.dtype, diagonals.dtype))
        self.diagonals = diagonals.to(self.poses.dtype)
        self._weight: Tensor | None = None

    @property
    def weight(self) -> Float[Tensor, "I J K K"]:  # type: ignore[override]  # computed when it is first read
        """The matrices, in memory as (J, K, K, I), the order that fast routing reads."""
        if self._weight is None:
            self._weight = torch.diag_embed(self.diagonals.transpose(0, 1), dim1=1, dim2=2).permute(3, 0, 1, 2)
        return self._weight

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return DiagonalVotes(poses, self.diagonals)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J K"]:
        if coupling is None:
            return torch.einsum("bik,ijk->bjk", self.poses, self.diagonals)
        return super().weighted_sum(coupling)


class SharedVotes(VotesOfPoses):
    """Votes W_j u_i: all input capsules share the matrix of an output capsule.

    A matrix is applied to a sum of poses, so it is used J times instead of I·J times.

    Args:
        poses: Input capsules u_i.
        weight: Matrices W_j, or one matrix for all output capsules.
        out_capsules: Number of output capsules (J). None: the number of matrices.
    """

    @checked
    def __init__(
        self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "N D K"], out_capsules: int | None = None
    ) -> None:
        J, (_, I, K) = len(weight) if out_capsules is None else out_capsules, poses.shape
        size = LayerSize(I, K, J, weight.shape[1])
        super().__init__(poses, size, torch.promote_types(poses.dtype, weight.dtype))
        # converted before it is expanded, so that its gradients are summed over the output capsules in this dtype
        self.weight = weight.to(self.poses.dtype).expand(J, -1, -1)

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return SharedVotes(poses, self.weight)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        total = self.poses.sum(1, keepdim=True) if coupling is None else coupling.to(self.poses).mT @ self.poses
        return torch.einsum("jdk,bjk->bjd", self.weight, total.expand(-1, self.size.out_capsules, -1))

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return self.poses @ torch.einsum("jdk,bjd->bjk", self.weight, parents.to(self.poses)).mT

    def factors(self) -> VoteFactors:
        return VoteFactors("shared", self.poses, self.weight)


class MatrixVotes(VotesOfPoses):
    """Votes M_i W_ij of poses that are square matrices, M_i (P, P), read row by row: K = D = P².

    All rows of a pose are multiplied by the same matrix. The sums treat each row as a capsule of P components.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J P P"]) -> None:
        I, J, P, _ = weight.shape
        super().__init__(poses, LayerSize(I, P * P, J, P * P), torch.promote_types(poses.dtype, weight.dtype))
        self.weight, self.side = weight.to(self.poses.dtype), P

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return MatrixVotes(poses, self.weight)

    @property
    def rows(self) -> DenseVotes:
        """Votes of the rows (B·P, I, P), each treated as a capsule."""
        return DenseVotes(self._rows_of(self.poses), self.weight.mT)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        each = None if coupling is None else coupling.repeat_interleave(self.side, 0)
        return self.rows.weighted_sum(each).unflatten(0, (-1, self.side)).movedim(1, 2).flatten(2)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return self.rows.agreement(self._rows_of(parents)).unflatten(0, (-1, self.side)).sum(1)

    def factors(self) -> VoteFactors:
        return VoteFactors("matrix", self.poses, self.weight)

    def _rows_of(self, poses: Float[Tensor, "B N D"]) -> Float[Tensor, "BP N P"]:
        return poses.unflatten(2, (self.side, self.side)).movedim(2, 1).flatten(0, 1)
