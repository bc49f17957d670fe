"""Routing by a mixture of Gaussians, the common part of EM, its authors' code, variational Bayes and Heinsen 2019.

The equations of each are the function ``fit`` of its file, which is registered by :func:`equations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.kernels.mixtures import Options, Sums, Tensors, VoteFactors, mixture_operation
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ranges import AtLeastOneIteration

Gaussians = tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "#B #J #I"]]
"""Poses, logits of the activations, and the logarithm of the coupling of the last fit."""


class MixtureInputs(NamedTuple):
    """Votes and activations of some rows, for the equations of a mixture."""

    votes: Sums
    activations: Float[Tensor, "B 1 I"]
    competition: MapCompetition | None
    """Competition between positions of a map; None if only the output capsules of a row compete."""
    present: Float[Tensor, "B 1"] | None
    """Number of input capsules of each row that are present; None if all are."""
    rounds: list[RoutingRound] | None = None
    """List that receives the intermediate results of each iteration, or None."""

    @property
    def number(self) -> int | Float[Tensor, "B 1"]:
        """Number of input capsules of a row."""
        return self.activations.shape[2] if self.present is None else self.present

    def uniform(self) -> Float[Tensor, "1 1 1"]:
        """Return the logarithm of a coupling of 1/J."""
        return self.activations.new_full((1, 1, 1), -math.log(self.votes.shape[1]))

    def start(self) -> Float[Tensor, "#B 1 #I"]:
        """Return the logarithm of the initial coupling, which is uniform over all capsules that compete."""
        if self.competition is None:
            return self.uniform()
        links = self.competition.links.to(self.activations)[self.competition.children].log()  # (L, I)
        return self.uniform() - links.unsqueeze(1).repeat(self.activations.shape[0] // len(links), 1, 1)

    def log_compete(self, logits: Float[Tensor, "B J I"]) -> Float[Tensor, "B J I"]:
        """Return the logarithm of the coupling: the softmax over the output capsules that compete."""
        if self.competition is None:
            return logits.log_softmax(1)
        return self.votes.log_compete(logits, self.competition)

    def note(
        self,
        logits: Tensor | None,
        log_coupling: Tensor,
        means: Float[Tensor, "B J D"],
        capsules: Float[Tensor, "B J D"],
        log_posterior: Float[Tensor, "B J I"],
        log_prior: Float[Tensor, "B J"],
        active: Float[Tensor, "B J"],
    ) -> None:
        """Add the intermediate results of an iteration to the rounds.

        Args:
            logits: Routing logits (B, J, I); None if they are zero.
            log_coupling: Logarithm of the coupling, broadcast to all rows and outputs.
            means: Means μ_j.
            capsules: Poses of the output capsules.
            log_posterior: Logarithms of the densities, ln N(V_ij), plus ``log_prior``.
            log_prior: Logarithm of the prior probability of each output capsule.
            active: Logits of the activations.
        """
        if self.rounds is not None:
            logits = torch.zeros_like(log_posterior) if logits is None else logits
            coupling = log_coupling.exp().expand_as(log_posterior)
            densities = log_posterior - log_prior.unsqueeze(2)
            self.rounds.append(RoutingRound(logits.mT, coupling.mT, means, capsules, densities.mT, active.sigmoid()))


Fit = Callable[..., Gaussians]
"""``fit(inputs, first, second, num_iterations, *settings)``; ``first`` and ``second`` are learned tensors."""
FITS: dict[str, Fit] = {}
"""Equations of each routing by name."""


def equations(name: str) -> Callable[[Fit], Fit]:
    """Register the equations of a mixture under a name."""

    def register(fit: Fit) -> Fit:
        FITS[name] = fit
        return fit

    return register


def _fit(
    votes: Sums, leaves: Sequence[Tensor], number: Tensor | None, children: Tensor | None, options: Options
) -> Gaussians:
    """Apply the equations of a routing to the votes of some rows."""
    active, first, second = leaves
    competition = None if children is None else MapCompetition(children, options.on_map)
    inputs = MixtureInputs(votes, active.unsqueeze(1), competition, number)
    return FITS[options.equations](inputs, first, second, options.num_iterations, *options.settings)


mixture = mixture_operation(_fit)
"""The operation that fits the Gaussians of all rows. All tensors must have one dtype of full precision."""


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
    """Name of the equations; see :func:`equations`."""
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
