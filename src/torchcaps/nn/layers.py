"""Capsule layers: a transform, which makes votes, and a routing, which makes capsules of them."""

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
"""What votes are told of the place of their capsule on a map."""
Competition = Literal["types", "types-and-positions"]
"""What the capsules that an input capsule of a map votes for compete over."""


class CapsuleLayer(nn.Module, ABC):
    """What the layers have in common: a transform and a routing, told their sizes I, K, J, D.

    ``competitors`` is how many output capsules compete for an input capsule, J if None; ``weights_of`` how many input
    capsules have weights of their own, I if None.
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
        """What the routing is given: the votes, and the activations of the capsules that vote."""

    @computed_in_full_precision
    def route(self, capsules: Capsules | Float[Tensor, "B I K"], *, return_coupling: bool = False) -> Routed:
        """What the routing returns: the output capsules, and the coupling if asked for.

        Of a layer on a map, these are those of its windows, position by position: (B·L, T, D), coupling (B·L, I, T).

        Args:
            capsules: Input capsules; of a layer that needs no map, their poses alone will do.
            return_coupling: Whether the coupling c_ij of the last iteration is asked for.

        Raises:
            InputError: Poses of another shape or device, or a routing that returns something else than capsules of the
                layer's sizes.
        """
        routed, dtype = self._route_in_full_precision(capsules, return_coupling)
        return routed.to(dtype)

    def _route_in_full_precision(
        self, capsules: Capsules | Float[Tensor, "B I K"], return_coupling: bool = False
    ) -> tuple[Routed, torch.dtype]:
        """Return what the routing returns before it is rounded, and the dtype that it is to be rounded to."""
        votes, activations = self.votes(capsules)  # type: ignore[arg-type]  # each layer says what it takes
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
            raise InputError(f"{name} returned what does not fit the layer: {error}") from None
        return routed.within(votes.mask), dtype

    def _transformed(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """Return the votes that the transform makes of poses."""
        tensors = self.transform(poses)
        if not isinstance(tensors, tuple) or not all(isinstance(each, Tensor) for each in tensors):
            name = type(self.transform).__name__
            raise InputError(
                f"{name}.forward must return a tuple of tensors, of which {name}.votes makes votes, got "
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
        """Raise InputError unless a routing returned capsules of the layer's sizes."""


