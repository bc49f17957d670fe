"""[loop] The equations of routing by the contractions, for gradients that are differentiated again.

Under ``create_graph`` the backward pass runs this loop instead of the fused one. It is slower, but can be
differentiated any number of times. It builds no votes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.contractions import agreement, weighted_sum
from torchcaps.ops.fused.layer import Options, working_dtype
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squashed


def gradients(
    options: Options, tensors: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients of poses, weight and bias that autograd can differentiate.

    Args:
        options: Options of the forward pass.
        tensors: Poses (B, I, K), weight (I, J, D, K) and bias (J, D); None for a layer without a bias.
        wanted: True for each of the three gradients to compute; the rest is None.
        grads: Gradients of the capsules (B, J, D) and of the coupling (B, I, J); None for a result without one.
    """
    # Aliases limit the gradients to this layer, because poses may be computed from the weight.
    tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
    with full_precision(tensors[0].device):
        results = zip(_route(options, *tensors), grads, strict=True)
        differentiable = [(result, grad) for result, grad in results if grad is not None and result.requires_grad]
        if not differentiable:
            return [torch.zeros_like(tensor) if want else None for tensor, want in zip(tensors, wanted, strict=True)]
        inputs = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
        outputs, given = zip(*differentiable, strict=True)
        found = iter(torch.autograd.grad(outputs, inputs, given, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in wanted]


def _route(options: Options, poses: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the capsules (B, J, D) and the last coupling (B, I, J), which is constant with ``stop_gradient``."""
    dtype = working_dtype(poses, weight)
    u, W = poses.to(dtype), weight.to(dtype)
    logits = u.new_zeros(W.shape[1], *u.shape[:2]).permute(1, 2, 0)  # in memory (J, B, I), as agreement returns them
    coupling = torch.ones_like(logits)
    axis = 1 if options.over_inputs else 2
    for iteration in range(max(options.num_iterations, 1)):
        if options.num_iterations:
            coupling = logits.softmax(axis)
            if options.leaky:
                coupling = coupling * logits.logsumexp(axis, keepdim=True).sigmoid()
            if options.stop_gradient:
                coupling = coupling.detach()
        s = weighted_sum(u, W, coupling)
        s = s if bias is None else s + bias.to(dtype)
        capsules = squashed(s, -1, options.eps) if options.num_iterations else s
        if iteration + 1 < options.num_iterations:
            logits = logits + agreement(u, W, capsules)
    return capsules.to(torch.promote_types(poses.dtype, weight.dtype)), coupling
