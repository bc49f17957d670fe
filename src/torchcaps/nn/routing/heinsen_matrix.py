"""Heinsen's routing of 2019: output capsules are Gaussians, and what they ignore counts against them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchcaps.nn.capsules import LayerSize
from torchcaps.nn.routing.mixture import Gaussians, Given, MixtureRouting
from torchcaps.ops.mixtures import by_output, log_densities, squared_deviations, weighted
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, Epsilon


@register("routing", "heinsen-matrix")
class HeinsenMatrixRouting(MixtureRouting):
    """EM without a temperature, whose activations weigh the data that a capsule uses against those that it ignores.

        c_ij ← 1/J
        repeat num_iterations times:
            D_ij  = c_ij a_i                                          used by j; a_i - D_ij is ignored
            l_j   = Σ_i β_use,ij D_ij - β_ignore,ij (a_i - D_ij)
            μ_jh  = Σ_i D_ij V_ijh / (Σ_i D_ij + eps)
            σ²_jh = Σ_i D_ij (V_ijh - μ_jh)² / (Σ_i D_ij + eps) + eps
            c_ij ← softmax_j(ln sigmoid(l_j) + ln N(V_ij; μ_j, σ²_j))  (not after the last time)
        pose_j = μ_j,   a_j = sigmoid(l_j)

    A learned bias (I, J, D) is part of the votes V_ij. It and both β (I, J) start at zero; in a layer that takes any
    number of input capsules, these share them, as in the source.

    Args:
        num_iterations: Routing iterations: how often the Gaussians are fitted.
        variance_eps: Added to the variances of Heinsen's Gaussians, and to what their sums are divided by.

    Source: Heinsen 2019, "An Algorithm for Routing Capsules in All Domains" (arXiv:1911.00792), and its code, whose
    input scores are the logits of a_i; it begins with the transform ``"matrix"``.
    """

    def __init__(self, num_iterations: AtLeastOneIteration = 3, *, variance_eps: Epsilon = 1e-5) -> None:
        super().__init__(num_iterations)
        self.variance_eps = variance_eps

    def bind(self, size: LayerSize) -> None:
        """Make both β and the bias."""
        I, _, J, D = size
        self.beta_use, self.beta_ignore = (nn.Parameter(torch.zeros(max(I, 1), J)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(max(I, 1), J, D))

    def fit(self, given: Given) -> Gaussians:
        learned = self.beta_use, self.beta_ignore, self.bias
        beta_use, beta_ignore, bias = (each.to(given.votes) for each in learned)
        active = given.activations.unsqueeze(2)  # (B, I, 1)
        votes = by_output(given.votes + bias)
        log_posterior = votes.new_zeros(given.votes.shape[:3])  # of zeros: the uniform start
        for t in range(self.num_iterations):
            log_coupling = given.log_compete(log_posterior)
            used = active * log_coupling.exp()
            logits = (beta_use * used - beta_ignore * (active - used)).sum(1)
            shares = used / (used.sum(1, keepdim=True) + self.variance_eps)
            means = weighted(shares, votes)
            if t == self.num_iterations - 1 and given.rounds is None:
                break
            squares = squared_deviations(votes, means)
            variances = weighted(shares, squares) + self.variance_eps
            densities = log_densities(squares, variances, variances.log())
            given.note(log_posterior, log_coupling, means, means, densities, logits)
            log_posterior = F.logsigmoid(logits).unsqueeze(1) + densities
        return means, logits, log_coupling.exp()
