"""[compiled] The convolution as one opaque operation for ``torch.compile``.

The algorithm is chosen at each call, because a graph may serve any number of images. The compiler must know the memory
order of results in advance, so the sizes of the kernel alone decide it. A compiled graph passes only tensors from
forward to backward, so the planes wait outside the graph for their ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.convolution.choice import MIN_CHANNELS, MIN_TRIMMED_OUTPUTS, Way, choose, plain_layout
from torchcaps.ops.convolution.passes import KeptPlanes, Pass, backward, forward
from torchcaps.ops.convolution.points import Shape
from torchcaps.ops.tickets import Tickets

_planes = Tickets[KeptPlanes]()


def _shape_of(features: Tensor, weight: Tensor, stride: Sequence[int]) -> Shape:
    (_, C, H, W), (O, _, k, l), (s, t) = features.shape, weight.shape, stride
    return Shape(C, O, (H, W), (k, l), (s, t))


def _way(shape: Shape, images: int, learning: bool) -> Way:
    return choose(shape, images, learning) if images else "plain"


def _order(weight: Tensor) -> tuple[int, int, int, int]:
    """Return the memory order of the axes of maps and of the features' gradient.

    Channels are last, as in PyTorch's convolution, if that is the usual algorithm; otherwise it is (h, w, B, O).
    """
    outputs, channels = weight.shape[:2]
    by_columns = channels < MIN_CHANNELS and outputs >= MIN_TRIMMED_OUTPUTS  # of many images
    plain_is_usual = not by_columns and plain_layout(weight) == torch.channels_last
    return (0, 2, 3, 1) if plain_is_usual else (2, 3, 0, 1)


def _in_order(maps: Tensor, weight: Tensor) -> Tensor:
    order = _order(weight)
    return maps.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


def _empty_in_order(like: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty_permuted(tuple(shape), _order(weight), dtype=like.dtype, device=like.device)


# ---- forward


def _forward(
    features: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], relu: bool, learning: bool
) -> tuple[Tensor, Tensor]:
    shape = _shape_of(features, weight, stride)
    way = _way(shape, len(features), learning)
    maps, planes = forward(features, weight, bias, shape, relu, way, learning)
    return _in_order(maps, weight), _planes.leave(planes)


def _forward_fake(
    features: Tensor, weight: Tensor, _bias: Any, stride: Sequence[int], *_options: Any
) -> tuple[Tensor, Tensor]:
    height, width = _shape_of(features, weight, stride).out
    maps = _empty_in_order(features, weight, (features.shape[0], weight.shape[0], height, width))
    return maps, features.new_empty(1)


# ---- backward; a gradient that is not needed is an empty tensor


def _backward(
    gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    maps: Tensor | None,
    ticket: Tensor,
    stride: Sequence[int],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _shape_of(features, weight, stride)
    done = Pass(shape, _way(shape, len(features), True), _planes.take(ticket))
    of_features, of_weight, of_bias = backward(done, gradient, features, weight, bias, maps, wanted)
    return (
        features.new_empty(0) if of_features is None else _in_order(of_features, weight),
        features.new_empty(0) if of_weight is None else of_weight.contiguous(),
        features.new_empty(0) if of_bias is None else of_bias.contiguous(),
    )


def _backward_fake(
    _gradient: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    _maps: Any,
    _ticket: Any,
    _stride: Any,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_in_order(features, weight, features.shape) if wanted[0] else features.new_empty(0),
        weight.new_empty(weight.shape) if wanted[1] else features.new_empty(0),
        bias.new_empty(bias.shape) if wanted[2] and bias is not None else features.new_empty(0),
    )


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (features, weight, bias, ctx.stride, relu, _), (maps, ticket) = inputs, output
    ctx.mark_non_differentiable(ticket)
    ctx.save_for_backward(features, weight, bias, maps if relu else None, ticket)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> Any:
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward_operation(gradient, *ctx.saved_tensors, ctx.stride, wanted)
    return *(grad if want else None for grad, want in zip(found, wanted, strict=True)), None, None, None


compiled_convolve = torch.library.custom_op(
    "torchcaps::convolve",
    _forward,
    mutates_args=(),
    schema="(Tensor features, Tensor weight, Tensor? bias, int[] stride, bool relu, bool learning) -> (Tensor, Tensor)",
)
compiled_convolve.register_fake(_forward_fake)
compiled_convolve.register_autograd(_gradients, setup_context=_save)
_backward_operation = torch.library.custom_op(
    "torchcaps::convolve_backward",
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor gradient, Tensor features, Tensor weight, Tensor? bias, Tensor? maps, Tensor ticket, int[] stride, "
        "bool[] wanted) -> (Tensor, Tensor, Tensor)"
    ),
)
_backward_operation.register_fake(_backward_fake)
