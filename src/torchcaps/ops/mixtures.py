"""Functions shared by the equations of mixtures of Gaussians."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

LOG_2_PI = math.log(2 * math.pi)


def share_out(
    log_coupling: Float[Tensor, "#B #J #I"], activations: Float[Tensor, "B 1 I"]
) -> tuple[Float[Tensor, "B #J I"], Float[Tensor, "B #J"]]:
    """Return the shares c_ij a_i / R_j, and the sums R_j = Σ_i c_ij a_i.

    The largest coupling of each j is factored out, so the shares are exact even if all couplings underflow. If R_j is
    zero, the shares are zero.
    """
    largest = log_coupling.detach().where(activations > 0, -math.inf).amax(2, keepdim=True)
    largest = largest.where(largest > -math.inf, 0.0)
    shares = (log_coupling - largest).clamp_max(80.0).exp() * activations  # an exponent above 0 has activation 0
    total = shares.sum(2, keepdim=True)
    return shares / total.where(total > 0, 1.0), (largest.exp() * total).squeeze(2)
