"""Inverted attention routing: output capsules compete for the vote of an input capsule and are normalised."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import ScoredRouting
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.parts import register
from torchcaps.ranges import AtLeastOneIteration, Epsilon


@checked
@computed_in_full_precision
def inverted_attention_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    num_iterations: AtLeastOneIteration = 2,
    *,
    norm_weight: Float[Tensor, "D"] | None = None,
    norm_bias: Float[Tensor, "D"] | None = None,
    eps: Epsilon = 1e-5,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """Attention with the softmax over the receivers: output capsules compete for the vote of an input capsule.

        c_ij = 1/J                             in the first iteration,
        c_ij = softmax_j(⟨û_j|i, v_j⟩ / √D)    in all later iterations,
        v_j  = LayerNorm(Σ_i c_ij û_j|i)       over the D components, after each iteration

    Args:
        votes: Votes û_j|i of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        num_iterations: Number of times that the coupling is computed, 1 to 1,000; 1 is uniform coupling.
        norm_weight: Scale of the normalisation; 1 if None.
        norm_bias: Shift of the normalisation; 0 if None.
        eps: Added to the variance of the D components.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling of the last iteration.

    Returns:
        Output capsules v_j, normalised, not squashed, so their length is no score. The dtype is that of ``votes`` (half
        precision is computed in float32). With ``return_coupling`` also c_ij. With D = 1 the normalised result is
        ``norm_bias``.

    Source: Tsai, Srivastava, Goh, Salakhutdinov 2020, "Capsules with inverted dot-product attention routing"
    (arXiv:2002.04764), procedure 1 for a single layer.
    """
    votes = BuiltVotes.of(votes, mask)
    routed = _route(votes, num_iterations, norm_weight, norm_bias, eps)
    return votes.finish(routed, coupling=return_coupling)


def _route(
    votes: Votes,
    num_iterations: int,
    norm_weight: Float[Tensor, "D"] | None,
    norm_bias: Float[Tensor, "D"] | None,
    eps: float = 1e-5,
) -> Routed:
    """Compute the equations of :func:`inverted_attention_routing`."""
    J, D = votes.size.out_capsules, votes.size.out_dim
    coupling = None
    total = votes.weighted_sum(None) / J
    weight, bias = (None if each is None else each.to(total.dtype) for each in (norm_weight, norm_bias))
    poses = F.layer_norm(total, (D,), weight, bias, eps)
    for _ in range(num_iterations - 1):
        coupling = votes.compete(votes.agreement(poses) / math.sqrt(D))
        poses = F.layer_norm(votes.weighted_sum(coupling), (D,), weight, bias, eps)
    return Routed(poses, coupling=votes.zeros() + 1 / J if coupling is None else coupling)


@register("routing", "inverted-attention")
class InvertedAttentionRouting(ScoredRouting):
    """Attention with the softmax over the receivers: :func:`torchcaps.inverted_attention_routing`.

    The normalisation's scale and shift (D) are learned.

    Args:
        num_iterations: Routing iterations: number of times that the coupling is computed; 1 is uniform coupling.

    Source: Tsai, Srivastava, Goh, Salakhutdinov 2020 (arXiv:2002.04764), each layer routed separately; the logit of
    the activation is the source's class score.
    """

    def __init__(self, num_iterations: AtLeastOneIteration = 2) -> None:
        super().__init__()
        self.num_iterations = num_iterations

    def bind(self, size: LayerSize) -> None:
        """Make the parameters of the normalisation."""
        self.norm_weight = self.learned("norm_weight", 1.0, size.out_dim)
        self.norm_bias = self.learned("norm_bias", 0.0, size.out_dim)
        super().bind(size)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations of the input capsules are ignored."""
        routed = _route(votes, self.num_iterations, self.norm_weight, self.norm_bias)
        return votes.finish(routed._replace(activations=self.scored(routed.poses)), coupling=return_coupling)
