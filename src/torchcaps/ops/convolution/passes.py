"""[passes] Forward and backward pass with the chosen algorithm, and a cache of kernel planes between calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchcaps.machine import MIB
from torchcaps.ops.convolution import columns, transform
from torchcaps.ops.convolution.choice import Way, images_at_once, plain_layout
from torchcaps.ops.convolution.points import Pair, Plan, Shape, best_plan
from torchcaps.ops.memory import get_working_memory
from torchcaps.tracing import is_exporting

KeptPlanes = tuple[list[Tensor], list[Tensor]]
"""Planes of features and of a kernel, kept from forward to backward."""
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of features, weight and bias; None for a gradient that is not needed."""


def plain(
    features: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, relu: bool
) -> Float[Tensor, "B O h w"]:
    """Convolve with PyTorch's convolution."""
    maps = F.conv2d(features, weight, bias, stride, padding)
    return F.relu(maps, inplace=not (maps.requires_grad or is_exporting())) if relu else maps


@dataclass
class Pass:
    """Data from a forward pass for its backward pass, besides the saved tensors."""

    shape: Shape
    way: Way
    planes: KeptPlanes | None = None
    """Planes of the forward pass, dropped after use; a second backward pass computes them again."""


def forward(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: Shape,
    relu: bool,
    way: Way,
    learning: bool,
) -> tuple[Tensor, KeptPlanes | None]:
    """Return the maps, and the planes for the backward pass if they fit into the working memory."""
    places, images = features.permute(2, 3, 0, 1), len(features)
    if way == "plain":
        laid_out = features.contiguous(memory_format=plain_layout(weight, features))
        return plain(laid_out, weight, bias, shape.stride, (0, 0), relu), None
    if way == "columns":
        return columns.forward(shape, places, weight, bias, relu).permute(2, 3, 0, 1), None
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images) or 1
    if learning:
        if weight in _kept:
            _keep(weight, None)  # training will change the kernel
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


def backward(
    done: Pass,
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: Tensor | None,
    wanted: list[bool],
) -> Grads:
    """Return the gradients marked in ``wanted``. ``maps`` is the output of the forward pass if it had a ReLU."""
    if done.way == "plain":
        return plain_backward(done.shape.stride, through_relu(gradient, maps), features, weight, bias, wanted)
    if done.way == "columns":
        return _columns_backward(done.shape, gradient, features, weight, bias, maps, wanted)
    return _transform_backward(done, gradient, features, weight, maps, wanted)


def _columns_backward(
    shape: Shape,
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: Tensor | None,
    wanted: list[bool],
) -> Grads:
    wants_features, wants_weight, wants_bias = wanted
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
    done: Pass, gradient: Tensor, features: Tensor, weight: Tensor, maps: Tensor | None, wanted: list[bool]
) -> Grads:
    wants_features, wants_weight, wants_bias = wanted
    gradient, images = through_relu(gradient, maps), len(features)
    plan = best_plan(done.shape, images)
    places, below = features.permute(2, 3, 0, 1), gradient.permute(2, 3, 0, 1)
    (X, W), done.planes = done.planes or (None, None), None
    at_once = (images_at_once(plan, images) or 1) if X is None else images  # kept planes hold all images
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


def plain_backward(
    stride: Pair, gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> Grads:
    """Return the gradients of a convolution without padding with PyTorch's operation."""
    sizes = None if bias is None else list(bias.shape)
    return torch.ops.aten.convolution_backward(
        gradient, features, weight, sizes, stride, (0, 0), (1, 1), False, (0, 0), 1, wanted
    )


def through_relu(gradient: Tensor, maps: Tensor | None) -> Tensor:
    """Return the gradient of a ReLU's input. ``maps`` is its output, or None without a ReLU."""
    return gradient if maps is None else torch.ops.aten.threshold_backward(gradient, maps, 0)


def _used_up(planes: list[Tensor]) -> Iterator[Tensor]:
    """Yield planes one after the other, and drop each when the next is requested."""
    while planes:
        yield planes.pop(0)


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
        planes = list(transform.kernel_planes(plan, weight.detach()))
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
