"""The equations of mixtures of Gaussians: what they are given, their names, and the operation that applies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.mixtures import Options, Sums, mixture_operation
from torchcaps.nn.capsules import RoutingRound
from torchcaps.nn.votes.competition import MapCompetition

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
