"""Votes: what each input capsule predicts for each output capsule, asked for in sums and, as a rule, never built.

A routing algorithm asks for weighted sums of the votes and for their agreement with output capsules, and for the votes
themselves only if it must have each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import LayerSize, Routed
from torchcaps.nn.competition import MapCompetition, SoftmaxOver, log_softmax
from torchcaps.ops.contractions import agreement, compute_votes, weighted_sum
from torchcaps.ops.precision import full_dtype, in_full_precision
from torchcaps.ops.vote_factors import VoteFactors


class Votes(ABC):
    """The votes û_j|i of the input capsules of a batch for its output capsules, as a routing algorithm sees them.

    Votes are computed in full precision: half precision becomes float32 here, and :meth:`finish` converts results back.

    Args:
        poses: Input capsules u_i.
        size: I, K, J, D.
        dtype: Of the results: the higher of the precisions of what the votes are made of; that of the poses if None.
    """

    competition: MapCompetition | None = None
    """Which output capsules compete on a map whose positions compete; else None."""
    mask: Bool[Tensor, "B I"] | None = None
    """True for each input capsule that is present; the poses of all others are zero. None if all are present."""

    def __init__(self, poses: Float[Tensor, "B I K"], size: LayerSize, dtype: torch.dtype | None = None) -> None:
        if poses.shape[1] == 0:
            raise InputError("votes must be of at least one input capsule, got I=0")
        self.dtype = poses.dtype if dtype is None else dtype
        self.poses, self.size = poses.to(full_dtype(self.dtype)), size

    @property
    def data(self) -> Float[Tensor, "B I K"]:
        """The poses; torchinfo reads the shape of a module's input from an attribute of this name."""
        return self.poses

    @abstractmethod
    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """Σ_i c_ij û_j|i; without coupling, the plain sum."""

    @abstractmethod
    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """⟨û_j|i, x_j⟩ with output capsules, or with any other vectors x_j."""

    @abstractmethod
    def build(self) -> Float[Tensor, "B I J D"]:
        """The votes themselves, for algorithms that need each of them: B·I·J·D numbers."""

    def factors(self) -> VoteFactors | None:
        """Return the tensors that the votes are made of, for routings that make them a block at a time.

        None if the votes can only be built. The votes of masked input capsules may be any finite numbers.
        """
        return None

    @abstractmethod
    def _of_images(self, images: slice) -> Votes:
        """The votes of some images, without regard to the mask."""

    @abstractmethod
    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        """The votes with zero in place of each number of an input capsule that is not present."""

    def __getitem__(self, images: slice) -> Votes:
        """The votes of some images, for algorithms that build those of a few at a time."""
        return self._like_these(self._of_images(images), None if self.mask is None else self.mask[images])

    def masked(self, mask: Bool[Tensor, "B I"] | None) -> Votes:
        """The votes of the input capsules that a mask marks as present, among those that are present already."""
        if mask is None:
            return self
        mask = mask if self.mask is None else mask & self.mask
        return self._like_these(self._hidden(mask), mask)

    def _like_these(self, votes: Votes, mask: Bool[Tensor, "B I"] | None) -> Votes:
        votes.competition, votes.dtype, votes.mask = self.competition, self.dtype, mask
        return votes

    def present(self, values: Float[Tensor, "B I *more"], otherwise: float = 0.0) -> Float[Tensor, "B I *more"]:
        """Values of the input capsules, replaced by ``otherwise`` for each input capsule that is not present.

        Every number of an input capsule passes here before it is used, so that nothing that is written at masked places
        is read, neither by a result nor by a gradient.
        """
        if self.mask is None:
            return values
        return values.where(self.mask.reshape(*self.mask.shape, *[1] * (values.ndim - 2)), otherwise)

    def zeros(self) -> Float[Tensor, "B I J"]:
        """Routing logits to start from, in full precision; in memory as (J, B, I), as agreement is."""
        shape = self.size.out_capsules, self.poses.shape[0], self.size.in_capsules
        return self.poses.new_zeros(shape).permute(1, 2, 0)

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
        # over inputs -∞ would make a row without any capsule NaN
        hidden = torch.finfo(logits.dtype).min if softmax_over == "inputs" else 0.0
        return self.present(self._compete(self.present(logits, hidden), softmax_over, leaky))

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
        logits = self.present(logits)
        return log_softmax(logits) if self.competition is None else self.competition.log_softmax(logits)

    def finish(self, routed: Routed, *, coupling: bool) -> Routed:
        """What a routing returns: ``routed`` in :attr:`dtype`, zero where no capsule is present; coupling if asked."""
        kept = routed if coupling else Routed(routed.poses, routed.activations)
        return kept.to(self.dtype).within(self.mask)


class BuiltVotes(Votes):
    """Votes that stand in a tensor.

    Args:
        votes: û_j|i.
        poses: What they were made of; if None, the votes for the first output capsule take their place.
        dtype: Of the results; that of the votes if None.
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
    def of(cls, given: Votes | Float[Tensor, "B I J D"], mask: Bool[Tensor, "B I"] | None = None) -> Votes:
        """Votes from votes, or from a tensor; of a mask's capsules alone."""
        return (given if isinstance(given, Votes) else cls(given)).masked(mask)

    def _of_images(self, images: slice) -> Votes:
        return BuiltVotes(self.votes[images], self.poses[images])

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        there = mask.unsqueeze(2)
        return BuiltVotes(self.votes.where(there.unsqueeze(3), 0), self.poses.where(there, 0))

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        if coupling is None:
            return self.votes.sum(1)
        return torch.einsum("bij,bijd->bjd", coupling.to(self.votes), self.votes)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return torch.einsum("bijd,bjd->bij", self.votes, parents.to(self.votes))

    def build(self) -> Float[Tensor, "B I J D"]:
        return self.votes

    def factors(self) -> VoteFactors:
        return VoteFactors("built", self.votes)


