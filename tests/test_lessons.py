"""A mistake of published capsule networks that MNIST's accuracy hides: stacks of layers that die at their start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support import assert_finite
from torchcaps.nn import DenseCapsules


def test_a_stack_of_capsule_layers_neither_dies_nor_saturates() -> None:
    """From its start, gradients of a useful size reach every layer, and lengths differ from image to image."""
    network = nn.Sequential(*(DenseCapsules(*sizes) for sizes in ((32, 8, 16, 8), (16, 8, 8, 8), (8, 8, 4, 16))))
    lengths = network(F.normalize(torch.randn(16, 32, 8), dim=-1)).scores()
    lengths.sum().backward()
    gradients = [layer.transform.weight.grad for layer in network]
    assert_finite([lengths, *gradients])
    assert 0.05 < lengths.mean() < 0.95
    assert all(gradient.norm() > 1e-3 for gradient in gradients)
    assert (lengths.std(0) > 1e-3).all()
