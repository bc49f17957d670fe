"""[columns] A convolution as one matrix product, for few input channels or very few images.

The window of each output becomes a row of a matrix. The matrix is made for some rows of outputs at a time, so that it
stays in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.convolution.points import Shape
from torchcaps.kernels.memory import Buffers, new_empty, slices
from torchcaps.kernels.threads import spread_over_threads, sum_over_threads

MAX_BLOCK_NUMBERS = 2**20
"""Numbers (4 MiB) of the larger matrix of a block; more leave the caches, fewer need more calls."""


def forward(
    shape: Shape,
    features: Float[Tensor, "H W B C"],
    kernel: Float[Tensor, "O C k l"],
    bias: Float[Tensor, "O"] | None,
    relu: bool,
) -> Float[Tensor, "h w B O"]:
    """Convolve, and apply a ReLU if ``relu`` is true."""
    maps = new_empty((*shape.out, features.shape[2], shape.outputs))
    weight = kernel.reshape(shape.outputs, -1).t()

    def convolve(rows: slice, windows: Float[Tensor, "_ _"]) -> None:
        out = maps[rows].view(-1, shape.outputs)
        if bias is None:
            torch.mm(windows, weight, out=out)
        else:
            torch.addmm(bias, windows, weight, out=out)
        if relu:
            out.clamp_min_(0)

    spread_over_threads(_pieces(shape, features, convolve))
    return maps


def kernel_gradient(
    shape: Shape,
    features: Float[Tensor, "H W B C"],
    gradient: Float[Tensor, "h w B O"],
    maps: Float[Tensor, "h w B O"] | None,
) -> tuple[Float[Tensor, "O C k l"], Float[Tensor, "O"]]:
    """Return the gradients of the kernel and of the bias.

    Args:
        shape: Sizes of the convolution.
        features: Input of the convolution.
        gradient: Gradient of its output.
        maps: Output of the ReLU, where zeros stop the gradient; None without a ReLU.
    """
    sizes, few = (shape.outputs, math.prod(shape.kernel) * shape.channels), _has_few(shape)
    total, bias = torch.zeros(sizes[::-1] if few else sizes), torch.zeros(shape.outputs)
    buffers = Buffers(total)

    def add(rows: slice, windows: Float[Tensor, "_ _"], total: Tensor, bias: Tensor) -> None:
        below = gradient[rows]
        if maps is not None:
            below = torch.ops.aten.threshold_backward(below, maps[rows], 0)
        below = below.reshape(-1, shape.outputs)
        part = buffers.take("part", total.shape)
        if few:  # windows lie in memory as (C · k · l, places · B)
            multiply(windows.t(), below, part)
        else:
            multiply(below.t().contiguous(), windows, part)
        total += part
        bias += below.sum(0)

    sum_over_threads(_pieces(shape, features, add), (total, bias))
    total = total.t().contiguous() if few else total
    return total.view(shape.outputs, shape.channels, *shape.kernel), bias


def _has_few(shape: Shape) -> bool:
    """Return True if there are so few channels that the matrix of windows is made transposed, positions last."""
    return shape.channels < 16


def _pieces(shape: Shape, features: Float[Tensor, "H W B C"], work: Callable[..., None]) -> list[Callable[..., None]]:
    """Return calls of ``work`` with slices of output rows and their windows (positions · B, C · k · l).

    Windows are in the order of the kernel. The longest axis stays last in memory: channels if there are many, otherwise
    positions and images (transposed).
    """
    (h, w), (k, l), (s, t), B = shape.out, shape.kernel, shape.stride, features.shape[2]
    few = _has_few(shape)
    if few:
        features = features.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    every = features.unfold(0, k, s).unfold(1, l, t)  # (h, w, B, C, k, l)
    length, buffers = k * l * shape.channels, Buffers(features)

    def piece(rows: slice, *totals: Tensor) -> None:
        block = every[rows].permute(3, 4, 5, 0, 1, 2) if few else every[rows]
        copy = buffers.take("windows", block.shape).copy_(block)
        work(rows, copy.view(length, -1).t() if few else copy.view(-1, length), *totals)

    step = max(1, MAX_BLOCK_NUMBERS // (w * B * max(length, shape.outputs)))
    return [partial(piece, rows) for rows in slices(h, step)]


# ---- the matrix product with the fastest library; the transform uses it too


def multiply(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"], out: Float[Tensor, "M N"]) -> None:
    """Compute ``out = left @ right`` in float32 on a CPU, with oneDNN if PyTorch has it.

    PyTorch computes matrix products with MKL, which uses AVX-512 on Intel processors only. oneDNN, which PyTorch uses
    for convolutions and linear layers, uses AVX-512 on all processors. It is 1.8 times as fast on an AMD processor with
    AVX-512, and as fast as MKL elsewhere. It is fast only if both matrices lie in memory row by row.
    """
    if _linear is None:
        torch.mm(left, right, out=out)
    else:
        out.copy_(_linear(left, right.t(), None, "none", [], ""))


# oneDNN's linear layer, as PyTorch's compiler calls it; None if PyTorch was built without oneDNN
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
