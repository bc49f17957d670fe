"""Factors of votes (poses and weights), and the computation of votes from them, some images at a time.

A :class:`Maker` computes the votes of some rows with the input capsules last, (B, J, D, I). It converts the gradient of
these votes to gradients of the factors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.memory import Buffers
from torchcaps.tracing import is_float32_on_cpu

Kind = Literal["built", "dense", "matrix", "shared"]
"""Formula of the votes: built votes, W_ij u_i, M_i W_ij, or W_j u_i."""


class VoteFactors(NamedTuple):
    """Tensors from which votes are computed, in full precision."""

    kind: Kind
    poses: Tensor
    """Input capsules (B, I, K); for ``"built"`` the votes (B, I, J, D)."""
    weight: Tensor | None = None
    """(I, J, D, K) for ``"dense"``, (I, J, P, P) for ``"matrix"``, (J, D, K) for ``"shared"``."""
    bias: Float[Tensor, "#I #J D"] | None = None
    """Added to the votes of all rows."""

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Sizes B, I, J, D of the votes."""
        B, I = self.poses.shape[:2]
        if self.weight is None:
            return B, I, *self.poses.shape[2:]
        J, D = self.weight.shape[:2] if self.kind == "shared" else self.weight.shape[1:3]
        return B, I, J, D * D if self.kind == "matrix" else D

    def of_rows(self, rows: slice) -> VoteFactors:
        """Return the factors of the votes of some rows."""
        return self._replace(poses=self.poses[rows])

    def build(self) -> Float[Tensor, "B J D I"]:
        """Return the votes of all rows, computed with PyTorch's operations."""
        if self.weight is None:
            votes = self.poses.permute(0, 2, 3, 1).contiguous()
        elif self.kind == "dense":
            votes = torch.einsum("bik,ijdk->bjdi", self.poses, self.weight).contiguous()
        elif self.kind == "shared":
            votes = torch.einsum("bik,jdk->bjdi", self.poses, self.weight).contiguous()
        else:
            square = self.poses.unflatten(2, self.weight.shape[2:])
            votes = torch.einsum("bipr,ijrq->bjpqi", square, self.weight).flatten(2, 3).contiguous()
        return votes if self.bias is None else votes + self.bias.permute(1, 2, 0)


