"""Fully connected capsule layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, Capsules, LayerSize
from torchcaps.nn.layers.base import CapsuleLayer, RoutingSpec, TransformSpec
from torchcaps.nn.votes import Votes
from torchcaps.nn.votes.positions import MapVotes, PlacedVotes
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import Size, Width

Coordinates = Literal["none", "centres", "tenths", "hundredths"]
"""How the position of a capsule on its map is added to its votes."""


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
        in_capsules: Number of input capsules (I); or the types and sizes of their map, such as types, height and width,
            which share_positions and coordinates need. None: any number, if neither transform nor routing has weights
            for each input capsule.
        in_dim: Components of an input capsule (K).
        out_capsules: Number of output capsules (J), if num_capsules is None.
        capsule_dim: Components of an output capsule (D).
        num_capsules: Output capsules of a dense layer; default: one for each class, as in the last layer.
        transform: The transform, which computes votes from capsules.
        routing: The routing algorithm, which computes output capsules from votes.
        share_positions: Capsules of one type share their weights at all positions of their map.
        coordinates: Add the position of a capsule on its map to its votes, for row and column i of n: (i + 1/2)/n or
            (i + 1)/(10 n) in the last column of the first two rows of a matrix, or (i - n/2)/100 in the first two
            components (EM's code).
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        shape = tuple(in_capsules) if isinstance(in_capsules, Sequence) else (in_capsules or 0,)
        if not 1 <= len(shape) <= 4:
            raise InputError(
                f"DenseCapsules: in_capsules must be a number, or the types and sizes of a map, got {shape}"
            )
        number, grid = math.prod(shape), shape if len(shape) > 1 else None
        if grid is None and (share_positions or coordinates != "none"):
            raise InputError("share_positions and coordinates need capsules on a map: types, height and width")
        if len(shape) != 3 and coordinates != "none":
            raise InputError(f"coordinates need types, height and width of a plane, got {shape}")
        size = LayerSize(number, in_dim, num_capsules or out_capsules, capsule_dim)
        shared = size._replace(in_capsules=grid[0]) if share_positions and grid else None
        super().__init__(size, transform, routing, transform_size=shared)
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
        poses, activations, _, mask = capsules
        votes, places = self._votes(poses, activations, mask), self._places(poses.device)
        votes = votes if places is None else PlacedVotes(votes, places)
        return votes.masked(mask), activations

    @checked
    def _votes(
        self,
        poses: Float[Tensor, "B {self.in_capsules} {self.in_dim}"],
        activations: Float[Tensor, "B {self.in_capsules}"] | None,
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
