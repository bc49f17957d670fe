"""Variational Bayes routing: EM routing with priors over the Gaussians, against output capsules that collapse."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_flags, is_exporting
from torchcaps.ops.dynamic_routing.checks import check_active_votes, check_iterations
from torchcaps.ops.dynamic_routing.reference import RoutingRound
from torchcaps.ops.em_routing import check_betas
from torchcaps.ops.mixtures import (
    LOG_2_PI,
    Gaussians,
    LogCompete,
    by_output,
    distances,
    share_out,
    squared_deviations,
    weighted,
)
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.votes import in_blocks, log_softmax_over_outputs


@overload
def vb_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[False] = False,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]: ...


@overload
def vb_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    return_coupling: Literal[True],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]: ...


def vb_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    return_coupling: bool = False,
) -> (
    tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]
    | tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
):
    """Variational Bayes routing: Gaussians with a Dirichlet and a Gaussian–Wishart prior, fitted to the votes V_ij.

    The priors are α₀ = 1, m₀ = 0, κ₀ = 1, Ψ₀ = identity, ν₀ = D + 1; ψ is the digamma function.

        c_ij ← 1/J
        repeat num_iterations times:
            R_j = Σ_i c_ij a_i,   α_j = 1 + R_j,   κ_j = 1 + R_j,   ν_j = D + 1 + R_j
            μ_j = Σ_i c_ij a_i V_ij / R_j,   m_j = R_j μ_j / κ_j
            p_jh = 1 + Σ_i c_ij a_i (V_ijh - μ_jh)² + (R_j / κ_j) μ_jh²                 (the inverse of Ψ_j)
            ln|Λ_j| = Σ_{d=0}^{D-1} ψ((ν_j - d) / 2) + D ln 2 - Σ_h ln p_jh,   ln π_j = ψ(α_j) - ψ(Σ_j α_j)
            ln q_ij = ½ ln|Λ_j| - ½ D ln 2π - ½ (D / κ_j + ν_j Σ_h (V_ijh - m_jh)² / p_jh)
            c_ij ← softmax_j(ln π_j + ln q_ij)                                          (not after the last time)
        pose_j = m_j
        l_j    = β_a,j - (exp(ln π_j) H_j + β_u,j),   H_j = ½ D ln(2πe) - ½ ln|Λ_j|

    The coupling is normalised from logarithms. The released code floors the sum of densities at 1e-11 instead, which
    with D = 16 many capsules stay below. The votes are worked on some images at a time, within
    :func:`torchcaps.set_working_memory`.

    Args:
        votes: V_ij, the prediction of input capsule i for output capsule j.
        activations: a_i, at least 0. Input capsules with 0 change nothing.
        beta_u: Cost of an active output capsule, learned.
        beta_a: Threshold of the activation, learned.
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        return_coupling: Also return the coupling c_ij of the last fit, before it is multiplied by a_i.

    Returns:
        Poses m_j, and the logits l_j of the activations, before the batch normalisation and the sigmoid that a layer
        adds, in the dtype of ``votes`` (half precision is computed in float32); with ``return_coupling`` also c_ij. If
        all fits into one block, it can be differentiated any number of times, else once.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other, or an option out of its range.

    Source: De Sousa Ribeiro, Leontidis, Kollias 2020, "Capsule routing via variational Bayes", algorithm 1
    (arXiv:1905.11455).
    """
    name = "vb_routing"
    check_flags(name, return_coupling=return_coupling)
    check_iterations(name, num_iterations, least=1)
    check_active_votes(name, votes, activations)
    check_betas(name, votes, beta_u=beta_u, beta_a=beta_a)
    full = in_full_precision(votes)
    each, betas = (full, activations.to(full.dtype)), (beta_u.to(full.dtype), beta_a.to(full.dtype))

    def work(votes: Tensor, activations: Tensor, beta_u: Tensor, beta_a: Tensor) -> Gaussians:
        return infer(votes, activations, beta_u, beta_a, num_iterations)

    with full_precision(votes.device):
        routed = in_blocks(work, each, betas, math.prod(full.shape[1:]))
    poses, logits, coupling = (tensor.to(votes.dtype) for tensor in routed)
    return (poses, logits, coupling) if return_coupling else (poses, logits)


def infer(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int,
    log_compete: LogCompete | None = None,
    rounds: list[RoutingRound] | None = None,
) -> Gaussians:
    """The equations of :func:`vb_routing`; ``log_compete`` is the logarithm of the softmax over j if None."""
    log_compete = log_compete or log_softmax_over_outputs
    D = votes.shape[3]
    log_posterior = votes.new_zeros(votes.shape[:3])
    log_coupling = log_softmax_over_outputs(log_posterior)  # 1/J on maps too
    votes = by_output(votes)
    steps = torch.arange(D, dtype=votes.dtype, device=votes.device)
    for iteration in range(1, num_iterations + 1):
        shares, mass = share_out(log_coupling, activations)  # (B, I, J), (B, J)
        R = mass.unsqueeze(2)  # (B, J, 1)
        means = weighted(shares, votes)  # (B, J, D)
        scatter = R * weighted(shares, squared_deviations(votes, means))
        centres = R / (1 + R) * means
        inverse_scale = 1 + scatter + centres * means
        degrees = D + 1 + mass
        log_precision = (
            digamma((degrees.unsqueeze(2) - steps) / 2).sum(2) + D * math.log(2) - inverse_scale.log().sum(2)
        )
        log_share = digamma(1 + mass) - digamma((1 + mass).sum(1, keepdim=True))
        if iteration == num_iterations and rounds is None:
            break
        far = distances(squared_deviations(votes, centres), inverse_scale)  # (B, I, J)
        known = (log_precision - D * LOG_2_PI - D / (1 + mass)) / 2  # (B, J)
        densities = known.unsqueeze(1) - degrees.unsqueeze(1) * far / 2
        if rounds is not None:
            logits = _logits(log_share, log_precision, beta_u, beta_a, D)
            rounds.append(RoutingRound(log_posterior, log_coupling.exp(), means, centres, densities, logits.sigmoid()))
        log_posterior = log_share.unsqueeze(1) + densities
        if iteration < num_iterations:
            log_coupling = log_compete(log_posterior)
    return centres, _logits(log_share, log_precision, beta_u, beta_a, D), log_coupling.exp()


def _logits(log_share: Tensor, log_precision: Tensor, beta_u: Tensor, beta_a: Tensor, D: int) -> Float[Tensor, "B J"]:
    entropy = (D * (LOG_2_PI + 1) - log_precision) / 2
    return beta_a - (log_share.exp() * entropy + beta_u)


def digamma(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The digamma function of numbers of at least one; in a graph that is exported, of operations that ONNX has.

    There it is ψ(x) = ψ(x + 6) - Σ_{k<6} 1 / (x + k), and Stirling's series of ψ(x + 6), whose error is below 1e-9.
    """
    if not is_exporting():
        return torch.digamma(x)
    y = x + 6
    square = 1 / y.square()
    series = y.log() - 1 / (2 * y) - square * (1 / 12 - square * (1 / 120 - square / 252))
    return series - sum(1 / (x + k) for k in range(6))
