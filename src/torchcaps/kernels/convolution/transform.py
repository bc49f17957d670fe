"""[transform] Forward and backward pass of a convolution by products of planes; read it from top to bottom.

``README.md`` of :mod:`torchcaps.kernels` derives the steps. Inside, features are (H, W, B, C) and maps (h, w, B, O).
Positions come first, so that a step along an axis of positions is one matrix product. Its long axis, last in memory,
holds the numbers of a position. Kernels are (O, C, k, l), and each pass copies them to channels last once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.convolution.columns import multiply
from torchcaps.kernels.convolution.points import Matrices, Plan
from torchcaps.kernels.memory import new_empty
from torchcaps.kernels.threads import spread_over_threads


class Planes:
    """Planes (R, rows, columns) of each group, computed one group at a time on iteration.

    Args:
        matrices: Matrices from positions to planes, along the first axis and then along the second.
        column: Function that returns the numbers at a position of the second axis: (size of the first axis, numbers).
        shape: Shape of a plane.
    """

    def __init__(self, matrices: Matrices, column: Callable[[int], Tensor], shape: tuple[int, int]) -> None:
        self._matrices, self._shape = matrices, shape
        self._half = new_empty((len(matrices.first), matrices.length, math.prod(shape)))
        for place in range(matrices.length):
            torch.mm(matrices.first, column(place), out=self._half[:, place])

    def __iter__(self) -> Iterator[Float[Tensor, "R _ _"]]:
        numbers = self._half.shape[2]
        for matrix, each in zip(self._matrices.second, self._matrices.rows, strict=True):
            out = new_empty((len(matrix), numbers))
            yield torch.mm(matrix, self._half[each].view(-1, numbers), out=out).view(-1, *self._shape)


# ---- making and multiplying planes


def kernel_planes(plan: Plan, weight: Float[Tensor, "O C k l"]) -> Planes:
    """[W] Return the planes of a kernel, (R, S, O). S is the summed axis, phases · C."""
    O, C = weight.shape[:2]
    channels_last = weight.permute(0, 2, 3, 1)
    if not channels_last.is_contiguous():  # each step below reads all channels of one position
        channels_last = new_empty(channels_last.shape).copy_(channels_last)
    kernel = channels_last.permute(1, 2, 3, 0)
    size, (s, t), (k, l) = plan.axes[0].taps, plan.shape.stride, plan.shape.kernel
    column = new_empty((size, len(plan.phases), C, O))

    def fill(place: int) -> Tensor:
        for part, (p, q) in zip(column.unbind(1), plan.phases, strict=True):
            taps = len(range(p, k, s)) if t * place + q < l else 0
            if taps:
                part[:taps] = kernel[p::s, t * place + q]
            part[taps:] = 0
        return column.view(size, -1)

    return Planes(plan.kernel, fill, (plan.summed, O))


def feature_planes(plan: Plan, features: Float[Tensor, "H W B C"]) -> Planes:
    """[X] Return the planes of features, (R, N, S). N is tiles · images."""
    B, C = features.shape[2:]
    (first, second), (s, t), (down, across) = plan.axes, plan.shape.stride, plan.tiles
    windows = _cover(features, *plan.covered)
    windows = windows.unfold(0, s * first.size, s * first.outputs).unfold(1, t * second.size, t * second.outputs)
    column = new_empty((first.size, down, across, B, len(plan.phases), C))

    def fill(place: int) -> Tensor:
        for part, (p, q) in zip(column.unbind(4), plan.phases, strict=True):
            part.copy_(windows[..., p::s, t * place + q].movedim(4, 0))
        return column.view(first.size, -1)

    return Planes(plan.features, fill, (down * across * B, plan.summed))


def map_planes(plan: Plan, maps: Float[Tensor, "h w B O"]) -> Planes:
    """[G] Return the planes of the maps' gradient, (R, O, N)."""
    B, O = maps.shape[2:]
    (m, n), (down, across) = plan.tile, plan.tiles
    tiles = _cover(maps, down * m, across * n).unflatten(1, (across, n)).unflatten(0, (down, m))
    column = new_empty((m, O, down, across, B))

    def fill(place: int) -> Tensor:
        column.copy_(tiles[:, :, :, place].permute(1, 4, 0, 2, 3))
        return column.view(m, -1)

    return Planes(plan.maps, fill, (O, down * across * B))


def forward(
    plan: Plan, X: Iterable[Tensor], W: Iterable[Tensor], images: int, bias: Float[Tensor, "O"] | None, relu: bool
) -> Float[Tensor, "h w B O"]:
    """[maps] Convolve: multiply planes of features and kernel, transform back to positions, and apply the ReLU."""
    (m, n), (down, across), (h, w), O = plan.tile, plan.tiles, plan.shape.out, plan.shape.outputs
    maps = new_empty((down, m, across, n, images, O))

    def products() -> Iterator[Tensor]:
        for left, right, spans in zip(X, W, plan.spans, strict=True):
            planes = new_empty((len(left), left.shape[1], O))
            spread_over_threads(_multiply_maps, zip(left, right, planes, spans, strict=True))
            yield planes

    for place, column in _from_planes(plan.maps, products()):
        column = column.view(m, down, across, images, O).movedim(0, 1)
        if bias is not None:
            column = column.add_(bias)
        maps[:, :, :, place] = column.clamp_min_(0) if relu else column
    return maps.view(down * m, across * n, images, O)[:h, :w]


