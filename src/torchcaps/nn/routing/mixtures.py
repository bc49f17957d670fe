"""Routing by mixtures of Gaussians: EM, as the paper has it and as its authors' code has it, and variational Bayes."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.flow import LayerSize
from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.transforms import Votes
from torchcaps.ops.dynamic_routing import RoutingRound
from torchcaps.ops.dynamic_routing.checks import check_iterations
from torchcaps.ops.em_routing import check_above_zero, fit, fit_as_the_code
from torchcaps.ops.mixtures import Gaussians
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.vb_routing import infer
from torchcaps.ops.votes import in_blocks


class MixtureRouting(Routing):
    """What they have in common: two learned numbers of each output capsule, and votes that are built some at a time.

    Without activations, those of the input capsules are the lengths of their poses.
    """

    start: tuple[float, float] = (0.0, 0.0)
    """Of the two numbers."""

    def __init__(self, num_iterations: int) -> None:
        super().__init__()
        check_iterations(type(self).__name__, num_iterations, least=1)
        self.num_iterations = num_iterations
        self.beta_u: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the two numbers of each output capsule."""
        self.belongs_to_no_layer(self.beta_u)
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
        numbers: Float[Tensor, "B I J D"],
        activations: Float[Tensor, "B I"],
        beta_u: Float[Tensor, "J"],
        beta_a: Float[Tensor, "J"],
        votes: Votes,
        rounds: list[RoutingRound] | None = None,
    ) -> Gaussians:
        """The Gaussians of built votes; ``votes`` knows who competes, and ``rounds`` is filled, where it is given."""

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        """Poses, and activations from their logits."""
        return poses, logits.sigmoid()

    def forward(
        self, votes: Votes, activations: Float[Tensor, "B I"] | None = None, *, return_coupling: bool = False
    ) -> Routed:
        """Route; see :class:`Routing`."""
        assert self.beta_u is not None
        build, each, others = votes.pieces()
        active = self.activations_of(votes, activations)
        betas = self.beta_u.to(active.dtype), self.beta_a.to(active.dtype)

        def work(each: Tensor, activations: Tensor, beta_u: Tensor, beta_a: Tensor, *others: Tensor) -> Gaussians:
            return self.fit(in_full_precision(build(each, *others)), activations, beta_u, beta_a, votes)

        numbers = math.prod((votes.size.in_capsules, votes.size.out_capsules, votes.size.out_dim))
        with full_precision(each.device):
            poses, logits, coupling = in_blocks(work, (each, active), (*betas, *others), numbers, votes.together)
            poses, out = self.finish(poses, logits)
        dtype = votes.poses.dtype
        return Routed(poses.to(dtype), out.to(dtype), coupling.to(dtype) if return_coupling else None)

    def rounds(self, votes: Votes, activations: Float[Tensor, "B I"] | None = None) -> list[RoutingRound]:
        """Every number of each iteration; see :class:`Routing`. Agreement is the logarithm of a vote's density."""
        assert self.beta_u is not None
        rounds: list[RoutingRound] = []
        active = self.activations_of(votes, activations)
        betas = self.beta_u.to(active.dtype), self.beta_a.to(active.dtype)
        with full_precision(votes.poses.device):
            self.fit(in_full_precision(votes.build()), active, *betas, votes, rounds)
        return rounds

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return f"num_iterations={self.num_iterations}"


class EMRouting(MixtureRouting):
    """EM routing as the paper writes it: :func:`torchcaps.em_routing`; β_u and β_a start at zero.

    The parameter ``beta_a`` is β_a·``final_lambda``, which is of the size of a logit: the temperature makes β_a itself
    a hundred times larger, so that an optimizer with one step size for all parameters, as Adam is, hardly moves it.

    Args:
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        final_lambda: The inverse temperature that the iterations grow towards; positive.
        cost_scale: Factor on the costs, 1 in the paper; 100·J/I, as in Gritzman's re-implementation, if None: then they
            do not grow with the number of input capsules.

    Raises:
        TypeError: An option of another type.
        ValueError: An option out of its range.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR 2018); Gritzman 2019
    (arXiv:1907.00652).
    """

    def __init__(self, num_iterations: int = 3, *, final_lambda: float = 0.01, cost_scale: float | None = None) -> None:
        super().__init__(num_iterations)
        check_above_zero(
            "EMRouting", final_lambda=final_lambda, **({} if cost_scale is None else {"cost_scale": cost_scale})
        )
        self.final_lambda, self.cost_scale = final_lambda, cost_scale

    def fit(
        self,
        numbers: Float[Tensor, "B I J D"],
        activations: Float[Tensor, "B I"],
        beta_u: Float[Tensor, "J"],
        beta_a: Float[Tensor, "J"],
        votes: Votes,
        rounds: list[RoutingRound] | None = None,
    ) -> Gaussians:
        """See :class:`MixtureRouting`."""
        scale = self.cost_scale or 100 * self.size.out_capsules / self.size.in_capsules
        options = self.num_iterations, self.final_lambda, scale
        return fit(numbers, activations, beta_u, beta_a / self.final_lambda, *options, votes.log_compete, rounds)

    def balanced_std(self, size: LayerSize) -> float:  # noqa: ARG002  as all routings
        """See :class:`Routing`; votes whose components vary by about one cost about nothing at the start."""
        return 1.0

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return f"{super().extra_repr()}, final_lambda={self.final_lambda:g}, cost_scale={self.cost_scale}"


