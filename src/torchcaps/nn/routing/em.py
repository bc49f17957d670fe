"""EM routing as in the paper: each output capsule is a Gaussian, fitted to its share of the votes.

The authors' code has another algorithm; see :mod:`~torchcaps.nn.routing.em_code`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.nn.capsules import LayerSize, Routed
from torchcaps.nn.routing.mixture import Gaussians, MixtureInputs, MixtureRouting, equations, route_mixture
from torchcaps.nn.votes import Votes
from torchcaps.ops.mixtures import LOG_2_PI
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, PositiveFactor


@checked
def em_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: AtLeastOneIteration = 3,
    *,
    final_lambda: PositiveFactor = 0.01,
    cost_scale: PositiveFactor = 1.0,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """EM routing as in the paper: a mixture of Gaussians with diagonal covariance, fitted to the votes V_ij.

        c_ij ← 1/J
        repeat for t = 0, 1, ..., num_iterations - 1:
            R_j   = Σ_i c_ij a_i
            μ_jh  = Σ_i c_ij a_i V_ijh / R_j
            σ²_jh = Σ_i c_ij a_i (V_ijh - μ_jh)² / R_j + 1e-9
            l_j   = λ_t (β_a,j - cost_scale · R_j Σ_h (β_u,j + ln σ_jh)),   λ_t = final_lambda (1 - 0.95^(t+1))
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; μ_j, σ²_j))       (not after the last iteration)
        pose_j = μ_j,   a_j = sigmoid(l_j)

    All steps use logarithms, so an output capsule gets its mean even if its coupling underflows. The votes are
    processed some images at a time, within :func:`torchcaps.set_working_memory`.

    Args:
        votes: Votes V_ij of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        activations: Activations a_i of the input capsules, at least 0. An input capsule with 0 has no influence. If
            all capsules of an image have 0, its poses are 0.
        beta_u: Cost of describing one component of a vote, learned.
        beta_a: Cost of not activating an output capsule, learned.
        num_iterations: Number of fits of the Gaussians, 1 to 1,000.
        final_lambda: Limit of the inverse temperature λ_t.
        cost_scale: Factor on the costs; 1 in the paper, 100·J/I in the re-implementation by Gritzman.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij of the last fit, without the factor a_i.

    Returns:
        Poses, and activations in 0..1, in the dtype of ``votes`` (half precision is computed in float32), and c_ij if
        requested.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", procedure 1 (ICLR 2018); the floor of the
    variance from Gritzman 2019, "Avoiding implementation pitfalls of matrix capsules" (arXiv:1907.00652).
    """
    learned, settings = (beta_u, beta_a), (final_lambda, cost_scale, 0.0, 1.0)
    return route_mixture(
        "em", num_iterations, settings, learned, votes, activations, mask=mask, return_coupling=return_coupling
    )


@equations("em")
def fit(
    inputs: MixtureInputs,
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    num_iterations: int,
    final_lambda: float,
    cost_scale: float,
    cost_of_inputs: float,
    unit: float,
) -> Gaussians:
    """Compute the equations of :func:`em_routing`.

    The cost scale is ``cost_scale`` plus ``cost_of_inputs`` / number of inputs. ``beta_a`` is β_a times ``unit``.
    """
    votes, log_posterior = inputs.votes, None
    _, _, D, _ = votes.shape
    scale = cost_scale + cost_of_inputs / inputs.number
    threshold, twice_beta_u = beta_a / unit, 2 * D * beta_u
    log_coupling = inputs.start()
    for t in range(num_iterations):
        shares, mass = votes.share_out(log_coupling, inputs.activations)  # (B, J, I), (B, J)
        means, scatter = votes.moments(shares)  # (B, J, D)
        variances = scatter + 1e-9
        log_variances = variances.log().sum(2)  # (B, J)
        twice_costs = mass * (twice_beta_u + log_variances)
        logits = final_lambda * (1 - 0.95 ** (t + 1)) * (threshold - scale / 2 * twice_costs)
        if t == num_iterations - 1 and inputs.rounds is None:
            break
        log_prior = F.logsigmoid(logits)
        constant = torch.sub(log_prior - D * LOG_2_PI / 2, log_variances, alpha=0.5)
        logits_before, log_posterior = log_posterior, votes.log_densities(constant, 1 / variances, means)  # (B, J, I)
        inputs.note(logits_before, log_coupling, means, means, log_posterior, log_prior, logits)
        log_coupling = inputs.log_compete(log_posterior)
    return means, logits, log_coupling


@register("routing", "em")
class EMRouting(MixtureRouting):
    """EM routing as in the paper: :func:`torchcaps.em_routing`; β_u and β_a are initially zero.

    The parameter ``beta_a`` is β_a·``final_lambda``, which is as large as a logit. β_a itself is a hundred times larger
    because of the temperature, so an optimizer with one step size for all parameters (Adam) would hardly move it.

    Args:
        num_iterations: Routing iterations: number of fits of the Gaussians.
        final_lambda: Limit of EM's inverse temperature over the iterations.
        cost_scale: Factor on EM's costs, 1 in the paper; default: 100 times output capsules over input capsules, so
            that costs do not grow with the number of input capsules.
    """

    equations = "em"

    def __init__(
        self,
        num_iterations: AtLeastOneIteration = 3,
        *,
        final_lambda: PositiveFactor = 0.01,
        cost_scale: PositiveFactor | None = None,
    ) -> None:
        super().__init__(num_iterations)
        self.final_lambda, self.cost_scale = final_lambda, cost_scale

    def settings(self) -> tuple[float, ...]:
        if self.cost_scale is None:
            return self.final_lambda, 0.0, 100.0 * len(self.beta_u), self.final_lambda
        return self.final_lambda, self.cost_scale, 0.0, self.final_lambda

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; votes with components of standard deviation one have initial costs near zero."""
        return 1.0
