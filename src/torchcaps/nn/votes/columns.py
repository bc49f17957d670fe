"""Votes on a map whose kernel lies inside the vote: each position has one vote of every input type for every output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.kernels.maps import (
    Options,
    Results,
    Slab,
    Tensors,
    Window,
    convolve,
    cropped,
    map_operation,
    slabs_of,
    window_sums,
)
from torchcaps.kernels.operation import Backend
from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.dynamic import dynamic_routing
from torchcaps.nn.votes.base import Votes, at_least_tiny
from torchcaps.nn.votes.competition import share_out
from torchcaps.tracing import is_graph_capture


class ColumnVotes(Votes):
    """Votes of T input types at each of L positions; a row is (image, position), position by position.

    The positions are innermost in memory, so sums and the softmax run along them without a copy of the votes.

    Args:
        columns: Votes in full precision.
        poses: Function that returns the input capsules of the rows. Called for routings that read poses.
        in_dim: Components of an input capsule (K).
        dtype: Dtype of the results.
    """

    def __init__(
        self, columns: Float[Tensor, "B T J D L"], poses: Callable[[], Tensor], in_dim: int, dtype: torch.dtype
    ) -> None:
        _, T, J, D, _ = columns.shape
        self.columns, self.size, self.dtype = columns, LayerSize(T, in_dim, J, D), dtype
        self._compute_poses: Callable[[], Tensor] = poses
        self._computed: Tensor | None = None

    @property
    def poses(self) -> Float[Tensor, "BL T K"]:
        """Mean of the capsules of a type that the vote of a row is computed from."""
        if self._computed is None:
            self._computed = self._compute_poses()
        return self._computed

    @property
    def like(self) -> Float[Tensor, "BL T"]:
        B, T, _, _, L = self.columns.shape
        return self.columns.new_empty(()).expand(B * L, T)

    def _by_image(self, x: Float[Tensor, "BL *more"]) -> Float[Tensor, "B *more L"]:
        B, *_, L = self.columns.shape
        return x.unflatten(0, (B, L)).movedim(1, -1)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        if coupling is None:
            return rows_of(self.columns.sum(1))
        shares = self._by_image(coupling.to(self.columns)).unsqueeze(3)
        return rows_of((shares * self.columns).sum(1))

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        return rows_of((self._by_image(parents.to(self.columns)).unsqueeze(1) * self.columns).sum(3))

    def build(self) -> Float[Tensor, "BL T J D"]:
        return rows_of(self.columns)

    def lengths(self) -> Float[Tensor, "BL T J"]:
        return rows_of(at_least_tiny(self.columns, 3).squeeze(3))

    def zeros(self) -> Float[Tensor, "BL T J"]:
        B, T, J, _, L = self.columns.shape
        return rows_of(self.columns.new_zeros(B, T, J, L))

    def _shares(self, logits: Float[Tensor, "BL T J"], axis: int, **options: bool) -> Float[Tensor, "BL T J"]:
        return rows_of(share_out(self._by_image(logits), axis, **options))

    def _hidden(self, mask: Bool[Tensor, "BL T"]) -> Votes:
        present = self._by_image(mask)[:, :, None, None]
        columns = self.columns.where(present, 0)
        return ColumnVotes(columns, lambda: self.poses.where(mask.unsqueeze(2), 0), self.size.in_dim, self.dtype)


class VotesOfTypes(NamedTuple):
    """The votes of a map's types for the outputs of a window, for all outputs or for those in a slab."""

    maps: Float[Tensor, "B T K *S"]
    """Capsules of each type, with the padding of the window, in full precision."""
    present: Float[Tensor, "#B #T *S"]
    """One for each capsule that is present; zero for masked capsules and padding."""
    kernel: Tensor
    """Kernel of the convolution."""
    bias: Tensor | None
    """Bias of the convolution."""
    groups: int
    """T if each type has a kernel, else 1."""
    window: Window
    """Kernel size, stride and padding."""
    out_sizes: tuple[int, ...]
    """Sizes of the output map."""
    size: LayerSize
    """Sizes T, K, J, D of a row."""
    mask: Bool[Tensor, "B T *S"] | None = None
    """True for each type that has a vote for an output position; None for all."""
    activations: Float[Tensor, "B T *S"] | None = None
    """Activations of the types at the output positions."""

    def slabs(self) -> list[Slab]:
        """Cut the outputs into slabs, within the working memory; one slab if the votes are few.

        A graph and ``torch.func`` get no slabs.
        """
        if is_graph_capture():
            return []
        T, _, J, D = self.size
        return slabs_of(self.window, self.maps, (T, J, D), self.out_sizes)

    def all_rows(self) -> tuple[Votes, Activations]:
        """Return votes and activations of all output positions."""
        return self._rows(self, [self.window.cut] * len(self.out_sizes), self.out_sizes)

    def of(self, slab: Slab) -> tuple[Votes, Activations]:
        """Return votes and activations of a slab."""
        part = self._replace(
            maps=slab.inputs(self.maps),
            present=slab.inputs(self.present),
            mask=None if self.mask is None else slab.outputs(self.mask),
            activations=None if self.activations is None else slab.outputs(self.activations),
        )
        return self._rows(part, [piece.skip for piece in slab.axes], slab.sizes)

    @staticmethod
    def _rows(part: VotesOfTypes, firsts: Sequence[int], sizes: Sequence[int]) -> tuple[Votes, Activations]:
        def poses() -> Float[Tensor, "BL T K"]:
            totals = sums(part.maps.flatten(0, 2)).unflatten(0, part.maps.shape[:3])
            counts = sums(part.present.flatten(0, 1)).unflatten(0, part.present.shape[:2]).clamp_min(1)
            return rows_of((totals / counts.unsqueeze(2)).flatten(3))

        sums = functools.partial(window_sums, window=part.window, firsts=firsts, sizes=sizes)
        T, K, J, D = part.size
        flat = part.maps.flatten(0, 1) if part.groups == 1 else part.maps.flatten(1, 2)
        columns = convolve(flat, part.kernel, part.bias, part.window, part.groups)
        columns = cropped(columns, firsts, sizes) if part.window.up else columns
        columns = columns.flatten(2)
        columns = columns.reshape(part.maps.shape[0], T, J, D, columns.shape[2])
        votes = ColumnVotes(columns, poses, K, part.maps.dtype)
        active = None if part.activations is None else rows_of(part.activations.flatten(2))
        return votes.masked(None if part.mask is None else rows_of(part.mask.flatten(2))), active


