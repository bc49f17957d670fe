"""EM routing as in the authors' released code, which differs from the paper."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.nn.capsules import Routed
from torchcaps.nn.routing.mixture import Gaussians, MixtureInputs, MixtureRouting, equations, route_mixture
from torchcaps.nn.votes import Votes
from torchcaps.ops.mixtures import LOG_2_PI
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, PositiveFactor

MASS_EPS = 1e-5
"""Added to the mass of an output capsule in a layer without a map; 1e-7 in a layer on a map."""


@checked
def em_routing_code(
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: AtLeastOneIteration = 3,
    *,
    final_beta: PositiveFactor = 0.01,
    min_variance: PositiveFactor = 0.0005,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """EM routing as in the authors' released code, which differs from the paper.

        c_ij ← 1/J,  x_jh ← 0
        repeat for t = 0, 1, ..., num_iterations - 1:
            R_j   = Σ_i c_ij a_i + 1e-5
            x_jh  ← 0.9 · Σ_i c_ij a_i V_ijh / R_j + 0.1 · x_jh
            σ²_jh = Σ_i c_ij a_i (V_ijh - x_jh)² / R_j + min_variance
            win_j = -R_j (Σ_h ln σ²_jh + sigma_bias_j · D · (ln 2π + 1))
            l_j   = β_t (win_j - 5000 · activation_bias_j),               β_t = final_beta (1 - 0.95^(t+1))
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; x_j, σ²_j))     (not after the last iteration)
        pose_j = x_j,   a_j = sigmoid(l_j)

    It differs from the paper in three points: the centre moves only nine tenths of the way in an iteration, the
    variance is taken about the moved centre, and the costs have other weights. The votes are processed some images at
    a time, within :func:`torchcaps.set_working_memory`.

    Args:
        votes: Votes V_ij of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        activations: Activations a_i of the input capsules, at least 0. An input capsule with 0 has no influence.
        sigma_bias: Weight of the cost of a vote, learned.
        activation_bias: Cost of an active output capsule divided by 5,000, learned.
        num_iterations: Number of fits of the Gaussians, 1 to 1,000.
        final_beta: Limit of the inverse temperature β_t, which the paper calls λ (``final_lambda`` of
            :func:`torchcaps.em_routing`). The class layer of the code passes on a quarter of its value.
        min_variance: Added to the variances.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij of the last fit, without the factor a_i.

    Returns:
        Poses and activations as from :func:`torchcaps.em_routing`.

    Source: the code of Hinton, Sabour, Frosst 2018, ``capsule_em/em_layers.py``, ``update_em_routing``, in
    google-research/google-research.
    """
    learned, settings = (sigma_bias, activation_bias), (final_beta, min_variance, MASS_EPS)
    return route_mixture(
        "em-code", num_iterations, settings, learned, votes, activations, mask=mask, return_coupling=return_coupling
    )


@equations("em-code")
def fit(
    inputs: MixtureInputs,
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int,
    final_beta: float,
    min_variance: float,
    mass_eps: float,
) -> Gaussians:
    """Compute the equations of :func:`em_routing_code`."""
    votes, log_posterior = inputs.votes, None
    B, J, D, _ = votes.shape
    centres = inputs.activations.new_zeros(B, J, D)
    log_coupling = inputs.uniform()  # even on maps, as in the code
    for t in range(num_iterations):
        shares = log_coupling.exp() * inputs.activations  # (B, J, I)
        mass = shares.sum(2) + mass_eps  # (B, J)
        shares = shares / mass.unsqueeze(2)
        centres, scatter = votes.moments(shares, centres, momentum=0.1)  # (B, J, D)
        variances = scatter + min_variance
        log_variances = variances.log().sum(2)  # (B, J)
        win = -mass * (log_variances + sigma_bias * D * (LOG_2_PI + 1))
        logits = final_beta * (1 - 0.95 ** (t + 1)) * (win - 5000 * activation_bias)
        if t == num_iterations - 1 and inputs.rounds is None:
            break
        log_prior = F.logsigmoid(logits)
        constant = log_prior - (D * LOG_2_PI + log_variances) / 2
        logits_before, log_posterior = log_posterior, votes.log_densities(constant, 1 / variances, centres)
        inputs.note(logits_before, log_coupling, centres, centres, log_posterior, log_prior, logits)
        log_coupling = inputs.log_compete(log_posterior)
    return centres, logits, log_coupling


@register("routing", "em-code")
class EMCodeRouting(MixtureRouting):
    """EM routing as in the authors' code: :func:`torchcaps.em_routing_code`.

    β_u is the code's sigma bias, β_a its activation bias. Both are initially 0.5 in a layer on a map; otherwise they
    are initially 2 and 1. The mass gets 1e-7 added on a map, otherwise 1e-5.

    Args:
        num_iterations: Routing iterations: number of fits of the Gaussians.
        final_beta: Limit of the inverse temperature of EM's code over the iterations.
        min_variance: Added to the variances of EM's code.
        on_map: Use the initial biases of EM's code for a layer on a map.
    """

    equations = "em-code"

    def __init__(
        self,
        num_iterations: AtLeastOneIteration = 3,
        *,
        final_beta: PositiveFactor = 0.01,
        min_variance: PositiveFactor = 0.0005,
        on_map: bool = False,
    ) -> None:
        super().__init__(num_iterations)
        self.final_beta, self.min_variance, self.on_map = final_beta, min_variance, on_map
        self.start = (0.5, 0.5) if on_map else (2.0, 1.0)

    def settings(self) -> tuple[float, ...]:
        return self.final_beta, self.min_variance, 1e-7 if self.on_map else MASS_EPS
