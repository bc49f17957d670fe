"""[passes] Forward and backward pass with the chosen algorithm, and a cache of kernel planes between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchcaps.kernels.convolution import columns, transform
from torchcaps.kernels.convolution.choice import (
    MIN_CHANNELS,
    MIN_TRIMMED_OUTPUTS,
    Way,
    choose,
    images_at_once,
    plain_layout,
)
from torchcaps.kernels.convolution.points import Plan, Shape, best_plan
from torchcaps.kernels.memory import get_working_memory, used_up
from torchcaps.kernels.operation import Forward
from torchcaps.machine import MIB
from torchcaps.tracing import is_compiled_as_one, is_exporting, is_float32_on_cpu

KeptPlanes = list[list[Tensor]]
"""Planes of features and of a kernel, kept from forward to backward; empty after use."""
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of features, weight and bias; None for a gradient that is not needed."""


class Tensors(NamedTuple):
    """Tensors of a convolution: features (B, C, H, W), weight (O, C, k, l) and bias (O)."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None


class Options(NamedTuple):
    """Arguments of :func:`torchcaps.kernels.convolution.convolve` besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    relu: bool
    way: str
    """The algorithm; ``"auto"``: the fastest one for the number of images of each call."""


class Results(NamedTuple):
    """Maps (B, O, h, w)."""

    maps: Tensor


def shape_of(features: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Shape:
    """Return the sizes of a convolution."""
    (_, C, H, W), (O, _, k, l), (s, t), (p, q) = features.shape, weight.shape, stride, padding
    return Shape(C, O, (H + 2 * p, W + 2 * q), (k, l), (s, t))


def plain(tensors: Tensors, options: Options) -> Results:
    """Convolve with PyTorch's convolution."""
    features, weight, bias = tensors
    if is_float32_on_cpu(*tensors):
        features = features.contiguous(memory_format=plain_layout(weight, features))
    return Results(_convolved(features, weight, bias, options.stride, options.padding, options.relu))


def suits(tensors: Tensors, options: Options) -> bool:
    """Return True if another algorithm than PyTorch's convolution may be the fastest one.

    A compiled graph may serve any number of images, so the algorithm is chosen at each of its calls.
    """
    features, weight, _ = tensors
    if is_compiled_as_one(*tensors):
        return options.way == "auto" and max(weight.shape[2:]) > 1
    if not is_float32_on_cpu(*tensors) or len(features) == 0:
        return False
    learning = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    return _way(tensors, options, learning) != "plain"


def fake(tensors: Tensors, options: Options) -> Results:
    """Return maps without numbers. Channels are last in memory if PyTorch's convolution is the usual algorithm."""
    features, weight, _ = tensors
    outputs, channels = weight.shape[:2]
    by_columns = channels < MIN_CHANNELS and outputs >= MIN_TRIMMED_OUTPUTS  # of many images
    plain_is_usual = not by_columns and plain_layout(weight) == torch.channels_last
    order = (0, 2, 3, 1) if plain_is_usual else (2, 3, 0, 1)
    height, width = shape_of(features, weight, options.stride, options.padding).out
    sizes = (features.shape[0], outputs, height, width)
    return Results(torch.empty_permuted(sizes, order, dtype=features.dtype, device=features.device))


def forward(tensors: Tensors, options: Options, needs_grad: Sequence[bool], keep: bool) -> Forward:
    """Return the maps, and the planes for the backward pass if they fit into the working memory."""
    (features, weight, bias), relu = tensors, options.relu
    shape, images, learning = shape_of(*tensors[:2], options.stride, options.padding), len(features), any(needs_grad)
    way = _way(tensors, options, learning)
    features = _padded(features, options)
    if way == "plain":
        laid_out = features.contiguous(memory_format=plain_layout(weight, features))
        return Forward(Results(_convolved(laid_out, weight, bias, options.stride, (0, 0), relu)))
    places = features.permute(2, 3, 0, 1)
    if way == "columns":
        return Forward(_own(columns.forward(shape, places, weight, bias, relu)))
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images) or 1
    if learning:
        if weight in _kept:
            _keep(weight, None)  # training will change the kernel
        W = transform.kernel_planes(plan, weight)
    else:
        W = _kept_planes(plan, weight)
    parts: list[Tensor] = []
    planes: KeptPlanes = []
    for part in places.split(at_once, 2):
        X = transform.feature_planes(plan, part)
        if keep and at_once >= images:
            planes = [X, W]
        parts.append(transform.forward(plan, X if planes else used_up(X), W, part.shape[2], bias, relu))
    return Forward(_own(_joined(parts)), planes)


def _own(maps: Float[Tensor, "h w B O"]) -> Results:
    """Return maps that are no view for autograd, so that callers may change them in place."""
    return Results(maps.permute(2, 3, 0, 1).detach())


def backward(
    tensors: Tensors,
    options: Options,
    results: Sequence[Tensor | None],
    planes: KeptPlanes | None,
    grads: Sequence[Tensor],
    needs_grad: Sequence[bool],
) -> Grads:
    """Return the gradients marked in ``needs_grad``."""
    features, weight, bias = tensors
    maps, gradient, way = results[0], grads[0], _way(tensors, options, learning=True)
    padded = _padded(features, options)
    if way == "plain":
        gradients = plain_backward(options.stride, through_relu(gradient, maps), padded, weight, bias, list(needs_grad))
    else:
        shape = shape_of(features, weight, options.stride, options.padding)
        if way == "columns":
            gradients = _columns_backward(shape, gradient, padded, weight, bias, maps, needs_grad)
        else:
            gradients = _transform_backward(shape, planes, gradient, padded, weight, maps, needs_grad)
    (p, q), of_features = options.padding, gradients[0]
    if of_features is None or not (p or q):
        return gradients
    return of_features[:, :, p : p + features.shape[2], q : q + features.shape[3]], *gradients[1:]


