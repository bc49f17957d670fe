"""Behaviour-to-interest routing: dynamic routing from the items of a user's history to a few interests."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, LayerSize, Routed, RoutingRound
from torchcaps.nn.routing.base import Routing, normal
from torchcaps.nn.routing.dynamic import dynamic_routing, routing_rounds
from torchcaps.nn.votes import Votes
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, Epsilon
from torchcaps.tracing import is_eager, is_graph_capture

Start = Literal["noise", "queries"]
"""Initial routing logits."""
NOISE_ITEMS = 4096
"""Number of items with noise drawn in advance. A graph takes no more, because it cannot use a seeded generator."""


@register("routing", "b2i")
class B2IRouting(Routing):
    """Dynamic routing with initial logits from noise or from learned queries.

        b_ij ~ N(0, 1), cut at two standard deviations     "noise"
        b_ij = ⟨û_j|i, q_j⟩                                "queries", with a learned vector q_j (D)
        v_j  = dynamic_routing(û, num_iterations, prior=b)

    With one matrix for all pairs (the transform ``"common"``), an item casts the same vote for all interests.
    Equal logits would therefore keep the interests equal. In training, noise is drawn anew for each row. In evaluation
    it is the same at each call and on every device, because it is drawn on the CPU from a fixed seed. Row n of the
    noise belongs to the n-th item that the mask marks as present. An exported or compiled graph with noise takes at
    most 4,096 items. With noise, gradients flow through the last weighted sum only, as in the source.

    Args:
        num_iterations: Routing iterations: number of times that the coupling is computed.
        start_from: Initial logits of B2I routing: noise, or the agreement with learned queries.
        interest_eps: Added under the root of B2I routing's squash.

    Source: Li et al. 2019, "Multi-Interest Network with Dynamic Routing for Recommendation at Tmall"
    (arXiv:1904.08030), section 3.3; Cen et al. 2020, "Controllable Multi-Interest Framework for Recommendation"
    (arXiv:2005.09347) and its code.
    """

    def __init__(
        self, num_iterations: AtLeastOneIteration = 3, *, start_from: Start = "noise", interest_eps: Epsilon = 1e-9
    ) -> None:
        super().__init__()
        self.num_iterations, self.start_from, self.interest_eps = num_iterations, start_from, interest_eps
        self.queries: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the queries (J, D), or draw the noise for evaluation."""
        if self.start_from == "queries":
            self.queries = self.learned("queries", normal(1.0), size.out_capsules, size.out_dim)
        else:
            self._noise = seeded_noise(NOISE_ITEMS, size.out_capsules)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations are ignored, because the lengths of poses have this role."""
        return dynamic_routing(
            votes,
            self.num_iterations,
            prior=self.prior(votes),
            stop_gradient=self.queries is None,
            eps=self.interest_eps,
            return_coupling=return_coupling,
        )

    def rounds(self, votes: Votes, activations: Activations = None) -> list[RoutingRound]:
        """Return the intermediate results of each iteration; see :func:`torchcaps.routing_rounds`."""
        return routing_rounds(votes, self.num_iterations, prior=self.prior(votes), eps=self.interest_eps)

    def prior(self, votes: Votes) -> Float[Tensor, "B I J"]:
        """Return the initial routing logits."""
        (B, I), J = votes.like.shape[:2], votes.size.out_capsules
        if self.queries is not None:
            return votes.agreement(self.queries.to(votes.like.dtype).expand(B, -1, -1))
        dtype, device = votes.like.dtype, votes.like.device
        if self.training:
            return truncated_normal(torch.rand(B, I, J, device=device)).to(dtype)
        if votes.mask is None:
            place = torch.arange(I, device=device).expand(B, -1)
        else:
            place = (votes.mask.cumsum(1) - 1).clamp_min(0)
        return self._noise_of(I, device).to(dtype)[place]

    def _noise_of(self, items: int, device: torch.device) -> Float[Tensor, "N J"]:
        """Return the noise for at least ``items`` items. It is always drawn on the CPU."""
        if isinstance(items, int) and len(self._noise) < items:  # a graph may pass a symbol
            if is_graph_capture():
                raise InputError(f"B2IRouting: a graph takes at most {len(self._noise)} items with noise, got {items}")
            self._noise = seeded_noise(2 ** math.ceil(math.log2(items)), self._noise.shape[1])
        noise = self._noise.to(device)
        if is_eager() and device.type != "meta":
            self._noise = noise  # copied to a GPU once
        return noise


def seeded_noise(number: int, out_capsules: int) -> Float[Tensor, "I J"]:
    """Draw the noise for evaluation. The first items of a longer history get the same numbers."""
    generator = torch.Generator("cpu").manual_seed(0)
    uniform = torch.rand(number, out_capsules, generator=generator, device="cpu", dtype=torch.float32)
    return truncated_normal(uniform)


def truncated_normal(uniform: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert uniform numbers to normal ones, cut at two standard deviations."""
    return 2**0.5 * ((2 * uniform - 1) * math.erf(2**0.5)).erfinv()
