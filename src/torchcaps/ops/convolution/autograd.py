"""[autograd] How PyTorch calls the ways of computing a convolution, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.convolution import columns, transform
from torchcaps.ops.convolution.choice import Way, images_at_once
from torchcaps.ops.convolution.plan import Pair, Plan, Shape, best_plan

Made = list[Tensor]
"""The planes of each group."""


def plain(
    features: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, "O"] | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
) -> Float[Tensor, "B O h w"]:
    """The reference: PyTorch's own convolution."""
    maps = F.conv2d(features, weight, bias, stride, padding)
    return F.relu(maps, inplace=not maps.requires_grad) if relu else maps


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Whether tensors are float32 on a CPU, computed with at once, and differentiated backward if at all."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]  # torch's types lack it
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack():
        return False
    return all(
        type(t) in (Tensor, torch.nn.Parameter)
        and (t.device.type, t.dtype, t.layout) == ("cpu", torch.float32, torch.strided)
        for t in tensors
        if t is not None
    )


def shape_of(features: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Shape:
    """The sizes of a convolution."""
    (_, C, H, W), (O, _, k, l) = features.shape, weight.shape
    return Shape(C, O, (H + 2 * padding[0], W + 2 * padding[1]), (k, l), stride)


class Convolve(torch.autograd.Function):
    """A convolution by columns or by the transform, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        """See :func:`forward`."""
        features, weight, bias, ctx.stride, ctx.padding, relu, ctx.way = call
        maps, ctx.planes = forward(features, weight, bias, ctx.stride, ctx.padding, relu, ctx.way, learning=True)
        maps = maps.detach()  # to autograd no view, so that it may be changed in place
        ctx.save_for_backward(features, weight, bias, maps if relu else None)
        return maps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of features, weight and bias, where they are wanted."""
        features, weight, bias, maps = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients will themselves be differentiated: by PyTorch's own operations
            gradient = gradient if maps is None else gradient * (maps > 0)
            grads = _plain_backward(ctx, gradient, features, weight, bias, list(ctx.needs_input_grad[:3]))
        elif ctx.way == "columns":
            grads = _columns_backward(ctx, gradient, features, weight, bias, maps)
        else:
            grads = _transform_backward(ctx, gradient, features, weight, maps)
        return *grads, None, None, None, None


def forward(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    relu: bool,
    way: Way,
    learning: bool,
) -> tuple[Tensor, tuple[Made, Made] | None]:
    """The maps, and the planes for the backward pass if they fit into the working memory."""
    shape, images = shape_of(features, weight, stride, padding), len(features)
    places, kernel = _places(features, padding), weight.permute(0, 2, 3, 1)
    if way == "columns":
        return columns.forward(shape, places, kernel, bias, relu).permute(2, 3, 0, 1), None
    plan = best_plan(shape, images)
    at_once = images_at_once(plan, images) or 1
    if learning:
        _kept.forget(weight)  # it is about to change
        W = list(transform.kernel_planes(plan, kernel))
    else:
        W = _kept.planes(plan, weight)
    parts: list[Tensor] = []
    planes = None
    for part in places.split(at_once, 2):
        X: Iterable[Tensor] = transform.feature_planes(plan, part)
        if learning and at_once >= images:
            X = made = list(X)
            planes = made, W
        parts.append(transform.forward(plan, X, W, part.shape[2], bias, relu))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).permute(2, 3, 0, 1), planes