class VotesOfPoses(Votes):
    """Votes that are made of poses, with weights that are the same for all images."""

    @abstractmethod
    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """The votes of other poses, with the same weights."""

    def _of_images(self, images: slice) -> Votes:
        return self._of(self.poses[images])

    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        return self._of(self.poses.where(mask.unsqueeze(2), 0))


class DenseVotes(VotesOfPoses):
    """Votes W_ij u_i, a matrix for each pair.

    Args:
        poses: Input capsules u_i.
        weight: W_ij.
    """

    @checked
    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> None:
        size = LayerSize(weight.shape[0], poses.shape[2], *weight.shape[1:3])
        super().__init__(poses, size, torch.promote_types(poses.dtype, weight.dtype))
        self.weight = weight.to(self.poses.dtype)  # once, so that the gradients of its uses are summed in this dtype

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return DenseVotes(poses, self.weight)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        return weighted_sum(self.poses, self.weight, coupling)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return agreement(self.poses, self.weight, parents)

    def build(self) -> Float[Tensor, "B I J D"]:
        return compute_votes(self.poses, self.weight)

    def factors(self) -> VoteFactors:
        return VoteFactors("dense", self.poses, self.weight)


class IdentityVotes(VotesOfPoses):
    """Votes u_i, the same for all output capsules; a subclass does something for each of these, to all input capsules.

    What is done to sums of poses, and not to each pose, is done J times instead of I·J times.
    """

    def __init__(
        self,
        poses: Float[Tensor, "B I K"],
        out_capsules: int,
        out_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _, I, K = poses.shape
        super().__init__(poses, LayerSize(I, K, out_capsules, out_dim or K), dtype)

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return IdentityVotes(poses, self.size.out_capsules)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        total = self.poses.sum(1, keepdim=True) if coupling is None else coupling.to(self.poses).mT @ self.poses
        return self._transform(total)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return self.poses @ self._transpose(parents.to(self.poses)).mT

    def build(self) -> Float[Tensor, "B I J D"]:
        return self._transform(self.poses.unsqueeze(2))

    def factors(self) -> VoteFactors:
        unit_vectors = torch.eye(self.size.in_dim, dtype=self.poses.dtype, device=self.poses.device)
        matrices = self._transform(unit_vectors.unsqueeze(1)).permute(1, 2, 0)  # (J, D, K)
        return VoteFactors("shared", self.poses, matrices)

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        """Apply T_j to poses (…, N, K); N is J, or 1 to use the same pose for every output."""
        return poses.expand(*poses.shape[:-2], self.size.out_capsules, -1)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        """T_jᵀ x, so that ⟨T_j u, x⟩ = ⟨u, T_jᵀ x⟩."""
        return parents


class SharedVotes(IdentityVotes):
    """Votes W_j u_i: all input capsules share the matrix of an output capsule."""

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "J D K"]) -> None:
        J, D, _ = weight.shape
        super().__init__(poses, J, D, torch.promote_types(poses.dtype, weight.dtype))
        self.weight = weight.to(self.poses.dtype)

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return SharedVotes(poses, self.weight)

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        return torch.einsum("jdk,...jk->...jd", self.weight, poses)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        return torch.einsum("jdk,bjd->bjk", self.weight, parents)


class CommonVotes(IdentityVotes):
    """Votes W u_i: one matrix for all pairs."""

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "D K"], out_capsules: int) -> None:
        super().__init__(poses, out_capsules, len(weight), torch.promote_types(poses.dtype, weight.dtype))
        self.weight = weight.to(self.poses.dtype)

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return CommonVotes(poses, self.weight, self.size.out_capsules)

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        return super()._transform(poses @ self.weight.mT)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        return parents @ self.weight


class FactoredVotes(CommonVotes):
    """Votes F (f_j∘u_i): the matrix of an output capsule is a matrix of all, whose columns it scales."""

    def __init__(
        self, poses: Float[Tensor, "B I K"], scale: Float[Tensor, "J K"], weight: Float[Tensor, "D K"]
    ) -> None:
        super().__init__(poses, weight, len(scale))
        self.scale = scale.to(self.poses.dtype)

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return FactoredVotes(poses, self.scale, self.weight)

    def _transform(self, poses: Float[Tensor, "*B N K"]) -> Float[Tensor, "*B J D"]:
        return super()._transform(poses * self.scale)

    def _transpose(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B J K"]:
        return super()._transpose(parents) * self.scale


class MatrixVotes(VotesOfPoses):
    """Votes M_i W_ij of poses that are square matrices, M_i (P, P), read row by row: K = D = P².

    The rows of a pose are transformed alike, so that a row is a capsule of P components to the sums.
    """

    def __init__(self, poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J P P"]) -> None:
        I, J, P, _ = weight.shape
        super().__init__(poses, LayerSize(I, P * P, J, P * P), torch.promote_types(poses.dtype, weight.dtype))
        self.weight, self.side = weight.to(self.poses.dtype), P

    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        return MatrixVotes(poses, self.weight)

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
        return self._joined(self.rows.build())

    def factors(self) -> VoteFactors:
        return VoteFactors("matrix", self.poses, self.weight)

    def _rows_of(self, poses: Float[Tensor, "B N D"]) -> Float[Tensor, "BP N P"]:
        return poses.unflatten(2, (self.side, self.side)).movedim(2, 1).flatten(0, 1)

    def _joined(self, rows: Float[Tensor, "BP *capsules P"]) -> Float[Tensor, "B *capsules D"]:
        return rows.unflatten(0, (-1, self.side)).movedim(1, -2).flatten(-2)