def route_columns(
    votes: VotesOfTypes, bias: Float[Tensor, "J D"] | None, num_iterations: int, eps: float, backend: Backend
) -> Float[Tensor, "B J D *S"]:
    """Return the output capsules of dynamic routing, computed slab by slab with a hand-written gradient."""
    kernel_size, stride, _, up = votes.window
    T, _, J, D = votes.size
    options = Options(
        (T, J, D), votes.out_sizes, kernel_size, stride, votes.window.cut, up, votes.groups, num_iterations, eps
    )
    return _route_map(Tensors(votes.maps, votes.kernel, votes.bias, bias), options, backend).capsules


def _route_all(tensors: Tensors, options: Options) -> Results:
    """Route the votes of all positions, slab by slab if they exceed the working memory."""
    (maps, kernel, vote_bias, bias), (T, J, D) = tensors, options.sizes
    window = Window(options.kernel_size, options.stride, options.cut, options.up)
    size = LayerSize(T, maps.shape[2], J, D)
    votes = VotesOfTypes(
        maps,
        maps.new_empty(1, 1, *maps.shape[3:]),
        kernel,
        vote_bias,
        options.groups,
        window,
        tuple(options.out_sizes),
        size,
    )
    routed = in_slabs(lambda some, _: dynamic_routing(some, options.num_iterations, bias=bias, eps=options.eps), votes)
    return Results(routed.poses.unflatten(0, (maps.shape[0], *options.out_sizes)).movedim((-2, -1), (1, 2)))


_route_map = map_operation(_route_all)


def in_slabs(work: Callable[[Votes, Activations], Routed], votes: VotesOfTypes) -> Routed:
    """Apply ``work`` to one slab of votes after the other, and join poses and activations, image by image.

    The backward pass computes a slab again, with the same random numbers.
    """
    slabs = votes.slabs()
    if len(slabs) <= 1:
        return work(*votes.all_rows())

    def of(slab: Slab) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return work(*votes.of(slab))[:2]
        results: tuple[Tensor | None, ...] = checkpoint(
            lambda part: work(*votes.of(part))[:2], slab, use_reentrant=False
        )
        return results

    parts_of_slabs = [of(slab) for slab in slabs]
    poses, activations = ([part for part in parts if part is not None] for parts in zip(*parts_of_slabs, strict=True))
    return Routed(_joined(poses, slabs), _joined(activations, slabs) if activations else None)


def _joined(parts: Sequence[Tensor], slabs: list[Slab]) -> Float[Tensor, "BL *more"]:
    """Join the rows of slabs to the rows of all images and positions."""
    boxes = [part.unflatten(0, (-1, *slab.sizes)) for part, slab in zip(parts, slabs, strict=True)]
    places = [(slab.images.start, *(piece.start for piece in slab.axes)) for slab in slabs]
    for axis in reversed(range(len(places[0]))):
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for place, box in zip(places, boxes, strict=True):
            groups.setdefault(place[:axis], []).append(box)
        places, boxes = list(groups), [torch.cat(group, axis) for group in groups.values()]
    return boxes[0].flatten(0, len(slabs[0].axes))


def rows_of(columns: Float[Tensor, "B *more L"]) -> Float[Tensor, "BL *more"]:
    """Return one row for each image and position."""
    return columns.movedim(-1, 1).flatten(0, 1)
