"""[plan] How a convolution is cut into phases and tiles, and what the transform of it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from torchcaps.ops.convolution.basis import Axis, Group, group_planes

Pair = tuple[int, int]

MOST_OUTPUTS = 12
"""Of a tile along an axis; more save little, and cost accuracy and memory."""
MOVE = 40
"""Multiplications in the time in which a number is moved through a transform, in and out of memory."""
CALLS = 6_000_000
"""Multiplications in the time in which the products of a plane are called."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a convolution of one image."""

    channels: int
    """C."""
    outputs: int
    """O."""
    size: Pair
    """Height and width of the features, with their padding."""
    kernel: Pair
    """Height and width of the kernel."""
    stride: Pair
    """Down and across."""

    @property
    def out(self) -> Pair:
        """Height and width of the maps."""
        (H, W), (k, l), (s, t) = self.size, self.kernel, self.stride
        return (H - k) // s + 1, (W - l) // t + 1

    @property
    def multiplications(self) -> int:
        """Of the plain convolution."""
        return self.channels * self.outputs * math.prod(self.kernel) * math.prod(self.out)


@dataclass(frozen=True, eq=False)
class Matrices:
    """What takes features, kernels or maps to planes, in float32."""

    rows: list[slice]
    """Rows of the first axis that each group is made of."""
    length: int
    """Places along the second axis."""
    first: Tensor
    """Along the first axis: (rows, size)."""
    second: list[Tensor]
    """Along the second axis, of each group: (planes, rows of the group · size)."""


@dataclass(frozen=True)
class Plan:
    """A convolution in tiles of one size."""

    shape: Shape
    tile: Pair
    """Outputs of a tile, down and across."""

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """Both axes of a tile."""
        taps = (-(-k // s) for k, s in zip(self.shape.kernel, self.shape.stride, strict=True))
        first, second = (Axis(m, r) for m, r in zip(self.tile, taps, strict=True))
        return first, second

    @cached_property
    def tiles(self) -> Pair:
        """How many, down and across."""
        down, across = (-(-size // m) for size, m in zip(self.shape.out, self.tile, strict=True))
        return down, across

    @cached_property
    def covered(self) -> Pair:
        """Height and width of the features that the tiles read."""
        down, across = (
            s * ((t - 1) * m + axis.size)
            for s, t, m, axis in zip(self.shape.stride, self.tiles, self.tile, self.axes, strict=True)
        )
        return down, across

    @cached_property
    def phases(self) -> list[Pair]:
        """Rows and columns that a stride takes together, in an order that puts those of equal length side by side.

        First the phases with fewer taps down and all across, then all and all, all and fewer, fewer and fewer.
        """
        (k, l), (s, t) = self.shape.kernel, self.shape.stride
        down, across = ([k % s == 0 or p < k % s for p in range(s)] for k, s in ((k, s), (l, t)))
        order = [(False, True), (True, True), (True, False), (False, False)]
        every = ((p, q) for p in range(s) for q in range(t))
        return sorted(every, key=lambda phase: order.index((down[phase[0]], across[phase[1]])))

    def _span(self, down: bool, across: bool) -> slice:
        """The phases that matter at infinity, where only the last tap counts: those with all taps along that axis."""
        (k, l), (s, t) = self.shape.kernel, self.shape.stride
        all_down, all_across = k % s or s, l % t or t
        fewer_down, both, fewer_across = (s - all_down) * all_across, all_down * all_across, all_down * (t - all_across)
        if down:
            return slice(fewer_down, fewer_down + both + (0 if across else fewer_across))
        return slice(0, fewer_down + both if across else s * t)

    @cached_property
    def spans(self) -> list[list[slice]]:
        """For each plane of each group, the numbers along the summed axis (phases · C) that are not zero."""
        C = self.shape.channels
        spans = [[self._span(*ends) for ends in group.ends] for group in self._groups]
        return [[slice(C * span.start, C * span.stop) for span in each] for each in spans]

    @cached_property
    def features(self) -> Matrices:
        """Tiles of the features to planes."""
        first, second = self.axes
        return self._matrices(second.size, first.features, [group.features for group in self._groups])

    @cached_property
    def kernel(self) -> Matrices:
        """Kernels to planes."""
        first, second = self.axes
        return self._matrices(second.taps, first.kernel, [group.kernel for group in self._groups])

    @cached_property
    def maps(self) -> Matrices:
        """Gradients of the maps to planes; transposed, planes to maps."""
        first, second = self.axes
        return self._matrices(second.outputs, first.maps, [group.maps for group in self._groups])

    def _matrices(self, length: int, first: np.ndarray, second: list[np.ndarray]) -> Matrices:
        return Matrices(
            [group.rows for group in self._groups], length, _float(first), [_float(each) for each in second]
        )

    @cached_property
    def _groups(self) -> list[Group]:
        return list(group_planes(*self.axes))

    @cached_property
    def summed(self) -> int:
        """The length of the axis that the products sum over: phases · C."""
        return self.shape.channels * math.prod(self.shape.stride)

    @cached_property
    def planes(self) -> int:
        """How many, R."""
        return sum(map(len, self.spans))

    @cached_property
    def numbers_of_kernel(self) -> int:
        """What the kernel takes in work buffers: its planes, and what they are made from."""
        first, second = self.axes
        return self.summed * self.shape.outputs * (self.planes + first.size * second.taps)

    @cached_property
    def numbers_of_image(self) -> int:
        """What an image takes in work buffers: its planes, what they are made from, and the planes of its maps."""
        first, second = self.axes
        tiles = math.prod(self.tiles)
        return tiles * (self.summed * (self.planes + first.size * second.size) + self.planes * self.shape.outputs)

    def cost(self, images: int) -> float:
        """What the transform costs, in multiplications."""
        products = sum(span.stop - span.start for each in self.spans for span in each)
        multiplied = images * math.prod(self.tiles) * products * self.shape.outputs
        moved = self.numbers_of_kernel + images * self.numbers_of_image
        return float(multiplied + MOVE * moved + CALLS * self.planes)


@lru_cache(maxsize=256)
def best_plan(shape: Shape, images: int) -> Plan:
    """The tiles of least cost for so many images."""
    down, across = (
        sorted({-(-size // count) for count in range(1, size + 1) if -(-size // count) <= MOST_OUTPUTS})
        for size in shape.out
    )
    plans = [_plan(shape, (m, n)) for m in down for n in across if abs(m - n) <= 2 or len(down) * len(across) <= 4]
    return min(plans, key=lambda plan: plan.cost(images))


@lru_cache(maxsize=1024)
def _plan(shape: Shape, tile: Pair) -> Plan:
    return Plan(shape, tile)


def _float(matrix: np.ndarray) -> Tensor:
    return torch.as_tensor(matrix, dtype=torch.float32).contiguous()
