"""[blocks] The tensors of a call as the steps want them, how they are cut, and the buffers that blocks use again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import full_dtype

BLOCK = 16.0  # MiB: a block's buffers stay in the caches; measured best for a large layer, near best for MNIST's
MAX_BATCH_SLICE = 128  # images; more do not make the products faster
MIN_BATCH_SLICE = 16  # images; with fewer, reading the weights costs more than multiplying by them
MIN_INPUT_BLOCK = 32  # input capsules; fewer make the inner loops short
INPUT_MULTIPLE = 16  # input capsules: a vector register of float32


class Block(NamedTuple):
    """Capsules that are worked on together."""

    outputs: slice
    inputs: slice


@dataclass(frozen=True)
class Blocks:
    """How a layer is cut; iterates over the parts of its weights."""

    outputs: list[slice]
    inputs: list[slice]
    batches: list[slice]

    def __iter__(self) -> Iterator[Block]:
        return (Block(j, i) for i in self.inputs for j in self.outputs)

    @classmethod
    def of(cls, u: Float[Tensor, "B K I"], W: Float[Tensor, "J D K I"], over_inputs: bool) -> Blocks:
        """Cut so that a block's buffers fit the working memory and the capsules that compete stay together."""
        B, I, (J, D, K) = u.shape[0], u.shape[2], W.shape[:3]
        if u.is_meta:  # which has shapes and no numbers
            return cls(slices(J, J), slices(I, I), slices(B, max(B, 1)))
        budget = int(min(BLOCK, get_working_memory()) * MIB) // u.element_size()
        matrix = D * K  # numbers of an input and output: W, and as many of grad_W
        link = 3 * K + 3  # numbers of an image, input and output: VW, gsW, coupled; agreement, coupling, spare
        b = _piece(B, MAX_BATCH_SLICE)
        if over_inputs:  # the weights of an output are one piece of memory, and used where they are
            while b > MIN_BATCH_SLICE and I * (matrix + b * link) > budget:
                b = -(-b // 2)
            j = _piece(J, budget // (I * (matrix + b * link)))
            return cls(slices(J, j), slices(I, I), slices(B, b))
        if I * J * (matrix + b * link) <= budget:
            return cls(slices(J, J), slices(I, I), slices(B, b))
        while b > MIN_BATCH_SLICE and min(I, MIN_INPUT_BLOCK) * (J * (2 * matrix + b * link) + b * K) > budget:
            b = -(-b // 2)
        i = _piece(I, budget // (J * (2 * matrix + b * link) + b * K), INPUT_MULTIPLE)
        return cls(slices(J, J), slices(I, i), slices(B, b))


def _piece(size: int, most: int, multiple: int = 1) -> int:
    """Length of the nearly equal pieces, at most ``most`` long, that ``size`` is cut into."""
    if size <= most:
        return max(size, 1)
    most = max(most // multiple * multiple, 1) if most >= multiple else max(most, 1)
    pieces = -(-size // most)
    return min(most, -(-size // (pieces * multiple)) * multiple)


def slices(size: int, piece: int) -> list[slice]:
    """``size`` things in pieces of that length; the last one may be shorter."""
    return [slice(start, min(start + piece, size)) for start in range(0, size, piece)]


class Buffers:
    """Work buffers of one call, used again and again: fresh memory would cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The buffer of that name in ``shape``, with whatever it holds."""
        size = torch.Size(shape).numel()
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = self._like.new_empty(size)
        return flat[:size].view(shape)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` itself if it is contiguous, else its copy in the buffer of that name."""
        return tensor if tensor.is_contiguous() else self.take(name, tensor.shape).copy_(tensor)


@dataclass(frozen=True)
class Layer:
    """The arguments of a call in their order of memory and in the dtype that is computed in, with its work buffers."""

    poses: Float[Tensor, "B K I"]
    weight: Float[Tensor, "J D K I"]
    bias: Float[Tensor, "J D"] | None
    options: Options
    buffers: Buffers

    @classmethod
    def of(cls, poses: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Layer:
        """Usually without a copy: the project's layers keep poses and weights in this order of memory."""
        dtype = working_dtype(poses, weight)
        u = poses.to(dtype).transpose(1, 2).contiguous()
        W = weight.to(dtype).permute(1, 2, 3, 0).contiguous()
        return cls(u, W, None if bias is None else bias.to(dtype), options, Buffers(u))

    @cached_property
    def blocks(self) -> Blocks:
        """How the layer is cut."""
        return Blocks.of(self.poses, self.weight, self.options.over_inputs)

    def weight_block(self, block: Block) -> Float[Tensor, "j D Ki"]:
        """W of a block, contiguous."""
        return self.buffers.contiguous("weight", self.weight[block.outputs, :, :, block.inputs]).flatten(2)

    def pose_block(self, block: Block, batch: slice) -> Float[Tensor, "b K i"]:
        """U of a block for some images, contiguous."""
        return self.buffers.contiguous("poses", self.poses[batch, :, block.inputs])


def working_dtype(poses: Tensor, weight: Tensor) -> torch.dtype:
    """Half precision is computed in float32."""
    return full_dtype(torch.promote_types(poses.dtype, weight.dtype))


# ---- the steps that more than one pass takes


def uniform_coupling(layer: Layer) -> float:
    """[first sum] c¹, the same for all links; 1 if there is no routing at all."""
    if layer.options.num_iterations == 0:
        return 1.0
    rivals = layer.poses.shape[2] if layer.options.over_inputs else layer.weight.shape[0]
    return 1.0 / (rivals + layer.options.leaky)


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
    layer: Layer, VW: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
) -> Float[Tensor, "j b i"]:
    """[logits], [coupling] c = softmax(⟨V_j, û_j|i⟩)."""
    logits = agreement(layer, VW, u, scratch)
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
