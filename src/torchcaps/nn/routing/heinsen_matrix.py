"""Heinsen's routing of 2019: output capsules are Gaussians, and ignored data lowers their activation."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.routing.mixture import Gaussians, MixtureInputs, MixtureRouting, equations
from torchcaps.ops.mixtures import LOG_2_PI
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, Epsilon


@register("routing", "heinsen-matrix")
class HeinsenMatrixRouting(MixtureRouting):
    """EM without a temperature; an activation is the value of the used data minus the cost of the ignored data.

        c_ij ← 1/J
        repeat num_iterations times:
            D_ij  = c_ij a_i                                          used by j; j ignores a_i - D_ij
            l_j   = Σ_i β_use,ij D_ij - β_ignore,ij (a_i - D_ij)
            μ_jh  = Σ_i D_ij V_ijh / (Σ_i D_ij + eps)
            σ²_jh = Σ_i D_ij (V_ijh - μ_jh)² / (Σ_i D_ij + eps) + eps
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; μ_j, σ²_j))  (not after the last iteration)
        pose_j = μ_j,   a_j = sigmoid(l_j)

    A learned bias (I, J, D) is part of the votes V_ij. The bias and both β (I, J) are initially zero. In a layer that
    takes any number of input capsules, all input capsules share them, as in the source.

    Args:
        num_iterations: Routing iterations: number of fits of the Gaussians.
        variance_eps: Added to the variances of Heinsen's Gaussians, and to the divisors of their sums.

    Source: Heinsen 2019, "An Algorithm for Routing Capsules in All Domains" (arXiv:1911.00792), and its code. There,
    the input scores are the logits of a_i, and the transform is ``"matrix"``.
    """

    equations = "heinsen-matrix"

    def __init__(self, num_iterations: AtLeastOneIteration = 3, *, variance_eps: Epsilon = 1e-5) -> None:
        super().__init__(num_iterations)
        self.variance_eps = variance_eps

    def bind(self, size: LayerSize) -> None:
        """Make both β and the bias."""
        I, _, J, D = size
        self.beta_use = self.learned("beta_use", 0.0, max(I, 1), J)
        self.beta_ignore = self.learned("beta_ignore", 0.0, max(I, 1), J)
        self.bias = self.learned("bias", 0.0, max(I, 1), J, D)

    def betas(self) -> tuple[Tensor, Tensor]:
        return self.beta_use, self.beta_ignore

    def vote_bias(self) -> Tensor:
        return self.bias

    def settings(self) -> tuple[float, ...]:
        return (self.variance_eps,)


@equations("heinsen-matrix")
def fit(
    inputs: MixtureInputs,
    beta_use: Float[Tensor, "I J"],
    beta_ignore: Float[Tensor, "I J"],
    num_iterations: int,
    eps: float,
) -> Gaussians:
    """Compute the equations of :class:`HeinsenMatrixRouting`."""
    votes, active, log_posterior = inputs.votes, inputs.activations, None  # active: (B, 1, I)
    B, J, D, _ = votes.shape
    zeros = active.new_zeros(B, J, D)  # with momentum 0: shares may sum to less than one
    log_coupling = inputs.start()
    for t in range(num_iterations):
        used = active * log_coupling.exp()  # (B, J, I)
        logits = (beta_use.mT * used - beta_ignore.mT * (active - used)).sum(2)  # (B, J)
        shares = used / (used.sum(2, keepdim=True) + eps)
        last = t == num_iterations - 1 and inputs.rounds is None
        means, scatter = votes.moments(shares, zeros, with_scatter=not last)  # (B, J, D)
        if last:
            break
        variances = scatter + eps
        log_prior = F.logsigmoid(logits)
        constant = log_prior - (D * LOG_2_PI + variances.log().sum(2)) / 2
        logits_before, log_posterior = log_posterior, votes.log_densities(constant, 1 / variances, means)  # (B, J, I)
        inputs.note(logits_before, log_coupling, means, means, log_posterior, log_prior, logits)
        log_coupling = inputs.log_compete(log_posterior)
    return means, logits, log_coupling
