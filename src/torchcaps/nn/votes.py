"""Votes: what each input capsule predicts for each output capsule, asked for in sums and, as a rule, never built.

A routing algorithm asks for weighted sums of the votes and for their agreement with output capsules, and for the votes
themselves only if it must have each of them.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.nn.capsules import LayerSize, Routed
from torchcaps.nn.competition import MapCompetition, SoftmaxOver, log_softmax
from torchcaps.ops.contractions import agreement, compute_votes, weighted_sum
from torchcaps.ops.mixtures import dense_votes, matrix_votes
from torchcaps.ops.precision import full_dtype, full_precision, in_full_precision
from torchcaps.tracing import is_graph_capture


class Votes(ABC):
    """The votes û_j|i of the input capsules of a batch for its output capsules, as a routing algorithm sees them.

    Args:
        poses: Input capsules u_i.
        size: I, K, J, D.
    """

    competition: MapCompetition | None = None
    """Who competes on a map whose positions compete; else None."""
    votes: Any = None
    """The votes that these are made of, if they are made of others."""
    positions: int = 1
    """So many rows of ``votes`` belong to an image."""
    mask: Bool[Tensor, "B I"] | None = None
    """Which input capsules are there; the others have poses of zero. None if all are."""

    def __init__(self, poses: Float[Tensor, "B I K"], size: LayerSize) -> None:
        self.poses, self.size = poses, size

    @abstractmethod
    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """Σ_i c_ij û_j|i; without coupling, the plain sum."""

    @abstractmethod
    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """⟨û_j|i, x_j⟩ with output capsules, or with any other vectors x_j."""

    @abstractmethod
    def build(self) -> Float[Tensor, "B I J D"]:
        """The votes themselves, for algorithms that need each of them: B·I·J·D numbers."""

    def __getitem__(self, images: slice) -> Votes:
        """The votes of some images, for algorithms that build those of a few at a time.

        A subclass that holds more of each image than poses and ``votes`` cuts that, too.
        """
        some = copy.copy(self)
        some.poses = self.poses[images]
        some.mask = None if self.mask is None else self.mask[images]
        if self.votes is not None:
            some.votes = self.votes[images.start * self.positions : images.stop * self.positions]
        return some

    def masked(self, mask: Bool[Tensor, "B I"] | None) -> Votes:
        """The votes of the input capsules that a mask says are there: sums go over these alone."""
        if mask is None:
            return self
        some = copy.copy(self)
        some.poses, some.mask = self.poses.where(mask.unsqueeze(2), 0), mask
        if self.votes is not None:
            some.votes = self._masked_votes(mask)
        return some

    def _masked_votes(self, mask: Bool[Tensor, "B I"]) -> Any:
        """The same of the votes that these are made of."""
        return self.votes.masked(mask)

    def active(self, activations: Float[Tensor, "B I"]) -> Float[Tensor, "B I"]:
        """Activations of the input capsules, zero for those that are not there."""
        return activations if self.mask is None else activations.where(self.mask, 0)

    def zeros(self) -> Float[Tensor, "B I J"]:
        """Routing logits to start from, in full precision; in memory as (J, B, I), as agreement is."""
        shape = self.size.out_capsules, self.poses.shape[0], self.size.in_capsules
        return self.poses.new_zeros(shape, dtype=full_dtype(self.poses.dtype)).permute(1, 2, 0)

    def compete(
        self, logits: Float[Tensor, "B I J"], softmax_over: SoftmaxOver = "outputs", *, leaky: bool = False
    ) -> Float[Tensor, "B I J"]:
        """Coupling c_ij: the softmax of the routing logits over the capsules that compete.

        Over ``"outputs"``, the output capsules that an input capsule votes for compete: all of them, or, in a layer on
        a map that says so, those of all positions whose windows hold the input capsule.

        Args:
            logits: b_ij.
            softmax_over: The axis on which capsules compete.
            leaky: Add a competitor with logit 0, whose share goes to no capsule.

        Returns:
            c_ij; zero for input capsules that are not there.
        """
        if self.mask is None:
            return self._compete(logits, softmax_over, leaky)
        there = self.mask.unsqueeze(2)
        if softmax_over == "inputs":  # by -∞, a row without any capsule would be NaN
            logits = logits.where(there, torch.finfo(logits.dtype).min)
        return self._compete(logits, softmax_over, leaky).where(there, 0)

    def _compete(
        self, logits: Float[Tensor, "B I J"], softmax_over: SoftmaxOver, leaky: bool
    ) -> Float[Tensor, "B I J"]:
        if self.competition is not None and softmax_over == "outputs":
            return self.competition.softmax(logits, leaky)
        axis = 2 if softmax_over == "outputs" else 1
        if leaky:
            shares = torch.cat([torch.zeros_like(logits.narrow(axis, 0, 1)), logits], axis).softmax(axis)
            return shares.narrow(axis, 1, logits.shape[axis])
        if axis == 2 and logits.movedim(2, 0).is_contiguous():  # as the contractions lay them out: kept so
            return logits.movedim(2, 0).softmax(0).movedim(0, 2)
        return logits.softmax(axis)

    def log_compete(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """The logarithm of :meth:`compete` over the outputs, exact even of couplings too small for their precision."""
        if self.competition is not None:
            return self.competition.log_softmax(logits)
        return log_softmax(logits)

    def finish(self, routed: Routed, *, coupling: bool) -> Routed:
        """What a routing returns: ``routed`` in the dtype of the poses, zero where no capsule is; coupling if asked."""
        kept = routed if coupling else routed._replace(coupling=None)
        poses, *others = (None if each is None else each.to(self.poses.dtype) for each in kept)
        assert poses is not None
        return Routed(poses, *others).within(self.mask)


class BuiltVotes(Votes):
    """Votes that stand in a tensor.

    Args:
        votes: û_j|i.
        poses: What they were made of; where nobody knows, the votes for the first output capsule stand for it.
    """

    def __init__(self, votes: Float[Tensor, "B I J D"], poses: Float[Tensor, "B I K"] | None = None) -> None:
        _, I, J, D = votes.shape
        if min(I, J, D) == 0:
            raise InputError(f"votes must be of at least one capsule and component, got I={I}, J={J}, D={D}")
        poses = votes[:, :, 0] if poses is None else poses
        super().__init__(poses, LayerSize(I, poses.shape[2], J, D))
        self.votes = votes

    @classmethod
    def of(cls, given: Votes | Float[Tensor, "B I J D"], mask: Bool[Tensor, "B I"] | None = None) -> Votes:
        """Votes from votes, or from a tensor, which is computed with in full precision; of a mask's capsules alone."""
        if isinstance(given, Votes):
            return given.masked(mask)
        built = cls(given)
        built.votes = in_full_precision(given)
        return built.masked(mask)

    def _masked_votes(self, mask: Bool[Tensor, "B I"]) -> Tensor:
        return self.votes.where(mask[..., None, None], 0)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        return self.votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling, self.votes)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return torch.einsum("bijd,bjd->bij", self.votes, parents)

    def build(self) -> Float[Tensor, "B I J D"]:
        return self.votes