def inputs_first(numbers: Float[Tensor, "B N I"]) -> Float[Tensor, "I B N"]:
    """Return numbers with the input capsules first, for one matrix product per input capsule.

    On a CPU PyTorch shuffles channels with vector instructions, but transposes single numbers, which takes twice as
    long. One shuffle for all rows is fastest, but runs in one thread, so several threads take the rows apart.
    """
    B, N, I = numbers.shape
    if not (numbers.numel() and is_float32_on_cpu(numbers)):
        return numbers.permute(2, 0, 1).contiguous()
    pieces = B if torch.get_num_threads() > 1 else 1
    channels_last = numbers.reshape(pieces, 1, 1, B * N * I // pieces).permute(0, 3, 1, 2)
    shuffled = torch.channel_shuffle(channels_last, B * N // pieces).permute(0, 2, 3, 1)
    return shuffled.view(pieces, I, B // pieces, N).transpose(0, 1).reshape(I, B, N)


class Maker(ABC):
    """Base class of the computation of votes in work buffers, and of the gradients of their factors.

    Args:
        factors: Tensors from which the votes are computed.
        needs_grad: True for each of poses, weight and bias that needs a gradient.
    """

    def __init__(self, factors: VoteFactors, needs_grad: tuple[bool, bool, bool]) -> None:
        self.B, self.I, self.J, self.D = factors.size
        self.factors, self.wants_poses, self.wants_weight = factors, needs_grad[0], needs_grad[1]
        self.buffers = Buffers(factors.poses)
        self.added = None if factors.bias is None else factors.bias.permute(1, 2, 0).contiguous()  # (J, D, I)
        self.for_poses: Tensor | None = None
        self.for_weight: Tensor | None = None
        self.for_bias = torch.zeros_like(self.added) if needs_grad[2] and self.added is not None else None

    def make(self, rows: slice) -> Float[Tensor, "b J D I"]:
        """Return the votes of some rows in a buffer."""
        votes = self._make(rows)
        return votes if self.added is None else torch.add(votes, self.added, out=self.take_votes(rows))

    def take_votes(self, rows: slice) -> Float[Tensor, "b J D I"]:
        """Return the buffer for the votes of some rows."""
        return self.buffers.take("votes", (rows.stop - rows.start, self.J, self.D, self.I))

    def add_gradient(self, rows: slice, gradient: Float[Tensor, "b J D I"]) -> None:
        """Add the gradients of the factors from the gradient of the votes of some rows."""
        if self.for_bias is not None:
            self.for_bias += gradient.sum(0).sum_to_size(self.for_bias.shape)
        if self.wants_poses or self.wants_weight:
            self._add_gradient(rows, gradient)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of poses, weight and bias; None for a gradient not in ``needs_grad``."""
        return self.for_poses, self.for_weight, None if self.for_bias is None else self.for_bias.permute(2, 0, 1)

    @abstractmethod
    def _make(self, rows: slice) -> Float[Tensor, "b J D I"]: ...

    @abstractmethod
    def _add_gradient(self, rows: slice, gradient: Float[Tensor, "b J D I"]) -> None: ...


class _Built(Maker):
    def __init__(self, factors: VoteFactors, needs_grad: tuple[bool, bool, bool]) -> None:
        super().__init__(factors, needs_grad)
        self.votes = factors.poses.permute(0, 2, 3, 1)
        if self.wants_poses:
            self.for_poses = factors.poses.new_empty(self.B, self.J, self.D, self.I).permute(0, 3, 1, 2)

    def _make(self, rows: slice) -> Tensor:
        votes = self.votes[rows]
        return votes if votes.is_contiguous() else self.take_votes(rows).copy_(votes)

    def _add_gradient(self, rows: slice, gradient: Tensor) -> None:
        if self.for_poses is not None:
            self.for_poses[rows] = gradient.permute(0, 3, 1, 2)


class _Dense(Maker):
    """One matrix product per input capsule, then a transposing copy."""

    def __init__(self, factors: VoteFactors, needs_grad: tuple[bool, bool, bool]) -> None:
        super().__init__(factors, needs_grad)
        self.poses = factors.poses.transpose(0, 1).contiguous()  # (I, B, K)
        self.columns = self._columns().flatten(2)  # (I, K, J·D)
        self.back = torch.empty_like(self.poses) if self.wants_poses else None
        self.outer = torch.zeros_like(self.columns) if self.wants_weight else None

    def _columns(self) -> Float[Tensor, "I K J D"]:
        """Return the weights, contiguous."""
        assert self.factors.weight is not None
        return self.factors.weight.permute(0, 3, 1, 2).contiguous()

    def _of_columns(self, gradient: Float[Tensor, "I K J D"]) -> Tensor:
        """Return the gradient of the weight from the gradient of :meth:`_columns`."""
        return gradient.permute(0, 2, 3, 1)

    def _make(self, rows: slice) -> Tensor:
        poses, votes = self.poses[:, rows], self.take_votes(rows)
        each = self.buffers.take("by input", (self.I, poses.shape[1], self.J * self.D))
        torch.bmm(poses, self.columns, out=each)
        votes.flatten(1, 2).copy_(each.permute(1, 2, 0))  # PyTorch copies a transposed matrix in one thread
        return votes

    def _add_gradient(self, rows: slice, gradient: Tensor) -> None:
        each = inputs_first(gradient.flatten(1, 2))
        if self.back is not None:
            self.back[:, rows] = torch.bmm(each, self.columns.transpose(1, 2))
        if self.outer is not None:
            self.outer.baddbmm_(self.poses[:, rows].transpose(1, 2), each)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.back is not None:
            self.for_poses = self.back.transpose(0, 1)
        if self.outer is not None:
            self.for_weight = self._of_columns(self.outer.view(self.I, -1, self.J, self.D))
        return super().gradients()


class _Matrix(_Dense):
    """Votes as sums of P elementwise products; their gradients as of dense votes.

    Poses and weights are expanded to the length of a vote, so each elementwise product runs over D·I contiguous
    numbers. The columns of dense votes hold W_ij once for each row of the pose M_i, and zeros.
    """

    def __init__(self, factors: VoteFactors, needs_grad: tuple[bool, bool, bool]) -> None:
        P = self.P = math.isqrt(factors.size[3])
        if any(needs_grad):
            super().__init__(factors, needs_grad)
        else:
            Maker.__init__(self, factors, needs_grad)
        assert factors.weight is not None
        self.by_column = factors.poses.unflatten(2, (P, P)).permute(0, 3, 2, 1).contiguous()  # (B, r, p, I)
        by_row = factors.weight.permute(1, 2, 3, 0)[:, :, None]  # (J, r, 1, q, I)
        self.expanded = by_row.expand(-1, -1, P, -1, -1).reshape(self.J, P, -1)  # (J, r, D·I)

    def _columns(self) -> Float[Tensor, "I K J D"]:
        assert self.factors.weight is not None
        columns = self.factors.poses.new_zeros(self.I, self.D, self.J, self.D)
        self._rows(columns).copy_(self.factors.weight.transpose(1, 2).unsqueeze(4))
        return columns

    def _of_columns(self, gradient: Tensor) -> Tensor:
        return self._rows(gradient).sum(4).transpose(1, 2)

    def _rows(self, columns: Float[Tensor, "I K J D"]) -> Float[Tensor, "I P J P P"]:
        """Return the numbers that are not always zero, as (I, r, J, q, p)."""
        P = self.P
        return columns.view(self.I, P, P, self.J, P, P).diagonal(dim1=1, dim2=4)

    def _make(self, rows: slice) -> Tensor:
        M, P = self.by_column[rows], self.P
        long = self.buffers.take("by input", (len(M), P, P, P, self.I))
        long = long.copy_(M.unsqueeze(3).expand(-1, -1, -1, P, -1)).flatten(2)  # (b, r, D·I)
        votes = self.take_votes(rows)
        flat = votes.flatten(2)
        torch.mul(long[:, None, 0], self.expanded[:, 0], out=flat)
        for r in range(1, P):
            flat.addcmul_(long[:, None, r], self.expanded[:, r])
        return votes


class _Shared(Maker):
    """One matrix product per row, which writes the votes in their final order."""

    def __init__(self, factors: VoteFactors, needs_grad: tuple[bool, bool, bool]) -> None:
        super().__init__(factors, needs_grad)
        assert factors.weight is not None
        self.poses = factors.poses.transpose(1, 2).contiguous()  # (B, K, I)
        self.weight = factors.weight.flatten(0, 1).contiguous()  # (J·D, K)
        self.back = torch.empty_like(self.poses) if self.wants_poses else None
        self.outer = torch.zeros_like(self.weight) if self.wants_weight else None

    def _make(self, rows: slice) -> Tensor:
        poses, votes = self.poses[rows], self.take_votes(rows)
        torch.bmm(self.weight.expand(len(poses), -1, -1), poses, out=votes.flatten(1, 2))
        return votes

    def _add_gradient(self, rows: slice, gradient: Tensor) -> None:
        each = gradient.flatten(1, 2)  # (b, J·D, I)
        if self.back is not None:
            self.back[rows] = self.weight.t() @ each
        if self.outer is not None:
            self.outer += torch.bmm(each, self.poses[rows].transpose(1, 2)).sum(0)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.back is not None:
            self.for_poses = self.back.transpose(1, 2)
        if self.outer is not None:
            self.for_weight = self.outer.view(self.J, self.D, -1)
        return super().gradients()


MAKERS: dict[Kind, type[Maker]] = {"built": _Built, "dense": _Dense, "matrix": _Matrix, "shared": _Shared}
