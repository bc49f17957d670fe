"""Homogeneous vector capsules: the sum of the votes, without routing."""

from __future__ import annotations

from torch import nn

from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.routing.vb import batch_normalised
from torchcaps.nn.votes import Votes
from torchcaps.parts import register


@register("routing", "hvc")
class HVCRouting(Routing):
    """Sum of the votes without coupling and squash. The length of a sum is a logit of its class.

        v_j = ReLU(BatchNorm(Σ_i V_ij) + b)

    The normalisation is over the images of a batch and the output capsules, for each component; b (D) is learned. The
    source uses the transform ``"elementwise"`` and the cross-entropy of the softmax of lengths (the loss
    ``"score-cross-entropy"`` with a scale of 1). The margin loss does not suit it, because lengths may exceed one. The
    momentum of the running statistics is PyTorch's 0.1; the source has 0.0003.

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136), and its code.
    """

    softmax_over = None
    by_row = False

    def bind(self, size: LayerSize) -> None:
        """Make the normalisation and its bias."""
        self.norm = nn.BatchNorm1d(size.out_dim, eps=1e-3, affine=False).train(self.training)
        self.bias = self.learned("bias", 0.0, size.out_dim)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Sum the votes; see :class:`Routing`. Activations are ignored. The coupling is one."""
        total = votes.weighted_sum(None)
        poses = (batch_normalised(total.mT, self.norm).mT + self.bias.to(total.dtype)).relu()
        return votes.finish(Routed(poses, coupling=votes.zeros() + 1), coupling=return_coupling)