def _way(tensors: Tensors, options: Options, learning: bool) -> Way:
    """Return the algorithm of a call."""
    features, weight, _ = tensors
    if options.way != "auto":
        return cast(Way, options.way)
    shape = shape_of(features, weight, options.stride, options.padding)
    return choose(shape, len(features), learning) if len(features) else "plain"


def _padded(features: Tensor, options: Options) -> Tensor:
    p, q = options.padding
    return F.pad(features, (q, q, p, p)) if p or q else features


def _convolved(
    features: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], relu: bool
) -> Tensor:
    maps = F.conv2d(features, weight, bias, stride, padding)
    return F.relu(maps, inplace=not (maps.requires_grad or is_exporting())) if relu else maps


def _columns_backward(
    shape: Shape,
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: Tensor | None,
    needs_grad: Sequence[bool],
) -> Grads:
    wants_features, wants_weight, wants_bias = needs_grad
    grad_features = grad_weight = grad_bias = None
    if wants_weight or wants_bias:
        places, below = features.permute(2, 3, 0, 1), gradient.permute(2, 3, 0, 1)
        above = None if maps is None else maps.permute(2, 3, 0, 1)
        grad_weight, grad_bias = columns.kernel_gradient(shape, places, below, above)
    if wants_features:
        gradient = through_relu(gradient, maps)
        only_features = [True, False, False]
        grad_features = plain_backward(shape.stride, gradient, features, weight, bias, only_features)[0]
    return grad_features, grad_weight, grad_bias if wants_bias else None


def _transform_backward(
    shape: Shape,
    planes: KeptPlanes | None,
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    maps: Tensor | None,
    needs_grad: Sequence[bool],
) -> Grads:
    wants_features, wants_weight, wants_bias = needs_grad
    gradient, images = through_relu(gradient, maps), len(features)
    plan = best_plan(shape, images)
    places, below = features.permute(2, 3, 0, 1), gradient.permute(2, 3, 0, 1)
    X, W = planes or (None, None)
    if planes:
        planes.clear()
    at_once = (images_at_once(plan, images) or 1) if X is None else images  # kept planes hold all images
    if wants_features and W is None:
        W = transform.kernel_planes(plan, weight)
    parts: list[Tensor] = []
    grad_features = grad_weight = None
    for part, g in zip(places.split(at_once, 2), below.split(at_once, 2), strict=True):
        G = transform.map_planes(plan, g)
        if wants_features and W is not None:
            last = (len(parts) + 1) * at_once >= images
            parts.append(transform.features_gradient(plan, used_up(W) if last else W, G, part.shape[2]))
        if wants_weight:
            kernel = transform.kernel_gradient(
                plan, used_up(transform.feature_planes(plan, part) if X is None else X), G
            )
            grad_weight = kernel if grad_weight is None else grad_weight.add_(kernel)
    if wants_features:
        grad_features = _joined(parts).permute(2, 3, 0, 1)
    return grad_features, grad_weight, gradient.sum((0, 2, 3)) if wants_bias else None


def plain_backward(
    stride: Sequence[int], gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, mask: list[bool]
) -> Grads:
    """Return the gradients of a convolution without padding with PyTorch's operation."""
    sizes = None if bias is None else list(bias.shape)
    return torch.ops.aten.convolution_backward(
        gradient, features, weight, sizes, stride, (0, 0), (1, 1), False, (0, 0), 1, mask
    )


def through_relu(gradient: Tensor, maps: Tensor | None) -> Tensor:
    """Return the gradient of a ReLU's input. ``maps`` is its output, or None without a ReLU."""
    return gradient if maps is None else torch.ops.aten.threshold_backward(gradient, maps, 0)


def _joined(parts: list[Float[Tensor, "h w b C"]]) -> Float[Tensor, "h w B C"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


MAX_KEPT_KERNELS = 4
"""Number of kernels in the cache of planes, for ensembles and networks with several wide convolutions."""
_kept = WeakTensorKeyDictionary()
"""Planes of kernels in calls without gradients, the latest first, until a kernel changes or is deleted."""


def _kept_planes(plan: Plan, weight: Tensor) -> list[Tensor]:
    """Return the planes of a kernel, from an earlier call if the kernel has not changed.

    All numbers are compared, because a version counter would miss changes through ``weight.data``. This takes a
    fraction of the time of the transform.
    """
    of, numbers, planes = _kept.get(weight, (None, None, []))
    if of is not plan or not torch.equal(numbers, weight):
        planes = transform.kernel_planes(plan, weight.detach())
        _keep(weight, (plan, weight.detach().clone(), planes))
    return planes


def _keep(weight: Tensor, entry: tuple[Plan, Tensor, list[Tensor]] | None) -> None:
    """Cache the planes of a kernel, or remove them if ``entry`` is None.

    The oldest kernels are dropped if there are too many, or if all planes exceed the working memory. The function
    replaces the dictionary instead of changing it, because another thread may be reading it.
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
