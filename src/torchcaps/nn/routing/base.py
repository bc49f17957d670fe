"""A routing algorithm: the abstract class of every module that makes output capsules of votes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError, WrongType
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.competition import SoftmaxOver
from torchcaps.nn.votes import Votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ops.squash import safe_norm


class Routing(nn.Module, ABC):
    """A routing algorithm: from the votes of input capsules to output capsules.

    Subclass it with a :meth:`forward` of the signature below, and register it by ``@register("routing", "mine")``, to
    put an algorithm of your own into a capsule layer. Parameters whose shapes depend on the layer's sizes are made in
    :meth:`bind`.
    """

    softmax_over: SoftmaxOver | None = "outputs"
    """The axis on which capsules compete, over which coupling sums to one; None if it sums to one over neither."""
    leaky: bool = False
    """Whether a competitor that is no capsule takes a share of the coupling."""
    num_iterations: int = 1
    """How many times the coupling is computed."""
    size: LayerSize | None = None
    """I, K, J, D of the layer that it belongs to."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Turn autocast off inside the algorithm of each subclass, also if it is called without a layer."""
        super().__init_subclass__(**options)
        for name in ("forward", "rounds"):
            if name in vars(cls):
                setattr(cls, name, computed_in_full_precision(vars(cls)[name]))

    def bind(self, size: LayerSize) -> None:
        """Make the parameters for the sizes I, K, J, D; a layer calls this once."""

    @staticmethod
    def activations_of(votes: Votes, activations: Activations) -> Float[Tensor, "B I"]:
        """How active the input capsules are, in full precision; the lengths of their poses where nothing says so."""
        active = safe_norm(votes.poses) if activations is None else activations
        return votes.present(active.to(votes.poses.dtype))

    def balanced_std(self, size: LayerSize) -> float:
        """The deviation of votes, relative to the length of a pose, with which output capsules start well.

        That is neither short, as too small a deviation halves the lengths again and again in a stack until nothing is
        left, nor saturated. Under uniform coupling c the sum of votes has D components of variance I·c²·σ²·‖u‖², where
        c = 1/J (competition over outputs), 1/I (over inputs) or 1 (no competition): σ = 1 / (c·√(I·D)) makes its length
        near one for poses of length one. J of ``size`` is how many output capsules compete for an input capsule.
        """
        I, J, D = max(size.in_capsules, 1), size.out_capsules, size.out_dim
        competitors = {"outputs": J, "inputs": I, None: 1}[self.softmax_over]
        return competitors / math.sqrt(I * D)

    def __call__(self, votes: Any, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward`.

        Raises:
            WrongType: ``votes`` is no :class:`Votes`.
        """
        if not isinstance(votes, Votes):
            got = type(votes).__name__
            raise WrongType(f"{type(self).__name__}: votes must be Votes, such as BuiltVotes(tensor), got {got}")
        return super().__call__(votes, *args, **kwargs)

    @abstractmethod
    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route.

        Args:
            votes: What the input capsules predict for the output capsules.
            activations: How active the input capsules are, 0..1; None where the length of a pose says so.
            return_coupling: Whether the coupling is asked for.

        Returns:
            Output capsules, and the coupling if it was asked for and there is one.
        """

    @computed_in_full_precision
    def rounds(self, votes: Votes, activations: Activations = None) -> list[RoutingRound]:
        """Every number of each iteration, for pictures and statistics; the arguments are those of :meth:`forward`.

        Of an algorithm that does not say more, this is one iteration: its coupling, and logits whose softmax the
        coupling is, ln c_ij.

        Raises:
            InputError: The algorithm returns no coupling.
        """
        routed = self(votes, activations, return_coupling=True)
        if routed.coupling is None:
            raise InputError(f"{type(self).__name__} returns no coupling, so there is none to show")
        logits = routed.coupling.clamp_min(1e-30).log()
        weighted_sum = votes.weighted_sum(routed.coupling)
        agreement = votes.agreement(routed.poses)
        return [RoutingRound(logits, routed.coupling, weighted_sum, routed.poses, agreement, routed.activations)]


class ScoredRouting(Routing):
    """A routing that normalises poses, so that their lengths say nothing: an activation is σ(w·v_j + b).

    w (D) and b are learned, the same for all output capsules.
    """

    def bind(self, size: LayerSize) -> None:
        """Make w and b; the parameters of the algorithm come before them."""
        D = size.out_dim
        self.score = nn.Parameter(torch.empty(D).uniform_(-1, 1) / math.sqrt(D))
        self.score_bias = nn.Parameter(torch.zeros(()))

    def scored(self, poses: Float[Tensor, "B J D"]) -> Float[Tensor, "B J"]:
        """Return the activations of output capsules, whose poses are still in full precision."""
        return (poses @ self.score.to(poses.dtype) + self.score_bias.to(poses.dtype)).sigmoid()
