"""[blocks] The tensors of a call in the memory order of the steps, their blocks, and the steps of both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.memory import Buffers, block_bytes, piece, slices
from torchcaps.kernels.threads import idle_threads_sleep, sum_over_threads
from torchcaps.ops.precision import full_dtype

MAX_BLOCK_MIB = 16.0  # on a CPU, so that buffers stay in the caches; best for a large layer, near best for MNIST's
MAX_THREAD_BLOCK_MIB = 8.0  # for each thread that takes blocks alone, because each core has caches of its own
MAX_BATCH_SLICE = 128  # images on a CPU; more do not make the products faster there
MIN_BATCH_SLICE = 16  # images; with fewer, reading the weights costs more than multiplying by them
MIN_INPUT_BLOCK = 32  # input capsules; with fewer, the inner loops are short
MIN_PIECES = 4  # blocks of inputs for each thread, so that threads share the work evenly
INPUT_MULTIPLE = 16  # input capsules; a vector register holds 16 float32 numbers


class Tensors(NamedTuple):
    """Tensors of :func:`torchcaps.route`: poses (B, I, K), weight (I, J, D, K) and bias (J, D)."""

    poses: Tensor
    weight: Tensor
    bias: Tensor | None


class Options(NamedTuple):
    """Arguments of :func:`torchcaps.route` besides tensors."""

    num_iterations: int
    over_inputs: bool
    stop_gradient: bool
    leaky: bool
    eps: float
    keep_coupling: bool = False
    """Return the last coupling, for the caller or for the backward pass."""


class Results(NamedTuple):
    """Capsules (B, J, D), the last coupling (B, I, J), and the sums s¹ … sʳ (r, B, J, D).

    The coupling is empty unless it is kept. Coupling and sums have the dtype of the computation; the capsules have the
    dtype of the tensors. The plain formula returns no sums.
    """

    capsules: Tensor
    coupling: Tensor
    sums: Tensor


class Layer:
    """Tensors of a call in the memory order and dtype of the computation, with work buffers.

    Tensors are copied only if their memory order differs from the order in the layers of :mod:`torchcaps.nn`.
    """

    def __init__(self, tensors: Tensors, options: Options) -> None:
        poses, weight, bias = tensors
        dtype = working_dtype(poses, weight)
        self.poses: Float[Tensor, "B K I"] = poses.to(dtype).transpose(1, 2).contiguous()
        self.weight: Float[Tensor, "J D K I"] = weight.to(dtype).permute(1, 2, 3, 0).contiguous()
        self.bias = None if bias is None else bias.to(dtype)
        self.options, self.buffers = options, Buffers(self.poses)
        self.competing_axis = 2 if options.over_inputs else 0
        """Axis of the logits (j, b, i) for the softmax."""
        is_spread = self.poses.device.type == "cpu" and not options.over_inputs and idle_threads_sleep()
        self.threads = torch.get_num_threads() if is_spread else 1
        """Number of threads that take blocks; 1 for blocks of outputs, which add to the same gradient of the poses."""
        self.outputs, self.inputs, self.batches = self._cut()

    def _cut(self) -> tuple[list[slice], list[slice], list[slice]]:
        """Cut outputs, inputs and images into blocks that fit the working memory; competing capsules stay together."""
        (B, K, I), (J, D, _, _) = self.poses.shape, self.weight.shape
        over_inputs = self.options.over_inputs
        budget = block_bytes(self.poses.device, MAX_BLOCK_MIB) // self.poses.element_size()
        matrix = D * K  # numbers of an input and output: W, and as many of grad_W
        link = 3 * K + 3  # numbers of an image, input and output: VW, gsW, coupled; agreement, coupling, spare
        whole = self.poses.is_meta  # no memory to save
        b = B if whole else piece(B, max_batch_slice(B, self.poses.device))
        if whole or I * J * (matrix + b * link) <= budget:
            return slices(J, J), slices(I, I), slices(B, b)
        if self.threads > 1:
            budget = block_bytes(self.poses.device, MAX_THREAD_BLOCK_MIB, self.threads) // self.poses.element_size()

        def smallest() -> int:
            """Return the numbers of the smallest block: one output (its weights need no copy) or one input."""
            return I * (matrix + b * link) if over_inputs else J * (2 * matrix + b * link) + b * K

        least = 1 if over_inputs else min(I, MIN_INPUT_BLOCK)
        while b > MIN_BATCH_SLICE and least * smallest() > budget:
            b = -(-b // 2)
        if over_inputs:
            return slices(J, piece(J, budget // smallest())), slices(I, I), slices(B, b)
        most = budget // smallest()
        if self.threads > 1:
            most = min(most, max(I // (self.threads * MIN_PIECES), MIN_INPUT_BLOCK))
        return slices(J, J), slices(I, piece(I, most, INPUT_MULTIPLE)), slices(B, b)

    def add_blocks(self, add: Callable[..., None], total: Float[Tensor, "B J D"]) -> None:
        """Add sums over all blocks of W to ``total``.

        Args:
            add: Function ``(j, i, W, total)`` that adds the sums of one block: slices of outputs and inputs, and their
                contiguous W (j, D, K·i).
            total: Sums of the whole layer.
        """

        def add_block(i: slice, total: Tensor) -> None:
            for j in self.outputs:
                add(j, i, self.buffers.contiguous("weight", self.weight[j, :, :, i]).flatten(2), total)

        pieces = [partial(add_block, i) for i in self.inputs]
        if self.threads == 1:
            for piece in pieces:
                piece(total)
        else:
            sum_over_threads(pieces, [total])

    def pose_blocks(self, i: slice) -> Iterator[tuple[slice, Float[Tensor, "b K i"]]]:
        """Yield slices of images with their contiguous block of U for some inputs."""
        for b in self.batches:
            yield b, self.buffers.contiguous("poses", self.poses[b, :, i])

    @property
    def uniform_coupling(self) -> float:
        """[first sum] The coupling c¹ of all links; 1 without routing."""
        if self.options.num_iterations == 0:
            return 1.0
        rivals = self.poses.shape[2] if self.options.over_inputs else self.weight.shape[0]
        return 1.0 / (rivals + self.options.leaky)

    def pull_back(
        self, name: str, vectors: Float[Tensor, "b j D"], W: Float[Tensor, "j D Ki"], u: Float[Tensor, "b K i"]
    ) -> Float[Tensor, "j b K i"]:
        """[logits] Return V_j W_j, the vector of an output in the space of its inputs."""
        pulled = self.buffers.take(name, (W.shape[0], *u.shape))
        torch.bmm(vectors.transpose(0, 1), W, out=pulled.flatten(2))
        return pulled

    def agreement(
        self, pulled: Float[Tensor, "j b K i"], u: Float[Tensor, "b K i"], scratch: Tensor
    ) -> Float[Tensor, "j b i"]:
        """[logits] Return ⟨V_j, û_j|i⟩ = Σ_k (V_j W_j)∘u, without the votes û."""
        j, b, _, i = pulled.shape
        return torch.sum(torch.mul(pulled, u, out=scratch), 2, out=self.buffers.take("agreement", (j, b, i)))

    def compete(self, logits: Float[Tensor, "j b i"]) -> Float[Tensor, "j b i"]:
        """[coupling] Return the softmax over the capsules that compete; if leaky, with one more logit of 0."""
        axis, out = self.competing_axis, self.buffers.take("coupling", logits.shape)
        torch.softmax(logits, axis, out=out)
        return out.mul_(logits.logsumexp(axis, keepdim=True).sigmoid_()) if self.options.leaky else out

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right, one product for each capsule, in a buffer."""
        return torch.bmm(left, right, out=self.buffers.take("sum", (*left.shape[:2], right.shape[2])))


def max_batch_slice(images: int, device: torch.device) -> int:
    """Return the largest number of images of a batch in one block."""
    return MAX_BATCH_SLICE if device.type == "cpu" else images


def working_dtype(poses: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the computation: float32 for half precision."""
    return full_dtype(torch.promote_types(poses.dtype, weight.dtype))
