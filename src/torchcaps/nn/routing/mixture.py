"""Routing by a mixture of Gaussians, the common part of EM, its authors' code, variational Bayes and Heinsen 2019."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.kernels.mixtures import Options, Sums, Tensors, VoteFactors
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.routing.equations import FITS, MixtureInputs, mixture
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ranges import AtLeastOneIteration


def activated(
    poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
    """Return the poses, and activations from their logits."""
    return poses, logits.sigmoid()


@computed_in_full_precision
def route_mixture(
    equations: str,
    num_iterations: int,
    settings: tuple[float, ...],
    learned: tuple[Tensor, Tensor],
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    *,
    mask: Bool[Tensor, "B I"] | None = None,
    bias: Float[Tensor, "I J D"] | None = None,
    return_coupling: bool = False,
    finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = activated,
) -> Routed:
    """Fit Gaussians to votes, some rows at a time within :func:`torchcaps.set_working_memory`.

    Args:
        equations: Name of the routing's equations.
        num_iterations: Number of fits of the Gaussians.
        settings: Further numbers for the equations.
        learned: The two learned tensors of the equations.
        votes: Votes V_ij.
        activations: Activations a_i of the input capsules.
        mask: True for each input capsule that is present; all if None.
        bias: Added to the votes of all rows.
        return_coupling: Also return the coupling.
        finish: Function from poses and logits to poses and activations.
    """
    whole = BuiltVotes.of(votes, mask)
    active = whole.present(activations.to(whole.like.dtype))
    first, second = (each.to(active) for each in learned)
    factors = vote_factors(whole, bias)
    children, on_map = None, 0
    if whole.competition is not None:
        children, on_map = whole.competition.children, whole.competition.number
    number = number_of_inputs(whole)
    tensors = Tensors(active, first, second, factors.poses, factors.weight, factors.bias, number, children)
    options = Options(equations, num_iterations, settings, factors.kind, on_map, return_coupling)
    poses, logits, coupling = mixture(tensors, options)
    return whole.finish(Routed(*finish(poses, logits), coupling.mT), coupling=return_coupling)


def vote_factors(votes: Votes, bias: Float[Tensor, "#I J D"] | None = None) -> VoteFactors:
    """Return the tensors from which votes plus a bias are computed."""
    factors = votes.factors()
    if bias is None:
        return factors
    bias = bias.to(votes.like)
    return factors._replace(bias=bias if factors.bias is None else bias + factors.bias)


def number_of_inputs(votes: Votes) -> Float[Tensor, "B 1"] | None:
    """Return the number of input capsules of each row that are present; None for all."""
    return None if votes.mask is None else votes.mask.sum(1, keepdim=True).clamp_min(1).to(votes.like)


class MixtureRouting(Routing):
    """Base class of routings that fit a mixture of Gaussians, with two learned numbers for each output capsule.

    Without activations, the lengths of the input poses are used.

    Args:
        num_iterations: Routing iterations: number of fits of the Gaussians.
    """

    equations: ClassVar[str]
    """Name of the equations; see :func:`torchcaps.nn.routing.equations.equations`."""
    start: tuple[float, float] = (0.0, 0.0)
    """Initial values of the two numbers."""

    def __init__(self, num_iterations: AtLeastOneIteration = 3) -> None:
        super().__init__()
        self.num_iterations = num_iterations

    def bind(self, size: LayerSize) -> None:
        """Make the two numbers of each output capsule."""
        self.beta_u = self.learned("beta_u", self.start[0], size.out_capsules)
        self.beta_a = self.learned("beta_a", self.start[1], size.out_capsules)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; output poses are means of votes, so votes should be as long as poses."""
        return 1 / math.sqrt(size.out_dim)

    def betas(self) -> tuple[Tensor, Tensor]:
        """Return the two learned tensors for the equations."""
        return self.beta_u, self.beta_a

    def settings(self) -> tuple[float, ...]:
        """Return the numbers for the equations after the number of iterations."""
        return ()

    def vote_bias(self) -> Float[Tensor, "#I J D"] | None:
        """Return a bias on the votes of all rows, or None."""
        return None

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        """Return poses, and activations from their logits."""
        return activated(poses, logits)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        return route_mixture(
            self.equations,
            self.num_iterations,
            self.settings(),
            self.betas(),
            votes,
            self.activations_of(votes, activations),
            bias=self.vote_bias(),
            return_coupling=return_coupling,
            finish=self.finish,
        )

    def rounds(self, votes: Votes, activations: Activations = None) -> list[RoutingRound]:
        """Return the intermediate results of each iteration; the agreement is the logarithm of a vote's density."""
        rounds: list[RoutingRound] = []
        active = self.activations_of(votes, activations).unsqueeze(1)
        sums = Sums(vote_factors(votes, self.vote_bias()).build())
        inputs = MixtureInputs(sums, active, votes.competition, number_of_inputs(votes), rounds)
        learned = (each.to(active) for each in self.betas())
        FITS[self.equations](inputs, *learned, self.num_iterations, *self.settings())
        return rounds
