"""[columns] A convolution as one matrix product: for few input channels, or for very few images.

The window of features below each output is laid out as a row of a matrix, some rows of outputs at a time, so that the
matrix stays in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.convolution.points import Shape
from torchcaps.ops.memory import new_empty

BLOCK = 2**20
"""Numbers of the larger of a block's two matrices, 4 MiB of them: few calls, and near the processor."""


def forward(
    shape: Shape,
    features: Float[Tensor, "H W B C"],
    kernel: Float[Tensor, "O C k l"],
    bias: Float[Tensor, "O"] | None,
    relu: bool,
) -> Float[Tensor, "h w B O"]:
    """The convolution, and its ReLU if asked for."""
    maps = new_empty((*shape.out, features.shape[2], shape.outputs))
    weight = kernel.reshape(shape.outputs, -1).t()
    for rows, windows in _windows(shape, features):
        out = maps[rows].view(-1, shape.outputs)
        if bias is None:
            torch.mm(windows, weight, out=out)
        else:
            torch.addmm(bias, windows, weight, out=out)
        if relu:
            out.clamp_min_(0)
    return maps


def kernel_gradient(
    shape: Shape,
    features: Float[Tensor, "H W B C"],
    gradient: Float[Tensor, "h w B O"],
    maps: Float[Tensor, "h w B O"] | None,
) -> tuple[Float[Tensor, "O C k l"], Float[Tensor, "O"]]:
    """The gradients of the kernel and of the bias; where ``maps``, what a ReLU left, are zero, nothing flows back."""
    sizes, few = (shape.outputs, math.prod(shape.kernel) * shape.channels), _has_few(shape)
    total = torch.zeros(sizes[::-1] if few else sizes)
    part, bias = torch.empty_like(total), torch.zeros(shape.outputs)
    for rows, windows in _windows(shape, features):
        below = gradient[rows]
        if maps is not None:
            below = torch.ops.aten.threshold_backward(below, maps[rows], 0)
        below = below.reshape(-1, shape.outputs)
        if few:  # windows lie in memory as (C · k · l, places · B)
            multiply(windows.t(), below, part)
        else:
            multiply(below.t().contiguous(), windows, part)
        total += part
        bias += below.sum(0)
    total = total.t().contiguous() if few else total
    return total.view(shape.outputs, shape.channels, *shape.kernel), bias


def _has_few(shape: Shape) -> bool:
    """Return whether there are few channels, so that the matrix of windows is laid out transposed, places last."""
    return shape.channels < 16


def _windows(shape: Shape, features: Float[Tensor, "H W B C"]) -> Iterator[tuple[slice, Float[Tensor, "_ _"]]]:
    """Some rows of outputs at a time: which, and their windows (places · B, C · k · l), in the order of the kernel.

    What is longest in memory stays so: channels if there are many, else places and images, the matrix transposed.
    """
    (h, w), (k, l), (s, t), B = shape.out, shape.kernel, shape.stride, features.shape[2]
    few = _has_few(shape)
    if few:
        features = features.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    windows = features.unfold(0, k, s).unfold(1, l, t)  # (h, w, B, C, k, l)
    length = k * l * shape.channels
    step = max(1, BLOCK // (w * B * max(length, shape.outputs)))
    buffer = torch.empty(min(step, h) * w * B * length)
    for start in range(0, h, step):
        rows = slice(start, min(start + step, h))
        block = windows[rows].permute(3, 4, 5, 0, 1, 2) if few else windows[rows]
        copy = buffer[: block.numel()].view(block.shape).copy_(block)
        yield rows, copy.view(length, -1).t() if few else copy.view(-1, length)


# ---- the matrix product, by the library that computes it fastest; the transform's planes go through it too


def multiply(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"], out: Float[Tensor, "M N"]) -> None:
    """``out = left @ right``, in float32 on a CPU.

    PyTorch gives such products to MKL, which uses AVX-512 on Intel's processors only. oneDNN, which PyTorch gives its
    convolutions and linear layers to, uses what there is: on an AMD processor with AVX-512 it is 1.8 times as fast,
    elsewhere as fast as MKL. It is quick only if both matrices lie in memory row by row.
    """
    if _linear is None:
        torch.mm(left, right, out=out)
    else:
        out.copy_(_linear(left, right.t(), None, "none", [], ""))


# oneDNN's linear layer, as PyTorch's own compiler calls it; None where PyTorch was built without
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
