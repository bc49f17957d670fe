"""Self-routing: each input capsule chooses its output capsules from its own pose."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.flow import LayerSize
from torchcaps.nn.routing.base import Routed, Routing
from torchcaps.nn.transforms import Votes
from torchcaps.ops.precision import full_precision, in_full_precision
from torchcaps.ops.self_routing import choose_outputs


class SelfRouting(Routing):
    """A mixture of experts: :func:`torchcaps.self_routing`, logits w_ij·u_i + b_ij, w (I, J, K) and b (I, J) from zero.

    The coupling is uniform at the start. Without activations, those of the input capsules are the lengths of their
    poses.

    Source: Hahn, Pyeon, Kim 2019, "Self-routing capsule networks", section 3 (NeurIPS 2019).
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None

    def bind(self, size: LayerSize) -> None:
        """Make the parameters of the logits."""
        self.belongs_to_no_layer(self.weight)
        I, K, J, _ = size
        self.weight, self.bias = nn.Parameter(torch.zeros(I, J, K)), nn.Parameter(torch.zeros(I, J))

    def balanced_std(self, size: LayerSize) -> float:
        """See :class:`Routing`; output poses are means, so that votes are as long as poses."""
        return 1 / math.sqrt(size.out_dim)

    def forward(
        self, votes: Votes, activations: Float[Tensor, "B I"] | None = None, *, return_coupling: bool = False
    ) -> Routed:
        """Route; see :class:`Routing`."""
        assert self.weight is not None
        dtype = votes.poses.dtype
        with full_precision(votes.poses.device):
            poses = in_full_precision(votes.poses)
            weight, bias = self.weight.to(poses.dtype), self.bias.to(poses.dtype)
            logits = torch.einsum("bik,ijk->bij", poses, weight) + bias
            routed = choose_outputs(votes, self.activations_of(votes, activations), logits)
        capsules, out, coupling = (tensor.to(dtype) for tensor in routed)
        return Routed(capsules, out, coupling if return_coupling else None)
