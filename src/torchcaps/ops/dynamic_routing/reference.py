"""Dynamic routing as the paper writes it: the page to read. Every fast path is tested against it.

B batch, I input capsules, J output capsules, D components of an output capsule, K components of an input capsule.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.checks import check_route
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.squash import squash


class RoutingRound(NamedTuple):
    """Every number of one iteration of dynamic routing; see :func:`routing_rounds`."""

    logits: Float[Tensor, "B I J"]
    """b_ij at the beginning of the iteration."""
    coupling: Float[Tensor, "B I J"]
    """c_ij, the softmax of the logits."""
    weighted_sum: Float[Tensor, "B J D"]
    """s_j = Σ_i c_ij û_j|i, and the bias where there is one."""
    capsules: Float[Tensor, "B J D"]
    """v_j = squash(s_j)."""
    agreement: Float[Tensor, "B I J"]
    """⟨û_j|i, v_j⟩; the next iteration begins with ``logits + agreement``."""
    activations: Float[Tensor, "B J"] | None = None
    """How certain each output capsule is; None where its length says so, as in dynamic routing."""


def compute_votes(poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> Float[Tensor, "B I J D"]:
    """Votes û_j|i = W_ij u_i: what input capsule i predicts for output capsule j (equation 2 of the paper).

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij.

    Returns:
        Votes, in the higher of the two precisions.

    Raises:
        TypeError: A tensor that is not floating-point.
        ValueError: Shapes that do not fit each other.
    """
    check_route("compute_votes", poses, weight)
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with full_precision(poses.device):
        return torch.einsum("ijdk,bik->bijd", weight.to(dtype), poses.to(dtype))


def route_votes(
    votes: Float[Tensor, "B I J D"],
    num_iterations: int,
    softmax_over: str,
    stop_gradient: bool,
    bias: Float[Tensor, "J D"] | None,
    prior: Float[Tensor, "I J"] | None,
    leaky: bool,
    eps: float,
    rounds: list[RoutingRound] | None = None,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"]]:
    """Output capsules and the last coupling. :func:`torchcaps.dynamic_routing` describes the arguments.

    ``rounds``, where it is given, is filled with every number of each iteration.
    """
    dtype = votes.dtype
    votes = in_full_precision(votes)
    B, I, J, D = votes.shape
    bias = votes.new_zeros(J, D) if bias is None else bias.to(votes.dtype)
    logits = votes.new_zeros(B, I, J) if prior is None else prior.to(votes.dtype).expand(B, I, J)

    if num_iterations == 0:  # no routing: the sum of the votes
        return (votes.sum(1) + bias).to(dtype), torch.ones_like(logits).to(dtype)

    capsules = votes.new_zeros(B, J, D)
    coupling = logits
    with full_precision(votes.device):
        for iteration in range(1, num_iterations + 1):
            coupling = compete(logits, softmax_over, leaky)  # (B, I, J)
            if stop_gradient:  # what made the coupling gets no gradient, so only the last weighted sum does
                coupling = coupling.detach()
            weighted_sum = torch.einsum("bij,bijd->bjd", coupling, votes) + bias
            capsules = squash(weighted_sum, eps=eps)
            if iteration == num_iterations and rounds is None:
                break
            agreement = torch.einsum("bijd,bjd->bij", votes, capsules)
            if rounds is not None:
                rounds.append(RoutingRound(logits, coupling, weighted_sum, capsules, agreement))
            logits = logits + agreement
    return capsules.to(dtype), coupling.to(dtype)


def compete(logits: Float[Tensor, "B I J"], softmax_over: str, leaky: bool) -> Float[Tensor, "B I J"]:
    """Coupling c_ij: the softmax of the routing logits over the axis on which capsules compete (equation 3).

    With ``leaky``, a competitor with logit 0 takes a share that goes to no capsule.
    """
    axis = {"outputs": 2, "inputs": 1}[softmax_over]
    if not leaky and axis == 2 and logits.movedim(2, 0).is_contiguous():  # as the contractions lay them out: kept so
        return logits.movedim(2, 0).softmax(0).movedim(0, 2)
    if not leaky:
        return logits.softmax(axis)
    none_of_the_above = torch.zeros_like(logits.narrow(axis, 0, 1))
    shares = torch.cat([none_of_the_above, logits], axis).softmax(axis)
    return shares.narrow(axis, 1, logits.shape[axis])
