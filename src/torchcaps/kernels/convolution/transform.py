"""[transform] Forward and backward pass of a convolution by products of planes; read it from top to bottom.

``README.md`` of :mod:`torchcaps.kernels` derives the steps. Inside, features are (H, W, B, C) and maps (h, w, B, O).
Positions come first, so that a step along an axis of positions is one matrix product. Its long axis, last in memory,
holds the numbers of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.convolution.columns import multiply
from torchcaps.kernels.convolution.points import Matrices, Plan
from torchcaps.kernels.memory import Buffers, block_bytes, cut, new_empty
from torchcaps.kernels.threads import Stage, spread_over_threads

MAX_CHUNK_MIB = 4.0
"""MiB of positions and of their transform in a chunk, for each thread; both stay in the caches."""

Chunk = tuple[slice, Callable[[Tensor], object]]
"""Some of the numbers of a position, and a function that reads or writes them at all positions: a tensor (size of the
first axis, size of the second axis, numbers)."""


# ---- making planes


def kernel_planes(plan: Plan, weight: Float[Tensor, "O C k l"]) -> list[Float[Tensor, "R S O"]]:
    """[W] Return the planes of a kernel for each group. S is the summed axis, phases · C."""
    (O, C), (s, t) = weight.shape[:2], plan.shape.stride

    def read(phase: tuple[int, int], channels: slice, positions: Tensor) -> None:
        p, q = phase
        taps = weight[:, channels, p::s, q::t].permute(2, 3, 1, 0)  # the shorter phases lack the last taps
        positions[: len(taps), : taps.shape[1]] = taps.flatten(2)
        positions[len(taps) :] = 0
        positions[:, taps.shape[1] :] = 0

    chunks: list[Chunk] = []
    for n, phase in enumerate(plan.phases):
        chunks += [(_range(each, O, n * C), partial(read, phase, each)) for each in _cut(plan.kernel, C, O)]
    return _planes(plan.kernel, chunks, (plan.summed, O))


def feature_planes(plan: Plan, features: Float[Tensor, "H W B C"]) -> list[Float[Tensor, "R N S"]]:
    """[X] Return the planes of features for each group. N is tiles · images."""
    B, C = features.shape[2:]
    (first, second), (s, t), (down, across) = plan.axes, plan.shape.stride, plan.tiles
    covered = _cover(features, *plan.covered)

    def read(i: int, j: int, images: slice, positions: Tensor) -> None:
        top, left = s * i * first.outputs, t * j * second.outputs
        parts = positions.view(first.size, second.size, -1, len(plan.phases), C).unbind(3)
        for part, (p, q) in zip(parts, plan.phases, strict=True):
            part.copy_(covered[top + p :: s, left + q :: t, images][: first.size, : second.size])

    chunks: list[Chunk] = []
    for n, (i, j) in enumerate(_tiles(plan)):
        images = _cut(plan.features, B, plan.summed)
        chunks += [(_range(each, plan.summed, n * B), partial(read, i, j, each)) for each in images]
    return _planes(plan.features, chunks, (down * across * B, plan.summed))


def map_planes(plan: Plan, maps: Float[Tensor, "h w B O"]) -> list[Float[Tensor, "R O N"]]:
    """[G] Return the planes of the maps' gradient for each group."""
    B, O = maps.shape[2:]
    (m, n), (down, across) = plan.tile, plan.tiles
    tiles = _cover(maps, down * m, across * n).unflatten(1, (across, n)).unflatten(0, (down, m))

    def read(outputs: slice, positions: Tensor) -> None:
        positions.view(m, n, -1, down, across, B).copy_(tiles[..., outputs].permute(1, 3, 5, 0, 2, 4))

    N = down * across * B
    chunks: list[Chunk] = [(_range(each, N), partial(read, each)) for each in _cut(plan.maps, O, N)]
    return _planes(plan.maps, chunks, (O, N))


# ---- multiplying planes


