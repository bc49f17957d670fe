"""Homework: three capsule layers, each with one fault that accuracy does not show. Find it, explain it, mend it.

    torchcaps check examples/flawed_layers.py:First --shape 4,12,8
    torchcaps check examples/flawed_layers.py:Second --shape 4,12,8
    torchcaps check examples/flawed_layers.py:Third --shape 4,12,8

Each maps 12 input capsules of 8 components (B, 12, 8) to 5 output capsules of 16 (B, 5, 16) by dynamic routing with
three iterations. Public code has faults of the same kinds; the page "Public implementations" counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

I, K, J, D = 12, 8, 5, 16


def squash(total: Tensor, dim: int) -> Tensor:
    """Shorten vectors to a length below one; their components lie along ``dim``."""
    squared = total.square().sum(dim, keepdim=True)
    return squared / (1 + squared) * total / (squared + 1e-12).sqrt()


class Votes(nn.Module):
    """Votes of each input capsule for each output capsule; the base of the three layers, without a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(I, J, D, K))

    def votes(self, poses: Tensor) -> Tensor:
        """Return the votes (B, I, J, D) of poses (B, I, K)."""
        return torch.einsum("ijdk,bik->bijd", self.weight, poses)


class First(Votes):
    """The first layer."""

    def forward(self, poses: Tensor) -> Tensor:
        """Return the output capsules (B, J, D)."""
        votes = self.votes(poses)
        logits = torch.zeros(1, I, J)
        for _ in range(3):
            coupling = logits.softmax(2)
            capsules = squash((coupling.unsqueeze(3) * votes).sum(1), dim=2)
            agreement = (votes * capsules.unsqueeze(1)).sum(3)
            logits = logits + agreement.mean(0, keepdim=True)
        return capsules


class Second(Votes):
    """The second layer."""

    def forward(self, poses: Tensor) -> Tensor:
        """Return the output capsules (B, J, D)."""
        votes = self.votes(poses).unsqueeze(4)  # (B, I, J, D, 1)
        logits = torch.zeros(len(poses), I, J, 1, 1)
        for _ in range(3):
            coupling = logits.softmax(2)
            capsules = squash((coupling * votes).sum(1, keepdim=True), dim=2)
            logits = logits + (votes * capsules).sum(3, keepdim=True)
        return capsules.squeeze(4).squeeze(1)


class Third(Votes):
    """The third layer."""

    def forward(self, poses: Tensor) -> Tensor:
        """Return the output capsules (B, J, D)."""
        votes = self.votes(poses)
        logits = [torch.zeros(len(poses), I, J)]  # of each iteration
        for _ in range(3):
            coupling = logits[0].softmax(2)
            capsules = squash((coupling.unsqueeze(3) * votes).sum(1), dim=2)
            logits.append(logits[0] + (votes * capsules.unsqueeze(1)).sum(3))
        return capsules
