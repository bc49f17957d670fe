"""Heinsen's routing of 2022: an output capsule is a sum of the inputs that it predicts well, each for its credit."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import ScoredRouting
from torchcaps.nn.votes import Votes
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration


@register("routing", "heinsen-vector")
class HeinsenVectorRouting(ScoredRouting):
    """Output capsules predict the inputs, and compete for each by how well they do.

        f_i  = sigmoid(⟨A_i, u_i⟩ / √I + a_i)                                  how much of u_i are data
        c_ij ← 1/J
        repeat num_iterations times:
            φ_ij = β_use,ij c_ij f_i - β_ignore,ij (f_i - c_ij f_i)            the credit of i for j
            s_j  = Σ_i φ_ij (V_ij / √I + b_j)
            p_j  = (LayerNorm(s_j) G) ∘ g_j + h_j                              what j predicts of the inputs
            c_ij ← softmax_j(ln sigmoid(m_ij ⟨u_i, p_j⟩ + n_ij))               (not after the last time)
        v_j  = LayerNorm(s_j)

    I is the number of input capsules that are there: the source divides by the padded number, so that padding changes
    its result. The votes are not built. A_i (K), a_i, m_ij, n_ij and both β_ij belong to an input capsule; in a layer
    that takes any number of them, they share the first four, and β_ij is an affine function of u_i, as in the source.
    A pose of one component is not normalised.

    Args:
        num_iterations: Routing iterations: how many times the coupling is computed; 1 is uniform coupling.

    Source: Heinsen 2022, "An Algorithm for Routing Vectors in Sequences" (arXiv:2211.11754), and its code, whose votes
    are those of the transform ``"factored"``.
    """

    def __init__(self, num_iterations: AtLeastOneIteration = 2) -> None:
        super().__init__()
        self.num_iterations = num_iterations

    def bind(self, size: LayerSize) -> None:
        """Make the parameters, which start as in the source."""
        I, K, J, D = size
        rows, std = max(I, 1), K**-0.5
        self.data_weight, self.data_bias = nn.Parameter(2 * std * torch.randn(rows, K)), nn.Parameter(torch.zeros(rows))
        self.vote_bias = nn.Parameter(torch.zeros(J, D))
        self.predict = nn.Parameter(D**-0.5 * torch.randn(D, K))
        self.predict_scale, self.predict_bias = nn.Parameter(torch.randn(J, K)), nn.Parameter(torch.zeros(J, K))
        self.match_scale, self.match_bias = nn.Parameter(std * torch.randn(rows, J)), nn.Parameter(torch.zeros(rows, J))
        start = torch.randn(2, I, J) if I else std * (2 * torch.rand(2, 1, J) - 1)
        self.beta = nn.Parameter(start)  # of what is used, and of what is ignored
        self.beta_weight = None if I else nn.Parameter(std * (2 * torch.rand(2, K, J) - 1))
        super().bind(size)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; that of the source, before its sums are divided by √I."""
        return 2 / math.sqrt(size.in_dim)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations of the input capsules are not used: f_i stands for them."""
        poses = votes.poses
        own = {name: each.to(poses.dtype) for name, each in self.named_parameters()}
        there = votes.present(poses.new_ones(poses.shape[:2]))
        scale = there.sum(1).clamp_min(1)[:, None, None] ** -0.5  # 1/√I
        score = (scale * poses * own["data_weight"]).sum(2) + own["data_bias"]
        data = (there * score.sigmoid()).unsqueeze(2)  # f_i
        beta = own["beta"] if self.beta_weight is None else own["beta"] + poses.unsqueeze(1) @ own["beta_weight"]
        use, ignore = beta.unbind(-3)
        logits = votes.zeros()
        for iteration in range(1, self.num_iterations + 1):
            coupling = votes.compete(logits)
            credit = use * coupling * data - ignore * (data - coupling * data)
            total = votes.weighted_sum(credit) * scale
            total = _normalised(total + credit.sum(1).unsqueeze(2) * own["vote_bias"])
            if iteration < self.num_iterations:
                predicted = total @ own["predict"] * own["predict_scale"] + own["predict_bias"]  # (B, J, K)
                logits = F.logsigmoid(poses @ predicted.mT * own["match_scale"] + own["match_bias"])
        return votes.finish(Routed(total, self.scored(total), coupling), coupling=return_coupling)


def _normalised(poses: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D"]:
    return F.layer_norm(poses, poses.shape[2:]) if poses.shape[2] > 1 else poses