def forward(
    plan: Plan,
    X: Iterable[Tensor],
    W: Iterable[Tensor],
    images: int,
    bias: Float[Tensor, "O"] | None,
    relu: bool,
) -> Float[Tensor, "h w B O"]:
    """[maps] Convolve: multiply planes of features and kernel, transform back to positions, and apply the ReLU."""
    (m, n), (down, across), (h, w), O = plan.tile, plan.tiles, plan.shape.out, plan.shape.outputs
    maps = new_empty((down, m, across, n, images, O))

    def products() -> Iterator[Products]:
        for left, right, spans in zip(X, W, plan.spans, strict=True):
            planes = new_empty((len(left), left.shape[1], O))
            yield planes, map(partial, [_multiply_maps] * len(left), left, right, planes, spans)

    def write(i: int, j: int, some: slice, positions: Tensor) -> None:
        tile = positions.view(m, n, -1, O)
        if bias is not None:
            tile.add_(bias)
        maps[i, :, j, :, some] = tile.clamp_min_(0) if relu else tile

    chunks: list[Chunk] = []
    for number, (i, j) in enumerate(_tiles(plan)):
        parts = _cut(plan.maps, images, O)
        chunks += [(_range(each, O, number * images), partial(write, i, j, each)) for each in parts]
    _from_planes(plan.maps, products(), chunks)
    return maps.view(down * m, across * n, images, O)[:h, :w]


def kernel_gradient(plan: Plan, X: Iterable[Tensor], G: Iterable[Tensor]) -> Float[Tensor, "O C k l"]:
    """[grad kernel] Multiply planes of the maps' gradient and of the features, summed over tiles and images."""
    C, O, (s, t), (k, l) = plan.shape.channels, plan.shape.outputs, plan.shape.stride, plan.shape.kernel
    gradient = torch.empty(0)

    def products() -> Iterator[Products]:
        nonlocal gradient
        for right, left, spans in zip(X, G, plan.spans, strict=True):
            planes = new_empty((len(left), O, plan.summed))
            yield planes, map(partial, [_multiply_kernels] * len(left), right, left, planes, spans)
        gradient = new_empty((O, C, k, l))  # only now, so that it takes the memory of planes

    def write(outputs: slice, positions: Tensor) -> None:
        parts = positions.view(*positions.shape[:2], -1, len(plan.phases), C).unbind(3)
        for part, (p, q) in zip(parts, plan.phases, strict=True):
            taps = gradient[outputs, :, p::s, q::t]
            taps.copy_(part[: taps.shape[2], : taps.shape[3]].permute(2, 3, 0, 1))

    _from_planes(
        plan.kernel,
        products(),
        [(_range(each, plan.summed), partial(write, each)) for each in _cut(plan.kernel, O, plan.summed)],
    )
    return gradient


def features_gradient(plan: Plan, W: Iterable[Tensor], G: Iterable[Tensor], images: int) -> Float[Tensor, "H W B C"]:
    """[grad features] Multiply planes of the kernel and of the maps' gradient, and add overlapping tiles."""
    C, (s, t), (down, across) = plan.shape.channels, plan.shape.stride, plan.tiles
    (first, second), (height, width) = plan.axes, plan.shape.size
    reach = tuple(max(a, b) for a, b in zip(plan.covered, plan.shape.size, strict=True))
    gradient = new_empty((*reach, images, C))
    alone = down * across == 1
    if not alone or reach != plan.covered:
        gradient.zero_()

    def products() -> Iterator[Products]:
        for left, right, spans in zip(W, G, plan.spans, strict=True):
            planes = new_empty((len(left), plan.summed, right.shape[2]))
            yield planes, map(partial, [_multiply_features] * len(left), left, right, planes, spans)

    def write(phase: tuple[int, int], channels: slice, positions: Tensor) -> None:
        tiles = positions.view(first.size, second.size, -1, down, across, images).movedim(2, -1)
        for i, j in _tiles(plan):
            top, left = s * i * first.outputs + phase[0], t * j * second.outputs + phase[1]
            rows = gradient[top : top + s * first.size : s, left : left + t * second.size : t, :, channels]
            tile = tiles[:, :, i, j]
            rows.copy_(tile) if alone else rows.add_(tile)

    chunks: list[Chunk] = []
    N = down * across * images
    for n, phase in enumerate(plan.phases):
        chunks += [(_range(each, N, n * C), partial(write, phase, each)) for each in _cut(plan.features, C, N)]
    _from_planes(plan.features, products(), chunks)
    return gradient[:height, :width]


# ---- the product of a plane, over the part of the summed axis that is not zero


def _multiply_maps(x: Tensor, kernel: Tensor, out: Tensor, span: slice) -> None:
    multiply(x[:, span], kernel[span], out)


def _multiply_kernels(x: Tensor, g: Tensor, out: Tensor, span: slice) -> None:
    multiply(g, x[:, span].contiguous(), _only(out, span, 1))


def _multiply_features(kernel: Tensor, g: Tensor, out: Tensor, span: slice) -> None:
    multiply(kernel[span], g, _only(out, span, 0))


