"""The forward pass: weighted sums, squash, and the running sum V of the capsules, which gives the next coupling.

For very few images the votes are built and stay in the caches, so that the weights are read only once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.dense.layer import Layer, Options, Results, Tensors
from torchcaps.kernels.memory import get_working_memory
from torchcaps.kernels.operation import Forward
from torchcaps.machine import MIB
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squashed

# Limits for building the votes. Within them it takes 0.2 to 1.0 of the time without votes, beyond them soon more
# (measured on a CPU: softmax over either axis, 2 to 4 iterations, layers of 2,000 to 700,000 links).
MIN_ITERATIONS = 2  # a single iteration uses each vote only once
MAX_IMAGES = 6
MAX_VOTES_MIB = 16.0  # larger votes leave the caches


def forward(tensors: Tensors, options: Options, _wanted: Sequence[bool], _keep: bool) -> Forward:
    """Compute :class:`~.layer.Results`."""
    poses, weight, _ = tensors
    with full_precision(poses.device):
        layer = Layer(tensors, options)
        (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
        sums = layer.poses.new_zeros(max(options.num_iterations, 1), B, J, D)
        if layer.bias is not None:
            sums += layer.bias
        coupling = layer.poses.new_empty((J, B, I) if options.keep_coupling else (0, 0, 0))
        votes = make_votes(layer) if _votes_pay_off(layer) else None
        summed_capsules = torch.zeros_like(sums[0])  # V
        for t, s in enumerate(sums):
            coupling_out = coupling if options.keep_coupling and t == len(sums) - 1 else None
            if t == 0:
                _add_first_sum(layer, votes, s, coupling_out)
            else:
                summed_capsules += squashed(sums[t - 1], -1, options.eps)
                _add_weighted_sum(layer, votes, summed_capsules, s, coupling_out)
        # without iterations the result is the sum, not squashed
        capsules = squashed(sums[-1], -1, options.eps) if options.num_iterations else sums[-1].clone()
        dtype = torch.promote_types(poses.dtype, weight.dtype)
        return Forward(Results(capsules.to(dtype), coupling.permute(1, 2, 0), sums))


def _add_first_sum(
    layer: Layer, votes: Float[Tensor, "J B D I"] | None, s: Float[Tensor, "B J D"], coupling_out: Tensor | None
) -> None:
    """[first sum] Add c¹ · U Wᵀ to s¹, or with held votes c¹ · Σ_i û_j|i."""
    if coupling_out is not None:
        coupling_out.fill_(layer.uniform_coupling)
    if votes is not None:
        s += votes.sum(3).mul_(layer.uniform_coupling).transpose(0, 1)
        return
    weight = layer.weight.flatten(2).flatten(0, 1).t()
    s.flatten(1).addmm_(layer.poses.flatten(1), weight, alpha=layer.uniform_coupling)


def _add_weighted_sum(
    layer: Layer,
    votes: Float[Tensor, "J B D I"] | None,
    summed_capsules: Float[Tensor, "B J D"],
    s: Float[Tensor, "B J D"],
    coupling_out: Float[Tensor, "J B I"] | None,
) -> None:
    """[weighted sum] Add (c_j∘u) W_jᵀ to s_j, or with held votes Σ_i c_ij û_j|i. V gives the coupling."""
    if votes is not None:
        coupling = layer.compete((summed_capsules.transpose(0, 1)[:, :, None] @ votes).squeeze(2))
        if coupling_out is not None:
            coupling_out.copy_(coupling)
        s += (coupling[:, :, None] @ votes.mT).squeeze(2).transpose(0, 1)
        return

    def add(j: slice, i: slice, W: Float[Tensor, "j D Ki"], total: Float[Tensor, "B J D"]) -> None:
        for b, u in layer.pose_blocks(i):
            VW = layer.pull_back("VW", summed_capsules[b, j], W, u)
            coupling = layer.compete(layer.agreement(VW, u, scratch=VW))
            if coupling_out is not None:
                coupling_out[j, b, i] = coupling
            coupled = torch.mul(coupling[:, :, None], u, out=VW)  # VW is no longer needed
            total[b, j] += layer.product(coupled.flatten(2), W.transpose(1, 2)).transpose(0, 1)

    layer.add_blocks(add, s)


# ---- [held votes]


def _votes_pay_off(layer: Layer) -> bool:
    """Return True if a call is faster with votes: very few images, several iterations, votes that fit the caches.

    The votes must also fit into the working memory, :func:`torchcaps.set_working_memory`.
    """
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    if not 0 < B <= MAX_IMAGES or layer.options.num_iterations < MIN_ITERATIONS or layer.poses.device.type != "cpu":
        return False
    mib = B * J * I * (D + 2) * layer.poses.element_size() / MIB  # votes, logits, coupling
    return mib <= min(MAX_VOTES_MIB, get_working_memory())


def make_votes(layer: Layer) -> Float[Tensor, "J B D I"]:
    """Return û_j = W_j u, summed over components k of the poses, so that each weight is read only once."""
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    votes = layer.buffers.take("votes", (J, B, D, I)).zero_()
    for W_k, u_k in zip(layer.weight[:, None].unbind(3), layer.poses[:, None].unbind(2), strict=True):
        votes.addcmul_(W_k, u_k)
    return votes
