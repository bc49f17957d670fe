"""Base class of capsule layers on maps of one to three axes: lines, planes and volumes."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.kernels.maps import Window
from torchcaps.nn.capsules import Capsules, Grid, LayerSize
from torchcaps.nn.convolutions import normalise
from torchcaps.nn.layers.base import CapsuleLayer
from torchcaps.nn.votes.positions import by_type
from torchcaps.ops.precision import computed_in_full_precision, full_dtype
from torchcaps.ranges import Padding
from torchcaps.words import MAP_SIZES, counted

MapPadding = Literal["same"] | Padding
"""Positions without capsules around a map."""


class MapLayer(CapsuleLayer):
    """Base class of capsule layers on a map. A row of votes is an output position of an image.

    Args:
        window: The kernel.
        dims: Axes of the map.
        in_types: Capsule types of the input map (T).
        size: Sizes of the layer; J is the number of types of the output map.
        repeat: How often each position of the input is repeated along each axis.
        pose_norm: Normalise poses over the batch.
        **parts: The other arguments of :class:`CapsuleLayer`.
    """

    def __init__(
        self,
        window: Window,
        dims: int,
        in_types: int,
        size: LayerSize,
        *,
        repeat: int = 1,
        pose_norm: bool,
        **parts: Any,
    ) -> None:
        self._check_window(window)
        super().__init__(size, **parts)
        self.window, self.dims, self.repeat, self.in_types = window, dims, repeat, in_types
        self.layer_types, self.capsule_dim, self.pose_norm = size.out_capsules, size.out_dim, pose_norm
        self.norm = nn.BatchNorm1d(size.out_capsules * size.out_dim) if pose_norm else None

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

    def _maps(self, capsules: Capsules) -> tuple[Float[Tensor, "B T K *S"], torch.dtype]:
        """Return the maps of the capsules in full precision, zero where they are masked, and the dtype of the votes."""
        self.out_grid(capsules.grid)
        assert capsules.grid is not None
        poses = self._on_map(capsules.poses, math.prod(capsules.grid), capsules.activations, capsules.mask)
        # converted before windows overlap, so that the gradients of all windows are summed in full precision
        dtype = functools.reduce(torch.promote_types, (each.dtype for each in self._learned()), poses.dtype)
        return poses.to(full_dtype(dtype)).unflatten(1, capsules.grid).movedim(-1, 2), dtype

    @checked
    def _on_map(
        self,
        poses: Float[Tensor, "B N {self.in_dim}"],
        number: int,
        activations: Float[Tensor, "B N"] | None,
        mask: Bool[Tensor, "B N"] | None,
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
            raise InputError(
                f"{name}: dims is {self.dims}, so the map must have types, {MAP_SIZES[self.dims]}, got {grid}"
            )
        if types != self.in_types or min(sizes) < least:
            raise InputError(
                f"{name}: the map must have {counted(self.in_types, 'type')}, and {MAP_SIZES[self.dims]} of at least "
                f"{least}, got "
                f"{grid}" + (f": in_types is {self.in_types}, got {types}" if types != self.in_types else "")
            )
        return self.layer_types, *(self.window.outputs(size * self.repeat) for size in sizes)

    @abstractmethod
    def _voting(self, mask: Bool[Tensor, "B T *S"]) -> Bool[Tensor, "BL I"]:
        """Return the mask of the input capsules of each row of votes from the mask of the map."""

    def _learned(self) -> list[Tensor]:
        """Return the tensors that the votes are computed with, besides the capsules."""
        return list(self.transform.parameters())


def join_types(*maps: Capsules) -> Capsules:
    """Join maps of one size along their types, as a network with skip connections does.

    If only some of the maps have activations, all other maps use the lengths of their poses.

    Args:
        *maps: Capsules on maps of the same size, with as many components.

    Raises:
        InputError: Capsules without a map, or maps of different sizes or components.
    """
    grids = [each.grid for each in maps]
    if not maps or None in grids:
        raise InputError("join_types: capsules must have a grid, as layers on a map return it")
    sizes = [grid[1:] for grid in grids if grid is not None]
    dims = [each.poses.shape[2] for each in maps]
    # compared one by one, because sizes in an exported graph cannot be hashed
    if any(dim != dims[0] for dim in dims):
        raise InputError(
            f"join_types: joined types must have as many components, got {' and '.join(map(str, dims))}; give the "
            "layers one capsule_dim"
        )
    if any(size != sizes[0] for size in sizes):
        shown = " and ".join("×".join(map(str, size)) for size in sizes)
        raise InputError(f"join_types: joined maps must have one size, got {shown}")
    active, mask = None, None
    if any(each.activations is not None for each in maps):
        active = torch.cat([each.scores() for each in maps], 1)
    if any(each.mask is not None for each in maps):
        every = [each.poses.new_ones(each.poses.shape[:2], dtype=torch.bool) for each in maps]
        mask = torch.cat([one if each.mask is None else each.mask for each, one in zip(maps, every, strict=True)], 1)
    types = sum(grid[0] for grid in grids if grid is not None)
    return Capsules(torch.cat([each.poses for each in maps], 1), active, (types, *sizes[0]), mask)
