"""The forward pass: sums, squash, and the running sum V of the capsules that the next coupling comes from.

The sums of very few images are taken from votes that stay in the caches. Without votes, each of the 2r - 1 products of
a forward pass reads all weights. For a large batch that is little beside the multiplications; for one image it is
nearly all the work. The votes of one image are small (0.7 MiB for MNIST's layer, whose weights are 5.6 MiB), and once
they are there no sum needs the weights again: they are read once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute.layer import (
    Layer,
    compete,
    couple,
    product,
    pull_back,
    uniform_coupling,
)
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squash

# Measured on a CPU, softmax over either axis, 2 to 4 iterations, layers of 2,000 to 700,000 links: within these bounds
# 0.2 to 1.0 of the time without votes, beyond them soon more. A single iteration has nothing to hold them for.
MIN_ITERATIONS = 2
MAX_IMAGES = 6
MAX_MIB = 16.0  # votes beyond the caches are slower than none


def forward(
    poses: Tensor, weight: Tensor, bias: Tensor | None, options: Options, keep_coupling: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Capsules (B, J, D), the last coupling (B, I, J) if it is kept, else empty, and the sums (r, B, J, D).

    Coupling and sums are in the dtype that is computed in, the capsules in that of the arguments.
    """
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with full_precision(poses.device):
        layer = Layer.of(poses, weight, bias, options)
        coupling = _new_coupling(layer, keep_coupling)
        sums = _take_sums(layer, coupling if keep_coupling else None)
        # with no iteration the sum itself is the result, not squashed
        capsules = squash(sums[-1], eps=options.eps) if options.num_iterations else sums[-1].clone()
        return capsules.to(dtype), coupling.permute(1, 2, 0), sums


def _take_sums(layer: Layer, coupling_out: Float[Tensor, "J B I"] | None) -> Float[Tensor, "r B J D"]:
    """The sums s¹ … sʳ; the coupling of the last iteration, unless that is the first, goes to ``coupling_out``."""
    votes = make_votes(layer) if _votes_pay_off(layer) else None
    sums = [_first_sum(layer) if votes is None else _first_sum_of(votes, layer)]
    summed_capsules = torch.zeros_like(sums[0])  # V
    for t in range(2, layer.options.num_iterations + 1):
        summed_capsules += squash(sums[-1], eps=layer.options.eps)
        out = coupling_out if t == layer.options.num_iterations else None
        if votes is None:
            sums.append(_weighted_sum(layer, summed_capsules, out))
        else:
            sums.append(_weighted_sum_of(votes, layer, summed_capsules, out))
    return torch.stack(sums)


def _new_coupling(layer: Layer, keep: bool) -> Float[Tensor, "J B I"]:
    """Where the last coupling goes, filled in already if there is no second iteration; empty if it is not kept."""
    if not keep:
        return layer.poses.new_empty(0, 0, 0)
    B, _, I = layer.poses.shape
    coupling = layer.poses.new_empty(layer.weight.shape[0], B, I)
    if layer.options.num_iterations <= 1:
        coupling.fill_(uniform_coupling(layer))
    return coupling


def _new_sum(layer: Layer) -> Float[Tensor, "B J D"]:
    """Where a weighted sum is added up: zeros, or the bias."""
    J, D = layer.weight.shape[:2]
    start = layer.poses.new_zeros(J, D) if layer.bias is None else layer.bias
    return start.repeat(layer.poses.shape[0], 1, 1)


def _first_sum(layer: Layer) -> Float[Tensor, "B J D"]:
    """[first sum] s¹ = c¹ · U Wᵀ + bias."""
    s = _new_sum(layer)
    s.flatten(1).addmm_(
        layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1).t(), alpha=uniform_coupling(layer)
    )
    return s


def _weighted_sum(
    layer: Layer, summed_capsules: Float[Tensor, "B J D"], coupling_out: Float[Tensor, "J B I"] | None
) -> Float[Tensor, "B J D"]:
    """[weighted sum] s_j = (c_j∘u) W_jᵀ + bias, with the coupling that the capsules so far ask for."""
    s = _new_sum(layer)
    for block in layer.blocks:
        W = layer.weight_block(block)
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            VW = pull_back(layer, "VW", summed_capsules[batch, block.outputs], W, u)
            coupling = couple(layer, VW, u, scratch=VW)
            if coupling_out is not None:
                coupling_out[block.outputs, batch, block.inputs] = coupling
            coupled = torch.mul(coupling[:, :, None], u, out=VW)  # VW has done its part
            s[batch, block.outputs] += product(layer, coupled.flatten(2), W.transpose(1, 2)).transpose(0, 1)
    return s


# ---- [held votes]


def _votes_pay_off(layer: Layer) -> bool:
    """Whether a call is faster with votes: very few images, several iterations, votes that stay in the caches.

    The votes also keep within :func:`torchcaps.set_working_memory`.
    """
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    if not 0 < B <= MAX_IMAGES or layer.options.num_iterations < MIN_ITERATIONS or layer.poses.device.type != "cpu":
        return False
    mib = B * J * I * (D + 2) * layer.poses.element_size() / MIB  # votes, logits, coupling
    return mib <= min(MAX_MIB, get_working_memory())


def make_votes(layer: Layer) -> Float[Tensor, "J B D I"]:
    """û_j = W_j u, a component k of the poses at a time: each weight is read once, and only the votes are written."""
    (B, _, I), (J, D, _, _) = layer.poses.shape, layer.weight.shape
    votes = layer.buffers.take("votes", (J, B, D, I)).zero_()
    for W_k, u_k in zip(layer.weight[:, None].unbind(3), layer.poses[:, None].unbind(2), strict=True):
        votes.addcmul_(W_k, u_k)
    return votes


def _first_sum_of(votes: Float[Tensor, "J B D I"], layer: Layer) -> Float[Tensor, "B J D"]:
    """[first sum] s¹ = c¹ · Σ_i û_j|i + bias."""
    return _with_bias(layer, votes.sum(3).mul_(uniform_coupling(layer)))


def _weighted_sum_of(
    votes: Float[Tensor, "J B D I"],
    layer: Layer,
    summed_capsules: Float[Tensor, "B J D"],
    coupling_out: Float[Tensor, "J B I"] | None,
) -> Float[Tensor, "B J D"]:
    """[logits], [coupling], [weighted sum] as the paper has them: s_j = Σ_i c_ij û_j|i + bias."""
    logits = (summed_capsules.transpose(0, 1)[:, :, None] @ votes).squeeze(2)
    coupling = compete(logits, layer.options, layer.buffers.take("coupling", logits.shape))
    if coupling_out is not None:
        coupling_out.copy_(coupling)
    return _with_bias(layer, (coupling[:, :, None] @ votes.mT).squeeze(2))


def _with_bias(layer: Layer, s: Float[Tensor, "J B D"]) -> Float[Tensor, "B J D"]:
    return s.transpose(0, 1) if layer.bias is None else s.transpose(0, 1) + layer.bias
