"""EM routing: each output capsule is a Gaussian, fitted to the votes that it is responsible for.

There are two algorithms of this name: the paper's (``em_routing``) and that of its authors' code (``em_routing_code``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, overload

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_flags, check_numbers, check_one_device, check_tensor
from torchcaps.ops.dynamic_routing.checks import check_active_votes, check_iterations
from torchcaps.ops.dynamic_routing.reference import RoutingRound
from torchcaps.ops.mixtures import (
    LOG_2_PI,
    Gaussians,
    LogCompete,
    by_output,
    log_densities,
    share_out,
    squared_deviations,
    weighted,
)
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.votes import in_blocks, log_softmax_over_outputs

MASS_EPS = 1e-5
"""Added to the mass of an output capsule in the authors' code, in a layer that is not on a map; on a map 1e-7."""


@overload
def em_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_lambda: float = 0.01,
    cost_scale: float = 1.0,
    return_coupling: Literal[False] = False,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]: ...


@overload
def em_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_lambda: float = 0.01,
    cost_scale: float = 1.0,
    return_coupling: Literal[True],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]: ...


def em_routing(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_lambda: float = 0.01,
    cost_scale: float = 1.0,
    return_coupling: bool = False,
) -> (
    tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]
    | tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
):
    """EM routing as the paper writes it: a mixture of Gaussians with diagonal covariance, fitted to the votes V_ij.

        c_ij ← 1/J
        repeat for t = 0, 1, ..., num_iterations - 1:
            R_j   = Σ_i c_ij a_i
            μ_jh  = Σ_i c_ij a_i V_ijh / R_j
            σ²_jh = Σ_i c_ij a_i (V_ijh - μ_jh)² / R_j + 1e-9
            l_j   = λ_t (β_a,j - cost_scale · R_j Σ_h (β_u,j + ln σ_jh)),   λ_t = final_lambda (1 - 0.95^(t+1))
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; μ_j, σ²_j))       (not after the last time)
        pose_j = μ_j,   a_j = sigmoid(l_j)

    Everything is computed from logarithms, so a coupling that is too small for its precision still gives an output
    capsule its mean. The votes are worked on some images at a time, within :func:`torchcaps.set_working_memory`.

    Args:
        votes: V_ij, the prediction of input capsule i for output capsule j.
        activations: a_i, at least 0. Input capsules with 0 change nothing; where all of an image are 0, so are poses.
        beta_u: What it costs to describe one component of a vote, learned.
        beta_a: What it costs not to activate an output capsule, learned.
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        final_lambda: The inverse temperature that λ_t grows towards; positive.
        cost_scale: Factor on the costs; 1 in the paper, 100·J/I in the re-implementation by Gritzman; positive.
        return_coupling: Also return the coupling c_ij of the last fit, before it is multiplied by a_i.

    Returns:
        Poses, and activations in 0..1, in the dtype of ``votes`` (half precision is computed in float32); with
        ``return_coupling`` also c_ij. If all fits into one block, it can be differentiated any number of times, else
        once.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other, or an option out of its range.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", procedure 1 (ICLR 2018); the floor of the
    variance is that of Gritzman 2019, "Avoiding implementation pitfalls of matrix capsules" (arXiv:1907.00652).
    """
    name = "em_routing"
    check_flags(name, return_coupling=return_coupling)
    check_iterations(name, num_iterations, least=1)
    check_above_zero(name, final_lambda=final_lambda, cost_scale=cost_scale)
    check_active_votes(name, votes, activations)
    check_betas(name, votes, beta_u=beta_u, beta_a=beta_a)

    def work(votes: Tensor, activations: Tensor, beta_u: Tensor, beta_a: Tensor) -> Gaussians:
        return fit(votes, activations, beta_u, beta_a, num_iterations, final_lambda, cost_scale)

    return _route(votes, activations, (beta_u, beta_a), work, return_coupling)


def fit(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int,
    final_lambda: float,
    cost_scale: float,
    log_compete: LogCompete | None = None,
    rounds: list[RoutingRound] | None = None,
) -> Gaussians:
    """The equations of :func:`em_routing`; ``log_compete`` is the logarithm of the softmax over j if None."""
    log_compete = log_compete or log_softmax_over_outputs
    log_posterior = votes.new_zeros(votes.shape[:3])  # of zeros: the uniform start
    D, votes = votes.shape[3], by_output(votes)
    for t in range(num_iterations):
        log_coupling = log_compete(log_posterior)
        shares, mass = share_out(log_coupling, activations)  # (B, I, J), (B, J)
        means = weighted(shares, votes)  # (B, J, D)
        squares = squared_deviations(votes, means)
        variances = weighted(shares, squares) + 1e-9
        log_variances = variances.log()
        costs = mass * (D * beta_u + log_variances.sum(2) / 2)
        logits = final_lambda * (1 - 0.95 ** (t + 1)) * (beta_a - cost_scale * costs)
        if t == num_iterations - 1 and rounds is None:
            break
        densities = log_densities(squares, variances, log_variances)
        if rounds is not None:
            rounds.append(RoutingRound(log_posterior, log_coupling.exp(), means, means, densities, logits.sigmoid()))
        log_posterior = F.logsigmoid(logits).unsqueeze(1) + densities
    return means, logits, log_coupling.exp()


@overload
def em_routing_code(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_beta: float = 0.01,
    min_variance: float = 0.0005,
    return_coupling: Literal[False] = False,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]: ...


@overload
def em_routing_code(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_beta: float = 0.01,
    min_variance: float = 0.0005,
    return_coupling: Literal[True],
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]: ...


