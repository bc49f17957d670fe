"""Homogeneous vector capsules: nothing is routed, the votes are summed."""

from __future__ import annotations

import torch
from torch import nn

from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.routing.vb import batch_normalised
from torchcaps.nn.votes import Votes
from torchcaps.parts import register


@register("routing", "hvc")
class HVCRouting(Routing):
    """The sum of the votes, without coupling and without squash; its length is a logit of the class.

        v_j = ReLU(BatchNorm(Σ_i V_ij) + b)

    The normalisation is over the images of a batch and the output capsules, for each component; b (D) is learned. In
    the source the votes are those of the transform ``"elementwise"``, and the loss is the cross-entropy of the softmax
    of lengths (``"score-cross-entropy"`` with a scale of 1). Lengths are not below one, so the margin loss does not go
    with it. The running statistics follow a batch by PyTorch's tenth, where the source has 0.0003.

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136), and its code.
    """

    softmax_over = None

    def bind(self, size: LayerSize) -> None:
        """Make the normalisation and its bias."""
        self.norm = nn.BatchNorm1d(size.out_dim, eps=1e-3, affine=False).train(self.training)
        self.bias = nn.Parameter(torch.zeros(size.out_dim))

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Sum; see :class:`Routing`. Activations are not used. The coupling is one."""
        total = votes.weighted_sum(None)
        poses = (batch_normalised(total.mT, self.norm).mT + self.bias.to(total.dtype)).relu()
        return votes.finish(Routed(poses, coupling=votes.zeros() + 1), coupling=return_coupling)
