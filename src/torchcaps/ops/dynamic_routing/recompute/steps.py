"""The steps that more than one pass takes."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute.layer import Block, Layer


def first_coupling(layer: Layer) -> Float[Tensor, "J I"]:
    """[first sum] c¹: the same for the whole batch, as it comes from the prior alone."""
    logits = layer.poses.new_zeros(layer.weight.shape[0], layer.poses.shape[2])
    if layer.prior is not None:
        logits += layer.prior
    return compete(logits[:, None], layer.options, torch.empty_like(logits[:, None]))[:, 0]


def uniform_coupling(layer: Layer) -> float:
    """[first sum] c¹ without a prior."""
    return layer.options.uniform_coupling(layer.poses.shape[2], layer.weight.shape[0])


def pull_back(
    layer: Layer, name: str, vectors: Float[Tensor, "b j D"], W: Float[Tensor, "j D Ki"], u: Float[Tensor, "b K i"]
) -> Float[Tensor, "j b K i"]:
    """[logits] V_j W_j: an output's vector seen from its inputs."""
    pulled = layer.buffers.take(name, (W.shape[0], *u.shape))
    torch.bmm(vectors.transpose(0, 1), W, out=pulled.flatten(2))
    return pulled


def agreement(
    layer: Layer, pulled: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
) -> Float[Tensor, "j b i"]:
    """[logits] ⟨V_j, û_j|i⟩ = Σ_k (V_j W_j)∘u, without the votes û."""
    j, b, _, i = pulled.shape
    return torch.sum(torch.mul(pulled, u, out=scratch), 2, out=layer.buffers.take("agreement", (j, b, i)))


def couple(
    layer: Layer, block: Block, VW: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
) -> Float[Tensor, "j b i"]:
    """[logits], [coupling] c = softmax(prior + ⟨V_j, û_j|i⟩)."""
    logits = agreement(layer, VW, u, scratch)
    if layer.prior is not None:
        logits += layer.prior[block.outputs, None, block.inputs]
    return compete(logits, layer.options, layer.buffers.take("coupling", logits.shape))


def compete(logits: Float[Tensor, "j b i"], options: Options, out: Tensor) -> Float[Tensor, "j b i"]:
    """[coupling] Softmax over the capsules that compete; if leaky, beside one more with logit 0."""
    axis = competing_axis(options)
    if not options.leaky:
        return torch.softmax(logits, axis, out=out)
    highest = logits.amax(axis, keepdim=True).clamp_min_(0)
    torch.sub(logits, highest, out=out).exp_()
    return out.div_(out.sum(axis, keepdim=True).add_(highest.neg_().exp_()))


def competing_axis(options: Options) -> int:
    """The axis of logits (j, b, i) that the softmax runs over."""
    return 2 if options.over_inputs else 0


def product(layer: Layer, left: Tensor, right: Tensor) -> Tensor:
    """The product left @ right, one product a capsule, in a buffer."""
    return torch.bmm(left, right, out=layer.buffers.take("sum", (*left.shape[:2], right.shape[2])))
