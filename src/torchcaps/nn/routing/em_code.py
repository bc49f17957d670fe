"""EM routing, as its authors' released code has it, which is not the paper's algorithm."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.nn.capsules import Routed
from torchcaps.nn.routing.fitting import Gaussians, MixtureInputs, equations
from torchcaps.nn.routing.mixture import MixtureRouting, route_mixture
from torchcaps.nn.votes import Votes
from torchcaps.ops.mixtures import LOG_2_PI, gaussian_log_densities
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, PositiveFactor

MASS_EPS = 1e-5
"""Added to the mass of an output capsule in a layer that is not on a map; on a map 1e-7."""


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
        votes: V_ij, the prediction of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        activations: a_i, at least 0. Input capsules with 0 change nothing.
        sigma_bias: Weight of what a vote costs, learned.
        activation_bias: A five-thousandth of what an active output capsule costs, learned.
        num_iterations: How often the Gaussians are fitted, 1 to 1,000.
        final_beta: The inverse temperature that β_t grows towards. The code's class layer hands on a quarter of its
            own.
        min_variance: Added to the variances.
        mask: Which input capsules are there; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij of the last fit, before it is multiplied by a_i.

    Returns:
        As :func:`torchcaps.em_routing`.

    Source: the code of Hinton, Sabour, Frosst 2018, ``capsule_em/em_layers.py``, ``update_em_routing``, in
    google-research/google-research.
    """
    learned, settings = (sigma_bias, activation_bias), (final_beta, min_variance, MASS_EPS)
    return route_mixture(
        "em-code", num_iterations, settings, learned, votes, activations, mask=mask, return_coupling=return_coupling
    )


@equations("em-code")
def fit(
    given: MixtureInputs,
    sigma_bias: Float[Tensor, "J"],
    activation_bias: Float[Tensor, "J"],
    num_iterations: int,
    final_beta: float,
    min_variance: float,
    mass_eps: float,
) -> Gaussians:
    """The equations of :func:`em_routing_code`."""
    votes, log_posterior = given.votes, None
    B, J, D, _ = votes.shape
    centres = given.activations.new_zeros(B, J, D)
    log_coupling = given.uniform()  # on maps too
    for t in range(num_iterations):
        shares = log_coupling.exp() * given.activations  # (B, J, I)
        mass = shares.sum(2) + mass_eps  # (B, J)
        shares = shares / mass.unsqueeze(2)
        means = votes.mean(shares)  # (B, J, D)
        centres = 0.9 * means + 0.1 * centres
        variances = votes.scatter(shares, means, centres) + min_variance
        log_variances = variances.log().sum(2)  # (B, J)
        win = -mass * (log_variances + sigma_bias * D * (LOG_2_PI + 1))
        logits = final_beta * (1 - 0.95 ** (t + 1)) * (win - 5000 * activation_bias)
        if t == num_iterations - 1 and given.rounds is None:
            break
        log_densities = gaussian_log_densities(votes, centres, variances, log_variances)  # (B, J, I)
        given.note(log_posterior, log_coupling, centres, centres, log_densities, logits)
        if t == num_iterations - 1:
            break
        log_posterior = F.logsigmoid(logits).unsqueeze(2) + log_densities
        log_coupling = given.log_compete(log_posterior)
    return centres, logits, log_coupling


@register("routing", "em-code")
class EMCodeRouting(MixtureRouting):
    """EM routing as its authors' code has it: :func:`torchcaps.em_routing_code`.

    β_u is the code's sigma bias, β_a its activation bias; they start at 0.5 in a layer on a map and at 2 and 1 in
    another, as does what is added to the mass: 1e-7 and 1e-5.

    Args:
        num_iterations: Routing iterations: how often the Gaussians are fitted.
        final_beta: The inverse temperature that the iterations of EM's code grow towards.
        min_variance: Added to the variances of EM's code.
        on_map: Whether the layer is one on a map: EM's code starts its biases otherwise there.
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
