"""The forward pass: sums, squash, and the running sum V of the capsules that the next coupling comes from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute import held_votes
from torchcaps.ops.dynamic_routing.recompute.layer import Layer
from torchcaps.ops.dynamic_routing.recompute.steps import (
    couple,
    first_coupling,
    product,
    pull_back,
    uniform_coupling,
)
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squash


def forward(
    poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: Options, keep_coupling: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Capsules (B, J, D), the last coupling (B, I, J) if it is kept, else empty, and the sums (r, B, J, D).

    Coupling and sums are in the dtype that is computed in, the capsules in that of the arguments.
    """
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with full_precision(poses.device):
        layer = Layer.of(poses, weight, bias, prior, options)
        coupling = _new_coupling(layer, keep_coupling)
        sums = _take_sums(layer, coupling if keep_coupling else None)
        # with no iteration the sum itself is the result, not squashed
        capsules = squash(sums[-1], eps=options.eps) if options.num_iterations else sums[-1].clone()
        return capsules.to(dtype), coupling.permute(1, 2, 0), sums


def _take_sums(layer: Layer, coupling_out: Float[Tensor, "J B I"] | None) -> Float[Tensor, "r B J D"]:
    """The sums s¹ … sʳ; the coupling of the last iteration, unless that is the first, goes to ``coupling_out``."""
    first_sum: Callable[[Layer], Tensor] = _first_sum
    weighted_sum: Callable[[Layer, Tensor, Tensor | None], Tensor] = _weighted_sum
    if held_votes.pay_off(layer):
        votes = held_votes.make_votes(layer)
        first_sum, weighted_sum = partial(held_votes.first_sum, votes), partial(held_votes.weighted_sum, votes)
    sums = [first_sum(layer)]
    summed_capsules = torch.zeros_like(sums[0])  # V
    for t in range(2, layer.options.num_iterations + 1):
        summed_capsules += squash(sums[-1], eps=layer.options.eps)
        keep = t == layer.options.num_iterations
        sums.append(weighted_sum(layer, summed_capsules, coupling_out if keep else None))
    return torch.stack(sums)


def _new_coupling(layer: Layer, keep: bool) -> Float[Tensor, "J B I"]:
    """Where the last coupling goes, filled in already if there is no second iteration; empty if it is not kept."""
    if not keep:
        return layer.poses.new_empty(0, 0, 0)
    B, _, I = layer.poses.shape
    coupling = layer.poses.new_empty(layer.weight.shape[0], B, I)
    if layer.options.num_iterations == 0:
        coupling.fill_(1)
    elif layer.options.num_iterations == 1:
        coupling.copy_(first_coupling(layer)[:, None])
    return coupling


def _new_sum(layer: Layer) -> Float[Tensor, "B J D"]:
    """Where a weighted sum is added up: zeros, or the bias."""
    J, D = layer.weight.shape[:2]
    start = layer.poses.new_zeros(J, D) if layer.bias is None else layer.bias
    return start.repeat(layer.poses.shape[0], 1, 1)


def _first_sum(layer: Layer) -> Float[Tensor, "B J D"]:
    """[first sum] s¹ = u (c¹∘W)ᵀ + bias."""
    s = _new_sum(layer)
    if layer.prior is None:
        s.flatten(1).addmm_(
            layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1).t(), alpha=uniform_coupling(layer)
        )
        return s
    coupling = first_coupling(layer)
    for block in layer.blocks:
        W = layer.weight[block.outputs, :, :, block.inputs] * coupling[block.outputs, None, None, block.inputs]
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            s[batch, block.outputs] += (u.flatten(1) @ W.flatten(2).flatten(0, 1).t()).unflatten(1, W.shape[:2])
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
            coupling = couple(layer, block, VW, u, scratch=VW)
            if coupling_out is not None:
                coupling_out[block.outputs, batch, block.inputs] = coupling
            coupled = torch.mul(coupling[:, :, None], u, out=VW)  # VW has done its part
            s[batch, block.outputs] += product(layer, "sum", coupled.flatten(2), W.transpose(1, 2)).transpose(0, 1)
    return s