def kernel_gradient(plan: Plan, X: Iterable[Tensor], G: Iterable[Tensor]) -> Float[Tensor, "O C k l"]:
    """[grad kernel] Multiply planes of the maps' gradient and of the features, summed over tiles and images."""
    C, O, (s, t), (k, l) = plan.shape.channels, plan.shape.outputs, plan.shape.stride, plan.shape.kernel
    gradient = new_empty((O, k, l, C))

    def products() -> Iterator[Tensor]:
        for right, left, spans in zip(X, G, plan.spans, strict=True):
            planes = new_empty((len(left), O, plan.summed))
            spread_over_threads(_multiply_kernels, zip(right, left, planes, spans, strict=True))
            yield planes

    for place, column in _from_planes(plan.kernel, products()):
        parts = column.view(plan.axes[0].taps, O, len(plan.phases), C).unbind(2)
        for part, (p, q) in zip(parts, plan.phases, strict=True):
            if t * place + q < l:
                gradient[:, p::s, t * place + q] = part[: len(range(p, k, s))].transpose(0, 1)
    return new_empty((O, C, k, l)).copy_(gradient.permute(0, 3, 1, 2))


def features_gradient(plan: Plan, W: Iterable[Tensor], G: Iterable[Tensor], images: int) -> Float[Tensor, "H W B C"]:
    """[grad features] Multiply planes of the kernel and of the maps' gradient, and add overlapping tiles."""
    C, (s, t), (down, across) = plan.shape.channels, plan.shape.stride, plan.tiles
    (first, second), (height, width) = plan.axes, plan.shape.size
    reach = tuple(max(a, b) for a, b in zip(plan.covered, plan.shape.size, strict=True))
    gradient = new_empty((*reach, images, C))
    alone = down * across == 1
    if not alone or reach != plan.covered:
        gradient.zero_()

    def products() -> Iterator[Tensor]:
        for left, right, spans in zip(W, G, plan.spans, strict=True):
            planes = new_empty((len(left), plan.summed, right.shape[2]))
            spread_over_threads(_multiply_features, zip(left, right, planes, spans, strict=True))
            yield planes

    for place, column in _from_planes(plan.features, products()):
        parts = column.view(first.size, len(plan.phases), C, down, across, images).unbind(1)
        for part, (p, q) in zip(parts, plan.phases, strict=True):
            for i in range(down):
                for j in range(across):
                    start, at = s * i * first.outputs + p, t * (j * second.outputs + place) + q
                    rows = gradient[start : start + s * first.size : s, at]
                    tile = part[:, :, i, j].transpose(1, 2)
                    rows.copy_(tile) if alone else rows.add_(tile)
    return gradient[:height, :width]


# ---- the product of a plane, over the part of the summed axis that is not zero


def _multiply_maps(x: Tensor, kernel: Tensor, out: Tensor, span: slice) -> None:
    multiply(x[:, span], kernel[span], out)


def _multiply_kernels(x: Tensor, g: Tensor, out: Tensor, span: slice) -> None:
    multiply(g, x[:, span].contiguous(), _only(out, span, 1))


def _multiply_features(kernel: Tensor, g: Tensor, out: Tensor, span: slice) -> None:
    multiply(kernel[span], g, _only(out, span, 0))


# ---- back from planes


def _from_planes(matrices: Matrices, planes: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Apply the transpose of :class:`Planes`: yield positions of the second axis with (first axis, numbers)."""
    half = None
    for matrix, each, group in zip(matrices.second, matrices.rows, planes, strict=True):
        flat = group.flatten(1)
        if half is None:
            half = new_empty((len(matrices.first), matrices.length, flat.shape[1]))
        torch.mm(matrix.t(), flat, out=half[each].view(-1, flat.shape[1]))
    assert half is not None
    column = new_empty((matrices.first.shape[1], half.shape[2]))
    for place in range(matrices.length):
        torch.mm(matrices.first.t(), half[:, place], out=column)
        yield place, column


def _only(plane: Tensor, span: slice, axis: int) -> Tensor:
    """Return the part of a plane that a product fills, and set the rest to zero."""
    size = plane.shape[axis]
    if span.stop - span.start < size:
        plane.narrow(axis, 0, span.start).zero_()
        plane.narrow(axis, span.stop, size - span.stop).zero_()
    return plane.narrow(axis, span.start, span.stop - span.start)


def _cover(places: Float[Tensor, "H W B C"], height: int, width: int) -> Float[Tensor, "height width B C"]:
    """Cut or zero-pad features or maps to the size that the tiles cover."""
    H, W = places.shape[:2]
    if height <= H and width <= W:
        return places[:height, :width]
    whole = new_empty((height, width, *places.shape[2:])).zero_()
    whole[: min(H, height), : min(W, width)] = places[:height, :width]
    return whole
