"""What the algorithms of mixtures share: votes that are built, Gaussians, and sums over votes.

All have gradients of their own, which pass over the votes seldom; they can be differentiated any number of times.
Torch's own multiply matrices of one row, lay out half of the results the other way
round, and go over a square three times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.tracing import is_graph_capture

LOG_2_PI = math.log(2 * math.pi)
Grads = tuple[Tensor | None, Tensor | None]


def _with_gradient(backward: Callable[..., Grads]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Compute the gradients of a function's first two arguments by ``backward(wanted, gradient, left, right)``.

    Where torch makes a graph of what is computed, it differentiates the function itself.
    """

    def decorate(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, left: Tensor, right: Tensor, *more: int) -> Tensor:
                ctx.save_for_backward(left, right)
                return forward(left, right, *more)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                grads = backward(ctx.needs_input_grad, gradient, *ctx.saved_tensors)
                return *grads, *(None for _ in ctx.needs_input_grad[2:])

        return functools.wraps(forward)(lambda *given: (forward if is_graph_capture() else Function.apply)(*given))

    return decorate


# ---- votes that are built: (B, I, J, D), in memory (B, J, D, I), and so are their gradients


def _dense_backward(wanted: Any, gradient: Tensor, poses: Tensor, matrices: Tensor) -> Grads:
    each = gradient.transpose(0, 1).contiguous().flatten(2)  # (I, B, N); a product would copy it I times otherwise
    return (
        (each @ matrices.transpose(1, 2)).transpose(0, 1) if wanted[0] else None,
        torch.bmm(poses.permute(1, 2, 0), each) if wanted[1] else None,
    )


@_with_gradient(_dense_backward)
def dense_votes(
    poses: Float[Tensor, "B I K"], matrices: Float[Tensor, "I K N"], out_capsules: int
) -> Float[Tensor, "B I J D"]:
    """W_ij u_i, of matrices whose columns are the components of all J output capsules, N = J·D."""
    products = torch.bmm(poses.transpose(0, 1), matrices)
    return products.permute(1, 2, 0).contiguous().unflatten(1, (out_capsules, -1)).permute(0, 3, 1, 2)


def _matrix_backward(wanted: Any, gradient: Tensor, poses: Tensor, weight: Tensor) -> Grads:
    (B, I, P, _), J = poses.shape, weight.shape[1]
    each = gradient.unflatten(3, (P, P)).permute(1, 0, 3, 2, 4).reshape(I, B * P, J * P)
    for_poses = for_weight = None
    if wanted[0]:
        back = each @ weight.transpose(2, 3).reshape(I, J * P, P)
        for_poses = back.unflatten(1, (B, P)).transpose(0, 1)
    if wanted[1]:
        rows = poses.transpose(0, 1).reshape(I, B * P, P)
        for_weight = (rows.transpose(1, 2) @ each).unflatten(2, (J, P)).transpose(1, 2)
    return for_poses, for_weight


@_with_gradient(_matrix_backward)
def matrix_votes(poses: Float[Tensor, "B I P P"], weight: Float[Tensor, "I J P P"]) -> Float[Tensor, "B I J D"]:
    """M_i W_ij, read row by row, D = P².

    Each product of matrices is P products of a component of the pose and one of the weight, over all input capsules at
    once.
    """
    M = poses.permute(0, 2, 3, 1).contiguous()[:, None, :, None]  # (B, 1, p, 1, r, I)
    W = weight.permute(1, 3, 2, 0).contiguous()[None, :, None]  # (1, J, 1, q, r, I)
    votes = M[..., 0, :] * W[..., 0, :]  # (B, J, p, q, I)
    for r in range(1, weight.shape[2]):
        votes.addcmul_(M[..., r, :], W[..., r, :])
    return votes.flatten(2, 3).permute(0, 3, 1, 2)


# ---- sums over votes


def by_output(votes: Float[Tensor, "B I J D"]) -> Float[Tensor, "B J D I"]:
    """Votes with the input capsules innermost in memory: each sum over them, or over D, is a matrix product then."""
    return votes.permute(0, 2, 3, 1).contiguous()


def _weighted_backward(wanted: Any, gradient: Tensor, shares: Tensor, numbers: Tensor) -> Grads:
    return _multiplied(numbers, gradient) if wanted[0] else None, _products(gradient, shares) if wanted[1] else None


@_with_gradient(_weighted_backward)
def weighted(shares: Float[Tensor, "B I J"], numbers: Float[Tensor, "B J D I"]) -> Float[Tensor, "B J D"]:
    """Σ_i shares_ij · numbers_ij."""
    return (shares.transpose(1, 2).unsqueeze(2) @ numbers.transpose(2, 3)).squeeze(2)


def _multiplied(numbers: Float[Tensor, "B J D I"], outputs: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
    return (outputs.unsqueeze(2) @ numbers).squeeze(2).transpose(1, 2)


def _products(outputs: Float[Tensor, "B J D"], pairs: Float[Tensor, "B I J"]) -> Float[Tensor, "B J D I"]:
    return outputs.unsqueeze(3) * pairs.transpose(1, 2).unsqueeze(2)


def _deviations_backward(wanted: Any, gradient: Tensor, votes: Tensor, centres: Tensor) -> Grads:
    deviations = votes - centres.unsqueeze(3)
    given = 2 * (deviations * gradient) if torch.is_grad_enabled() else deviations.mul_(gradient).mul_(2)
    return given if wanted[0] else None, -given.sum(3) if wanted[1] else None


@_with_gradient(_deviations_backward)
def squared_deviations(votes: Float[Tensor, "B J D I"], centres: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D I"]:
    """(V_ijh - x_jh)²."""
    deviations = votes - centres.unsqueeze(3)
    return deviations.square() if is_graph_capture() else deviations.square_()  # which torch.vmap has no rule for


# ---- Gaussians


def distances(squares: Float[Tensor, "B J D I"], variances: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
    """Σ_h squares_h / variances_h."""
    return _multiplied(squares, variances.reciprocal())


def log_densities(
    squares: Float[Tensor, "B J D I"], variances: Float[Tensor, "B J D"], log_variances: Float[Tensor, "B J D"]
) -> Float[Tensor, "B I J"]:
    """Ln N(V_ij; μ_j, σ²_j), of the squared differences of votes and means."""
    normalisation = variances.shape[2] * LOG_2_PI + log_variances.sum(2)  # (B, J)
    return -(normalisation.unsqueeze(1) + distances(squares, variances)) / 2


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
    return shares / total.where(total > 0, 1.0).unsqueeze(1), largest.exp().squeeze(1) * total
