"""Heinsen's routing of 2022: an output capsule is a weighted sum of the votes of inputs that it predicts well."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import ScoredRouting, normal, uniform
from torchcaps.nn.votes import Votes
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration


@register("routing", "heinsen-vector")
class HeinsenVectorRouting(ScoredRouting):
    """Output capsules predict the input capsules; the best predictor of an input capsule gets most of its vote.

        f_i  = sigmoid(⟨A_i, u_i⟩ / √I + a_i)                                  share of u_i that is data
        c_ij ← 1/J
        repeat num_iterations times:
            φ_ij = β_use,ij c_ij f_i - β_ignore,ij (f_i - c_ij f_i)            the credit of i for j
            s_j  = Σ_i φ_ij (V_ij / √I + b_j)
            p_j  = (LayerNorm(s_j) G) ∘ g_j + h_j                              prediction of the inputs by j
            c_ij ← softmax_j(ln sigmoid(m_ij ⟨u_i, p_j⟩ + n_ij))               (not after the last iteration)
        v_j  = LayerNorm(s_j)

    I is the number of input capsules without padding. The source divides by the padded number, so padding changes its
    result. The votes are not built. Each input capsule has its A_i (K), a_i, m_ij, n_ij and both β_ij. In a layer that
    takes any number of input capsules, all share the first four, and β_ij is an affine function of u_i, as in the
    source. A pose of one component is not normalised.

    Args:
        num_iterations: Routing iterations: number of times that the coupling is computed; 1 is uniform coupling.

    Source: Heinsen 2022, "An Algorithm for Routing Vectors in Sequences" (arXiv:2211.11754), and its code, which uses
    the transform ``"factored"``.
    """

    def __init__(self, num_iterations: AtLeastOneIteration = 2) -> None:
        super().__init__()
        self.num_iterations = num_iterations

    def bind(self, size: LayerSize) -> None:
        """Make the parameters, with the initial values of the source."""
        I, K, J, D = size
        rows, std = max(I, 1), K**-0.5
        self.data_weight = self.learned("data_weight", normal(2 * std), rows, K)
        self.data_bias = self.learned("data_bias", 0.0, rows)
        self.vote_bias = self.learned("vote_bias", 0.0, J, D)
        self.predict = self.learned("predict", normal(D**-0.5), D, K)
        self.predict_scale = self.learned("predict_scale", normal(1.0), J, K)
        self.predict_bias = self.learned("predict_bias", 0.0, J, K)
        self.match_scale = self.learned("match_scale", normal(std), rows, J)
        self.match_bias = self.learned("match_bias", 0.0, rows, J)
        self.beta = self.learned("beta", normal(1.0) if I else uniform(std), 2, rows, J)  # β_use, β_ignore
        self.beta_weight = None if I else self.learned("beta_weight", uniform(std), 2, K, J)
        super().bind(size)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; the value of the source, before its sums are divided by √I."""
        return 2 / math.sqrt(size.in_dim)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations of the input capsules are ignored, because f_i has their role."""
        poses = votes.poses
        learned = {name: getattr(self, name).to(poses.dtype) for name in self._initial}
        present = votes.present(poses.new_ones(poses.shape[:2]))
        scale = present.sum(1).clamp_min(1)[:, None, None] ** -0.5  # 1/√I
        score = (scale * poses * learned["data_weight"]).sum(2) + learned["data_bias"]
        data = (present * score.sigmoid()).unsqueeze(2)  # f_i
        beta = learned["beta"]
        if self.beta_weight is not None:
            beta = beta + poses.unsqueeze(1) @ learned["beta_weight"]
        use, ignore = beta.unbind(-3)
        logits = votes.zeros()
        for iteration in range(1, self.num_iterations + 1):
            coupling = votes.compete(logits)
            credit = use * coupling * data - ignore * (data - coupling * data)
            total = votes.weighted_sum(credit) * scale
            total = _normalised(total + credit.sum(1).unsqueeze(2) * learned["vote_bias"])
            if iteration < self.num_iterations:
                predicted = total @ learned["predict"] * learned["predict_scale"] + learned["predict_bias"]  # (B, J, K)
                logits = F.logsigmoid(poses @ predicted.mT * learned["match_scale"] + learned["match_bias"])
        return votes.finish(Routed(total, self.scored(total), coupling), coupling=return_coupling)


def _normalised(poses: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D"]:
    return F.layer_norm(poses, poses.shape[2:]) if poses.shape[2] > 1 else poses
