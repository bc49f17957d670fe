"""Capsule layers: a transform, which makes votes, and a routing, which makes capsules of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.nn.flow import Capsules, LayerSize
from torchcaps.nn.routing import DynamicRouting, Routed, Routing
from torchcaps.nn.transforms import Dense, MapVotes, PlacedVotes, Rivals, Transform, Votes
from torchcaps.ops.checks import check_choice, check_flags, check_sizes, check_tensor

Coordinates = Literal["none", "centres", "tenths", "hundredths"]
"""What votes are told of the place of their capsule on a map."""
Competition = Literal["types", "types-and-positions"]
"""What the capsules that an input capsule of a map votes for compete over."""


class CapsuleLayer(nn.Module, ABC):
    """What the layers have in common: a transform and a routing, told their sizes I, K, J, D.

    ``rivals`` is how many output capsules compete for an input capsule, J if None; ``weights_of`` how many input
    capsules have weights of their own, I if None.
    """

    def __init__(
        self,
        size: LayerSize,
        transform: Transform | None,
        routing: Routing | None,
        rivals: int | None = None,
        weights_of: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for given, kind, what in ((transform, Transform, "transform"), (routing, Routing, "routing")):
            if not isinstance(given, kind | None):
                raise TypeError(f"{name}: {what} must be a {kind.__name__} or None, got {type(given).__name__}")
        self.size = size
        self.in_capsules, self.in_dim, self.out_capsules, self.out_dim = size
        self.transform = Dense() if transform is None else transform
        self.routing = DynamicRouting() if routing is None else routing
        rivals = size.out_capsules if rivals is None else rivals
        of = size if weights_of is None else size._replace(in_capsules=weights_of)
        self.transform.bind(of, self.routing.balanced_std(size._replace(out_capsules=rivals)))
        self.routing.bind(size)

    @abstractmethod
    def votes(self, capsules: Capsules) -> tuple[Votes, Float[Tensor, "B I"] | None]:
        """What the routing is given: the votes, and the activations of the capsules that vote."""

    def route(self, capsules: Capsules | Float[Tensor, "B I K"], *, return_coupling: bool = False) -> Routed:
        """What the routing returns: the output capsules, and the coupling if asked for.

        Of a layer on a map, these are those of its windows, position by position: (B·L, T, D), coupling (B·L, I, T).

        Args:
            capsules: Input capsules; of a layer that needs no map, their poses alone will do.
            return_coupling: Whether the coupling c_ij of the last iteration is asked for.

        Raises:
            TypeError: Poses that are not floating-point.
            ValueError: Poses of another shape, or on another device.
            InputError: The routing returns something else than capsules of the layer's sizes.
        """
        votes, activations = self.votes(capsules)  # type: ignore[arg-type]  # each layer says what it takes
        routed = self.routing(votes, activations, return_coupling=return_coupling)
        _check_routed(type(self.routing).__name__, routed, self.size)
        return routed

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return ", ".join(f"{letter}={number}" for letter, number in zip("IKJD", self.size, strict=True))


class DenseCapsules(CapsuleLayer):
    """Fully connected capsule layer: every input capsule votes for every output capsule, routing decides.

    Usable alone and stacked: capsules, or poses (B, I, K) alone, in; capsules (B, J, D) out.

    A stack needs poses that are not too short: every squash shortens short capsules further. In an experiment with
    three stacked layers (32 → 16 → 8 → 4 capsules, default initialisation, Adam), fed with poses of length 0.1, both
    softmax axes stayed at their initial loss for 1,000 steps; of length 0.2, over outputs they trained, over inputs
    they stayed for 400 steps; of length 0.3, both trained, over outputs better.

    Args:
        in_capsules: I.
        in_dim: K.
        out_capsules: J.
        out_dim: D.
        transform: From capsules to votes; :class:`torchcaps.nn.Dense`, a matrix for each pair, if None.
        routing: The routing algorithm; :class:`DynamicRouting` with its defaults if None.
        grid: Types, height and width of the map that the input capsules stand on, where the next two options need it.
        share_positions: Capsules of a type have the same weights at all positions of the map.
        coordinates: Votes also say where their capsule stands, in row and column of n: ``"centres"``, (i + ½)/n, or
            ``"tenths"``, (i + 1)/(10 n), in the last column of the first two rows of a pose that is a matrix;
            ``"hundredths"``, (i − n/2)/100, in the first two components.

    Raises:
        TypeError: A size that is no integer, or a transform or a routing that is none.
        ValueError: A size below one, or one that the transform cannot have, or no map where there must be one.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829); weights shared by positions and coordinate
    addition from Hinton, Sabour, Frosst 2018, section 4 (ICLR 2018), from De Sousa Ribeiro et al. 2020
    (arXiv:1905.11455), and from the former's code.
    """

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        out_capsules: int,
        out_dim: int,
        *,
        transform: Transform | None = None,
        routing: Routing | None = None,
        grid: tuple[int, int, int] | None = None,
        share_positions: bool = False,
        coordinates: Coordinates = "none",
    ) -> None:
        name = "DenseCapsules"
        sizes = {"in_capsules": in_capsules, "in_dim": in_dim, "out_capsules": out_capsules, "out_dim": out_dim}
        check_sizes(name, **sizes)
        check_flags(name, share_positions=share_positions)
        check_choice(name, "coordinates", coordinates, ("none", "centres", "tenths", "hundredths"))
        on_a_map = share_positions or coordinates != "none"
        if on_a_map and (grid is None or math.prod(grid) != in_capsules):
            raise ValueError(f"{name}: grid must be types, height and width of {in_capsules} capsules, got {grid}")
        size = LayerSize(**sizes)
        super().__init__(size, transform, routing, weights_of=grid[0] if share_positions and grid else None)
        self.grid, self.share_positions, self.coordinates = grid, share_positions, coordinates
        if coordinates != "none":
            assert grid is not None
            _places(coordinates, grid, out_dim)  # raises, where poses are no matrices

    def forward(self, capsules: Capsules | Float[Tensor, "B I K"]) -> Capsules:
        """Output capsules v_j of input capsules, or of their poses alone; see :meth:`route`."""
        routed = self.route(capsules)
        return Capsules(routed.poses, routed.activations)

    def votes(self, capsules: Capsules | Float[Tensor, "B I K"]) -> tuple[Votes, Float[Tensor, "B I"] | None]:
        """What the routing is given."""
        capsules = Capsules.of(capsules)
        shape, fixed_by = ("B", self.in_capsules, self.in_dim), ("", "in_capsules", "in_dim")
        check_tensor("DenseCapsules", "poses", capsules.poses, shape, fixed_by=fixed_by)
        votes = self._map_votes(capsules.poses) if self.share_positions else self.transform(capsules.poses)
        if self.coordinates == "none" or self.grid is None:
            return votes, capsules.activations
        places = _places(self.coordinates, self.grid, self.out_dim)
        return PlacedVotes(votes, places.to(capsules.poses.device)), capsules.activations

    def _map_votes(self, poses: Float[Tensor, "B I K"]) -> Votes:
        """The votes of capsules whose weights are those of their type."""
        assert self.grid is not None
        types, positions = self.grid[0], math.prod(self.grid[1:])
        by_position = poses.unflatten(1, (types, positions)).transpose(1, 2)  # (B, L, T, K)
        return MapVotes(self.transform(by_position.flatten(0, 1)), poses, positions)

    def extra_repr(self) -> str:
        """Sizes, and what is shared, for ``print(model)``."""
        shared = ", share_positions=True" * self.share_positions
        return super().extra_repr() + shared + f", coordinates={self.coordinates!r}" * (self.coordinates != "none")


class ConvCapsules(CapsuleLayer):
    """Capsule layer on a map: the capsules of a window vote for those at the position in its middle.

    The weights are the same at all positions. Output capsules stand on a map too, in the order of
    :class:`Capsules`, so that such layers stack.

    Args:
        in_types: Capsule types of the map that comes in.
        in_dim: K.
        out_types: Capsule types of the map that goes out.
        out_dim: D.
        kernel_size: Height and width of a window, positions.
        stride: From one window to the next, positions.
        padding: Positions around the map at which there are no capsules: their poses are zero.
        norm: Normalise each component of each type of output poses over batch and positions, with a learned scale and
            shift.
        compete_over: ``"types"``: the output types at one position compete for an input capsule;
            ``"types-and-positions"``: those of all positions whose windows hold it.
        transform: From the capsules of a window to votes; :class:`torchcaps.nn.Dense` if None.
        routing: The routing algorithm; :class:`DynamicRouting` with its defaults if None.

    Raises:
        TypeError: A size that is no integer, or a transform or a routing that is none.
        ValueError: A size below one, padding as large as the kernel, or an option that does not exist.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR), for the layer and the competition
    over positions.
    """

    def __init__(
        self,
        in_types: int,
        in_dim: int,
        out_types: int,
        out_dim: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 0,
        norm: bool = False,
        compete_over: Competition = "types",
        transform: Transform | None = None,
        routing: Routing | None = None,
    ) -> None:
        name = "ConvCapsules"
        check_sizes(name, in_types=in_types, in_dim=in_dim, out_types=out_types, out_dim=out_dim)
        check_sizes(name, kernel_size=kernel_size, stride=stride)
        check_sizes(name, least=0, padding=padding)
        check_choice(name, "compete_over", compete_over, ("types", "types-and-positions"))
        if padding >= kernel_size:
            raise ValueError(f"{name}: padding must be below kernel_size, {kernel_size}, got {padding}")
        windows = max(1, round((kernel_size / stride) ** 2))  # that hold a capsule which is far from the edges
        rivals = out_types * windows if compete_over == "types-and-positions" else out_types
        super().__init__(LayerSize(in_types * kernel_size**2, in_dim, out_types, out_dim), transform, routing, rivals)
        self.in_types, self.out_types = in_types, out_types
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.compete_over: Competition = compete_over
        check_flags(name, norm=norm)
        self.norm = nn.BatchNorm1d(out_types * out_dim) if norm else None

    def forward(self, capsules: Capsules) -> Capsules:
        """Output capsules, on a map, from those of a map with its grid.

        Raises:
            TypeError: Poses that are not floating-point.
            ValueError: Capsules without a grid, of other types or components, or on a map smaller than a window.
        """
        routed, grid = self.route(capsules), self.out_grid(capsules.grid)
        positions = grid[1] * grid[2]
        activations = None if routed.activations is None else on_map(routed.activations, positions)
        poses = routed.poses if self.norm is None else self.norm(routed.poses.flatten(1)).view_as(routed.poses)
        return Capsules(on_map(poses, positions), activations, grid)

    def votes(self, capsules: Capsules) -> tuple[Votes, Float[Tensor, "BL I"] | None]:
        """What the routing is given: the votes of the capsules of each of the B·L windows."""
        if not isinstance(capsules, Capsules):
            raise TypeError(f"ConvCapsules: capsules must be Capsules with a grid, got {type(capsules).__name__}")
        grid = capsules.grid
        self.out_grid(grid)
        assert grid is not None
        shape = ("B", math.prod(grid), self.in_dim)
        check_tensor("ConvCapsules", "poses", capsules.poses, shape, fixed_by=("", "", "in_dim"))
        poses = capsules.poses.unflatten(1, grid)  # (B, T, H, W, K)
        windows = self._windows(poses.movedim(-1, 2).flatten(1, 2))  # (B, T·K, k², L)
        B, _, area, positions = windows.shape
        windows = windows.unflatten(1, (self.in_types, self.in_dim)).permute(0, 4, 2, 1, 3)  # (B, L, K, T, k²)
        votes = self.transform(windows.reshape(B * positions, self.in_dim, self.in_types * area).transpose(1, 2))
        if self.compete_over == "types-and-positions":
            votes.rivals = Rivals(self.window_capsules(grid, poses.device), math.prod(grid) + 1)
        if capsules.activations is None:
            return votes, None
        activations = self._windows(capsules.activations.unflatten(1, grid)).flatten(1, 2)  # (B, I, L)
        return votes, activations.transpose(1, 2).flatten(0, 1)

    def window_capsules(self, grid: tuple[int, int, int], device: torch.device | None = None) -> Int[Tensor, "L I"]:
        """The capsule of the map ``grid``, counted from 1, that each capsule of each window is; 0 beyond the edge."""
        number = torch.arange(1.0, math.prod(grid) + 1, device=device)  # exact up to 2^24
        return self._windows(number.view(1, *grid)).flatten(1, 2)[0].t().long()

    def out_grid(self, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Types, height and width of the map that goes out, from those of the map that comes in.

        Raises:
            ValueError: A map that is none, of other types, or smaller than a window.
        """
        if grid is None:
            raise ValueError(
                "ConvCapsules: capsules must stand on a map, but these have no grid; primary capsules of the grouping "
                '"channels" and other ConvCapsules have one'
            )
        types, *sizes = grid
        if types != self.in_types or min(sizes) + 2 * self.padding < self.kernel_size:
            raise ValueError(
                f"ConvCapsules: the map must have {self.in_types} types, and height and width of at least "
                f"{self.kernel_size - 2 * self.padding}, got {grid}"
                + (f": in_types is {self.in_types}, got {types}" if types != self.in_types else "")
            )
        height, width = ((size + 2 * self.padding - self.kernel_size) // self.stride + 1 for size in sizes)
        return self.out_types, height, width

    def _windows(self, maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C k2 L"]:
        """The windows of each map."""
        columns = F.unfold(maps, self.kernel_size, padding=self.padding, stride=self.stride)  # (B, C·k², L)
        return columns.unflatten(1, (maps.shape[1], self.kernel_size**2))

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return (
            f"{self.in_types}×{self.in_dim} → {self.out_types}×{self.out_dim}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, norm={self.norm is not None}, "
            f"compete_over={self.compete_over!r}"
        )


def _check_routed(name: str, routed: Routed, size: LayerSize) -> None:
    """Raise InputError unless a routing, named ``name``, returned capsules of the sizes I, K, J, D."""
    if not isinstance(routed, Routed):
        raise InputError(
            f"{name} must return Routed(poses, activations, coupling) of torchcaps.nn, got {type(routed).__name__}"
        )
    I, _, J, D = size
    for what, tensor, shape in (
        ("poses", routed.poses, (J, D)),
        ("activations", routed.activations, (J,)),
        ("coupling", routed.coupling, (I, J)),
    ):
        if tensor is None and what != "poses":
            continue
        letters = {"poses": "B, J, D", "activations": "B, J", "coupling": "B, I, J"}[what]
        wanted = f"({letters}) = (B, {', '.join(map(str, shape))})"
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must return {what} of shape {wanted}, got {type(tensor).__name__}")
        if tensor.ndim != len(shape) + 1 or tensor.shape[1:] != shape:
            raise InputError(f"{name} must return {what} of shape {wanted}, got {tuple(tensor.shape)}")


def on_map(windows: Float[Tensor, "BL T *more"], positions: int) -> Float[Tensor, "B TL *more"]:
    """What was computed for the windows of a map of L ``positions``, in the order of :class:`Capsules`."""
    return windows.unflatten(0, (-1, positions)).transpose(1, 2).flatten(1, 2)


def _places(coordinates: Coordinates, grid: tuple[int, int, int], dim: int) -> Float[Tensor, "I D"]:
    """What is added to the votes of each capsule of a map: its row and its column."""
    types, height, width = grid
    side = math.isqrt(dim)
    if coordinates != "hundredths" and (side * side != dim or side < 2):
        raise ValueError(f"DenseCapsules: coordinates={coordinates!r} needs poses that are matrices, got out_dim={dim}")
    if dim < 2:
        raise ValueError(f"DenseCapsules: coordinates need at least 2 components, got {dim}")
    of = {
        "centres": lambda n: (torch.arange(n) + 0.5) / n,
        "tenths": lambda n: (torch.arange(n) + 1) / (10 * n),
        "hundredths": lambda n: (torch.arange(n) - n / 2) / 100,
    }[coordinates]
    row, column = (0, 1) if coordinates == "hundredths" else (side - 1, 2 * side - 1)
    places = torch.zeros(types, height, width, dim)
    places[..., row], places[..., column] = of(height)[:, None], of(width)
    return places.flatten(0, 2)
