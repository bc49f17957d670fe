"""Base class of capsule layers on maps of one to three axes: lines, planes and volumes."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, Capsules, Grid, LayerSize, Routed
from torchcaps.nn.column_votes import VotesOfTypes, in_slabs, route_columns, rows_of
from torchcaps.nn.convolutions import normalise
from torchcaps.nn.layers import CapsuleLayer, RoutingSpec, TransformSpec
from torchcaps.nn.map_votes import by_type
from torchcaps.nn.routing.dynamic import DynamicRouting
from torchcaps.nn.transforms import Dense, Shared, Transform
from torchcaps.nn.votes import Votes
from torchcaps.ops.precision import computed_in_full_precision, full_dtype
from torchcaps.ops.windows import Window, repeated, window_sums
from torchcaps.parts import build
from torchcaps.tracing import has_hooks, is_eager
from torchcaps.words import counted

Voters = Literal["places", "types"]
"""Voters of an output position: each capsule of its window, or each input type with one vote for the window."""
SIZES = {1: "length", 2: "height and width", 3: "depth, height and width"}
"""The sizes of a map, in words."""


class MapLayer(CapsuleLayer):
    """Base class of capsule layers on a map. A row of votes is an output position of an image.

    With ``voters="types"``, the vote of type t for component d of output j at position p is a convolution of the
    type's map, so the kernel lies inside the vote: V[t, j, d, p] = Σ_k Σ_q W[j, d, k, q] u[t, k, s·p + q - before],
    with the stride s and the padding before the map.

    The votes of a large map are computed and routed slab by slab, within :func:`torchcaps.set_working_memory`, and
    again in the backward pass. Dynamic routing without further options never keeps votes. All votes are computed at
    once if the coupling is requested, if the routing is not :attr:`~torchcaps.nn.Routing.by_row`, and for exports,
    ``torch.compile`` and ``torch.func``.

    Args:
        window: The kernel.
        dims: Axes of the map.
        in_types: Capsule types of the input map (T).
        in_dim: Components of an input capsule (K).
        layer_types: Types of the output map (J).
        capsule_dim: Components of an output capsule (D).
        voters: What votes for an output position.
        repeat: How often each position of the input is repeated along each axis.
        competing_windows: Windows that compete for an input capsule.
        vote_bias: Add a learned number to each component of a vote.
        pose_norm: Normalise poses over the batch.
        transform: The transform.
        routing: The routing.
    """

    def __init__(
        self,
        window: Window,
        dims: int,
        in_types: int,
        in_dim: int,
        layer_types: int,
        capsule_dim: int,
        *,
        voters: Voters = "types",
        repeat: int = 1,
        competing_windows: int = 1,
        vote_bias: bool,
        pose_norm: bool,
        transform: TransformSpec,
        routing: RoutingSpec,
    ) -> None:
        self._check_window(window)
        name, transform = type(self).__name__, build("transform", transform)
        if voters == "types" and isinstance(transform, Transform) and type(transform) not in (Shared, Dense):
            got = type(transform).__name__
            raise InputError(f'{name}: votes of types need the transform "shared" or "dense", got {got}')
        if vote_bias and voters != "types":
            raise InputError(f'{name}: vote_bias needs voters="types"')
        area, of_types = window.kernel**dims, voters == "types"
        size = LayerSize(in_types if of_types else in_types * area, in_dim, layer_types, capsule_dim)
        inside = size._replace(in_dim=in_dim * area) if of_types else None
        summed = area / window.stride**dims if window.up else area  # capsules in the vote of a type
        competitors = layer_types * competing_windows
        super().__init__(size, transform, routing, competitors, inside, max(summed, 1) if of_types else 1)
        self.window, self.dims, self.voters, self.repeat = window, dims, voters, repeat
        self.in_types, self.layer_types, self.capsule_dim = in_types, layer_types, capsule_dim
        self.pose_norm, self.vote_bias = pose_norm, vote_bias
        self.norm = nn.BatchNorm1d(layer_types * capsule_dim) if pose_norm else None
        kernels = in_types if isinstance(self.transform, Dense) else 1
        self.bias = nn.Parameter(torch.zeros(kernels, layer_types, capsule_dim)) if vote_bias else None

    def _check_window(self, window: Window) -> None:
        name = type(self).__name__
        if window.padding != "same" and window.padding >= window.kernel:
            raise InputError(f"{name}: layer_padding must be below layer_kernel, {window.kernel}, got {window.padding}")
        if window.up and window.kernel < window.stride:
            raise InputError(
                f"{name}: layer_kernel must be at least layer_stride, {window.stride}, or some outputs get no vote, "
                f"got {window.kernel}"
            )

    @computed_in_full_precision
    def forward(self, capsules: Capsules) -> Capsules:
        """Return the output capsules with their grid.

        Raises:
            InputError: Capsules without a grid, of other types or components, or on a map of other axes or smaller than
                a window.
        """
        routed, dtype = self._route_in_full_precision(capsules)
        grid = self.out_grid(capsules.grid)
        positions = math.prod(grid[1:])
        if self.norm is not None:
            poses = routed.poses
            routed = routed._replace(poses=normalise(self.norm, poses.flatten(1)).view_as(poses))
        poses, activations, _ = routed.to(dtype)
        activations = None if activations is None else by_type(activations, positions)
        mask = None
        if capsules.mask is not None and capsules.grid is not None:  # a position with at least one vote is present
            voted = self._voting(capsules.mask.unflatten(1, capsules.grid)).any(1, keepdim=True)
            mask = by_type(voted.expand(-1, self.layer_types), positions)
        return Capsules(by_type(poses, positions), activations, grid, mask)

    @checked
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: votes and activations of the children of each of the B·L positions."""
        maps, dtype = self._maps(capsules)
        grid, mask = capsules.grid, capsules.mask
        if self.voters == "types":
            votes, activations = self._votes_of_types(maps, capsules).all_rows()
            votes.dtype = dtype
            return votes, activations
        votes = self._votes_of_places(maps, capsules)
        assert grid is not None
        votes.dtype = dtype
        votes = votes.masked(None if mask is None else self._voting(mask.unflatten(1, grid)))
        active = capsules.activations
        return votes, None if active is None else self._in_windows(active.to(maps.dtype).unflatten(1, grid))

    def _route_in_full_precision(
        self, capsules: Capsules | Float[Tensor, "B I K"], return_coupling: bool = False
    ) -> tuple[Routed, torch.dtype]:
        """Route the positions of a large map slab by slab, so that only the votes of a slab are in memory."""
        if self.voters == "places" or return_coupling or not isinstance(capsules, Capsules):
            return super()._route_in_full_precision(capsules, return_coupling)
        maps, dtype = self._maps(capsules)
        votes, routing = self._votes_of_types(maps, capsules), self.routing
        in_parts = routing.by_row and is_eager() and not maps.is_meta and not has_hooks(routing)
        slabs = votes.slabs() if in_parts else []
        if slabs and type(routing) is DynamicRouting and routing.is_basic and votes.mask is None:
            bias = None if routing.bias is None else routing.bias.to(maps)
            capsules_of = route_columns(votes, slabs, bias, routing.num_iterations, routing.squash_eps)
            return Routed(rows_of(capsules_of.flatten(3))), dtype
        if len(slabs) <= 1:
            return self._routed(*votes.all_rows()), dtype
        return in_slabs(lambda slab: self._routed(*votes.of(slab)), slabs), dtype

    def _maps(self, capsules: Capsules) -> tuple[Float[Tensor, "B T K *S"], torch.dtype]:
        """Return the maps of the capsules in full precision, zero where they are masked, and the dtype of the votes."""
        self.out_grid(capsules.grid)
        assert capsules.grid is not None
        poses = self._on_map(capsules.poses, math.prod(capsules.grid), capsules.mask)
        # converted before windows overlap, so that the gradients of all windows are summed in full precision
        weights = [*self.transform.parameters(), *([] if self.bias is None else [self.bias])]
        dtype = functools.reduce(torch.promote_types, (each.dtype for each in weights), poses.dtype)
        return poses.to(full_dtype(dtype)).unflatten(1, capsules.grid).movedim(-1, 2), dtype

    @checked
    def _on_map(
        self, poses: Float[Tensor, "B N {self.in_dim}"], number: int, mask: Bool[Tensor, "B N"] | None
    ) -> Float[Tensor, "B N K"]:
        if poses.shape[1] != number:
            name = type(self).__name__
            raise InputError(f"{name}: the grid needs poses of {counted(number, 'capsule')}, got {poses.shape[1]}")
        return poses if mask is None else poses.where(mask.unsqueeze(2), 0)

    def out_grid(self, grid: Grid | None) -> Grid:
        """Return types and size of the output map for an input map.

        Raises:
            InputError: No map, a map of other axes or another number of types, or a map smaller than a window.
        """
        name = type(self).__name__
        if grid is None:
            raise InputError(
                f"{name}: capsules must have a grid; primary capsules of the grouping "
                '"channels" and other layers on a map have one'
            )
        types, *sizes = grid
        least = -(-self.window.least() // self.repeat)
        if len(sizes) != self.dims:
            raise InputError(f"{name}: dims is {self.dims}, so the map must have types, {SIZES[self.dims]}, got {grid}")
        if types != self.in_types or min(sizes) < least:
            raise InputError(
                f"{name}: the map must have {counted(self.in_types, 'type')}, and {SIZES[self.dims]} of at least "
                f"{least}, got "
                f"{grid}" + (f": in_types is {self.in_types}, got {types}" if types != self.in_types else "")
            )
        return self.layer_types, *(self.window.outputs(size * self.repeat) for size in sizes)

    def _voting(self, mask: Bool[Tensor, "B T *S"]) -> Bool[Tensor, "BL I"]:
        """Return which children are present: capsules that are, or types that have a capsule in the window."""
        if self.voters == "places":
            return self._in_windows(mask.to(torch.float32)) > 0
        return rows_of(self.window_sums(mask.to(torch.float32)).flatten(2)) > 0

    # ---- each type of the map is a child

    def _votes_of_types(self, maps: Float[Tensor, "B T K *S"], capsules: Capsules) -> VotesOfTypes:
        grid = capsules.grid
        assert grid is not None
        mask = None if capsules.mask is None else capsules.mask.unflatten(1, grid)
        present = maps.new_ones(1, 1, *grid[1:]) if mask is None else mask.to(maps)
        active = None
        if capsules.activations is not None:  # the mean over the window
            numbers = capsules.activations.to(maps.dtype).unflatten(1, grid)
            sums = self.window_sums(numbers if mask is None else numbers.where(mask, 0))
            active = sums / self.window_sums(present).clamp_min(1)
        return VotesOfTypes(
            self._prepared(maps).contiguous(),
            self._prepared(present),
            *self._kernel(maps),
            self.window,
            self.out_grid(grid)[1:],
            self.size,
            None if mask is None else self.window_sums(present) > 0,
            active,
        )

    def _kernel(self, like: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """Return kernel and bias of the convolution in the dtype of ``like``, and its groups."""
        side = [self.window.kernel] * self.dims
        no_rows = like.new_empty((0, self.in_types, self.in_dim * math.prod(side)))  # called for the sake of its hooks
        _, matrices = self.transform(no_rows)
        kernel = matrices.to(like).unflatten(-1, (self.in_dim, *side))  # (J, D, K, *k), or (T, J, D, K, *k)
        kernel = kernel.flatten(-self.dims - 3, -self.dims - 2)
        kernel = kernel.transpose(-self.dims - 2, -self.dims - 1) if self.window.up else kernel
        bias = None if self.bias is None else self.bias.to(like).flatten()
        if isinstance(self.transform, Dense):
            return kernel.flatten(0, 1), bias, self.in_types
        return kernel, bias, 1

    def _prepared(self, maps: Float[Tensor, "*more *S"]) -> Float[Tensor, "*more *S"]:
        """Return maps as the window needs them: with each position repeated, and with zeros around them."""
        return self.window.padded(repeated(maps, self.dims, self.repeat), self.dims)

    def window_sums(self, numbers: Float[Tensor, "B T *S"]) -> Float[Tensor, "B T *S"]:
        """Return the sum of the numbers of a type's capsules that each output position sees."""
        sizes = [self.window.outputs(size * self.repeat) for size in numbers.shape[2:]]
        sums = window_sums(self._prepared(numbers).flatten(0, 1), self.window, [self.window.cut] * self.dims, sizes)
        return sums.unflatten(0, numbers.shape[:2])

    # ---- each place of a window is a child

    def _votes_of_places(self, maps: Float[Tensor, "B T K *S"], capsules: Capsules) -> Votes:
        windows = self._windows(maps.flatten(1, 2))  # (B, T·K, kⁿ, L)
        B, _, area, positions = windows.shape
        windows = windows.unflatten(1, (self.in_types, self.in_dim)).permute(0, 4, 2, 1, 3)  # (B, L, K, T, kⁿ)
        poses = windows.reshape(B * positions, self.in_dim, self.in_types * area)
        return self._transformed(poses.transpose(1, 2))

    def _in_windows(self, numbers: Float[Tensor, "B T *S"]) -> Float[Tensor, "BL I"]:
        """Collect one number of each capsule of a map by windows."""
        return self._windows(numbers).flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _windows(self, maps: Float[Tensor, "B C *S"]) -> Float[Tensor, "B C kn L"]:
        """Return the windows of each map."""
        kernel, stride, _, _ = self.window
        maps = self.window.padded(maps, self.dims)
        if self.dims == 2:
            return F.unfold(maps, kernel, stride=stride).unflatten(1, (maps.shape[1], kernel**2))
        for axis in range(2, 2 + self.dims):
            maps = maps.unfold(axis, kernel, stride)  # (B, C, *L, *k)
        return maps.flatten(2, 1 + self.dims).flatten(3).transpose(2, 3)
