"""Self-attention routing: the coupling of a vote grows with its agreement with all votes for the same output."""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, Votes
from torchcaps.ops.precision import computed_in_full_precision
from torchcaps.ops.squash import exponential_squash
from torchcaps.parts import register


@checked
@computed_in_full_precision
def self_attention_routing(
    votes: Votes | Float[Tensor, "B I J D"],
    *,
    bias: Float[Tensor, "I J"] | None = None,
    mask: Bool[Tensor, "B I"] | None = None,
    return_coupling: bool = False,
) -> Routed:
    """Routing without iterations: the coupling of a vote grows with its agreement with all votes for the same output.

        a_ij = ⟨û_j|i, Σ_k û_j|k⟩ / √D
        c_ij = softmax_j(a_ij) + bias_ij
        v_j  = exponential_squash(Σ_i c_ij û_j|i)

    Args:
        votes: Votes û_j|i of input capsule i for output capsule j; a tensor, or :class:`torchcaps.nn.Votes`.
        bias: Added to the coupling after the softmax; may be learned, and negative.
        mask: True for each input capsule that is present; all if None; as for :func:`torchcaps.dynamic_routing`.
        return_coupling: Also return the coupling c_ij, bias included.

    Returns:
        Output capsules v_j, lengths in [0, 1), in the dtype of ``votes`` (half precision is computed in float32), and
        c_ij if requested.

    Source: Mazzia, Salvetti, Chiaberge 2021, "Efficient-CapsNet: capsule network with self-attention routing",
    section 3 (arXiv:2101.12491).
    """
    votes = BuiltVotes.of(votes, mask)
    total = votes.weighted_sum(None)
    coupling = votes.compete(votes.agreement(total) / math.sqrt(total.shape[2]))
    if bias is not None:
        coupling = votes.present(coupling + bias.to(coupling.dtype))
    poses = exponential_squash(votes.weighted_sum(coupling))
    return votes.finish(Routed(poses, coupling=coupling), coupling=return_coupling)


@register("routing", "self-attention")
class SelfAttentionRouting(Routing):
    """Attention among the votes, without iterations: :func:`torchcaps.self_attention_routing`.

    Args:
        attention_bias: Learn a bias on the coupling of self-attention, initially zero.
    """

    def __init__(self, *, attention_bias: bool = True) -> None:
        super().__init__()
        self.attention_bias = attention_bias
        self.bias: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the bias (I, J) with ``attention_bias``."""
        if self.attention_bias:
            self.bias = self.learned("bias", 0.0, size.inputs(self), size.out_capsules)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Activations are ignored, because the lengths of poses have this role."""
        return self_attention_routing(votes, bias=self.bias, return_coupling=return_coupling)
