"""Capsule layers: a transform computes votes, and a routing computes output capsules from them."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, Capsules, Grid, LayerSize, Routed
from torchcaps.nn.competition import MapCompetition
from torchcaps.nn.convolutions import normalise
from torchcaps.nn.map_votes import MapVotes, PlacedVotes, by_type
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.transforms import Transform
from torchcaps.nn.votes import Votes
from torchcaps.ops.precision import computed_in_full_precision, full_dtype
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import Padding, Pixels, Size, Width

TransformSpec = Annotated[Spec, Choice("transform")]
RoutingSpec = Annotated[Spec, Choice("routing")]
Coordinates = Literal["none", "centres", "tenths", "hundredths"]
"""How the position of a capsule on its map is added to its votes."""
Competition = Literal["types", "types-and-positions"]
"""Which output capsules compete for an input capsule of a map."""


class CapsuleLayer(nn.Module, ABC):
    """Base class of capsule layers: builds a transform and a routing for the sizes I, K, J, D.

    Args:
        size: Sizes of the layer.
        transform: Name or module of the transform.
        routing: Name or module of the routing.
        competitors: Number of output capsules that compete for one input capsule. None: J.
        weights_of: Number of input capsules with separate weights. None: I.
    """

    def __init__(
        self,
        size: LayerSize,
        transform: TransformSpec,
        routing: RoutingSpec,
        competitors: int | None = None,
        weights_of: int | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.in_capsules, self.in_dim, self.out_capsules, self.out_dim = size
        self.transform: Transform = build("transform", transform)
        self.routing: Routing = build("routing", routing)
        for given, kind, what in ((self.transform, Transform, "transform"), (self.routing, Routing, "routing")):
            check(f"{type(self).__name__}: {what}", given, kind)
        of = size if weights_of is None else size._replace(in_capsules=weights_of)
        if self.routing.size is not None and next(self.routing.parameters(), None) is not None:
            name = type(self.routing).__name__
            raise InputError(f"{name}: a routing with parameters belongs to one layer; make one for each")
        self.routing.size = size
        competing = size if competitors is None else size._replace(out_capsules=competitors)
        self.transform.bind(of, self.routing.balanced_std(competing))
        self.routing.bind(size)

    @abstractmethod
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: the votes, and the activations of the input capsules."""

    @computed_in_full_precision
    def route(self, capsules: Capsules | Float[Tensor, "B I K"], *, return_coupling: bool = False) -> Routed:
        """Compute votes and route them.

        A layer on a map routes each window: it returns poses (B·L, T, D) and coupling (B·L, I, T), position by
        position.

        Args:
            capsules: Input capsules. A layer without a map also takes a tensor of poses.
            return_coupling: Also return the coupling c_ij of the last iteration.

        Raises:
            InputError: Poses of another shape or device, or a routing whose result does not have the sizes of the
                layer.
        """
        routed, dtype = self._route_in_full_precision(capsules, return_coupling)
        return routed.to(dtype)

    def _route_in_full_precision(
        self, capsules: Capsules | Float[Tensor, "B I K"], return_coupling: bool = False
    ) -> tuple[Routed, torch.dtype]:
        """Return the result of the routing in full precision, and the dtype to convert it to."""
        votes, activations = self.votes(capsules)  # type: ignore[arg-type]  # subclasses may take a tensor of poses
        dtype, votes.dtype = votes.dtype, votes.poses.dtype
        activations = None if activations is None else votes.present(activations)
        routed = self.routing(votes, activations, return_coupling=return_coupling)
        name = type(self.routing).__name__
        if not isinstance(routed, Routed):
            raise InputError(
                f"{name} must return Routed(poses, activations, coupling) of torchcaps.nn, got {type(routed).__name__}"
            )
        try:
            self._look_at(*routed)
        except InputError as error:
            raise InputError(f"{name} returned a result that does not fit the layer: {error}") from None
        return routed.masked(votes.mask), dtype

    def _transformed(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """Return the votes that the transform computes from poses."""
        tensors = self.transform(poses)
        if not isinstance(tensors, tuple) or not all(isinstance(each, Tensor) for each in tensors):
            name = type(self.transform).__name__
            raise InputError(
                f"{name}.forward must return a tuple of tensors, the arguments of {name}.votes, got "
                f"{type(tensors).__name__}"
            )
        return self.transform.votes(*tensors)

    @checked
    def _look_at(
        self,
        poses: Float[Tensor, "B {self.out_capsules} {self.out_dim}"],
        activations: Float[Tensor, "B {self.out_capsules}"] | None,
        coupling: Float[Tensor, "B {self.in_capsules} {self.out_capsules}"] | None,
    ) -> None:
        """Raise InputError unless the result of a routing has the sizes of the layer."""


@register("layer", "dense")
class DenseCapsules(CapsuleLayer):
    """Fully connected capsule layer: every input capsule votes for every output capsule; the routing weighs the votes.

    Takes :class:`Capsules` or a tensor of poses (B, I, K), and returns capsules (B, J, D). Layers can be stacked.

    A stack needs poses that are not too short, because every squash shortens short capsules further. An experiment
    trained three stacked layers (32 → 16 → 8 → 4 capsules, default initialisation, Adam):

    | length of the input poses | softmax over outputs | softmax over inputs |
    |---|---|---|
    | 0.1 | initial loss for 1,000 steps | initial loss for 1,000 steps |
    | 0.2 | trained | initial loss for 400 steps |
    | 0.3 | trained, better than over inputs | trained |

    Args:
        in_capsules: Number of input capsules (I); or types, height and width of their map, which share_positions and
            coordinates need. None: any number, if neither transform nor routing has weights for each input capsule.
        in_dim: Components of an input capsule (K).
        out_capsules: Number of output capsules (J), unless num_capsules is given.
        capsule_dim: Components of an output capsule (D).
        num_capsules: Output capsules of a dense layer; default: one for each class, as in the last layer.
        transform: The transform, which computes votes from capsules.
        routing: The routing algorithm, which computes output capsules from votes.
        share_positions: Capsules of one type share their weights at all positions of their map.
        coordinates: Add the position of a capsule on its map to its votes, for row and column i of n: (i + 1/2)/n or
            (i + 1)/(10 n) in the last column of the first two rows of a matrix, or (i - n/2)/100 in the first two
            components (EM's code).

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829); weights shared by positions and coordinate
    addition from Hinton, Sabour, Frosst 2018, section 4 (ICLR 2018), from De Sousa Ribeiro et al. 2020
    (arXiv:1905.11455), and from the former's code.
    """

    def __init__(
        self,
        in_capsules: Size | tuple[Size, ...] | None,
        in_dim: Size,
        out_capsules: Size,
        capsule_dim: Width = 16,
        *,
        num_capsules: Width | None = None,
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
        share_positions: bool = False,
        coordinates: Coordinates = "none",
    ) -> None:
        shape = tuple(in_capsules) if isinstance(in_capsules, Sequence) else (in_capsules or 0,)
        if len(shape) not in (1, 3):
            raise InputError(f"DenseCapsules: in_capsules must be a number, or types, height and width, got {shape}")
        number, grid = math.prod(shape), shape if len(shape) == 3 else None
        if grid is None and (share_positions or coordinates != "none"):
            raise InputError("share_positions and coordinates need capsules on a map: types, height and width")
        size = LayerSize(number, in_dim, num_capsules or out_capsules, capsule_dim)
        super().__init__(size, transform, routing, weights_of=grid[0] if share_positions and grid else None)
        self.capsule_dim, self.num_capsules = capsule_dim, num_capsules
        self.share_positions, self.coordinates = share_positions, coordinates
        self.grid = grid
        self._places(torch.device("meta"))  # raises if coordinates need poses that are matrices

    def forward(self, capsules: Capsules | Float[Tensor, "B I K"]) -> Capsules:
        """Return the output capsules v_j; see :meth:`route`."""
        routed = self.route(capsules)
        return Capsules(routed.poses, routed.activations)

    def votes(self, capsules: Capsules | Float[Tensor, "B I K"]) -> tuple[Votes, Activations]:
        """Return the inputs of the routing."""
        capsules = Capsules.of(capsules)
        votes, places = self._votes(capsules.poses, capsules.mask), self._places(capsules.poses.device)
        votes = votes if places is None else PlacedVotes(votes, places)
        return votes.masked(capsules.mask), capsules.activations

    @checked
    def _votes(
        self,
        poses: Float[Tensor, "B {self.in_capsules} {self.in_dim}"],
        mask: Bool[Tensor, "B {self.in_capsules}"] | None,
    ) -> Votes:
        # masked before the transform, which may sum over input capsules
        poses = poses if mask is None else poses.where(mask.unsqueeze(2), 0)
        if not self.share_positions or self.grid is None:
            return self._transformed(poses)
        positions = math.prod(self.grid[1:])
        by_position = poses.unflatten(1, (-1, positions)).transpose(1, 2)  # (B, L, T, K)
        return MapVotes(self._transformed(by_position.flatten(0, 1)), poses, positions)

    def _places(self, device: torch.device) -> Float[Tensor, "I D"] | None:
        """Return the coordinates, row and column, to add to the votes of each capsule; None without coordinates."""
        if self.coordinates == "none" or self.grid is None:
            return None
        types, height, width = self.grid
        side = math.isqrt(self.capsule_dim)
        if self.coordinates != "hundredths" and (side * side != self.capsule_dim or side < 2):
            raise InputError(
                f'DenseCapsules: coordinates="{self.coordinates}" needs poses that are matrices, got capsule_dim='
                f"{self.capsule_dim}"
            )
        if self.capsule_dim < 2:
            raise InputError(f"DenseCapsules: coordinates need at least 2 components, got {self.capsule_dim}")
        along = {
            "centres": lambda n: (torch.arange(n, device=device) + 0.5) / n,
            "tenths": lambda n: (torch.arange(n, device=device) + 1) / (10 * n),
            "hundredths": lambda n: (torch.arange(n, device=device) - n / 2) / 100,
        }[self.coordinates]
        row, column = (0, 1) if self.coordinates == "hundredths" else (side - 1, 2 * side - 1)
        places = torch.zeros(types, height, width, self.capsule_dim, device=device)
        places[..., row], places[..., column] = along(height)[:, None], along(width)
        return places.flatten(0, 2)


@register("layer", "conv")
class ConvCapsules(CapsuleLayer):
    """Capsule layer on a map: the capsules of a window vote for the output capsules at the centre of the window.

    All positions share the weights. Output capsules form a map too, in the order of :class:`Capsules`, so such layers
    can be stacked.

    Args:
        in_types: Capsule types of the input map.
        in_dim: Components of an input capsule (K).
        layer_types: Output capsule types of a layer on a map.
        capsule_dim: Components of an output capsule (D).
        layer_kernel: Height and width of a window of a layer on a map, positions.
        layer_stride: Stride of a layer on a map, positions.
        layer_padding: Positions without capsules around the map, on each side.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        compete_over: In a layer on a map, the output types of one position compete for an input capsule, or the output
            types of all windows that contain it.
        transform: The transform, which computes votes from capsules.
        routing: The routing algorithm, which computes output capsules from votes.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR), for the layer and the competition
    over positions.
    """

    def __init__(
        self,
        in_types: Size,
        in_dim: Size,
        layer_types: Width = 16,
        capsule_dim: Width = 16,
        *,
        layer_kernel: Pixels = 3,
        layer_stride: Pixels = 1,
        layer_padding: Padding = 0,
        pose_norm: bool = False,
        compete_over: Competition = "types",
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
    ) -> None:
        if layer_padding >= layer_kernel:
            raise InputError(f"layer_padding must be below layer_kernel, {layer_kernel}, got {layer_padding}")
        windows = max(1, round((layer_kernel / layer_stride) ** 2))  # that contain a capsule far from the edges
        competitors = layer_types * windows if compete_over == "types-and-positions" else layer_types
        size = LayerSize(in_types * layer_kernel**2, in_dim, layer_types, capsule_dim)
        super().__init__(size, transform, routing, competitors)
        self.in_types, self.layer_types, self.capsule_dim = in_types, layer_types, capsule_dim
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding
        self.pose_norm, self.compete_over = pose_norm, compete_over
        self.norm = nn.BatchNorm1d(layer_types * capsule_dim) if pose_norm else None

    @computed_in_full_precision
    def forward(self, capsules: Capsules) -> Capsules:
        """Return the output capsules with their grid.

        Raises:
            InputError: Capsules without a grid, of other types or components, or on a map smaller than a window.
        """
        routed, dtype = self._route_in_full_precision(capsules)
        grid = self.out_grid(capsules.grid)
        positions = grid[1] * grid[2]
        if self.norm is not None:
            poses = routed.poses
            routed = routed._replace(poses=normalise(self.norm, poses.flatten(1)).view_as(poses))
        poses, activations, _ = routed.to(dtype)
        activations = None if activations is None else by_type(activations, positions)
        mask = None
        if capsules.mask is not None and capsules.grid is not None:  # a position with at least one vote is present
            voted = self._in_windows(capsules.mask.to(poses), capsules.grid).any(1, keepdim=True)
            mask = by_type(voted.expand(-1, self.layer_types), positions)
        return Capsules(by_type(poses, positions), activations, grid, mask)

    @checked
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: votes and activations of the capsules of each of the B·L windows."""
        grid, mask = capsules.grid, capsules.mask
        self.out_grid(grid)
        assert grid is not None
        poses = self._on_map(capsules.poses, math.prod(grid), mask)
        # converted before windows overlap, so that the gradients of all windows are summed in full precision
        dtype = functools.reduce(torch.promote_types, (each.dtype for each in self.transform.parameters()), poses.dtype)
        full = full_dtype(dtype)
        poses = poses.to(full).unflatten(1, grid)  # (B, T, H, W, K)
        windows = self._windows(poses.movedim(-1, 2).flatten(1, 2))  # (B, T·K, k², L)
        B, _, area, positions = windows.shape
        windows = windows.unflatten(1, (self.in_types, self.in_dim)).permute(0, 4, 2, 1, 3)  # (B, L, K, T, k²)
        votes = self._transformed(windows.reshape(B * positions, self.in_dim, self.in_types * area).transpose(1, 2))
        votes.dtype = dtype
        if self.compete_over == "types-and-positions":
            votes.competition = MapCompetition(self.window_capsules(grid, poses.device), math.prod(grid) + 1)
        if mask is not None:
            votes = votes.masked(self._in_windows(mask.to(poses), grid) > 0)
        if capsules.activations is None:
            return votes, None
        return votes, self._in_windows(capsules.activations.to(full), grid)

    @checked
    def _on_map(
        self, poses: Float[Tensor, "B N {self.in_dim}"], number: int, mask: Bool[Tensor, "B N"] | None
    ) -> Float[Tensor, "B N K"]:
        if poses.shape[1] != number:
            raise InputError(f"ConvCapsules: the grid needs poses of {number} capsules, got {poses.shape[1]}")
        return poses if mask is None else poses.where(mask.unsqueeze(2), 0)

    def _in_windows(self, numbers: Float[Tensor, "B N"], grid: Grid) -> Float[Tensor, "BL I"]:
        """Collect one number of each capsule of a map by windows."""
        return self._windows(numbers.unflatten(1, grid)).flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def window_capsules(self, grid: Grid, device: torch.device | None = None) -> Int[Tensor, "L I"]:
        """Return the index on the map, counted from 1, of each capsule of each window; 0 outside the map."""
        number = torch.arange(1.0, math.prod(grid) + 1, device=device)  # exact up to 2^24
        return self._windows(number.view(1, *grid)).flatten(1, 2)[0].t().long()

    def out_grid(self, grid: Grid | None) -> Grid:
        """Return types, height and width of the output map for an input map.

        Raises:
            InputError: No map, another number of types, or a map smaller than a window.
        """
        if grid is None:
            raise InputError(
                "ConvCapsules: capsules must have a grid; primary capsules of the grouping "
                '"channels" and other ConvCapsules have one'
            )
        types, *sizes = grid
        least = self.layer_kernel - 2 * self.layer_padding
        if types != self.in_types or min(sizes) < least:
            raise InputError(
                f"ConvCapsules: the map must have {self.in_types} types, and height and width of at least {least}, got "
                f"{grid}" + (f": in_types is {self.in_types}, got {types}" if types != self.in_types else "")
            )
        height, width = ((size - least) // self.layer_stride + 1 for size in sizes)
        return self.layer_types, height, width

    def _windows(self, maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C k2 L"]:
        """Return the windows of each map."""
        columns = F.unfold(maps, self.layer_kernel, padding=self.layer_padding, stride=self.layer_stride)
        return columns.unflatten(1, (maps.shape[1], self.layer_kernel**2))  # (B, C, k², L)