def _only(plane: Tensor, span: slice, axis: int) -> Tensor:
    """Return the part of a plane that a product fills, and set the rest to zero."""
    size = plane.shape[axis]
    if span.stop - span.start < size:
        plane.narrow(axis, 0, span.start).zero_()
        plane.narrow(axis, span.stop, size - span.stop).zero_()
    return plane.narrow(axis, span.start, span.stop - span.start)


# ---- between positions and planes


Products = tuple[Tensor, Iterable[Callable[[], object]]]
"""Planes of a group, and the products that compute them."""


def _planes(matrices: Matrices, chunks: Sequence[Chunk], shape: tuple[int, int]) -> list[Tensor]:
    """Return planes (R, rows, columns) for each group, made along the first axis and then along the second."""
    groups = [new_empty((len(matrix), *shape)) for matrix in matrices.second]
    buffers = Buffers(groups[0])

    def make(numbers: slice, read: Callable[[Tensor], object]) -> None:
        (rows, size), places, length = matrices.first.shape, matrices.length, numbers.stop - numbers.start
        positions = buffers.take("positions", (size, places, length))
        read(positions)
        half = buffers.take("half", (rows, places, length))
        torch.mm(matrices.first, positions.flatten(1), out=half.flatten(1))
        for matrix, each, group in zip(matrices.second, matrices.rows, groups, strict=True):
            torch.mm(matrix, half[each].view(-1, length), out=group.flatten(1)[:, numbers])

    spread_over_threads([partial(make, *chunk) for chunk in chunks])
    return groups


def _from_planes(matrices: Matrices, groups: Iterator[Products], chunks: Sequence[Chunk]) -> None:
    """Apply the transpose of :func:`_planes`. Products of a group run beside the transform of the group before it."""
    (rows, size), places = matrices.first.shape, matrices.length
    lengths = [numbers.stop - numbers.start for numbers, _ in chunks]
    halves = new_empty((rows * places * sum(lengths),)).split([rows * places * length for length in lengths])
    halves = [half.view(rows, places, length) for half, length in zip(halves, lengths, strict=True)]

    def transform(matrix: Tensor, each: slice, planes: Tensor) -> Iterator[Callable[[], object]]:
        flat = planes.flatten(1)
        for (numbers, _), half in zip(chunks, halves, strict=True):
            yield partial(torch.mm, matrix.t(), flat[:, numbers], out=half[each].view(-1, half.shape[2]))

    buffers = Buffers(halves[0])

    def finish(half: Tensor, write: Callable[[Tensor], object]) -> None:
        positions = buffers.take("positions", (size, places, half.shape[2]))
        torch.mm(matrices.first.t(), half.flatten(1), out=positions.flatten(1))
        write(positions)

    def pieces() -> Iterator[Callable[[], object]]:
        stages: list[Stage] = []
        for planes, products in groups:
            yield from (multiplied := Stage(products))
            if stages:  # these wait for products that are finished by now
                yield from stages[-1]
            matrix, each = matrices.second[len(stages)], matrices.rows[len(stages)]
            stages.append(Stage(transform(matrix, each, planes), multiplied))
            del planes, products  # free memory before the next group is made
        yield from stages[-1]
        yield from Stage(
            (partial(finish, half, write) for half, (_, write) in zip(halves, chunks, strict=True)), *stages
        )

    spread_over_threads(pieces())


def _cut(matrices: Matrices, items: int, numbers: int) -> list[slice]:
    """Cut items with some numbers at each position into slices, for chunks that stay in the caches."""
    rows, size = matrices.first.shape
    bytes_of_item = 4 * (rows + size) * matrices.length * numbers
    return cut(items, bytes_of_item, block_bytes(matrices.first.device, MAX_CHUNK_MIB, torch.get_num_threads()))


def _range(items: slice, numbers: int, start: int = 0) -> slice:
    """Return the slice of the numbers of some items, after the numbers of ``start`` other items."""
    return slice((start + items.start) * numbers, (start + items.stop) * numbers)


def _tiles(plan: Plan) -> list[tuple[int, int]]:
    """Return the places of all tiles, row by row."""
    down, across = plan.tiles
    return [(i, j) for i in range(down) for j in range(across)]


def _cover(places: Float[Tensor, "H W B C"], height: int, width: int) -> Float[Tensor, "height width B C"]:
    """Cut or zero-pad features or maps to the size that the tiles cover."""
    H, W = places.shape[:2]
    if height <= H and width <= W:
        return places[:height, :width]
    whole = new_empty((height, width, *places.shape[2:])).zero_()
    whole[: min(H, height), : min(W, width)] = places[:height, :width]
    return whole
