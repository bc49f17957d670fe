"""Fast convolutions on a CPU: ``convolve``.

The reference is one line, ``F.conv2d``; the algorithms are in :mod:`torchcaps.kernels.convolution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.kernels.convolution import Options, Pair, Shape, Tensors, choose, convolution, shape_of
from torchcaps.ops.precision import check_one_dtype
from torchcaps.ranges import Padding, Pixels

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
    tensors = Tensors(features, weight, bias)
    _check(shape_of(features, weight, stride, padding), *tensors)
    implementation: Literal["reference", "auto"] = "reference" if way == "plain" else "auto"
    return convolution(tensors, Options(stride, padding, relu, way), implementation).maps


def _check(shape: Shape, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError unless the kernel fits into the features; WrongType unless all tensors have one dtype."""
    if 0 in weight.shape or 0 in features.shape[2:] or min(shape.out) < 1:
        raise InputError(
            f"convolve: features must be at least as large as the kernel, and neither empty, "
            f"got shapes {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_one_dtype("convolve: features, weight and bias", features, weight, bias)
