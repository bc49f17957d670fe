"""[points] Cut a convolution into phases and tiles, and make the matrices that transform a tile.

``README.md`` of :mod:`torchcaps.kernels` derives both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Pair = tuple[int, int]

INFINITY = complex("inf")
MAX_TILE_OUTPUTS = 12
"""Outputs of a tile along an axis; more save little, and cost accuracy and memory."""
MOVE_COST = 40
"""Cost of moving a number through a transform, in and out of memory, in multiplications."""
PLANE_COST = 6_000_000
"""Fixed cost of calling the products of a plane, in multiplications."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a convolution: C, O, and for one image the padded features, the kernel and the stride."""

    channels: int
    outputs: int
    size: Pair
    kernel: Pair
    stride: Pair

    @property
    def out(self) -> Pair:
        """Height and width of the maps."""
        (H, W), (k, l), (s, t) = self.size, self.kernel, self.stride
        return (H - k) // s + 1, (W - l) // t + 1


# ---- one axis


def points(n: int) -> list[complex]:
    """Return the points at which polynomials of ``n`` coefficients are evaluated: infinity, zero, roots of unity.

    Complex points come first, because they have the most planes, and later points reuse their memory. One of two
    conjugate points is enough. Real points are cheaper, but more than four (even n) or three (odd n) cost accuracy.
    """
    order = n - 1 if n % 2 else n - 2  # order of the roots of unity
    real = [INFINITY, 1 + 0j, -1 + 0j] if n % 2 else [INFINITY, 0j, 1 + 0j, -1 + 0j]
    return [*(complex(np.exp(2j * np.pi * k / order)) for k in range(1, order // 2)), *real[:n]]


def is_real(point: complex) -> bool:
    """Return True if the value of a real polynomial at a point is real; otherwise it is two real numbers."""
    return point == INFINITY or point.imag == 0


def evaluate(at: Sequence[complex], size: int) -> np.ndarray:
    """Return the matrix (n, size) from coefficients to values, with two rows for a complex point, otherwise one."""
    rows: list[np.ndarray] = []
    for point in at:
        if point == INFINITY:
            rows.append(np.eye(size)[-1])
            continue
        powers = np.power(point, np.arange(size))
        rows += [powers.real] if is_real(point) else [powers.real, powers.imag]
    return np.array(rows)


class Axis:
    """One axis of a tile: m outputs of a correlation with r taps (of the longest phase) from n = m + r − 1 values."""

    def __init__(self, outputs: int, taps: int) -> None:
        self.outputs, self.taps = outputs, taps
        self.size = outputs + taps - 1
        self.points = points(self.size)
        widths = [1 if is_real(point) else 2 for point in self.points]
        #: the rows of each point: two for a complex point, otherwise one
        self.rows = [slice(end - width, end) for end, width in zip(itertools.accumulate(widths), widths, strict=True)]
        features, kernel, maps = (evaluate(self.points, size) for size in (self.size, taps, outputs))
        #: matrices from a tile of the features (n), the taps of the kernel (r) and the outputs (m) to rows
        self.matrices = np.linalg.inv(features).T, kernel, maps


# ---- two axes, one inside the other


class Group(NamedTuple):
    """Planes of one point of the first axis with all points of the second axis."""

    rows: slice
    """Rows of the first axis from which the planes are computed."""
    matrices: list[np.ndarray]
    """Matrices from these rows of features, kernel and maps (n, r or m numbers each) to planes: (planes, rows · n)."""
    ends: list[tuple[bool, bool]]
    """For each plane, True for each axis where its point is infinity."""


def group_planes(first: Axis, second: Axis) -> Iterator[Group]:
    """Yield all planes of a tile: one for each real number of its transform, three for each complex number."""
    for rows, point in zip(first.rows, first.points, strict=True):
        width = rows.stop - rows.start
        numbers = [_numbers(width, columns, second.size) for columns in second.rows]
        values = np.concatenate([number for each in numbers for number in each])
        duals = iter(np.linalg.inv(values).T)
        planes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        ends: list[tuple[bool, bool]] = []
        for other, each in zip(second.points, numbers, strict=True):
            for number in each:
                before = len(planes)
                planes += _products([next(duals) for _ in number], list(number))
                ends += [(point == INFINITY, other == INFINITY)] * (len(planes) - before)
        along = (np.kron(np.eye(width), matrix) for matrix in second.matrices)
        matrices = [np.array(each) @ matrix for each, matrix in zip(zip(*planes, strict=True), along, strict=True)]
        yield Group(rows, matrices, ends)


def _numbers(width: int, columns: slice, size: int) -> list[np.ndarray]:
    """Return the numbers for rows of the first axis and columns of the second, as forms (1 or 2, width · size).

    A real number has one form; a complex number has two, its real and its imaginary part. Two complex axes give two
    complex numbers: the product of the points, and the product with one of them conjugated.
    """
    units = np.eye(width * size).reshape(width, size, -1)[:, columns]
    if width == 1 or units.shape[1] == 1:
        return [units.reshape(-1, width * size)]
    (rr, ri), (ir, ii) = units
    return [np.array([rr - ii, ri + ir]), np.array([rr + ii, ir - ri])]


def _products(dual: list[np.ndarray], value: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the planes of a number: forms of features, kernel and maps. The sum of their products is its share."""
    if len(value) == 1:
        return [(dual[0], value[0], value[0])]
    (dr, di), (vr, vi) = dual, value
    return [(dr + di, vr, vr + vi), (-dr, vr + vi, vi), (di, vi - vr, vr)]


# ---- a whole convolution


@dataclass(frozen=True, eq=False)
class Matrices:
    """Matrices from features, kernels or maps to planes, in float32. Their transposes lead back."""

    rows: list[slice]
    """Rows of the first axis for each group."""
    length: int
    """Number of positions along the second axis."""
    first: Tensor
    """Matrix along the first axis: (rows, size)."""
    second: list[Tensor]
    """Matrix along the second axis for each group: (planes, rows of the group · size)."""


class Plan:
    """A convolution in tiles of one size.

    Args:
        shape: Sizes of the convolution.
        tile: Outputs of a tile, down and across.
    """

    def __init__(self, shape: Shape, tile: Pair) -> None:
        self.shape, self.tile = shape, tile
        (m, n), (h, w), (k, l), (s, t), C = tile, shape.out, shape.kernel, shape.stride, shape.channels
        self.axes = first, second = Axis(m, -(-k // s)), Axis(n, -(-l // t))
        #: number of tiles, down and across, and height and width of the features that they read
        self.tiles = down, across = -(-h // m), -(-w // n)
        self.covered = s * ((down - 1) * m + first.size), t * ((across - 1) * n + second.size)
        # for each phase: does it have all taps down, and across? At infinity only the last tap counts. This order puts
        # the phases that have it side by side.
        whole = {(p, q): (k % s == 0 or p < k % s, l % t == 0 or q < l % t) for p in range(s) for q in range(t)}
        order = [(False, True), (True, True), (True, False), (False, False)]
        #: offsets (row, column) of the phases
        self.phases = sorted(whole, key=lambda phase: order.index(whole[phase]))
        #: the length of the axis that the products sum over, phases · C
        self.summed = C * s * t

        def span(at_infinity: tuple[bool, bool]) -> slice:
            axes = [axis for axis in range(2) if at_infinity[axis]]
            matter = [all(whole[phase][axis] for axis in axes) for phase in self.phases]
            start = matter.index(True)
            return slice(C * start, C * (start + sum(matter)))

        groups = list(group_planes(first, second))
        #: for each plane of each group, the slice of the summed axis that is not zero
        self.spans = [[span(ends) for ends in group.ends] for group in groups]
        self.planes = sum(map(len, self.spans))
        #: multiplications for an image and an output channel
        self.products_of_image = down * across * sum(span.stop - span.start for each in self.spans for span in each)
        rows = [group.rows for group in groups]
        self.features, self.kernel, self.maps = (
            Matrices(rows, along.shape[1], _float(matrix), [_float(group.matrices[n]) for group in groups])
            for n, (matrix, along) in enumerate(zip(first.matrices, second.matrices, strict=True))
        )
        #: numbers in the work buffers of the kernel and of an image: planes and their inputs
        self.numbers_of_kernel = self.summed * shape.outputs * (self.planes + first.size * second.taps)
        each = self.summed * (self.planes + first.size * second.size) + self.planes * shape.outputs
        self.numbers_of_image = down * across * each

    def cost(self, images: int) -> float:
        """Return the estimated cost of the transform in multiplications."""
        multiplied = images * self.products_of_image * self.shape.outputs
        moved = self.numbers_of_kernel + images * self.numbers_of_image
        return float(multiplied + MOVE_COST * moved + PLANE_COST * self.planes)


_plan = lru_cache(maxsize=1024)(Plan)


@lru_cache(maxsize=256)
def best_plan(shape: Shape, images: int) -> Plan:
    """Return the plan with the tile size of least cost for a number of images."""
    down, across = (
        sorted({-(-size // count) for count in range(1, size + 1) if -(-size // count) <= MAX_TILE_OUTPUTS})
        for size in shape.out
    )
    plans = [_plan(shape, (m, n)) for m in down for n in across if abs(m - n) <= 2 or len(down) * len(across) <= 4]
    return min(plans, key=lambda plan: plan.cost(images))


def _float(matrix: np.ndarray) -> Tensor:
    return torch.as_tensor(matrix, dtype=torch.float32).contiguous()
