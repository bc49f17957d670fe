"""The backward pass, without votes: iterations are undone from the last to the first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute.layer import (
    Block,
    Layer,
    agreement,
    competing_axis,
    couple,
    product,
    pull_back,
    uniform_coupling,
)
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squash


class Gradients(NamedTuple):
    """Gradients in the making, as the steps want them; None if not wanted."""

    poses: Float[Tensor, "B K I"] | None
    weight: Float[Tensor, "J D K I"] | None
    bias: Float[Tensor, "J D"] | None

    @classmethod
    def start(cls, layer: Layer, wanted: list[bool]) -> Gradients:
        """Zeros; the weight's, when the last iteration is going to write it block by block, uninitialised."""
        u, W = layer.poses, layer.weight
        poses, weight, bias = wanted
        iterated = layer.options.num_iterations > 1
        return cls(
            torch.zeros_like(u) if poses else None,
            None if not weight else torch.empty_like(W) if iterated else torch.zeros_like(W),
            u.new_zeros(W.shape[:2]) if bias else None,
        )


def backward(
    grad_capsules: Tensor | None,
    grad_coupling: Tensor | None,
    poses: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sums: Tensor,
    coupling: Tensor,
    wanted: list[bool],
    *scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """[backward] Gradients of poses, weight and bias in their axes and dtypes; empty where none is wanted."""
    options = Options(*scalars)
    with full_precision(poses.device):
        layer = Layer.of(poses, weight, bias, options)
        grads = Gradients.start(layer, wanted)
        grad_v = torch.zeros_like(sums[0]) if grad_capsules is None else grad_capsules.to(sums.dtype)
        if options.num_iterations == 0:
            _first_backward(layer, grad_v, grads)
        elif options.stop_gradient:
            grad_s = _squash_backward(sums[-1], grad_v, options.eps)
            if options.num_iterations == 1:
                _first_backward(layer, grad_s, grads)
            else:
                _stopped_backward(layer, coupling.permute(2, 0, 1), grad_s, grads)
        else:
            grad_c = None if grad_coupling is None else grad_coupling.permute(2, 0, 1)
            _full_backward(layer, sums, grad_v, grad_c, grads)
        # a registered operation must not return a tensor twice: hence a new empty one for each that is not wanted
        return (
            poses.new_empty(0) if grads.poses is None else grads.poses.transpose(1, 2).to(poses.dtype),
            poses.new_empty(0) if grads.weight is None else grads.weight.permute(3, 0, 1, 2).to(weight.dtype),
            poses.new_empty(0) if grads.bias is None or bias is None else grads.bias.to(bias.dtype),
        )


def _full_backward(layer: Layer, sums: Tensor, grad_v: Tensor, grad_c: Tensor | None, grads: Gradients) -> None:
    """[backward] Back through all iterations, the last first."""
    capsules = squash(sums, eps=layer.options.eps)
    grad_summed = torch.zeros_like(grad_v)  # G, the gradient of V
    for t in range(len(sums), 1, -1):
        grad_s = _squash_backward(sums[t - 1], grad_v, layer.options.eps)
        _iteration_backward(layer, capsules[: t - 1].sum(0), grad_s, grad_c, grads, grad_summed, last=t == len(sums))
        grad_v, grad_c = grad_summed, None
    _first_backward(layer, _squash_backward(sums[0], grad_v, layer.options.eps), grads)


def _iteration_backward(
    layer: Layer,
    summed_capsules: Float[Tensor, "B J D"],
    grad_s: Float[Tensor, "B J D"],
    grad_c: Float[Tensor, "J B I"] | None,
    grads: Gradients,
    grad_summed: Float[Tensor, "B J D"],
    last: bool,
) -> None:
    """[backward] An iteration after the first; adds to ``grads`` and to ``grad_summed``."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    for block in layer.blocks:
        W = layer.weight_block(block)
        grad_W = None if grads.weight is None else layer.buffers.take("grad_W", W.shape).zero_()
        for batch in layer.blocks.batches:
            u = layer.pose_block(block, batch)
            V, gs = summed_capsules[batch, block.outputs], grad_s[batch, block.outputs]
            VW = pull_back(layer, "VW", V, W, u)
            gsW = pull_back(layer, "gsW", gs, W, u)
            scratch = layer.buffers.take("coupled", VW.shape)
            coupling = couple(layer, VW, u, scratch)

            grad_logits = agreement(layer, gsW, u, scratch)  # [coupling, backward]
            if grad_c is not None:
                grad_logits += grad_c[block.outputs, batch, block.inputs]
            _compete_backward(coupling, grad_logits, layer.options)

            if grads.poses is not None:  # [poses, backward]
                mixed = gsW.mul_(coupling[:, :, None]).addcmul_(VW, grad_logits[:, :, None])
                grads.poses[batch, :, block.inputs] += mixed.sum(0)
            if grad_W is not None:  # [weight, backward]
                coupled = torch.mul(coupling[:, :, None], u, out=scratch).flatten(2)
                grad_W.baddbmm_(gs.permute(1, 2, 0), coupled)
            coupled = torch.mul(grad_logits[:, :, None], u, out=scratch).flatten(2)
            if grad_W is not None:
                grad_W.baddbmm_(V.permute(1, 2, 0), coupled)
            grad_V = product(layer, coupled, W.transpose(1, 2))  # [logits, backward]
            grad_summed[batch, block.outputs] += grad_V.transpose(0, 1)
        _put_block(grads.weight, block, grad_W, add=not last)


def _stopped_backward(
    layer: Layer, coupling: Float[Tensor, "J B I"], grad_s: Float[Tensor, "B J D"], grads: Gradients
) -> None:
    """[stopped gradient] Back through the last weighted sum with its coupling held constant."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    if grads.poses is None and grads.weight is None:
        return
    for block in layer.blocks:
        W = layer.weight_block(block)
        grad_W = None if grads.weight is None else layer.buffers.take("grad_W", W.shape).zero_()
        for batch in layer.blocks.batches:
            u, gs = layer.pose_block(block, batch), grad_s[batch, block.outputs]
            c = coupling[block.outputs, batch, block.inputs][:, :, None]
            if grads.poses is not None:  # [poses, backward]
                grads.poses[batch, :, block.inputs] += pull_back(layer, "gsW", gs, W, u).mul_(c).sum(0)
            if grad_W is not None:  # [weight, backward]
                coupled = torch.mul(c, u, out=layer.buffers.take("coupled", (W.shape[0], *u.shape)))
                grad_W.baddbmm_(gs.permute(1, 2, 0), coupled.flatten(2))
        _put_block(grads.weight, block, grad_W, add=False)


def _first_backward(layer: Layer, grad_s: Tensor, grads: Gradients) -> None:
    """[first sum, backward] The first iteration: its coupling is the same for the whole batch."""
    if grads.bias is not None:
        grads.bias.add_(grad_s.sum(0))
    gs, u, W = grad_s.flatten(1), layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1)
    if grads.poses is not None:
        grads.poses.flatten(1).addmm_(gs, W, alpha=uniform_coupling(layer))
    if grads.weight is not None:
        grads.weight.flatten(2).flatten(0, 1).addmm_(gs.t(), u, alpha=uniform_coupling(layer))


def _compete_backward(coupling: Tensor, grad: Tensor, options: Options) -> Tensor:
    """[coupling, backward] db = c∘(a − Σ c∘a) over the capsules that compete, in place of a; a leak has a = 0."""
    return grad.sub_((coupling * grad).sum(competing_axis(options), keepdim=True)).mul_(coupling)


def _squash_backward(s: Tensor, grad_v: Tensor, eps: float) -> Tensor:
    """[squash, backward] g_s = h g_v + 2 h' ⟨s, g_v⟩ s."""
    n = s.square().sum(-1, keepdim=True)
    q = torch.rsqrt(n + eps)
    h = n * q / (1 + n)
    slope = q / (1 + n).square() - n * q.pow(3) / (2 * (1 + n))
    return h * grad_v + 2 * slope * (s * grad_v).sum(-1, keepdim=True) * s


def _put_block(total: Tensor | None, block: Block, part: Tensor | None, add: bool) -> None:
    """Write a block of the weight's gradient, or add to it."""
    if total is None or part is None:
        return
    target = total[block.outputs, :, :, block.inputs]
    part = part.view(target.shape)
    target.add_(part) if add else target.copy_(part)
