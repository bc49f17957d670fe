"""Routing by a mixture of Gaussians: what EM, its authors' code and variational Bayes have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.nn.capsules import LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes, dtype_of
from torchcaps.ops.checkpoint import blocks, in_blocks
from torchcaps.ops.precision import full_dtype, full_precision, in_full_precision
from torchcaps.ranges import AtLeastOneIteration

Gaussians = tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
"""Poses, logits of the activations, and the coupling of the last fit."""


class Given(NamedTuple):
    """What the Gaussians of some images are fitted to."""

    votes: Float[Tensor, "B I J D"]
    activations: Float[Tensor, "B I"]
    log_compete: Callable[[Tensor], Tensor]
    """From logits (B, I, J) to the logarithm of the coupling."""
    number: int | Float[Tensor, "B 1"]
    """How many input capsules there are."""
    rounds: list[RoutingRound] | None = None
    """Filled with every number, where it is given."""

    @classmethod
    def of(cls, votes: Votes, activations: Float[Tensor, "B I"], rounds: list[RoutingRound] | None = None) -> Given:
        """Votes that are built."""
        built = in_full_precision(votes.build())
        number = built.shape[1] if votes.mask is None else votes.mask.sum(1, keepdim=True).clamp_min(1).to(built)
        return cls(built, activations, votes.log_compete, number, rounds)

    def note(self, logits: Tensor, log_coupling: Tensor, means: Tensor, capsules: Tensor, *more: Tensor) -> None:
        """Add the numbers of an iteration; ``more`` are densities and the logits of the activations."""
        if self.rounds is not None:
            agreement, active = more
            coupling = log_coupling.exp()
            self.rounds.append(RoutingRound(logits, coupling, means, capsules, agreement, active.sigmoid()))


Fit = Callable[..., Gaussians]
"""The equations of an algorithm: from what is :class:`Given`, two learned numbers of each output capsule, settings."""


def fit_votes(fit: Callable[[Given], Gaussians], votes: Votes, activations: Float[Tensor, "B I"]) -> Gaussians:
    """The Gaussians of votes that are built some images at a time, within :func:`torchcaps.set_working_memory`."""
    I, _, J, D = votes.size
    dtype = full_dtype(votes.poses.dtype)
    multiple = 1 if votes.competition is None else votes.competition.rows_per_image
    rows = blocks(votes.poses.shape[0], I * J * D * dtype.itemsize, votes.poses.device, multiple)
    given = activations.to(dtype)
    items = [(votes, given)] if len(rows) == 1 else [(votes[images], given[images]) for images in rows]

    def work(item: tuple[Votes, Tensor]) -> Gaussians:
        return fit(Given.of(*item))

    with full_precision(votes.poses.device):
        poses, logits, coupling = in_blocks(work, items)
    return poses, logits, coupling


def route_mixture(
    fit: Fit,
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    learned: tuple[Float[Tensor, "J"], Float[Tensor, "J"]],
    settings: Mapping[str, Any],
    mask: Bool[Tensor, "B I"] | None,
    return_coupling: bool,
    activate: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Routed:
    """The mixture of a public function."""
    given = BuiltVotes.of(votes, mask)
    working = tuple(each.to(full_dtype(given.poses.dtype)) for each in learned)
    equations = functools.partial(fit, learned=working, **settings)
    poses, logits, coupling = fit_votes(equations, given, given.active(activations))
    return Routed(poses, activate(logits), coupling).within(given.mask).to(dtype_of(votes), coupling=return_coupling)


class MixtureRouting(Routing):
    """A mixture of Gaussians with two learned numbers of each output capsule, fitted to votes that are built.

    Without activations, those of the input capsules are the lengths of their poses.

    Args:
        num_iterations: Routing iterations: how often the Gaussians are fitted.
        equations: Of the algorithm, from what is given to the Gaussians.
    """

    start: tuple[float, float] = (0.0, 0.0)
    """Where the two numbers start."""

    def __init__(self, num_iterations: AtLeastOneIteration, equations: Fit) -> None:
        super().__init__()
        self.num_iterations, self.equations = num_iterations, equations

    def bind(self, size: LayerSize) -> None:
        """Make the two numbers of each output capsule."""
        self.require_unbound()
        u, a = self.start
        self.beta_u = nn.Parameter(torch.full((size.out_capsules,), u))
        self.beta_a = nn.Parameter(torch.full((size.out_capsules,), a))
        self.size = size

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; output poses are means, so that votes are as long as poses."""
        return 1 / math.sqrt(size.out_dim)

    def learned(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What is learned, as the equations have it."""
        return self.beta_u.to(dtype), self.beta_a.to(dtype)

    def settings(self) -> dict[str, Any]:
        """What else the equations are told."""
        return {"num_iterations": self.num_iterations}

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        """Poses, and activations from their logits."""
        return poses, logits.sigmoid()

    def forward(
        self, votes: Votes, activations: Float[Tensor, "B I"] | None = None, *, return_coupling: bool = False
    ) -> Routed:
        """Route; see :class:`Routing`."""
        poses, logits, coupling = fit_votes(self.fit, votes, self.activations_of(votes, activations))
        with full_precision(votes.poses.device):
            poses, active = self.finish(poses, logits)
        return Routed(poses, active, coupling).within(votes.mask).to(votes.poses.dtype, coupling=return_coupling)

    def rounds(self, votes: Votes, activations: Float[Tensor, "B I"] | None = None) -> list[RoutingRound]:
        """Every number of each iteration; see :class:`Routing`. Agreement is the logarithm of a vote's density."""
        rounds: list[RoutingRound] = []
        with full_precision(votes.poses.device):
            active = self.activations_of(votes, activations)
            self.fit(Given.of(votes, active, rounds))
        return rounds

    def fit(self, given: Given) -> Gaussians:
        """The Gaussians of some images."""
        return self.equations(given, self.learned(given.votes.dtype), **self.settings())