def em_routing_code(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int = 3,
    *,
    final_beta: float = 0.01,
    min_variance: float = 0.0005,
    return_coupling: bool = False,
) -> (
    tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"]]
    | tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B I J"]]
):
    """EM routing as the authors' released code has it, which is not the paper's.

        c_ij ← 1/J,  x_jh ← 0
        repeat for t = 0, 1, ..., num_iterations - 1:
            R_j   = Σ_i c_ij a_i + 1e-5
            x_jh  ← 0.9 · Σ_i c_ij a_i V_ijh / R_j + 0.1 · x_jh
            σ²_jh = Σ_i c_ij a_i (V_ijh - x_jh)² / R_j + min_variance
            win_j = -R_j (Σ_h ln σ²_jh + sigma_bias_j · D · (ln 2π + 1))
            l_j   = β_t (win_j - 5000 · activation_bias_j),               β_t = final_beta (1 - 0.95^(t+1))
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; x_j, σ²_j))     (not after the last time)
        pose_j = x_j,   a_j = sigmoid(l_j)

    Against the paper, the centre moves by nine tenths in an iteration, the variance is taken about the moved centre,
    and the costs are weighted otherwise. The votes are worked on some images at a time, within
    :func:`torchcaps.set_working_memory`.

    Args:
        votes: V_ij, the prediction of input capsule i for output capsule j.
        activations: a_i, at least 0. Input capsules with 0 change nothing.
        sigma_bias: Weight of what a vote costs, learned.
        activation_bias: A five-thousandth of what an active output capsule costs, learned.
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        final_beta: The inverse temperature that β_t grows towards; positive. The code's class layer hands on a quarter
            of its own.
        min_variance: Added to the variances; positive.
        return_coupling: Also return the coupling c_ij of the last fit, before it is multiplied by a_i.

    Returns:
        As :func:`em_routing`.

    Raises:
        TypeError: A tensor that is not floating-point, or an option of another type.
        ValueError: Shapes or devices that do not fit each other, or an option out of its range.

    Source: the code of Hinton, Sabour, Frosst 2018, ``capsule_em/em_layers.py``, ``update_em_routing``, in
    google-research/google-research.
    """
    name = "em_routing_code"
    check_flags(name, return_coupling=return_coupling)
    check_iterations(name, num_iterations, least=1)
    check_above_zero(name, final_beta=final_beta, min_variance=min_variance)
    check_active_votes(name, votes, activations)
    check_betas(name, votes, sigma_bias=sigma_bias, activation_bias=activation_bias)

    def work(votes: Tensor, activations: Tensor, sigma_bias: Tensor, activation_bias: Tensor) -> Gaussians:
        return fit_as_the_code(
            votes, activations, sigma_bias, activation_bias, num_iterations, final_beta, min_variance
        )

    return _route(votes, activations, (sigma_bias, activation_bias), work, return_coupling)


def fit_as_the_code(
    votes: Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int,
    final_beta: float,
    min_variance: float,
    mass_eps: float = MASS_EPS,
    log_compete: LogCompete | None = None,
    rounds: list[RoutingRound] | None = None,
) -> Gaussians:
    """The equations of :func:`em_routing_code`; ``log_compete`` is the logarithm of the softmax over j if None."""
    log_compete = log_compete or log_softmax_over_outputs
    B, I, J, D = votes.shape
    centres = votes.new_zeros(B, J, D)
    log_posterior = votes.new_zeros(B, I, J)
    log_coupling = log_softmax_over_outputs(log_posterior)  # 1/J on maps too
    votes = by_output(votes)
    for t in range(num_iterations):
        coupling = log_coupling.exp()
        shares = coupling * activations.unsqueeze(2)
        mass = shares.sum(1) + mass_eps  # (B, J)
        shares = shares / mass.unsqueeze(1)
        centres = 0.9 * weighted(shares, votes) + 0.1 * centres
        squares = squared_deviations(votes, centres)
        variances = weighted(shares, squares) + min_variance
        log_variances = variances.log()
        win = -mass * (log_variances.sum(2) + sigma_bias * D * (LOG_2_PI + 1))
        logits = final_beta * (1 - 0.95 ** (t + 1)) * (win - 5000 * activation_bias)
        if t == num_iterations - 1 and rounds is None:
            break
        densities = log_densities(squares, variances, log_variances)
        if rounds is not None:
            rounds.append(RoutingRound(log_posterior, coupling, centres, centres, densities, logits.sigmoid()))
        log_posterior = F.logsigmoid(logits).unsqueeze(1) + densities
        log_coupling = log_compete(log_posterior)
    return centres, logits, coupling


# ---- checks, and blocks


def check_above_zero(caller: str, **numbers: float) -> None:
    """Raise unless options are positive, finite numbers."""
    check_numbers(caller, **numbers)
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{caller}: {name} must be positive and finite, got {number}")


def check_betas(caller: str, votes: Tensor, **betas: Tensor) -> None:
    """Raise unless tensors have one number for each output capsule, and are on the device of the votes."""
    for name, tensor in betas.items():
        check_tensor(caller, name, tensor, (votes.shape[2],))
        check_one_device(caller, votes=votes, **{name: tensor})


def _route(
    votes: Tensor,
    activations: Tensor,
    betas: tuple[Tensor, Tensor],
    work: Callable[..., Gaussians],
    return_coupling: bool,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Poses, activations and, if asked for, coupling, from built votes, in blocks."""
    full = in_full_precision(votes)
    each, shared = (full, activations.to(full.dtype)), tuple(beta.to(full.dtype) for beta in betas)
    with full_precision(votes.device):
        poses, logits, coupling = in_blocks(work, each, shared, math.prod(full.shape[1:]))
        routed = tuple(tensor.to(votes.dtype) for tensor in (poses, logits.sigmoid(), coupling))
    return routed if return_coupling else routed[:2]  # type: ignore[return-value]  # three, or two of them
