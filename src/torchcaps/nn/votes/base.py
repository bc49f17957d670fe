"""Votes: the predictions of the input capsules for the output capsules, usually never built in memory.

A routing algorithm asks for weighted sums of the votes and for their agreement with output capsules. It builds the
votes only if it needs each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.kernels.mixtures import VoteFactors
from torchcaps.nn.capsules import LayerSize, Routed
from torchcaps.nn.votes.competition import MapCompetition, SoftmaxOver, log_softmax, share_out
from torchcaps.ops.precision import full_dtype


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

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of the sums of each subclass, because some shapes would be broadcast without a word."""
        super().__init_subclass__(**options)
        for name in ("weighted_sum", "agreement"):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

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
    def letters(self) -> dict[str, Any]:
        """Sizes of the letters B, I, J and D in annotations, and the device; see :func:`torchcaps.checks.checked`."""
        (B, I), (_, _, J, D) = self.like.shape[:2], self.size
        return {"B": B, "I": I, "J": J, "D": D, "device": self.like.device}

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

    def factors(self) -> VoteFactors:
        """Return the tensors from which a routing computes the votes block by block; by default the built votes.

        Votes of masked input capsules may be any finite numbers.
        """
        return VoteFactors("built", self.build())

    @abstractmethod
    def _hidden(self, mask: Bool[Tensor, "B I"]) -> Votes:
        """Return the votes with all numbers of masked input capsules set to zero."""

    @checked
    def masked(self, mask: Bool[Tensor, "B I"] | None) -> Votes:
        """Mask input capsules, in addition to capsules that are masked already."""
        if mask is None:
            return self
        mask = mask if self.mask is None else mask & self.mask
        votes = self._hidden(mask)
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

    @checked
    def compete(
        self,
        logits: Float[Tensor, "B I J"],
        softmax_over: SoftmaxOver = "outputs",
        *,
        leaky: bool = False,
        sparse: bool = False,
    ) -> Float[Tensor, "B I J"]:
        """Return the coupling: the softmax of the routing logits over the capsules that compete.

        Over ``"outputs"``, all output capsules that an input capsule votes for compete. With
        ``compete_over="types-and-positions"``, these are the output capsules of all windows that contain it.

        Args:
            logits: Routing logits b_ij.
            softmax_over: The axis on which capsules compete.
            leaky: Add a competitor with logit 0, whose share goes to no capsule.
            sparse: Use the sparsemax instead of the softmax, so that most shares are exactly zero.

        Returns:
            Coupling c_ij; zero for masked input capsules.

        Raises:
            InputError: ``sparse`` with the outputs of several windows as competitors.
        """
        if sparse and self.competition is not None and softmax_over == "outputs":
            raise InputError('compete: sparse=True needs a layer with compete_over="types"')
        # not -∞: over inputs, the softmax of a row without any capsule would be NaN
        hidden = torch.finfo(logits.dtype).min if softmax_over == "inputs" else 0.0
        logits = self.present(logits, hidden)
        if self.competition is not None and softmax_over == "outputs":
            return self.present(self.competition.softmax(logits, leaky))
        return self.present(self._shares(logits, 2 if softmax_over == "outputs" else 1, leaky=leaky, sparse=sparse))

    def _shares(self, logits: Float[Tensor, "B I J"], axis: int, **options: bool) -> Float[Tensor, "B I J"]:
        if axis == 2 and logits.movedim(2, 0).is_contiguous():  # keep the memory order of the contractions
            return share_out(logits.movedim(2, 0), 0, **options).movedim(0, 2)
        return share_out(logits, axis, **options)

    @checked
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
