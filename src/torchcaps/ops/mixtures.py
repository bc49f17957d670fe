"""What the algorithms of mixtures share: Gaussians, and sums over votes that stand in memory output by output.

The sums have gradients of their own, which pass over the votes seldom and in memory that is used again. Torch's own
multiply matrices of one row, lay out half of the results the other way round, and go over a square three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.memory import combine
from torchcaps.ops.self_routing import above_zero
from torchcaps.ops.votes import is_traced

LogCompete = Callable[[Tensor], Tensor]
"""From logits (B, I, J) to the logarithm of the coupling."""
Gaussians = tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
"""Poses, logits of the activations, and the coupling of the last weighted sum."""
LOG_2_PI = math.log(2 * math.pi)


def share_out(
    log_coupling: Float[Tensor, "B I J"], activations: Float[Tensor, "B I"]
) -> tuple[Float[Tensor, "B I J"], Float[Tensor, "B J"]]:
    """c_ij a_i, divided by its sum over i, and this sum R_j.

    The largest logarithm of a j's couplings is taken out of both, so that the shares are exact even where all
    couplings are too small for their precision. Where R_j is zero, so are the shares.
    """
    a = activations.unsqueeze(2)
    largest = log_coupling.detach().where(a > 0, -math.inf).amax(1, keepdim=True)  # of those that have a share
    largest = largest.where(largest > -math.inf, 0.0)
    shares = (log_coupling - largest).clamp_max(80.0).exp() * a  # above 0 only where a is 0
    total = shares.sum(1)
    return shares / above_zero(total).unsqueeze(1), largest.exp().squeeze(1) * total


def log_densities(
    squares: Float[Tensor, "B J D I"], variances: Float[Tensor, "B J D"], log_variances: Float[Tensor, "B J D"]
) -> Float[Tensor, "B I J"]:
    """Ln N(V_ij; μ_j, σ²_j), of the squared differences of votes and means."""
    normalisation = variances.shape[2] * LOG_2_PI + log_variances.sum(2)  # (B, J)
    return -(normalisation.unsqueeze(1) + distances(squares, variances)) / 2


# ---- sums over votes


def by_output(votes: Float[Tensor, "B I J D"]) -> Float[Tensor, "B J D I"]:
    """Votes with the input capsules innermost in memory: each sum over them, or over D, is a matrix product then."""
    return votes.permute(0, 2, 3, 1).contiguous()


def weighted(shares: Float[Tensor, "B I J"], numbers: Float[Tensor, "B J D I"]) -> Float[Tensor, "B J D"]:
    """Σ_i shares_ij · numbers_ij."""
    return _sum_over_inputs(shares, numbers) if is_traced() else _SumOverInputs.apply(shares, numbers)


def distances(squares: Float[Tensor, "B J D I"], variances: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
    """Σ_h squares_h / variances_h."""
    precisions = variances.reciprocal()
    return _sum_over_components(squares, precisions) if is_traced() else _SumOverComponents.apply(squares, precisions)


def squared_deviations(votes: Float[Tensor, "B J D I"], centres: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D I"]:
    """(V_ijh - x_jh)²."""
    return (votes - centres.unsqueeze(3)).square() if is_traced() else _SquaredDeviations.apply(votes, centres)


def _sum_over_inputs(pairs: Float[Tensor, "B I J"], numbers: Float[Tensor, "B J D I"]) -> Float[Tensor, "B J D"]:
    return (pairs.transpose(1, 2).unsqueeze(2) @ numbers.transpose(2, 3)).squeeze(2)


def _sum_over_components(numbers: Float[Tensor, "B J D I"], outputs: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
    return (outputs.unsqueeze(2) @ numbers).squeeze(2).transpose(1, 2)


def _products(outputs: Float[Tensor, "B J D"], pairs: Float[Tensor, "B I J"]) -> Float[Tensor, "B J D I"]:
    return combine(torch.mul, outputs.unsqueeze(3), pairs.transpose(1, 2).unsqueeze(2))


class _SumOverInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(pairs, numbers)
        return _sum_over_inputs(pairs, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        pairs, numbers = ctx.saved_tensors
        for_pairs, for_numbers = ctx.needs_input_grad
        return (
            _sum_over_components(numbers, gradient) if for_pairs else None,
            _products(gradient, pairs) if for_numbers else None,
        )


class _SumOverComponents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, outputs: Tensor) -> Tensor:
        ctx.save_for_backward(numbers, outputs)
        return _sum_over_components(numbers, outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        numbers, outputs = ctx.saved_tensors
        for_numbers, for_outputs = ctx.needs_input_grad
        return (
            _products(outputs, gradient) if for_numbers else None,
            _sum_over_inputs(gradient, numbers) if for_outputs else None,
        )


class _SquaredDeviations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, votes: Tensor, centres: Tensor) -> Tensor:
        ctx.save_for_backward(votes, centres)
        return combine(torch.sub, votes, centres.unsqueeze(3)).square_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        votes, centres = ctx.saved_tensors
        for_votes, for_centres = ctx.needs_input_grad
        deviations = combine(torch.sub, votes, centres.unsqueeze(3))
        given = 2 * (deviations * gradient) if torch.is_grad_enabled() else deviations.mul_(gradient).mul_(2)
        return given if for_votes else None, -given.sum(3) if for_centres else None
