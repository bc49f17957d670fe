"""Capsule layers on maps of one to three axes: lines, planes and volumes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.nn.capsules import Capsules, Grid
from torchcaps.nn.competition import MapCompetition
from torchcaps.nn.layers import RoutingSpec, TransformSpec
from torchcaps.nn.map_layer import MapLayer, Voters
from torchcaps.nn.votes import Votes
from torchcaps.ops.windows import Window
from torchcaps.parts import register
from torchcaps.ranges import Axes, Padding, Pixels, Size, Width

Competition = Literal["types", "types-and-positions"]
"""Which output capsules compete for an input capsule of a map."""
MapPadding = Literal["same"] | Padding
"""Positions without capsules around a map."""
Upsampling = Literal["transposed", "nearest"]
"""How a map becomes larger: by a transposed convolution, or by repeating positions before a convolution."""


@register("layer", "conv")
class ConvCapsules(MapLayer):
    """Capsule layer on a map: the capsules of a window vote for the output capsules at the centre of the window.

    All positions share the weights. Output capsules form a map too, in the order of :class:`Capsules`, so such layers
    can be stacked.

    With ``voters="types"``, the votes of a type's capsules in a window are summed to one vote, and the types compete.
    The kernel is one for all input types with the transform ``"shared"`` (J, D, K·kⁿ), and one for each with
    ``"dense"``. Routings that look at input capsules, not only at votes, get the mean pose and activation of the
    type's capsules in the window. A type is masked where all its capsules in the window are.

    Args:
        in_types: Capsule types of the input map.
        in_dim: Components of an input capsule (K).
        layer_types: Output capsule types of a layer on a map.
        capsule_dim: Components of an output capsule (D).
        dims: Axes of the map: 1 (lines), 2 (planes) or 3 (volumes).
        voters: What votes for an output position: each capsule of its window (places), or each input type with one
            vote for the whole window (types).
        layer_kernel: Side of a window of a layer on a map, positions.
        layer_stride: Stride of a layer on a map, positions.
        layer_padding: Positions without capsules around the map, on each side; same: as many as ⌈size / stride⌉ outputs
            need, of which the smaller half is before the map, as in TensorFlow.
        vote_bias: Add a learned number, initially 0, to each component of a vote; needs voters=types.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        compete_over: In a layer on a map, the output types of one position compete for an input capsule, or the output
            types of all windows that contain it.
        transform: The transform, which computes votes from capsules.
        routing: The routing algorithm, which computes output capsules from votes.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR), for the layer and the competition
    over positions; LaLonde, Bagci 2018, "Capsules for Object Segmentation" (arXiv:1804.04241), for types as children
    and one kernel for all of them; Nguyen, Hua, Le 2021, "3D-UCaps" (arXiv:2203.08965), for one kernel each.
    """

    def __init__(
        self,
        in_types: Size,
        in_dim: Size,
        layer_types: Width = 16,
        capsule_dim: Width = 16,
        *,
        dims: Axes = 2,
        voters: Voters = "places",
        layer_kernel: Pixels = 3,
        layer_stride: Pixels = 1,
        layer_padding: MapPadding = 0,
        vote_bias: bool = False,
        pose_norm: bool = False,
        compete_over: Competition = "types",
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
    ) -> None:
        windows = 1
        if compete_over == "types-and-positions":
            if voters == "types":
                raise InputError(
                    'ConvCapsules: with voters="types" a vote belongs to one position, so compete_over must be '
                    '"types", got types-and-positions'
                )
            windows = max(1, round((layer_kernel / layer_stride) ** dims))  # that contain a capsule far from the edges
        super().__init__(
            Window(layer_kernel, layer_stride, layer_padding),
            dims,
            in_types,
            in_dim,
            layer_types,
            capsule_dim,
            voters=voters,
            competing_windows=windows,
            vote_bias=vote_bias,
            pose_norm=pose_norm,
            transform=transform,
            routing=routing,
        )
        self.compete_over = compete_over
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding

    def _votes_of_places(self, maps: Float[Tensor, "B T K *S"], capsules: Capsules) -> Votes:
        votes, grid = super()._votes_of_places(maps, capsules), capsules.grid
        if self.compete_over == "types-and-positions" and grid is not None:
            votes.competition = MapCompetition(self.window_capsules(grid, maps.device), math.prod(grid) + 1)
        return votes

    def window_capsules(self, grid: Grid, device: torch.device | None = None) -> Int[Tensor, "L I"]:
        """Return the index on the map, counted from 1, of each capsule of each window; 0 outside the map."""
        number = torch.arange(1.0, math.prod(grid) + 1, device=device)  # exact up to 2^24
        return self._windows(number.view(1, *grid)).flatten(1, 2)[0].t().long()


@register("layer", "deconv")
class DeconvCapsules(MapLayer):
    """Capsule layer that enlarges a map: each input type has one vote for each output, by a transposed convolution.

    The layer is :class:`ConvCapsules` with ``voters="types"`` in the other direction: a map of size S becomes one of
    size stride·S. Poses and activations that a routing looks at are means over the capsules that a vote is summed over.

    Args:
        in_types: Capsule types of the input map.
        in_dim: Components of an input capsule (K).
        layer_types: Output capsule types of a layer on a map.
        capsule_dim: Components of an output capsule (D).
        dims: Axes of the map: 1 (lines), 2 (planes) or 3 (volumes).
        upsampling: Enlarge the map by a transposed convolution, or repeat each position (nearest) and convolve.
        layer_kernel: Side of a window of a layer on a map, positions.
        layer_stride: Factor by which the map becomes larger.
        layer_padding: Output positions cut off on each side of a transposed convolution, or positions without capsules
            around the repeated map; same: as many as stride·size outputs need.
        vote_bias: Add a learned number, initially 0, to each component of a vote.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        transform: The transform: shared (one kernel for all input types) or dense (one for each).
        routing: The routing algorithm, which computes output capsules from votes.

    Source: LaLonde, Bagci 2018, "Capsules for Object Segmentation" (arXiv:1804.04241).
    """

    def __init__(
        self,
        in_types: Size,
        in_dim: Size,
        layer_types: Width = 16,
        capsule_dim: Width = 16,
        *,
        dims: Axes = 2,
        upsampling: Upsampling = "transposed",
        layer_kernel: Pixels = 4,
        layer_stride: Pixels = 2,
        layer_padding: MapPadding = "same",
        vote_bias: bool = False,
        pose_norm: bool = False,
        transform: TransformSpec = "shared",
        routing: RoutingSpec = "dynamic",
    ) -> None:
        up = upsampling == "transposed"
        super().__init__(
            Window(layer_kernel, layer_stride if up else 1, layer_padding, up),
            dims,
            in_types,
            in_dim,
            layer_types,
            capsule_dim,
            repeat=1 if up else layer_stride,
            vote_bias=vote_bias,
            pose_norm=pose_norm,
            transform=transform,
            routing=routing,
        )
        self.upsampling = upsampling
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding


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
