"""Routing by a mixture of Gaussians: what EM, its authors' code and variational Bayes have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.ops.checkpoint import blocks, in_blocks
from torchcaps.ops.precision import computed_in_full_precision
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
        built = votes.build()
        number = built.shape[1] if votes.mask is None else votes.mask.sum(1, keepdim=True).clamp_min(1).to(built)
        return cls(built, activations, votes.log_compete, number, rounds)

    def note(
        self, logits: Tensor, log_coupling: Tensor, means: Tensor, capsules: Tensor, densities: Tensor, active: Tensor
    ) -> None:
        """Add the numbers of an iteration; ``active`` are the logits of the activations."""
        if self.rounds is not None:
            numbers = logits, log_coupling.exp(), means, capsules, densities, active.sigmoid()
            self.rounds.append(RoutingRound(*numbers))


def activated(
    poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
    """Poses, and activations from their logits."""
    return poses, logits.sigmoid()


@computed_in_full_precision
def route_mixture(
    fit: Callable[[Given], Gaussians],
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    mask: Bool[Tensor, "B I"] | None,
    return_coupling: bool,
    finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = activated,
) -> Routed:
    """The Gaussians of votes that are built some images at a time, within :func:`torchcaps.set_working_memory`."""
    whole = BuiltVotes.of(votes, mask)
    I, _, J, D = whole.size
    dtype, device = whole.poses.dtype, whole.poses.device
    multiple = 1 if whole.competition is None else whole.competition.rows_per_image
    rows = blocks(whole.poses.shape[0], I * J * D * dtype.itemsize, device, multiple)
    active = whole.present(activations.to(dtype))
    items = [(whole, active)] if len(rows) == 1 else [(whole[images], active[images]) for images in rows]

    def work(item: tuple[Votes, Tensor]) -> Gaussians:
        return fit(Given.of(*item))

    poses, logits, coupling = in_blocks(work, items)
    return whole.finish(Routed(*finish(poses, logits), coupling), coupling=return_coupling)


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
        u, a = self.start
        self.beta_u = nn.Parameter(torch.full((size.out_capsules,), u))
        self.beta_a = nn.Parameter(torch.full((size.out_capsules,), a))

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; output poses are means, so that votes are as long as poses."""
        return 1 / math.sqrt(size.out_dim)

    @abstractmethod
    def fit(self, given: Given) -> Gaussians:
        """The Gaussians of some images."""

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        """Poses, and activations from their logits."""
        return activated(poses, logits)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        active = self.activations_of(votes, activations)
        return route_mixture(self.fit, votes, active, None, return_coupling, self.finish)

    def rounds(self, votes: Votes, activations: Activations = None) -> list[RoutingRound]:
        """Every number of each iteration; see :class:`Routing`. Agreement is the logarithm of a vote's density."""
        rounds: list[RoutingRound] = []
        self.fit(Given.of(votes, self.activations_of(votes, activations), rounds))
        return rounds
