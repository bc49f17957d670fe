"""[columns] A convolution as one matrix product, for few input channels or very few images.

The window of each output becomes a row of a matrix. The matrix is made for some rows of outputs at a time, so that it
stays in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.convolution.points import Shape
from torchcaps.kernels.memory import new_empty

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
    """Return the gradients of the kernel and of the bias.

    Args:
        shape: Sizes of the convolution.
        features: Input of the convolution.
        gradient: Gradient of its output.
        maps: Output of the ReLU, where zeros stop the gradient; None without a ReLU.
    """
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
    """Return True if there are so few channels that the matrix of windows is made transposed, positions last."""
    return shape.channels < 16


def _windows(shape: Shape, features: Float[Tensor, "H W B C"]) -> Iterator[tuple[slice, Float[Tensor, "_ _"]]]:
    """Yield slices of output rows with their windows (positions · B, C · k · l), in the order of the kernel.

    The longest axis stays last in memory: channels if there are many, otherwise positions and images (transposed).
    """
    (h, w), (k, l), (s, t), B = shape.out, shape.kernel, shape.stride, features.shape[2]
    few = _has_few(shape)
    if few:
        features = features.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    windows = features.unfold(0, k, s).unfold(1, l, t)  # (h, w, B, C, k, l)
    length = k * l * shape.channels
    step = max(1, MAX_BLOCK_NUMBERS // (w * B * max(length, shape.outputs)))
    buffer = torch.empty(min(step, h) * w * B * length)
    for start in range(0, h, step):
        rows = slice(start, min(start + step, h))
        block = windows[rows].permute(3, 4, 5, 0, 1, 2) if few else windows[rows]
        copy = buffer[: block.numel()].view(block.shape).copy_(block)
        yield rows, copy.view(length, -1).t() if few else copy.view(-1, length)


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
