"""Convolutions, faster than PyTorch's own where that can be: ``convolve``.

The reference is one line, ``F.conv2d``. ``README.md`` beside this file derives the transform. To be
read in this order:

- :mod:`.points`: the matrices of the transform, and how a convolution is cut into phases and tiles;
- :mod:`.transform`: forward and backward, from top to bottom;
- :mod:`.columns`: the other way, one matrix product, for few input channels and for very few images;
- :mod:`.choice`: which way is taken; this file: how PyTorch calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.ops.convolution import columns, transform
from torchcaps.ops.convolution.choice import Way, choose, images_at_once, plain_layout
from torchcaps.ops.convolution.points import Pair, Plan, Shape, best_plan
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import check_one_dtype
from torchcaps.ranges import Padding, Pixels
from torchcaps.tracing import is_exporting, is_float32_on_cpu

Backend = Literal["auto", "plain", "columns", "transform"]
"""How a convolution is computed; see :func:`convolve`."""
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of features, weight and bias, where they are wanted."""

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
    """A 2-D convolution, in the fastest way for its sizes.

        maps_bo(y, x) = bias_o + Σ_c Σ_ij weight_oc(i, j) · features_bc(s·y + i, s·x + j)

    On a CPU and in float32 it is computed as a product of planes, with a fifth of the multiplications (wide kernels
    and many channels), as one matrix product (few input channels), or by PyTorch; everything else by PyTorch: other
    devices and dtypes, autocast, ``torch.compile``, ``torch.func``, exports. Gradients can be differentiated again. A
    NaN or an infinite number among the features reaches all outputs of its tile, where PyTorch's reaches those under
    whose windows it lies.

    Args:
        features: Maps, or images.
        weight: Kernels; fastest if they are contiguous.
        bias: Added to each output channel.
        stride: Pixels, down and across.
        padding: Zeros on each side, pixels, down and across.
        relu: Also apply a ReLU, which then takes no memory of its own in the backward pass.
        backend: ``"auto"``: the fastest; ``"plain"``: ``F.conv2d``; ``"columns"``: one matrix product;
            ``"transform"``: products of planes. What cannot be computed in the way that is asked for is computed
            plainly, as above.

    Returns:
        Maps of H' = ⌊(H + 2·padding − k) / s⌋ + 1 rows, likewise columns.

    Source: the transform is a fast algorithm of the kind of Winograd 1980, "Arithmetic Complexity of Computations",
    with roots of unity for points; the derivation is in ``README.md``.
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
    """:func:`convolve` of arguments that were checked."""
    (_, C, H, W), (O, _, k, l), (p, q) = features.shape, weight.shape, padding
    shape, given = Shape(C, O, (H + 2 * p, W + 2 * q), (k, l), stride), (features, weight, bias)
    _check(shape, *given)
    learning = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    ordinary = is_float32_on_cpu(*given)
    if not ordinary or len(features) == 0:
        way = "plain"
    elif way == "auto":
        way = choose(shape, len(features), learning)
    if way == "plain":
        if ordinary:
            features = features.contiguous(memory_format=plain_layout(weight))
        maps = F.conv2d(features, weight, bias, stride, padding)
        return F.relu(maps, inplace=not (maps.requires_grad or is_exporting())) if relu else maps
    padded = F.pad(features, (q, q, p, p)) if p or q else features
    if learning:
        return _Convolve.apply(padded, weight, bias, shape, relu, way)
    return forward(padded, weight, bias, shape, relu, way, False)[0]


def _check(shape: Shape, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless the kernel fits into the features, and all are of one dtype or autocast brings them to one."""
    if 0 in weight.shape or 0 in features.shape[2:] or min(shape.out) < 1:
        raise InputError(
            f"convolve: features must be at least as large as the kernel, and neither empty, "
            f"got shapes {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_one_dtype("convolve: features, weight and bias", features, weight, bias)


# ---- forward and backward


class _Convolve(torch.autograd.Function):
    """A convolution by columns or by the transform, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        features, weight, bias, ctx.shape, relu, ctx.way = call
        maps, ctx.planes = forward(features, weight, bias, ctx.shape, relu, ctx.way, True)
        maps = maps.detach()  # to autograd no view, so that it may be changed in place
        ctx.save_for_backward(features, weight, bias, maps if relu else None)
        return maps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, maps = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients will themselves be differentiated: by PyTorch's own operations
            wanted = list(ctx.needs_input_grad[:3])
            grads = _plain_backward(ctx, _through_relu(gradient, maps), features, weight, bias, wanted)
        elif ctx.way == "columns":
            grads = _columns_backward(ctx, gradient, features, weight, bias, maps)
        else:
            grads = _transform_backward(ctx, gradient, features, weight, maps)
        return *grads, None, None, None


def forward(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: Shape,
    relu: bool,
    way: Way,
    learning: bool,
) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]] | None]:
    """The maps, and the planes for the backward pass if they fit into the working memory."""
    places, images = features.permute(2, 3, 0, 1), len(features)
    if way == "columns":
        return columns.forward(shape, places, weight, bias, relu).permute(2, 3, 0, 1), None
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images) or 1
    if learning:
        if weight in _kept:
            _keep(weight, None)  # it is about to change
        W = list(transform.kernel_planes(plan, weight))
    else:
        W = _kept_planes(plan, weight)
    parts: list[Tensor] = []
    planes = None
    for part in places.split(at_once, 2):
        X: Iterable[Tensor] = transform.feature_planes(plan, part)
        if learning and at_once >= images:
            X = made = list(X)
            planes = made, W
        parts.append(transform.forward(plan, X, W, part.shape[2], bias, relu))
    return _joined(parts).permute(2, 3, 0, 1), planes


def _columns_backward(
    ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor | None
) -> Grads:
    wants_features, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_features = grad_weight = grad_bias = None
    if wants_weight or wants_bias:
        places, below = features.permute(2, 3, 0, 1), gradient.permute(2, 3, 0, 1)
        above = None if maps is None else maps.permute(2, 3, 0, 1)
        grad_weight, grad_bias = columns.kernel_gradient(ctx.shape, places, below, above)
    if wants_features:
        gradient = _through_relu(gradient, maps)
        grad_features = _plain_backward(ctx, gradient, features, weight, bias, [True, False, False])[0]
    return grad_features, grad_weight, grad_bias if wants_bias else None


def _transform_backward(ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, maps: Tensor | None) -> Grads:
    wants_features, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    gradient, images = _through_relu(gradient, maps), len(features)
    plan = best_plan(ctx.shape, images)
    places, below = features.permute(2, 3, 0, 1), gradient.permute(2, 3, 0, 1)
    # planes are let go as soon as they have served; a second backward pass makes them again
    (X, W), ctx.planes = ctx.planes or (None, None), None
    at_once = (images_at_once(plan, images) or 1) if X is None else images  # planes are kept of all images
    if wants_features and W is None:
        W = list(transform.kernel_planes(plan, weight))
    parts: list[Tensor] = []
    grad_features = grad_weight = None
    for part, g in zip(places.split(at_once, 2), below.split(at_once, 2), strict=True):
        G = transform.map_planes(plan, g)
        if wants_features and W is not None:
            last = (len(parts) + 1) * at_once >= images
            parts.append(transform.features_gradient(plan, _used_up(W) if last else W, G, part.shape[2]))
        if wants_weight:
            made = transform.feature_planes(plan, part) if X is None else _used_up(X)
            kernel = transform.kernel_gradient(plan, made, G)
            grad_weight = kernel if grad_weight is None else grad_weight.add_(kernel)
    if wants_features:
        grad_features = _joined(parts).permute(2, 3, 0, 1)
    return grad_features, grad_weight, gradient.sum((0, 2, 3)) if wants_bias else None


def _plain_backward(
    ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> Grads:
    sizes = None if bias is None else list(bias.shape)
    return torch.ops.aten.convolution_backward(
        gradient, features, weight, sizes, ctx.shape.stride, (0, 0), (1, 1), False, (0, 0), 1, wanted
    )


def _through_relu(gradient: Tensor, maps: Tensor | None) -> Tensor:
    return gradient if maps is None else torch.ops.aten.threshold_backward(gradient, maps, 0)


def _used_up(planes: list[Tensor]) -> Iterator[Tensor]:
    """The planes one after the other, each let go when the next is asked for."""
    while planes:
        yield planes.pop(0)


def _joined(parts: list[Float[Tensor, "h w b C"]]) -> Float[Tensor, "h w B C"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


MAX_KEPT_KERNELS = 4
"""Kernels whose planes are kept at most: those of an ensemble, or of a network with several wide convolutions."""
_kept = WeakTensorKeyDictionary()
"""Planes of the kernels of calls without gradients, the latest first, until a kernel changes or goes."""


def _kept_planes(plan: Plan, weight: Tensor) -> list[Tensor]:
    """The planes of a kernel; those of an earlier call if it still holds the same numbers.

    All numbers are compared, which takes a fraction of the time of the transform: a version counter would miss changes
    through ``weight.data``.
    """
    of, numbers, planes = _kept.get(weight, (None, None, []))
    if of is not plan or not torch.equal(numbers, weight):
        planes = list(transform.kernel_planes(plan, weight.detach()))
        _keep(weight, (plan, weight.detach().clone(), planes))
    return planes


def _keep(weight: Tensor, entry: tuple[Plan, Tensor, list[Tensor]] | None) -> None:
    """Remember the planes of a kernel, or forget them if ``entry`` is None.

    The oldest kernels are dropped if there are too many, or if all planes together exceed the working memory. A new
    dictionary takes the place of the old one, because another thread may be reading that.
    """
    global _kept
    latest = [] if entry is None else [(weight, entry)]
    latest += [(other, its) for other, its in _kept.items() if other is not weight]
    room, fitting = get_working_memory() * MIB, WeakTensorKeyDictionary()
    for kernel, (plan, numbers, planes) in latest[:MAX_KEPT_KERNELS]:
        room -= sum(group.nbytes for group in planes)
        if room < 0 and fitting:
            break
        fitting[kernel] = plan, numbers, planes
    _kept = fitting