def _columns_backward(
    ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wants_features, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_features = grad_weight = grad_bias = None
    if wants_weight or wants_bias:
        shape = shape_of(features, weight, ctx.stride, ctx.padding)
        below = None if maps is None else maps.permute(2, 3, 0, 1)
        kernel, grad_bias = columns.kernel_gradient(
            shape, _places(features, ctx.padding), gradient.permute(2, 3, 0, 1), below
        )
        grad_weight = kernel.permute(0, 3, 1, 2)
    if wants_features:
        gradient = _through_relu(gradient, maps)
        grad_features = _plain_backward(ctx, gradient, features, weight, bias, [True, False, False])[0]
    return grad_features, grad_weight if wants_weight else None, grad_bias if wants_bias else None


def _transform_backward(
    ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, maps: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wants_features, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    gradient = _through_relu(gradient, maps)
    shape, images = shape_of(features, weight, ctx.stride, ctx.padding), len(features)
    plan = best_plan(shape, images)
    places, below = _places(features, ctx.padding), gradient.permute(2, 3, 0, 1)
    # planes are let go as soon as they have served; a second backward pass makes them again
    (X, W), ctx.planes = ctx.planes or (None, None), None
    at_once = (images_at_once(plan, images) or 1) if X is None else images  # planes are kept of all images
    if wants_features and W is None:
        W = list(transform.kernel_planes(plan, weight.permute(0, 2, 3, 1)))
    parts: list[Tensor] = []
    grad_weight = None
    for part, g in zip(places.split(at_once, 2), below.split(at_once, 2), strict=True):
        G = transform.map_planes(plan, g)
        if wants_features and W is not None:
            last = (len(parts) + 1) * at_once >= images
            parts.append(transform.features_gradient(plan, _used_up(W) if last else W, G, part.shape[2]))
        if wants_weight:
            kernel = transform.kernel_gradient(
                plan, transform.feature_planes(plan, part) if X is None else _used_up(X), G
            )
            grad_weight = kernel if grad_weight is None else grad_weight.add_(kernel)
    grad_features = None
    if wants_features:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        (H, V), (down, across) = features.shape[2:], ctx.padding
        grad_features = whole[down : down + H, across : across + V].permute(2, 3, 0, 1)
    return (
        grad_features,
        None if grad_weight is None else grad_weight.permute(0, 3, 1, 2),
        gradient.sum((0, 2, 3)) if wants_bias else None,
    )


def _used_up(planes: Made) -> Iterator[Tensor]:
    """The planes one after the other, each let go when the next is asked for."""
    while planes:
        yield planes.pop(0)


def _plain_backward(
    ctx: Any, gradient: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    sizes = None if bias is None else list(bias.shape)
    return torch.ops.aten.convolution_backward(
        gradient, features, weight, sizes, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, wanted
    )


def _through_relu(gradient: Tensor, maps: Tensor | None) -> Tensor:
    return gradient if maps is None else torch.ops.aten.threshold_backward(gradient, maps, 0)


def _places(features: Float[Tensor, "B C H W"], padding: Pair) -> Float[Tensor, "H W B C"]:
    """Padded features as the ways read them, places first; a view where there is no padding."""
    if any(padding):
        features = F.pad(features, (padding[1], padding[1], padding[0], padding[0]))
    return features.permute(2, 3, 0, 1)


class _Kept:
    """The planes of kernels, from one call without gradients to the next, until the kernel changes or goes."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Plan, Tensor, Made]] = {}

    def planes(self, plan: Plan, weight: Tensor) -> Made:
        """The planes of a kernel; those of the last call if it still holds the same numbers.

        All numbers are compared, which takes a fraction of the time of the transform: a version counter would miss
        changes through ``weight.data``.
        """
        entry = self._entries.get(id(weight))
        if entry is not None and entry[0]() is weight and entry[1] is plan and torch.equal(entry[2], weight):
            return entry[3]
        planes = list(transform.kernel_planes(plan, weight.detach().permute(0, 2, 3, 1)))
        key = id(weight)
        gone = weakref.ref(weight, lambda _: self._entries.pop(key, None))
        self._entries = {key: (gone, plan, weight.detach().clone(), planes)}
        return planes

    def forget(self, weight: Tensor) -> None:
        """Let the planes of a kernel go."""
        self._entries.pop(id(weight), None)


_kept = _Kept()
