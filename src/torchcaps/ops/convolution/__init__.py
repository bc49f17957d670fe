"""Fast convolutions on a CPU: ``convolve``.

The reference is one line, ``F.conv2d``. ``README.md`` in this folder derives the transform. Read the files in this
order:

- :mod:`.points`: cuts a convolution into phases and tiles, and makes the matrices of the transform;
- :mod:`.transform`: forward and backward pass by the transform, from top to bottom;
- :mod:`.columns`: a convolution as one matrix product, for few input channels or very few images;
- :mod:`.choice`: chooses the algorithm; :mod:`.passes`: forward and backward pass with the chosen algorithm;
- this file: the entry for eager code; :mod:`.compiled`: the entry for ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ops.convolution.choice import choose, plain_layout
from torchcaps.ops.convolution.compiled import compiled_convolve
from torchcaps.ops.convolution.passes import Pass, backward, forward, plain, plain_backward, through_relu
from torchcaps.ops.convolution.points import Pair, Shape
from torchcaps.ops.precision import check_one_dtype
from torchcaps.ranges import Padding, Pixels
from torchcaps.tracing import is_compiled_as_one, is_float32_on_cpu

Backend = Literal["auto", "plain", "columns", "transform"]
"""Algorithm of a convolution; see :func:`convolve`."""

__all__ = ["Backend", "Shape", "choose", "convolve"]


@checked
def convolve(
    features: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, "O"] | None = None,
    stride: tuple[Pixels, Pixels] | Pixels = 1,
    padding: tuple[Padding, Padding] | Padding = 0,
    *,
    relu: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "B O h w"]:
    """2-D convolution with the fastest algorithm for its sizes.

        maps_bo(y, x) = bias_o + Σ_c Σ_ij weight_oc(i, j) · features_bc(s·y + i, s·x + j)

    On a CPU in float32 there are three algorithms: the transform, which needs a fifth of the multiplications (wide
    kernels and many channels); one matrix product (few input channels); and PyTorch's convolution. All other cases use
    PyTorch's convolution: other devices and dtypes, autocast, ``torch.func``, exports. Gradients can be differentiated
    again. With the transform, a NaN or an infinite feature changes all outputs of its tile; with PyTorch, only the
    outputs whose windows contain it.

    Args:
        features: Feature maps or images.
        weight: Kernels; fastest if they are contiguous.
        bias: Added to each output channel.
        stride: Stride in pixels, one number or (down, across).
        padding: Zero padding on each side in pixels, one number or (down, across).
        relu: Also apply a ReLU, which then needs no extra memory in the backward pass.
        backend: ``"auto"``: the fastest algorithm; ``"plain"``: ``F.conv2d``; ``"columns"``: one matrix product;
            ``"transform"``: the transform. ``F.conv2d`` is also used if the requested algorithm does not apply.

    Returns:
        Maps with H' = ⌊(H + 2·padding − k) / s⌋ + 1 rows, and columns likewise.

    Source: the transform follows Winograd 1980, "Arithmetic Complexity of Computations", with roots of unity as
    points; ``README.md`` has the derivation.
    """
    s, t = stride if isinstance(stride, Sequence) else (stride, stride)
    p, q = padding if isinstance(padding, Sequence) else (padding, padding)
    return compute(features, weight, bias, (s, t), (p, q), relu, backend)


def compute(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    way: Backend = "auto",
) -> Float[Tensor, "B O h w"]:
    """:func:`convolve` without checks of types and shapes."""
    (_, C, H, W), (O, _, k, l), (p, q) = features.shape, weight.shape, padding
    shape, given = Shape(C, O, (H + 2 * p, W + 2 * q), (k, l), stride), (features, weight, bias)
    _check(shape, *given)
    learning = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    if is_compiled_as_one(*given) and way == "auto" and max(k, l) > 1:
        padded = F.pad(features, (q, q, p, p)) if p or q else features
        return compiled_convolve(padded, weight, bias, list(stride), relu, learning)[0]
    if not is_float32_on_cpu(*given):
        return plain(features, weight, bias, stride, padding, relu)
    if way == "auto":
        way = choose(shape, len(features), learning)
    if way == "plain" or len(features) == 0:
        laid_out = features.contiguous(memory_format=plain_layout(weight, features))
        return plain(laid_out, weight, bias, stride, padding, relu)
    padded = F.pad(features, (q, q, p, p)) if p or q else features
    if learning:
        return _Convolve.apply(padded, weight, bias, shape, relu, way)
    return forward(padded, weight, bias, shape, relu, way, False)[0]


def _check(shape: Shape, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError unless the kernel fits into the features; WrongType unless all tensors have one dtype."""
    if 0 in weight.shape or 0 in features.shape[2:] or min(shape.out) < 1:
        raise InputError(
            f"convolve: features must be at least as large as the kernel, and neither empty, "
            f"got shapes {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_one_dtype("convolve: features, weight and bias", features, weight, bias)


class _Convolve(torch.autograd.Function):
    """Convolution by columns or by the transform, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        features, weight, bias, shape, relu, way = call
        maps, planes = forward(features, weight, bias, shape, relu, way, True)
        ctx.done = Pass(shape, way, planes)
        maps = maps.detach()  # no view for autograd, so that callers may change it in place
        ctx.save_for_backward(features, weight, bias, maps if relu else None)
        return maps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, maps = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # use PyTorch's operations, because the gradients are differentiated again
            gradient = through_relu(gradient, maps)
            grads = plain_backward(ctx.done.shape.stride, gradient, features, weight, bias, wanted)
        else:
            grads = backward(ctx.done, gradient, features, weight, bias, maps, wanted)
        return *grads, None, None, None
