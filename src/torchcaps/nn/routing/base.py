"""Base class of routing algorithms, the modules that compute output capsules from votes."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError, WrongType
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.votes import Votes
from torchcaps.nn.votes.competition import SoftmaxOver
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ops.squash import safe_norm

Initial = float | Callable[[Tensor], Any]
"""Initial value of a parameter, or a function that draws it in place."""


def normal(std: float) -> Initial:
    """Return a function that draws a tensor from a normal distribution."""
    return functools.partial(nn.init.normal_, std=std)


def uniform(limit: float) -> Initial:
    """Return a function that draws a tensor uniformly from -limit to limit."""
    return functools.partial(nn.init.uniform_, a=-limit, b=limit)


class Routing(nn.Module, ABC):
    """Base class of routing algorithms, which compute output capsules from the votes of input capsules.

    To use your own algorithm in a capsule layer, write a subclass with the :meth:`forward` below and register it with
    ``@register("routing", "mine")``. Make parameters whose shapes depend on the layer's sizes in :meth:`bind`.
    """

    softmax_over: SoftmaxOver | None = "outputs"
    """The axis on which capsules compete and the coupling sums to one. None: the coupling sums to one on no axis."""
    leaky: bool = False
    """True if the softmax has one more competitor, whose share goes to no capsule."""
    num_iterations: int = 1
    """Number of times that the coupling is computed."""
    by_row: bool = True
    """True if each row of votes is routed by itself. A layer then routes the positions of a large map part by part.
    False for an algorithm that computes with several rows, such as batch normalisation."""
    has_map_kernel: bool = False
    """True for dynamic routing with the options that its kernel for the types of a map has."""
    size: LayerSize | None = None
    """Sizes I, K, J, D of the layer that contains the routing."""
    keeps_sizes: bool = False
    """True if :meth:`bind` changed the routing, which then belongs to one layer. Set by the layer."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Turn autocast off inside the algorithm of each subclass, even for calls without a layer."""
        super().__init_subclass__(**options)
        for name in ("forward", "rounds"):
            if name in vars(cls):
                setattr(cls, name, computed_in_full_precision(vars(cls)[name]))

    def __init__(self) -> None:
        super().__init__()
        self._initial: dict[str, Initial] = {}

    def bind(self, size: LayerSize) -> None:
        """Make the parameters for the sizes I, K, J, D. A layer calls this once."""

    def learned(self, name: str, initial: Initial, *shape: int) -> nn.Parameter:
        """Return a new parameter with its initial values, which :meth:`reset_parameters` gives it again.

        Args:
            name: Name of the attribute that holds the parameter.
            initial: Initial value, or a function that draws a tensor in place.
            *shape: Sizes of the parameter.
        """
        self._initial[name] = initial
        parameter = nn.Parameter(torch.empty(shape))
        _draw(parameter, initial)
        return parameter

    def reset_parameters(self) -> None:
        """Give each parameter its initial values, some of them drawn from torch's random generator."""
        for name, initial in self._initial.items():
            _draw(getattr(self, name), initial)

    @staticmethod
    def activations_of(votes: Votes, activations: Activations) -> Float[Tensor, "B I"]:
        """Return the activations of the input capsules in full precision, or the lengths of their poses if None."""
        active = safe_norm(votes.poses) if activations is None else activations
        return votes.present(active.to(votes.like.dtype))

    def balanced_std(self, size: LayerSize) -> float:
        """Return the standard deviation of votes, relative to the length of a pose, for balanced output capsules.

        Balanced output capsules are neither so short that a stack of layers shrinks them to nothing, nor saturated.
        Under uniform coupling c, the sum of votes has D components of variance I·c²·σ²·‖u‖². Here c is 1/J (competition
        over outputs), 1/I (over inputs) or 1 (no competition). With σ = 1 / (c·√(I·D)) the sum has a length near one
        for poses of length one.

        Args:
            size: Sizes of the layer, where J is the number of output capsules that compete for an input capsule.
        """
        I, J, D = max(size.in_capsules, 1), size.out_capsules, size.out_dim
        competitors = {"outputs": J, "inputs": I, None: 1}[self.softmax_over]
        return competitors / math.sqrt(I * D)

    def __call__(self, votes: Any, *args: Any, **kwargs: Any) -> Routed:
        """Call :meth:`forward`.

        Raises:
            WrongType: ``votes`` is no :class:`Votes`.
        """
        if not isinstance(votes, Votes):
            name = type(votes).__name__
            raise WrongType(f"{type(self).__name__}: votes must be Votes, such as BuiltVotes(tensor), got {name}")
        routed: Routed = super().__call__(votes, *args, **kwargs)
        return routed

    @abstractmethod
    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route.

        Args:
            votes: Votes of the input capsules for the output capsules.
            activations: Activations of the input capsules, 0..1. None: use the length of the pose.
            return_coupling: Also return the coupling.

        Returns:
            Output capsules, and the coupling if it was requested and the algorithm has one.
        """

    @computed_in_full_precision
    def rounds(self, votes: Votes, activations: Activations = None) -> list[RoutingRound]:
        """Return the intermediate results of each iteration, for figures and statistics; see :meth:`forward`.

        The default is one iteration with the final coupling. Its logits are ln c_ij, because their softmax is the
        coupling.

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


def _draw(parameter: Tensor, initial: Initial) -> None:
    initial(parameter) if callable(initial) else nn.init.constant_(parameter, initial)


class ScoredRouting(Routing):
    """Base class of routings that normalise poses. An activation is σ(w·v_j + b), because all lengths are equal.

    w (D) and b are learned and shared by all output capsules.
    """

    def bind(self, size: LayerSize) -> None:
        """Make w and b. Subclasses make their parameters first and then call this."""
        self.score = self.learned("score", uniform(size.out_dim**-0.5), size.out_dim)
        self.score_bias = self.learned("score_bias", 0.0)

    def scored(self, poses: Float[Tensor, "B J D"]) -> Float[Tensor, "B J"]:
        """Return the activations of output capsules from their poses in full precision."""
        return (poses @ self.score.to(poses.dtype) + self.score_bias.to(poses.dtype)).sigmoid()