class DenseVotes(Votes):
    """Votes W_ij u_i, a matrix for each pair.

    Args:
        poses: Input capsules u_i.
        weight: W_ij.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> None:
        super().__init__(poses, LayerSize(weight.shape[0], poses.shape[2], *weight.shape[1:3]))
        self.weight = weight

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        return weighted_sum(self.poses, self.weight, coupling)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return agreement(self.poses, self.weight, parents)

    def build(self) -> Float[Tensor, "B I J D"]:
        if is_graph_capture():
            return compute_votes(self.poses, self.weight)
        votes = dense_votes(self.poses.to(self.columns.dtype), self.columns, self.size.out_capsules)
        return votes.to(torch.promote_types(self.poses.dtype, self.weight.dtype))

    @functools.cached_property
    def columns(self) -> Float[Tensor, "I K JD"]:
        """The matrices laid out so that each capsule's votes are one product."""
        dtype = full_dtype(torch.promote_types(self.poses.dtype, self.weight.dtype))
        return self.weight.to(dtype).permute(0, 3, 1, 2).flatten(2).contiguous()

    def __getitem__(self, images: slice) -> Votes:
        _ = self.columns  # laid out once, for the votes of all images
        return super().__getitem__(images)


class IdentityVotes(Votes):
    """Votes u_i, the same for all output capsules; a subclass does something for each of these, to all input capsules.

    What is done to sums of poses, and not to each pose, is done J times instead of I·J times.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], out_capsules: int, out_dim: int | None = None) -> None:
        _, I, K = poses.shape
        super().__init__(poses, LayerSize(I, K, out_capsules, out_dim or K))

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        with full_precision(self.poses.device):
            poses = in_full_precision(self.poses)
            total = poses.sum(1, keepdim=True) if coupling is None else coupling.to(poses).mT @ poses
            return self._transform(total).to(self.poses.dtype)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        with full_precision(self.poses.device):
            poses = in_full_precision(self.poses)
            return (poses @ self._transpose(parents.to(poses)).mT).to(self.poses.dtype)

    def build(self) -> Float[Tensor, "B I J D"]:
        with full_precision(self.poses.device):
            return self._transform(in_full_precision(self.poses).unsqueeze(2)).to(self.poses.dtype)

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        """T_j u of poses for each output capsule; of one pose for all, N = 1, too."""
        return poses.expand(*poses.shape[:-2], self.size.out_capsules, -1)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        """T_jᵀ x, so that ⟨T_j u, x⟩ = ⟨u, T_jᵀ x⟩."""
        return parents


class SharedVotes(IdentityVotes):
    """Votes W_j u_i: all input capsules share the matrix of an output capsule."""

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "J D K"]) -> None:
        super().__init__(poses, *weight.shape[:2])
        self.weight = weight

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        return torch.einsum("jdk,...jk->...jd", in_full_precision(self.weight), poses)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        return torch.einsum("jdk,bjd->bjk", in_full_precision(self.weight), parents)


class FactoredVotes(IdentityVotes):
    """Votes F (f_j∘u_i): the matrix of an output capsule is a matrix of all, whose columns it scales."""

    def __init__(
        self, poses: Float[Tensor, "B I K"], scale: Float[Tensor, "J K"], weight: Float[Tensor, "D K"]
    ) -> None:
        super().__init__(poses, len(scale), len(weight))
        self.scale, self.weight = scale, weight

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        return (poses * self.scale.to(poses)) @ self.weight.to(poses).mT

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        return parents @ self.weight.to(parents) * self.scale.to(parents)


class MatrixVotes(Votes):
    """Votes M_i W_ij of poses that are square matrices, M_i (P, P), read row by row: K = D = P².

    The rows of a pose are transformed alike, so that a row is a capsule of P components to the sums.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J P P"]) -> None:
        I, J, P, _ = weight.shape
        super().__init__(poses, LayerSize(I, P * P, J, P * P))
        self.weight, self.side = weight, P

    @property
    def rows(self) -> DenseVotes:
        """The votes of the rows (B·P, I, P), each a capsule."""
        return DenseVotes(self._rows_of(self.poses), self.weight.mT)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        each = None if coupling is None else coupling.repeat_interleave(self.side, 0)
        return self._joined(self.rows.weighted_sum(each))

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return self.rows.agreement(self._rows_of(parents)).unflatten(0, (-1, self.side)).sum(1)

    def build(self) -> Float[Tensor, "B I J D"]:
        if is_graph_capture():
            return self._joined(self.rows.build())
        dtype = torch.promote_types(self.poses.dtype, self.weight.dtype)
        poses, weight = (tensor.to(full_dtype(dtype)) for tensor in (self.poses, self.weight))
        return matrix_votes(poses.unflatten(2, (self.side, self.side)), weight).to(dtype)

    def _rows_of(self, poses: Float[Tensor, "B N D"]) -> Float[Tensor, "BP N P"]:
        return poses.unflatten(2, (self.side, self.side)).movedim(2, 1).flatten(0, 1)

    def _joined(self, rows: Float[Tensor, "BP *capsules P"]) -> Float[Tensor, "B *capsules D"]:
        return rows.unflatten(0, (-1, self.side)).movedim(1, -2).flatten(-2)
