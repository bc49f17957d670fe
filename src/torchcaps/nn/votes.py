"""Votes: the predictions of the input capsules for the output capsules, usually never built in memory.

A routing algorithm asks for weighted sums of the votes and for their agreement with output capsules. It builds the
votes only if it needs each of them.
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
    """Base class of votes û_j|i, the interface between a transform and a routing algorithm.

    Votes are computed in full precision: half precision becomes float32 here, and :meth:`finish` converts results back.

    Args:
        poses: Input capsules u_i.
        size: Sizes I, K, J, D of the layer.
        dtype: Dtype of the results. None: the dtype of the poses. Subclasses pass the higher dtype of poses and
            weights.
    """

    competition: MapCompetition | None = None
    """The competition between positions of a map; None if only the output capsules of a row compete."""
    mask: Bool[Tensor, "B I"] | None = None
    """True for each input capsule that is present; the poses of masked capsules are zero. None if all are present."""

    def __init__(self, poses: Float[Tensor, "B I K"], size: LayerSize, dtype: torch.dtype | None = None) -> None:
        if poses.shape[1] == 0:
            raise InputError("votes must be of at least one input capsule, got I=0")
        self.dtype = poses.dtype if dtype is None else dtype
        self._poses, self.size = poses.to(full_dtype(self.dtype)), size

    @property
    def poses(self) -> Float[Tensor, "B I K"]:
        """Input capsules u_i in full precision."""
        return self._poses

    @property
    def like(self) -> Float[Tensor, "B I more"]:
        """A tensor with the dtype and the device of the votes, and with as many rows and input capsules."""
        return self.poses

    @property
    def data(self) -> Float[Tensor, "B I more"]:
        """The poses. torchinfo reads the shape of a module's input from an attribute named ``data``."""
        return self.like

    @abstractmethod
    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """Return Σ_i c_ij û_j|i, or the plain sum if ``coupling`` is None."""

    @abstractmethod
    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """Return the scalar products ⟨û_j|i, x_j⟩ with output capsules or any other vectors x_j."""

    @abstractmethod
    def build(self) -> Float[Tensor, "B I J D"]:
        """Return all B·I·J·D numbers, for algorithms that need every single vote."""

    def lengths(self) -> Float[Tensor, "B I J"]:
        """Return the lengths ‖û_j|i‖, at least 1e-8."""
        return at_least_tiny(self.build(), 3).squeeze(3)

    def factors(self) -> VoteFactors | None:
        """Return the tensors from which a routing computes the votes block by block.

        None if the votes can only be built. Votes of masked input capsules may be any finite numbers.
        """
        return None

    @abstractmethod
    def _of_images(self, images: slice) -> Votes:
        """Return the votes of some images, ignoring the mask."""

    @abstractmethod
    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        """Return the votes with all numbers of masked input capsules set to zero."""

    def __getitem__(self, images: slice) -> Votes:
        """Return the votes of some images, for algorithms that build a few images at a time."""
        return self._like_these(self._of_images(images), None if self.mask is None else self.mask[images])

    def masked(self, mask: Bool[Tensor, "B I"] | None) -> Votes:
        """Mask input capsules, in addition to capsules that are masked already."""
        if mask is None:
            return self
        mask = mask if self.mask is None else mask & self.mask
        return self._like_these(self._hidden(mask), mask)

    def _like_these(self, votes: Votes, mask: Bool[Tensor, "B I"] | None) -> Votes:
        votes.competition, votes.dtype, votes.mask = self.competition, self.dtype, mask
        return votes

    def present(self, values: Float[Tensor, "B I *more"], otherwise: float = 0.0) -> Float[Tensor, "B I *more"]:
        """Replace the values of masked input capsules by ``otherwise``.

        Every number of an input capsule passes through here before it is used. Therefore neither results nor gradients
        depend on the values of masked capsules.
        """
        if self.mask is None:
            return values
        return values.where(self.mask.reshape(*self.mask.shape, *[1] * (values.ndim - 2)), otherwise)

    def zeros(self) -> Float[Tensor, "B I J"]:
        """Return routing logits of zero in full precision, in memory as (J, B, I) like the agreement."""
        like = self.like
        return like.new_zeros(self.size.out_capsules, like.shape[0], self.size.in_capsules).permute(1, 2, 0)

    def compete(
        self, logits: Float[Tensor, "B I J"], softmax_over: SoftmaxOver = "outputs", *, leaky: bool = False
    ) -> Float[Tensor, "B I J"]:
        """Return the coupling: the softmax of the routing logits over the capsules that compete.

        Over ``"outputs"``, all output capsules that an input capsule votes for compete. With
        ``compete_over="types-and-positions"``, these are the output capsules of all windows that contain it.

        Args:
            logits: Routing logits b_ij.
            softmax_over: The axis on which capsules compete.
            leaky: Add a competitor with logit 0, whose share goes to no capsule.

        Returns:
            Coupling c_ij; zero for masked input capsules.
        """
        # not -∞: over inputs, the softmax of a row without any capsule would be NaN
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
        if axis == 2 and logits.movedim(2, 0).is_contiguous():  # keep the memory order of the contractions
            return logits.movedim(2, 0).softmax(0).movedim(0, 2)
        return logits.softmax(axis)

    def log_compete(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """Return the logarithm of :meth:`compete` over outputs, exact even if the coupling itself underflows."""
        logits = self.present(logits)
        return log_softmax(logits) if self.competition is None else self.competition.log_softmax(logits)

    def finish(self, routed: Routed, *, coupling: bool) -> Routed:
        """Convert results to :attr:`dtype`, apply the mask, and drop the coupling unless it is requested.

        Every routing returns through here.
        """
        kept = routed if coupling else Routed(routed.poses, routed.activations)
        return kept.to(self.dtype).masked(self.mask)


def at_least_tiny(vectors: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Return the lengths of vectors, at least 1e-8, with an axis ``dim`` of size one. The gradient at zero is zero."""
    return vectors.square().sum(dim, keepdim=True).clamp_min(1e-16).sqrt()


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
    def of(cls, given: Votes | Float[Tensor, "B I J D"], mask: Bool[Tensor, "B I"] | None = None) -> Votes:
        """Return votes unchanged or wrap a tensor of votes, and apply the mask."""
        return (given if isinstance(given, Votes) else cls(given)).masked(mask)

    def _of_images(self, images: slice) -> Votes:
        return BuiltVotes(self.votes[images], self.poses[images])

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

    def factors(self) -> VoteFactors:
        return VoteFactors("built", self.votes)


class VotesOfPoses(Votes):
    """Votes computed from poses with weights that all images share."""

    @abstractmethod
    def _of(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """Return the votes of other poses with the same weights."""

    def _of_images(self, images: slice) -> Votes:
        return self._of(self.poses[images])

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

    def build(self) -> Float[Tensor, "B I J D"]:
        return compute_votes(self.poses, self.weight)

    def factors(self) -> VoteFactors:
        return VoteFactors("dense", self.poses, self.weight)


class IdentityVotes(VotesOfPoses):
    """Votes u_i, the same for all output capsules. Subclasses apply a map T_j for each output capsule.

    T_j is applied to sums of poses, so it runs J times instead of I·J times.
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
        """Return T_jᵀ x, with which ⟨T_j u, x⟩ = ⟨u, T_jᵀ x⟩."""
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
    """Votes F (f_j∘u_i): all output capsules share the matrix F, and each scales its columns by f_j."""

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
