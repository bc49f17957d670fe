"""Self-routing: each input capsule chooses its output capsules from its pose alone."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.ops.mixtures import share_out
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.parts import register


@checked
@computed_in_full_precision
def self_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    activations: Float[Tensor, "B I"],
    routing_logits: Float[Tensor, "B I J"],
    *,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """Mixture of experts: the routing logits of an input capsule depend on its pose alone, without iterations.

        c_ij   = softmax_j(logits_ij)
        pose_j = Σ_i c_ij a_i û_j|i / Σ_i c_ij a_i
        a_j    = Σ_i c_ij a_i / Σ_i a_i

    The shares c_ij a_i / Σ_i c_ij a_i are computed from logarithms, so an output capsule gets its mean even if all its
    couplings underflow.

    Args:
        votes: Votes û_j|i of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        activations: Activations a_i of the input capsules, at least 0. If all capsules of an image have 0, its poses
            and activations are 0.
        routing_logits: Logits of input capsule i for output capsule j, in the source a linear function of its pose u_i.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij, without the factor a_i.

    Returns:
        Poses, and activations, which sum to 1 over j, in the dtype of ``votes`` (half precision is computed in
        float32), and c_ij if requested.

    Source: Hahn, Pyeon, Kim 2019, "Self-routing capsule networks", section 3 (NeurIPS 2019).
    """
    votes = BuiltVotes.of(votes, mask)
    active, logits = (votes.present(each.to(votes.like.dtype)) for each in (activations, routing_logits))
    log_coupling = votes.log_compete(logits)
    shares, mass = share_out(log_coupling.mT, active.unsqueeze(1))  # (B, J, I), (B, J)
    total = active.sum(1, keepdim=True)
    routed = Routed(votes.weighted_sum(shares.mT), mass / total.where(total > 0, 1.0), log_coupling.exp())
    return votes.finish(routed, coupling=return_coupling)


@register("routing", "self")
class SelfRouting(Routing):
    """Self-routing, :func:`torchcaps.self_routing`, with the learned logits w_ij·u_i + b_ij.

    w (I, J, K) and b (I, J) are initially zero, so the initial coupling is uniform. Without activations, the lengths
    of the input poses are used.
    """

    def bind(self, size: LayerSize) -> None:
        """Make the parameters of the logits."""
        I, K, J = size.inputs(self), size.in_dim, size.out_capsules
        self.weight, self.bias = self.learned("weight", 0.0, I, J, K), self.learned("bias", 0.0, I, J)

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; output poses are means of votes, so votes should be as long as poses."""
        return 1 / math.sqrt(size.out_dim)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        poses = votes.poses
        logits = torch.einsum("bik,ijk->bij", poses, self.weight.to(poses.dtype)) + self.bias.to(poses.dtype)
        return self_routing(votes, self.activations_of(votes, activations), logits, return_coupling=return_coupling)