@register("layer", "dense")
class DenseCapsules(CapsuleLayer):
    """Fully connected capsule layer: every input capsule votes for every output capsule, routing decides.

    Usable alone and stacked: capsules, or poses (B, I, K) alone, in; capsules (B, J, D) out.

    A stack needs poses that are not too short: every squash shortens short capsules further. In an experiment with
    three stacked layers (32 → 16 → 8 → 4 capsules, default initialisation, Adam), fed with poses of length 0.1, both
    softmax axes stayed at their initial loss for 1,000 steps; of length 0.2, over outputs they trained, over inputs
    they stayed for 400 steps; of length 0.3, both trained, over outputs better.

    Args:
        in_capsules: I; or types, height and width of the map that the input capsules stand on, which share_positions
            and coordinates need; None for any number, where neither transform nor routing has weights for each.
        in_dim: K.
        out_capsules: J, where num_capsules does not say otherwise.
        capsule_dim: Components of an output capsule.
        num_capsules: Output capsules of a dense layer; one for each class if none is given, as the last layer has.
        transform: The transform, which makes votes of capsules.
        routing: The routing algorithm, which makes capsules of votes.
        share_positions: The capsules of a type share their weights at all positions of the map that they stand on.
        coordinates: Votes also say where their capsule stands on the map, row and column of n: (i + 1/2)/n or
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
            raise InputError("share_positions and coordinates need capsules that stand on a map")
        size = LayerSize(number, in_dim, num_capsules or out_capsules, capsule_dim)
        super().__init__(size, transform, routing, weights_of=grid[0] if share_positions and grid else None)
        self.capsule_dim, self.num_capsules = capsule_dim, num_capsules
        self.share_positions, self.coordinates = share_positions, coordinates
        self.grid = grid
        self._places(torch.device("meta"))  # raises, where poses are no matrices

    def forward(self, capsules: Capsules | Float[Tensor, "B I K"]) -> Capsules:
        """Output capsules v_j of input capsules, or of their poses alone; see :meth:`route`."""
        routed = self.route(capsules)
        return Capsules(routed.poses, routed.activations)

    def votes(self, capsules: Capsules | Float[Tensor, "B I K"]) -> tuple[Votes, Activations]:
        """What the routing is given."""
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
        poses = poses if mask is None else poses.where(mask.unsqueeze(2), 0)  # a transform may use them at once
        if not self.share_positions or self.grid is None:
            return self._transformed(poses)
        positions = math.prod(self.grid[1:])
        by_position = poses.unflatten(1, (-1, positions)).transpose(1, 2)  # (B, L, T, K)
        return MapVotes(self._transformed(by_position.flatten(0, 1)), poses, positions)

    def _places(self, device: torch.device) -> Float[Tensor, "I D"] | None:
        """What is added to the votes of each capsule of a map: its row and its column; None where nothing is."""
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
    """Capsule layer on a map: the capsules of a window vote for those at the position in its middle.

    The weights are the same at all positions. Output capsules stand on a map too, in the order of
    :class:`Capsules`, so that such layers stack.

    Args:
        in_types: Capsule types of the map that comes in.
        in_dim: K.
        layer_types: Capsule types that go out of a layer on a map.
        capsule_dim: Components of an output capsule.
        layer_kernel: Height and width of a window of a layer on a map, positions.
        layer_stride: Stride of a layer on a map, positions.
        layer_padding: Positions without capsules around the map, on each side.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        compete_over: In a layer on a map, the output types at one position compete for a capsule, or those of all
            positions whose windows hold it.
        transform: The transform, which makes votes of capsules.
        routing: The routing algorithm, which makes capsules of votes.

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
        windows = max(1, round((layer_kernel / layer_stride) ** 2))  # that hold a capsule which is far from the edges
        competitors = layer_types * windows if compete_over == "types-and-positions" else layer_types
        size = LayerSize(in_types * layer_kernel**2, in_dim, layer_types, capsule_dim)
        super().__init__(size, transform, routing, competitors)
        self.in_types, self.layer_types, self.capsule_dim = in_types, layer_types, capsule_dim
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding
        self.pose_norm, self.compete_over = pose_norm, compete_over
        self.norm = nn.BatchNorm1d(layer_types * capsule_dim) if pose_norm else None

    @computed_in_full_precision
    def forward(self, capsules: Capsules) -> Capsules:
        """Output capsules, on a map, from those of a map with its grid.

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
        if capsules.mask is not None and capsules.grid is not None:  # a position is there where a capsule votes for it
            voted = self._in_windows(capsules.mask.to(poses), capsules.grid).any(1, keepdim=True)
            mask = by_type(voted.expand(-1, self.layer_types), positions)
        return Capsules(by_type(poses, positions), activations, grid, mask)

    @checked
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """What the routing is given: the votes of the capsules of each of the B·L windows."""
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
            raise InputError(f"ConvCapsules: poses must be those of {number} capsules, got {poses.shape[1]}")
        return poses if mask is None else poses.where(mask.unsqueeze(2), 0)

    def _in_windows(self, numbers: Float[Tensor, "B N"], grid: Grid) -> Float[Tensor, "BL I"]:
        """What the capsules of a map have, one number each, for those of each window."""
        return self._windows(numbers.unflatten(1, grid)).flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def window_capsules(self, grid: Grid, device: torch.device | None = None) -> Int[Tensor, "L I"]:
        """The capsule of the map ``grid``, counted from 1, that each capsule of each window is; 0 beyond the edge."""
        number = torch.arange(1.0, math.prod(grid) + 1, device=device)  # exact up to 2^24
        return self._windows(number.view(1, *grid)).flatten(1, 2)[0].t().long()

    def out_grid(self, grid: Grid | None) -> Grid:
        """Types, height and width of the map that goes out, from those of the map that comes in.

        Raises:
            InputError: A map that is none, of other types, or smaller than a window.
        """
        if grid is None:
            raise InputError(
                "ConvCapsules: capsules must stand on a map, but these have no grid; primary capsules of the grouping "
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
        """The windows of each map."""
        columns = F.unfold(maps, self.layer_kernel, padding=self.layer_padding, stride=self.layer_stride)
        return columns.unflatten(1, (maps.shape[1], self.layer_kernel**2))  # (B, C, k², L)
