"""Convolutions, faster than PyTorch's own where that can be: ``convolve``.

The reference is one line, ``F.conv2d`` (:func:`.autograd.plain`). ``README.md`` beside this file derives the
transform. To be read in this order:

- :mod:`.basis`: the matrices of the transform, from the sizes of a correlation;
- :mod:`.plan`: how a convolution is cut into phases and tiles;
- :mod:`.transform`: forward and backward, from top to bottom; :mod:`.products`: the products of its planes;
- :mod:`.columns`: the other way, one matrix product, for few input channels and for very few images;
- :mod:`.choice`: which way is taken; :mod:`.autograd`: how PyTorch calls them.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.convolution.autograd import compute, is_ordinary, plain, shape_of
from torchcaps.ops.convolution.choice import choose, working_mib
from torchcaps.ops.convolution.plan import Pair, Shape

Backend = Literal["auto", "plain", "columns", "transform"]
"""How a convolution is computed; see :func:`convolve`."""
BACKENDS: tuple[Backend, ...] = ("auto", "plain", "columns", "transform")
"""All of them."""

__all__ = ["BACKENDS", "Backend", "Shape", "choose", "convolve", "shape_of", "working_mib"]


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
        TypeError: Tensors that are not floating-point.
        ValueError: Shapes that do not fit, or an option out of its range; the message names it.

    Source: the transform is a fast algorithm of the kind of Winograd 1980, "Arithmetic Complexity of Computations",
    with roots of unity for points; the derivation is in ``README.md``.
    """
    stride, padding = _pair(stride), _pair(padding)
    _check(features, weight, bias, stride, padding, backend)
    if backend == "plain" or not is_ordinary(features, weight, bias):
        return plain(features, weight, bias, stride, padding, relu)
    given = [tensor for tensor in (features, weight, bias) if tensor is not None]
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    way = choose(shape_of(features, weight, stride, padding), len(features), learning) if backend == "auto" else backend
    if way == "plain" or len(features) == 0:
        return plain(features, weight, bias, stride, padding, relu)
    return compute(features, weight, bias, stride, padding, relu, way, learning)


def _pair(value: int | Pair) -> Pair:
    down, across = (value, value) if isinstance(value, int) else value
    return down, across


def _check(features: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, backend: str) -> None:
    for name, tensor, axes in (("features", features, 4), ("weight", weight, 4), ("bias", bias, 1)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"convolve: {name} must be floating-point, got {tensor.dtype}")
        if tensor.ndim != axes:
            raise ValueError(f"convolve: {name} must have {axes} axes, got shape {tuple(tensor.shape)}")
    (C, H, W), (O, channels, k, l) = features.shape[1:], weight.shape
    if channels != C:
        raise ValueError(
            f"convolve: weight must have shape (O, {C}, k, l) as features have {C} channels, got {tuple(weight.shape)}"
        )
    if bias is not None and len(bias) != O:
        raise ValueError(f"convolve: bias must have shape ({O},), got {tuple(bias.shape)}")
    if min(stride) < 1 or min(padding) < 0:
        raise ValueError(f"convolve: stride must be at least 1 and padding at least 0, got {stride} and {padding}")
    if H + 2 * padding[0] < k or W + 2 * padding[1] < l:
        raise ValueError(
            f"convolve: features must be at least as large as the kernel, {k}×{l}, got shape {tuple(features.shape)}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"convolve: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
