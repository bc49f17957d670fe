"""Routing by a mixture of Gaussians: what EM, its authors' code and variational Bayes have in common."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.capsules import LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes, dtype_of
from torchcaps.ops.checkpoint import blocks, in_blocks
from torchcaps.ops.precision import full_dtype, full_precision, in_full_precision
from torchcaps.ranges import AtLeastOneIteration

LogCompete = Callable[[Tensor], Tensor]
"""From logits (B, I, J) to the logarithm of the coupling."""
Gaussians = tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
"""Poses, logits of the activations, and the coupling of the last fit."""
Fit = Callable[..., Gaussians]
"""From votes (B, I, J, D) that are built, activations (B, I), LogCompete and, where rounds are wanted, their list."""


def fit_votes(fit: Fit, votes: Votes, activations: Float[Tensor, "B I"]) -> Gaussians:
    """The Gaussians of votes that are built some images at a time, within :func:`torchcaps.set_working_memory`."""
    I, _, J, D = votes.size
    dtype = full_dtype(votes.poses.dtype)
    row_bytes = I * J * D * torch.empty(0, dtype=dtype).element_size()
    multiple = 1 if votes.competition is None else votes.competition.rows_per_image
    rows = blocks(len(votes.poses), row_bytes, votes.poses.device, multiple)
    given = activations.to(dtype)
    items = [(votes, given)] if len(rows) == 1 else [(votes[images], given[images]) for images in rows]

    def work(item: tuple[Votes, Tensor]) -> Gaussians:
        some, active = item
        return fit(in_full_precision(some.build()), active, some.log_compete)

    with full_precision(votes.poses.device):
        poses, logits, coupling = in_blocks(work, items)
    return poses, logits, coupling


def route_mixture(
    fit: Callable[..., Gaussians],
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    learned: tuple[Float[Tensor, "J"], Float[Tensor, "J"]],
    return_coupling: bool,
    activate: Callable[[Tensor], Tensor] = torch.sigmoid,
    **options: Any,
) -> Routed:
    """The mixture of a public function: its two learned numbers of each output capsule, and its options."""
    given = BuiltVotes.of(votes)
    working = tuple(each.to(full_dtype(given.poses.dtype)) for each in learned)
    poses, logits, coupling = fit_votes(functools.partial(fit, learned=working, **options), given, activations)
    return Routed(poses, activate(logits), coupling).to(dtype_of(votes), coupling=return_coupling)


class MixtureRouting(Routing):
    """A mixture of Gaussians with two learned numbers of each output capsule, fitted to votes that are built.

    Without activations, those of the input capsules are the lengths of their poses.

    Args:
        num_iterations: Routing iterations: how often the Gaussians are fitted.
    """

    start: tuple[float, float] = (0.0, 0.0)
    """Where the two numbers start."""

    def __init__(self, num_iterations: AtLeastOneIteration = 3) -> None:
        super().__init__()
        self.num_iterations = num_iterations

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

    @abstractmethod
    def fit(
        self,
        votes: Float[Tensor, "B I J D"],
        activations: Float[Tensor, "B I"],
        log_compete: LogCompete,
        rounds: list[RoutingRound] | None = None,
    ) -> Gaussians:
        """The Gaussians of built votes; ``rounds`` is filled where it is given."""

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
        return Routed(poses, active, coupling).to(votes.poses.dtype, coupling=return_coupling)

    def rounds(self, votes: Votes, activations: Float[Tensor, "B I"] | None = None) -> list[RoutingRound]:
        """Every number of each iteration; see :class:`Routing`. Agreement is the logarithm of a vote's density."""
        rounds: list[RoutingRound] = []
        with full_precision(votes.poses.device):
            active = self.activations_of(votes, activations)
            self.fit(in_full_precision(votes.build()), active, votes.log_compete, rounds)
        return rounds
