"""What the equations of mixtures of Gaussians share."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.ledger import Sums

LOG_2_PI = math.log(2 * math.pi)


def gaussian_log_densities(
    votes: Sums, means: Float[Tensor, "B J D"], variances: Float[Tensor, "B J D"], log_variances: Float[Tensor, "B J"]
) -> Float[Tensor, "B J I"]:
    """Return ln N(V_ij; μ_j, σ²_j); ``log_variances`` is Σ_h ln σ²_jh."""
    normalisation = variances.shape[2] * LOG_2_PI + log_variances
    return torch.add(-normalisation.unsqueeze(2) / 2, votes.distance(variances.reciprocal(), means), alpha=-0.5)


def share_out(
    log_coupling: Float[Tensor, "#B #J #I"], activations: Float[Tensor, "B 1 I"]
) -> tuple[Float[Tensor, "B #J I"], Float[Tensor, "B #J"]]:
    """Return c_ij a_i, divided by its sum over i, and this sum R_j.

    The largest logarithm of a j's couplings is taken out of both, so that the shares are exact even where all
    couplings are too small for their precision. Where R_j is zero, so are the shares.
    """
    largest = log_coupling.detach().where(activations > 0, -math.inf).amax(2, keepdim=True)  # of those with a share
    largest = largest.where(largest > -math.inf, 0.0)
    shares = (log_coupling - largest).clamp_max(80.0).exp() * activations  # above 0 only where a is 0
    total = shares.sum(2, keepdim=True)
    return shares / total.where(total > 0, 1.0), (largest.exp() * total).squeeze(2)
