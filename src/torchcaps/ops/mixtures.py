"""Functions shared by the equations of mixtures of Gaussians."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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
    if log_coupling.shape[1] == 1:  # the initial coupling, which is not far from uniform
        shares = log_coupling.exp() * activations
        total = shares.sum(2, keepdim=True)
        return shares / (total + (total == 0)), total.squeeze(2)
    with torch.no_grad():
        largest = log_coupling.masked_fill(activations == 0, -math.inf).amax(2, keepdim=True)
        largest = largest.nan_to_num(neginf=0.0)  # of an image without active capsules
    # an exponent above 0 has activation 0; unlike a clamp, hardtanh has a gradient of one step
    shares = F.hardtanh(log_coupling - largest, -1e30, 80.0).exp() * activations
    total = shares.sum(2, keepdim=True)
    return shares / (total + (total == 0)), (largest.exp() * total).squeeze(2)
