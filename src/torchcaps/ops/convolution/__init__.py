"""Convolutions, faster than PyTorch's own where that can be: ``convolve``.

The reference is one line, ``F.conv2d`` (:func:`.autograd.plain`). ``README.md`` beside this file derives the
transform. To be read in this order:

- :mod:`.basis`: the matrices of the transform, from the sizes of a correlation;
- :mod:`.plan`: how a convolution is cut into phases and tiles;
- :mod:`.transform`: forward and backward, from top to bottom;
- :mod:`.columns`: the other way, one matrix product, for few input channels and for very few images;
- :mod:`.choice`: which way is taken; :mod:`.autograd`: how PyTorch calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_choice, check_flags, check_one_device, check_one_dtype, check_sizes, check_tensor
from torchcaps.ops.convolution.autograd import Convolve, forward, is_ordinary, plain, shape_of
from torchcaps.ops.convolution.choice import choose, working_mib
from torchcaps.ops.convolution.plan import Pair, Shape

Backend = Literal["auto", "plain", "columns", "transform"]
"""How a convolution is computed; see :func:`convolve`."""
BACKENDS: tuple[Backend, ...] = ("auto", "plain", "columns", "transform")
"""All of them."""
LAYOUTS = (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]  # torch's types lack it
"""Of the memory of tensors; PyTorch's convolution takes oneDNN's, too."""

__all__ = ["BACKENDS", "LAYOUTS", "Backend", "Shape", "choose", "convolve", "shape_of", "working_mib"]


def convolve(
    features: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, "O"] | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    *,
    relu: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "B O h w"]:
    """A 2-D convolution, in the fastest way for its sizes.

        maps_bo(y, x) = bias_o + Σ_c Σ_ij weight_oc(i, j) · features_bc(s·y + i, s·x + j)

    On a CPU and in float32 it is computed as a product of planes, with a fifth of the multiplications (wide kernels
    and many channels), as one matrix product (few input channels), or by PyTorch; everything else by PyTorch: other
    devices and dtypes, autocast, ``torch.compile``, ``torch.func``, exports. Gradients can be differentiated again. A
    NaN or an infinite number among the features reaches all outputs of its tile, where PyTorch's reaches those under
    whose windows it lies.

    Args:
        features: Maps, or images.
        weight: Kernels; fastest if channels come last in memory (``torch.channels_last``).
        bias: Added to each output channel.
        stride: Pixels, down and across.
        padding: Zeros on each side, pixels, down and across.
        relu: Also apply a ReLU, which then takes no memory of its own in the backward pass.
        backend: ``"auto"``: the fastest; ``"plain"``: ``F.conv2d``; ``"columns"``: one matrix product;
            ``"transform"``: products of planes. What cannot be computed in the way that is asked for is computed
            plainly, as above.

    Returns:
        Maps of H' = ⌊(H + 2·padding − k) / s⌋ + 1 rows, likewise columns.

    Raises:
        TypeError: Tensors that are not floating-point or, without autocast, of different dtypes; an option of another
            type.
        ValueError: Shapes or devices that do not fit, or an option out of its range; the message names it.

    Source: the transform is a fast algorithm of the kind of Winograd 1980, "Arithmetic Complexity of Computations",
    with roots of unity for points; the derivation is in ``README.md``.
    """
    stride, padding = _pair("stride", stride, 1), _pair("padding", padding, 0)
    check_choice("convolve", "backend", backend, BACKENDS)
    check_flags("convolve", relu=relu)
    _check_tensors(features, weight, bias, padding)
    if backend == "plain" or not is_ordinary(features, weight, bias):
        return plain(features, weight, bias, stride, padding, relu)
    given = [tensor for tensor in (features, weight, bias) if tensor is not None]
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    way = choose(shape_of(features, weight, stride, padding), len(features), learning) if backend == "auto" else backend
    if way == "plain" or len(features) == 0:
        return plain(features, weight, bias, stride, padding, relu)
    if learning:
        return Convolve.apply(features, weight, bias, stride, padding, relu, way)
    return forward(features, weight, bias, stride, padding, relu, way, learning=False)[0]


def _pair(name: str, value: int | Pair, least: int) -> Pair:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"convolve: {name} must be an integer or two of them, got {value!r}")
    for size in pair:
        check_sizes("convolve", least=least, **{name: size})
    return pair


def _check_tensors(features: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> None:
    check_tensor("convolve", "features", features, ("B", "C", "H", "W"), LAYOUTS)
    check_tensor("convolve", "weight", weight, ("O", "C", "k", "l"), (torch.strided, features.layout))
    if bias is not None:
        check_tensor("convolve", "bias", bias, weight.shape[:1], (torch.strided, features.layout))
    check_one_device("convolve", features=features, weight=weight, bias=bias)
    check_one_dtype("convolve", features=features, weight=weight, bias=bias)
    if 0 in weight.shape:
        raise ValueError(f"convolve: weight must not be empty, got shape {tuple(weight.shape)}")
    (C, H, W), (_, channels, k, l) = features.shape[1:], weight.shape
    if channels != C:
        raise ValueError(
            f"convolve: weight must have shape (O, {C}, k, l) as features have {C} channels, got {tuple(weight.shape)}"
        )
    if min(H, W) < 1 or H + 2 * padding[0] < k or W + 2 * padding[1] < l:
        raise ValueError(
            f"convolve: features must be at least as large as the kernel, {k}×{l}, got shape {tuple(features.shape)}"
        )