class EMCodeRouting(MixtureRouting):
    """EM routing as its authors' code has it: :func:`torchcaps.em_routing_code`.

    β_u is the code's sigma bias, β_a its activation bias; they start at 0.5 in a layer on a map and at 2 and 1 in
    another, as does what is added to the mass: 1e-7 and 1e-5.

    Args:
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        final_beta: The inverse temperature that the iterations grow towards; positive.
        min_variance: Added to the variances; positive.
        on_map: Whether the layer is one on a map.

    Raises:
        TypeError: An option of another type.
        ValueError: An option out of its range.

    Source: the code of Hinton, Sabour, Frosst 2018, google-research/google-research, ``capsule_em``.
    """

    def __init__(
        self, num_iterations: int = 3, *, final_beta: float = 0.01, min_variance: float = 0.0005, on_map: bool = False
    ) -> None:
        super().__init__(num_iterations)
        check_above_zero("EMCodeRouting", final_beta=final_beta, min_variance=min_variance)
        self.final_beta, self.min_variance, self.on_map = final_beta, min_variance, on_map
        self.start = (0.5, 0.5) if on_map else (2.0, 1.0)

    def fit(
        self,
        numbers: Float[Tensor, "B I J D"],
        activations: Float[Tensor, "B I"],
        beta_u: Float[Tensor, "J"],
        beta_a: Float[Tensor, "J"],
        votes: Votes,
        rounds: list[RoutingRound] | None = None,
    ) -> Gaussians:
        """See :class:`MixtureRouting`."""
        options = self.num_iterations, self.final_beta, self.min_variance, 1e-7 if self.on_map else 1e-5
        return fit_as_the_code(numbers, activations, beta_u, beta_a, *options, votes.log_compete, rounds)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return (
            f"{super().extra_repr()}, final_beta={self.final_beta:g}, min_variance={self.min_variance:g}, "
            f"on_map={self.on_map}"
        )


class VBRouting(MixtureRouting):
    """Variational Bayes routing: :func:`torchcaps.vb_routing`; β_u and β_a start at zero.

    The logits of the activations and the poses are normalised over the batch, without scale and shift, as in the
    source; a batch of one image in training takes the running statistics.

    Args:
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.

    Raises:
        TypeError: An option of another type.
        ValueError: An option out of its range.

    Source: De Sousa Ribeiro, Leontidis, Kollias 2020 (arXiv:1905.11455).
    """

    def __init__(self, num_iterations: int = 3) -> None:
        super().__init__(num_iterations)

    def bind(self, size: LayerSize) -> None:
        """See :class:`MixtureRouting`."""
        super().bind(size)
        self.pose_norm = nn.BatchNorm1d(size.out_capsules, affine=False).train(self.training)
        self.activation_norm = nn.BatchNorm1d(size.out_capsules, affine=False).train(self.training)

    def fit(
        self,
        numbers: Float[Tensor, "B I J D"],
        activations: Float[Tensor, "B I"],
        beta_u: Float[Tensor, "J"],
        beta_a: Float[Tensor, "J"],
        votes: Votes,
        rounds: list[RoutingRound] | None = None,
    ) -> Gaussians:
        """See :class:`MixtureRouting`."""
        return infer(numbers, activations, beta_u, beta_a, self.num_iterations, votes.log_compete, rounds)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; that of the source, whose matrices of 4×4 start with a variance of about 1/(16·I).

        The prior has the variance one. Votes that vary less start with a coupling that is near uniform, and the
        normalisation brings poses to variance one, however short votes are. Of three layers whose votes vary by one,
        nothing is learned in the first hundred steps.
        """
        return 1 / (2 * math.sqrt(size.in_capsules * size.out_dim))

    def finish(
        self, poses: Float[Tensor, "B J D"], logits: Float[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]:
        """See :class:`MixtureRouting`."""
        return normalised(poses, self.pose_norm), normalised(logits, self.activation_norm).sigmoid()


def normalised(x: Float[Tensor, "B J *D"], norm: nn.BatchNorm1d) -> Float[Tensor, "B J *D"]:
    """Batch normalisation, which takes the running statistics where a single row has none of its own."""
    learns = norm.training and len(x) > 1
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    if not learns:
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
    return nn.functional.batch_norm(x, mean, variance, None, None, learns, norm.momentum or 0.1, norm.eps)
