"""The tensors of a call as the steps want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.dynamic_routing.options import Options, in_memory_order
from torchcaps.ops.dynamic_routing.recompute.blocks import Block, Blocks, Buffers
from torchcaps.ops.precision import full_dtype


@dataclass(frozen=True)
class Layer:
    """The arguments of a call in their order of memory and in the dtype that is computed in, with its work buffers."""

    poses: Float[Tensor, "B K I"]
    weight: Float[Tensor, "J D K I"]
    bias: Float[Tensor, "J D"] | None
    prior: Float[Tensor, "J I"] | None
    options: Options
    buffers: Buffers

    @classmethod
    def of(cls, poses: Tensor, weight: Tensor, bias: Tensor | None, prior: Tensor | None, options: Options) -> Layer:
        """Usually without a copy: the project's layers keep poses and weights in this order of memory."""
        dtype = working_dtype(poses, weight)
        bias = None if bias is None else bias.to(dtype)
        prior = None if prior is None or options.num_iterations == 0 else prior.to(dtype)
        u, W, prior = in_memory_order(poses.to(dtype), weight.to(dtype), prior)
        return cls(u, W, bias, prior, options, Buffers(u))

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
