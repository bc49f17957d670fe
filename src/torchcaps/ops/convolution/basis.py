"""[basis] The matrices of the transform, from the sizes of a correlation; ``README.md`` derives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

INFINITY = complex("inf")


def points(n: int) -> list[complex]:
    """Where polynomials of ``n`` coefficients are evaluated: infinity, zero, and roots of unity.

    Complex points come first, for their planes are the most, and what they take serves the others after them. Of two
    that are conjugate to each other, one stands for both. Real points are cheaper, and more of them than four for an
    even n, or three for an odd one, would cost accuracy.
    """
    order = n - 1 if n % 2 else n - 2  # of the roots of unity
    real = [INFINITY, 1 + 0j, -1 + 0j] if n % 2 else [INFINITY, 0j, 1 + 0j, -1 + 0j]
    return [*(complex(np.exp(2j * np.pi * k / order)) for k in range(1, order // 2)), *real[:n]]


def is_real(point: complex) -> bool:
    """Whether the value of a real polynomial at a point is one real number; else it is two."""
    return point == INFINITY or point.imag == 0


def evaluate(at: Sequence[complex], size: int) -> np.ndarray:
    """The matrix (n, size) from coefficients to values at points: a row each, and two where a value is complex."""
    rows: list[np.ndarray] = []
    for point in at:
        if point == INFINITY:
            rows.append(np.eye(size)[-1])
            continue
        powers = np.power(point, np.arange(size))
        rows += [powers.real] if is_real(point) else [powers.real, powers.imag]
    return np.array(rows)


class Axis:
    """One axis of a tile: m outputs of a correlation with r taps (of the longest phase), by n = m + r − 1 values."""

    def __init__(self, outputs: int, taps: int) -> None:
        self.outputs, self.taps = outputs, taps
        self.size = outputs + taps - 1
        self.points = points(self.size)
        widths = [1 if is_real(point) else 2 for point in self.points]
        #: the rows of each point: one, or two of a complex one
        self.rows = [slice(end - width, end) for end, width in zip(itertools.accumulate(widths), widths, strict=True)]
        #: from a tile of the features (n), the taps of the kernel (r) and the outputs (m) to rows
        self.features = np.linalg.inv(evaluate(self.points, self.size)).T
        self.kernel = evaluate(self.points, taps)
        self.maps = evaluate(self.points, outputs)


class Group(NamedTuple):
    """The planes of one point of the first axis with all points of the second one."""

    rows: slice
    """The rows of the first axis that they are made of."""
    features: np.ndarray
    """From these rows, each with the numbers along the second axis, to planes: (planes, rows · n)."""
    kernel: np.ndarray
    """Likewise (planes, rows · r)."""
    maps: np.ndarray
    """Likewise (planes, rows · m)."""
    ends: list[tuple[bool, bool]]
    """For each plane, whether its points of the first and of the second axis are infinity."""


def group_planes(first: Axis, second: Axis) -> Iterator[Group]:
    """All planes of a tile: one for each real number of its transform, three for each complex one."""
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
        features, kernel, maps = (np.array(each) for each in zip(*planes, strict=True))
        along = [np.kron(np.eye(width), matrix) for matrix in (second.features, second.kernel, second.maps)]
        yield Group(rows, features @ along[0], kernel @ along[1], maps @ along[2], ends)


def _numbers(width: int, columns: slice, size: int) -> list[np.ndarray]:
    """The numbers that rows of the first axis and columns of the second make, as forms (1 or 2, width · size).

    A real number is one form, a complex one two, its real and its imaginary part. Two complex axes make two complex
    numbers: the product of the points, and that with one of them conjugated.
    """
    units = np.eye(width * size).reshape(width, size, -1)[:, columns]
    if width == 1 or units.shape[1] == 1:
        return [units.reshape(-1, width * size)]
    (rr, ri), (ir, ii) = units
    return [np.array([rr - ii, ri + ir]), np.array([rr + ii, ir - ri])]


def _products(dual: list[np.ndarray], value: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The planes of a number: forms of features, kernel and maps whose products, summed, make its share."""
    if len(value) == 1:
        return [(dual[0], value[0], value[0])]
    (dr, di), (vr, vi) = dual, value
    return [(dr + di, vr, vr + vi), (-dr, vr + vi, vi), (di, vi - vr, vr)]
