"""Dynamic routing as published PyTorch code commonly writes it: the yardstick, not a part of the library."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_routing(poses: Tensor, weight: Tensor, num_iterations: int = 3, stop_gradient: bool = False) -> Tensor:
    """Output capsules (B, J, D) from poses (B, I, K) and weights (I, J, D, K), by broadcasting.

    Votes by a broadcast product, logits with an entry for every image and two trailing axes of size one, elementwise
    products and sums for the weighted sum and for the agreement, all of it left to autograd. ``stop_gradient``
    detaches the votes of all iterations but the last.
    """
    (B, I, _), J = poses.shape, weight.shape[1]
    votes = torch.matmul(weight[None], poses[:, :, None, :, None])  # (B, I, J, D, 1)
    constant_votes = votes.detach() if stop_gradient else votes
    logits = torch.zeros(B, I, J, 1, 1, dtype=poses.dtype, device=poses.device)
    for iteration in range(1, num_iterations + 1):
        last = iteration == num_iterations
        coupling = logits.softmax(2)
        capsules = _squash((coupling * (votes if last else constant_votes)).sum(1, keepdim=True))  # (B, 1, J, D, 1)
        if not last:
            logits = logits + (constant_votes * capsules).sum(3, keepdim=True)
    return capsules.squeeze(4).squeeze(1)


def _squash(s: Tensor, eps: float = 1e-7) -> Tensor:
    squared = (s**2).sum(3, keepdim=True)
    return squared / (1 + squared) * s / torch.sqrt(squared + eps)
