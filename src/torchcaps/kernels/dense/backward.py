"""The backward pass without votes, from the last iteration to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.dense.layer import Layer, Options, Tensors
from torchcaps.kernels.memory import new_empty_like
from torchcaps.ops.precision import full_precision
from torchcaps.ops.squash import squash_backward, squashed


class Gradients(NamedTuple):
    """Sums of the gradients in the memory order of the steps; None for a gradient that is not needed."""

    poses: Float[Tensor, "B K I"] | None
    weight: Float[Tensor, "J D K I"] | None
    bias: Float[Tensor, "J D"] | None


def backward(
    tensors: Tensors,
    options: Options,
    results: Sequence[Any],
    _kept: None,
    grads_of_results: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """[backward] Return the gradients of poses, weight and bias; None for a gradient not in ``needs_grad``."""
    poses, weight, bias = tensors
    _, coupling, sums = results
    grad_capsules, grad_coupling, _ = grads_of_results
    with full_precision(poses.device):
        layer = Layer(tensors, options)
        u, W = layer.poses, layer.weight
        grads = Gradients(
            new_empty_like(u).zero_() if needs_grad[0] else None,
            new_empty_like(W) if needs_grad[1] else None,
            u.new_zeros(W.shape[:2]) if needs_grad[2] else None,
        )
        if grads.weight is not None and options.num_iterations <= 1:
            grads.weight.zero_()  # with several iterations, the last one writes the whole gradient first
        grad_v = torch.zeros_like(sums[0]) if grad_capsules is None else grad_capsules.to(sums.dtype)
        grad_c = None if grad_coupling is None else grad_coupling.permute(2, 0, 1)
        grad_summed = torch.zeros_like(sums[0])  # G, the gradient of V
        for t in range(len(sums), 0, -1):
            grad_s = squash_backward(sums[t - 1], grad_v, -1, options.eps) if options.num_iterations else grad_v
            if grads.bias is not None:
                grads.bias.add_(grad_s.sum(0))
            if t == 1:
                _first_backward(layer, grad_s, grads)
            elif options.stop_gradient:
                _stopped_backward(layer, coupling.permute(2, 0, 1), grad_s, grads)
                break
            else:
                summed_capsules = squashed(sums[: t - 1], -1, options.eps).sum(0)
                _iteration_backward(layer, summed_capsules, grad_s, grad_c, grads, grad_summed, last=t == len(sums))
                grad_v, grad_c = grad_summed, None
        return (
            None if grads.poses is None else grads.poses.transpose(1, 2).to(poses.dtype),
            None if grads.weight is None else grads.weight.permute(3, 0, 1, 2).to(weight.dtype),
            None if grads.bias is None or bias is None else grads.bias.to(bias.dtype),
        )


def _iteration_backward(
    layer: Layer,
    summed_capsules: Float[Tensor, "B J D"],
    grad_s: Float[Tensor, "B J D"],
    grad_c: Float[Tensor, "J B I"] | None,
    grads: Gradients,
    grad_summed: Float[Tensor, "B J D"],
    last: bool,
) -> None:
    """[backward] Add the gradients of an iteration after the first to ``grads`` and ``grad_summed``."""

    def add(j: slice, i: slice, W: Float[Tensor, "j D Ki"], total: Float[Tensor, "B J D"]) -> None:
        with _weight_gradient(layer, grads, j, i, last) as grad_W:
            for b, u in layer.pose_blocks(i):
                V, gs = summed_capsules[b, j], grad_s[b, j]
                VW = layer.pull_back("VW", V, W, u)
                gsW = layer.pull_back("gsW", gs, W, u)
                scratch = layer.buffers.take("coupled", VW.shape)
                coupling = layer.compete(layer.agreement(VW, u, scratch))

                grad_logits = layer.agreement(gsW, u, scratch)  # [coupling, backward]
                if grad_c is not None:
                    grad_logits += grad_c[j, b, i]
                _compete_backward(layer, coupling, grad_logits)

                if grads.poses is not None:  # [poses, backward]
                    mixed = gsW.mul_(coupling[:, :, None]).addcmul_(VW, grad_logits[:, :, None])
                    grads.poses[b, :, i] += mixed.sum(0)
                if grad_W is not None:  # [weight, backward]
                    coupled = torch.mul(coupling[:, :, None], u, out=scratch).flatten(2)
                    grad_W.baddbmm_(gs.permute(1, 2, 0), coupled)
                coupled = torch.mul(grad_logits[:, :, None], u, out=scratch).flatten(2)
                if grad_W is not None:
                    grad_W.baddbmm_(V.permute(1, 2, 0), coupled)
                grad_V = layer.product(coupled, W.transpose(1, 2))  # [logits, backward]
                total[b, j] += grad_V.transpose(0, 1)

    layer.add_blocks(add, grad_summed)


def _stopped_backward(
    layer: Layer, coupling: Float[Tensor, "J B I"], grad_s: Float[Tensor, "B J D"], grads: Gradients
) -> None:
    """[stopped gradient] Add the gradients of the last weighted sum with a constant coupling."""
    if grads.poses is None and grads.weight is None:
        return

    def add(j: slice, i: slice, W: Float[Tensor, "j D Ki"], _total: Tensor) -> None:
        with _weight_gradient(layer, grads, j, i, last=True) as grad_W:
            for b, u in layer.pose_blocks(i):
                gs, c = grad_s[b, j], coupling[j, b, i][:, :, None]
                if grads.poses is not None:  # [poses, backward]
                    grads.poses[b, :, i] += layer.pull_back("gsW", gs, W, u).mul_(c).sum(0)
                if grad_W is not None:  # [weight, backward]
                    coupled = torch.mul(c, u, out=layer.buffers.take("coupled", (W.shape[0], *u.shape)))
                    grad_W.baddbmm_(gs.permute(1, 2, 0), coupled.flatten(2))

    layer.add_blocks(add, grad_s.new_zeros(0))


def _first_backward(layer: Layer, grad_s: Tensor, grads: Gradients) -> None:
    """[first sum, backward] Add the gradients of the first iteration, where all links have the same coupling."""
    gs, u, W = grad_s.flatten(1), layer.poses.flatten(1), layer.weight.flatten(2).flatten(0, 1)
    if grads.poses is not None:
        grads.poses.flatten(1).addmm_(gs, W, alpha=layer.uniform_coupling)
    if grads.weight is not None:
        grads.weight.flatten(2).flatten(0, 1).addmm_(gs.t(), u, alpha=layer.uniform_coupling)


@contextmanager
def _weight_gradient(
    layer: Layer, grads: Gradients, j: slice, i: slice, last: bool
) -> Iterator[Float[Tensor, "j D Ki"] | None]:
    """Lend a zero buffer for the gradient of a block of W, which is then written (``last``) or added."""
    if grads.weight is None:
        yield None
        return
    target = grads.weight[j, :, :, i]
    grad_W = layer.buffers.take("grad_W", target.shape).zero_()
    yield grad_W.flatten(2)
    target.copy_(grad_W) if last else target.add_(grad_W)


def _compete_backward(layer: Layer, coupling: Tensor, grad: Tensor) -> Tensor:
    """[coupling, backward] Replace a by db = c∘(a − Σ c∘a), over the capsules that compete; a leak has a = 0."""
    return grad.sub_((coupling * grad).sum(layer.competing_axis, keepdim=True)).mul_(coupling)
