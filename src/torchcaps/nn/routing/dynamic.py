"""Routing by agreement, Sabour, Frosst and Hinton 2017."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.flow import LayerSize
from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.transforms import DenseVotes, Votes
from torchcaps.ops.checks import check_choice, check_flags
from torchcaps.ops.dynamic_routing import BACKENDS, Backend, RouteOptions, RoutingRound, SoftmaxOver, route
from torchcaps.ops.dynamic_routing.checks import check_options
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.squash import squash


class DynamicRouting(Routing):
    """Routing by agreement: each input capsule sends its vote to the output capsules that agree with it.

    The equations are those of :func:`torchcaps.dynamic_routing`. Without a learned prior, votes of a dense transform go
    the fast way of :func:`torchcaps.route`. All others are asked for their sums and their agreement, and are never
    built either.

    Args:
        num_iterations: How many times the coupling is computed, 0 to 1,000; 0 sums the votes without squash, 1 is
            uniform coupling.
        softmax_over: ``"outputs"`` (the paper) or ``"inputs"``.
        stop_gradient: Let gradients flow through the last weighted sum only.
        leaky: Add a "none of the above" competitor.
        bias: Add a learned bias (J, D), starting at 0.1, before the squash.
        learn_prior: Learn the start of the routing logits (I, J), from zero.
        eps: The squash's epsilon.
        backend: See :func:`torchcaps.route`; for votes of a dense transform, without a learned prior.

    Raises:
        TypeError: An option of another type.
        ValueError: A value that is out of its range, or an option that does not exist.

    Source: Sabour, Frosst, Hinton 2017, procedure 1 (arXiv:1710.09829); the bias from the authors' released code.
    """

    def __init__(
        self,
        num_iterations: int = 3,
        *,
        softmax_over: SoftmaxOver = "outputs",
        stop_gradient: bool = False,
        leaky: bool = False,
        bias: bool = False,
        learn_prior: bool = False,
        eps: float = 1e-7,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        flags = {"stop_gradient": stop_gradient, "leaky": leaky, "bias": bias, "learn_prior": learn_prior}
        check_options("DynamicRouting", num_iterations, softmax_over, eps, **flags)
        check_choice("DynamicRouting", "backend", backend, BACKENDS)
        self.num_iterations = num_iterations
        self.softmax_over: SoftmaxOver = softmax_over
        self.stop_gradient = stop_gradient
        self.leaky = leaky
        self.eps = eps
        self.backend: Backend = backend
        self.has_bias, self.learns_prior = bias, learn_prior
        self.bias: nn.Parameter | None = None
        self.prior: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the bias and the prior, where they are wanted.

        Raises:
            ValueError: They were made before, for another layer.
        """
        self.belongs_to_no_layer(self.bias if self.prior is None else self.prior)
        I, _, J, D = size
        if self.has_bias:
            self.bias = nn.Parameter(torch.full((J, D), 0.1))
        if self.learns_prior:
            self.prior = nn.Parameter(torch.zeros(I, J))

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`.

        Over inputs, votes that give a length of one under uniform coupling are of length √I, of which the second
        iteration chooses a single one, and the squash is saturated. There the sum grows from one iteration to the next:
        of short sums, the t-th has about the length s_t = σ²·s²_{t-1}, and s_1 = σ·√(D/I). The last one, s_r, is of
        length one for σ = (I/D)^(1/(6 - 2^(3-r))).
        """
        I, _, _, D = size
        if self.num_iterations == 0:
            return (I * D) ** -0.5
        if self.softmax_over == "inputs":
            return (I / D) ** (1 / (6 - 2.0 ** (3 - self.num_iterations)))
        return super().balanced_std(size)

    def forward(
        self,
        votes: Votes,
        activations: Float[Tensor, "B I"] | None = None,  # noqa: ARG002  lengths say it
        *,
        return_coupling: bool = False,
    ) -> Routed:
        """Route by agreement; see :class:`Routing`. Activations are not used: the length of a pose says the same."""
        check_flags("DynamicRouting", return_coupling=return_coupling)
        if self.prior is None and isinstance(votes, DenseVotes) and votes.weight.ndim == 4 and votes.rivals is None:
            return self._route_dense(votes, return_coupling)
        poses, coupling = self._follow(votes)
        dtype = votes.poses.dtype
        return Routed(poses.to(dtype), coupling=coupling.to(dtype) if return_coupling else None)

    def rounds(self, votes: Votes, activations: Float[Tensor, "B I"] | None = None) -> list[RoutingRound]:  # noqa: ARG002
        """Every number of each iteration; see :func:`torchcaps.routing_rounds`."""
        rounds: list[RoutingRound] = []
        self._follow(votes, rounds)
        return rounds

    def _route_dense(self, votes: DenseVotes, return_coupling: bool) -> Routed:
        """The same, fused."""
        options: RouteOptions = {
            "softmax_over": self.softmax_over,
            "stop_gradient": self.stop_gradient,
            "bias": self.bias,
            "leaky": self.leaky,
            "eps": self.eps,
            "backend": self.backend,
        }
        if not return_coupling:
            return Routed(route(votes.poses, votes.weight, self.num_iterations, **options))
        poses, coupling = route(votes.poses, votes.weight, self.num_iterations, return_coupling=True, **options)
        return Routed(poses, coupling=coupling)

    def _follow(
        self, votes: Votes, rounds: list[RoutingRound] | None = None
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
        """Capsules and coupling; ``rounds``, where it is given, is filled with every number of each iteration."""
        with full_precision(votes.poses.device):
            logits = votes.zeros()
            logits = logits if self.prior is None else logits + self.prior.to(logits.dtype)
            if self.num_iterations == 0:  # no routing: the plain sum
                return self._sum(votes, None), torch.ones_like(logits)
            for iteration in range(1, self.num_iterations + 1):
                coupling = votes.compete(logits, self.softmax_over, leaky=self.leaky)
                if self.stop_gradient:
                    coupling = coupling.detach()
                weighted_sum = self._sum(votes, coupling)
                capsules = squash(weighted_sum, eps=self.eps)
                if iteration == self.num_iterations and rounds is None:
                    break
                agreement = in_full_precision(votes.agreement(capsules))
                if rounds is not None:
                    rounds.append(RoutingRound(logits, coupling, weighted_sum, capsules, agreement))
                logits = logits + agreement
        return capsules, coupling

    def _sum(self, votes: Votes, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """The weighted sum of the votes, and the bias."""
        weighted_sum = in_full_precision(votes.weighted_sum(coupling))
        return weighted_sum if self.bias is None else weighted_sum + self.bias.to(weighted_sum.dtype)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return (
            f"num_iterations={self.num_iterations}, softmax_over={self.softmax_over!r}, "
            f"stop_gradient={self.stop_gradient}, leaky={self.leaky}, bias={self.has_bias}, "
            f"learn_prior={self.learns_prior}, eps={self.eps:g}"
        )
