"""Kernels on maps of one to three axes, and convolutions of whole maps or of slabs of them.

``*S`` are the sizes of a map, one to three of them. A slab is a box of outputs of some images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.memory import piece, slices


class Piece(NamedTuple):
    """Some outputs along an axis, and the positions of the padded map that they see."""

    start: int
    stop: int
    first: int
    length: int
    skip: int
    """Outputs of the convolution of these positions before ``start``."""


class Slab(NamedTuple):
    """A box of outputs of some images."""

    images: slice
    axes: tuple[Piece, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs along each axis."""
        return tuple(piece.stop - piece.start for piece in self.axes)

    @property
    def positions(self) -> int:
        """Number of output positions of an image."""
        return math.prod(self.sizes)

    def outputs(self, maps: Float[Tensor, "B *more"]) -> Float[Tensor, "b *more"]:
        """Return the part of maps of outputs (B, …, *S) that belongs to the slab, as a view."""
        return self._of(maps, [(piece.start, piece.stop - piece.start) for piece in self.axes])

    def inputs(self, maps: Float[Tensor, "B *more"]) -> Float[Tensor, "b *more"]:
        """Return the part of padded maps (B, …, *S) that the slab sees, as a view."""
        return self._of(maps, [(piece.first, piece.length) for piece in self.axes])

    def _of(self, maps: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        maps = maps if maps.shape[0] == 1 else maps[self.images]
        for axis, (first, length) in enumerate(ranges, maps.ndim - len(ranges)):
            maps = maps.narrow(axis, first, length)
        return maps


class Window(NamedTuple):
    """A kernel that moves over a map, the same along each axis."""

    kernel: int
    """Side of the kernel, positions."""
    stride: int
    """Down: input positions from one output to the next. Up: outputs from one input position to the next."""
    padding: int | Literal["same"]
    """Zeros on both sides. ``"same"``: as many as ⌈size / stride⌉ outputs need (up: size·stride outputs), of which the
    smaller half is before the map, as in TensorFlow. Up, the outputs that zeros would have given are cut off."""
    up: bool = False
    """A transposed convolution."""

    def outputs(self, size: int) -> int:
        """Return the number of outputs along an axis of ``size`` positions."""
        kernel, stride, padding, up = self
        if padding == "same":
            return size * stride if up else -(-size // stride)
        return (size - 1) * stride + kernel - 2 * padding if up else (size + 2 * padding - kernel) // stride + 1

    def least(self) -> int:
        """Return the smallest size of an axis that gives an output."""
        if self.padding == "same":
            return 1
        if not self.up:
            return max(self.kernel - 2 * self.padding, 1)
        return max(-(-(1 + 2 * self.padding - self.kernel) // self.stride) + 1, 1)

    def zeros(self, size: int) -> tuple[int, int]:
        """Return the zeros before and after an axis; none for windows that go up."""
        if self.up:
            return 0, 0
        if self.padding != "same":
            return self.padding, self.padding
        total = max(self.kernel - ((size - 1) % self.stride + 1), 0)
        return total // 2, total - total // 2

    @property
    def cut(self) -> int:
        """The number of outputs cut off before the first one; for windows that go up."""
        if not self.up:
            return 0
        return (self.kernel - self.stride) // 2 if self.padding == "same" else self.padding

    def padded(self, maps: Float[Tensor, "B *more"], axes: int) -> Float[Tensor, "B *padded"]:
        """Return maps with zeros around their last ``axes`` axes."""
        zeros = [self.zeros(size) for size in reversed(maps.shape[-axes:])]
        return F.pad(maps, [number for pair in zeros for number in pair]) if any(map(any, zeros)) else maps

    def piece(self, size: int, start: int, stop: int) -> Piece:
        """Return the piece of a padded axis of ``size`` positions that outputs ``start`` to ``stop`` see."""
        k, s = self.kernel, self.stride
        if not self.up:
            return Piece(start, stop, start * s, (stop - start - 1) * s + k, 0)
        first = max(-(-(start + self.cut - k + 1) // s), 0)
        last = min((stop - 1 + self.cut) // s, size - 1)
        return Piece(start, stop, first, last - first + 1, start + self.cut - first * s)

    def slabs(
        self, images: int, padded: Sequence[int], outs: Sequence[int], position_bytes: int, most: int
    ) -> list[Slab]:
        """Cut the outputs of a batch into slabs of nearly equal size: by images, then lines, then along the next axis.

        Args:
            images: Number of images (B).
            padded: Sizes of the maps with their padding.
            outs: Sizes of the outputs.
            position_bytes: Bytes of the votes for one output position.
            most: Bytes of votes in a slab. A slab has at least one line, or one position of a volume's planes.
        """
        lengths, of_image = list(outs), position_bytes * math.prod(outs)
        for axis in range(min(len(outs), 2)):
            if of_image <= most:
                break
            row = of_image // lengths[axis]
            lengths[axis] = piece(outs[axis], max(1, most // row))
            of_image = row * lengths[axis]
        together = piece(images, max(1, most // max(of_image, 1)))
        cuts = [
            [self.piece(size, part.start, part.stop) for part in slices(out, length)]
            for size, out, length in zip(padded, outs, lengths, strict=True)
        ]
        return [Slab(part, axes) for part in slices(images, together) for axes in product(*cuts)]


def convolve(
    maps: Float[Tensor, "N C *S"], kernel: Tensor, bias: Tensor | None, window: Window, groups: int = 1
) -> Float[Tensor, "N O *S"]:
    """Convolve maps without padding, up or down; kernels are as in PyTorch's convolutions."""
    n = maps.ndim - 2
    return torch.convolution(maps, kernel, bias, [window.stride] * n, [0] * n, [1] * n, window.up, [0] * n, groups)


def cropped(maps: Float[Tensor, "N O *S"], firsts: Sequence[int], sizes: Sequence[int]) -> Float[Tensor, "N O *S"]:
    """Return the box of maps that begins at ``firsts`` along the last axes, as a view."""
    for axis, (first, size) in enumerate(zip(firsts, sizes, strict=True), maps.ndim - len(sizes)):
        maps = maps.narrow(axis, first, size)
    return maps


def window_sums(
    numbers: Float[Tensor, "N *S"], window: Window, firsts: Sequence[int], sizes: Sequence[int]
) -> Float[Tensor, "N *S"]:
    """Return the sum of the numbers of a padded map that each output of a box sees."""
    ones = numbers.new_ones(1, 1, *[window.kernel] * len(sizes))
    sums = convolve(numbers.unsqueeze(1), ones, None, window).squeeze(1)
    return cropped(sums, firsts, sizes) if window.up else sums


def repeated(maps: Float[Tensor, "*more *S"], axes: int, times: int) -> Float[Tensor, "*more *S"]:
    """Repeat each position along the last ``axes`` axes."""
    if times == 1:
        return maps
    return (
        F.interpolate(maps.flatten(0, -axes - 1).unsqueeze(1), scale_factor=times)
        .unflatten(0, maps.shape[:-axes])
        .squeeze(-axes - 1)
    )
