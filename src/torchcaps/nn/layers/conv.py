"""Convolutional capsule layers: the capsules of a window vote for the output capsules at its centre."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.kernels.maps import Window
from torchcaps.nn.capsules import Activations, Capsules, Grid, LayerSize
from torchcaps.nn.layers.base import RoutingSpec, TransformSpec
from torchcaps.nn.layers.maps import MapLayer, MapPadding
from torchcaps.nn.votes import Votes
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import Axes, Pixels, Size, Width

Competition = Literal["types", "types-and-positions"]
"""Which output capsules compete for an input capsule of a map."""


def current_tree(tree: Any) -> Any:
    """Return the tree of a file in the options of today.

    In files of earlier versions, ``voters="types"`` of the layer ``"conv"`` makes it the layer ``"conv-types"``.
    """
    if isinstance(tree, list | tuple):
        return type(tree)(map(current_tree, tree))
    if not isinstance(tree, Mapping):
        return tree
    current = {name: current_tree(value) for name, value in tree.items()}
    if current.get("name") == "conv" and "voters" in current:
        of_types = current.pop("voters") == "types"
        current["name"] = "conv-types" if of_types else "conv"
        current.pop("compete_over" if of_types else "vote_bias", None)  # had a single value there
    return current


@register("layer", "conv")
class ConvCapsules(MapLayer):
    """Capsule layer on a map: the capsules of a window vote for the output capsules at the centre of the window.

    All positions share the weights. Output capsules form a map too, in the order of :class:`Capsules`, so such layers
    can be stacked. In :class:`ConvTypeCapsules`, each input type casts one vote for the whole window.

    Args:
        in_types: Capsule types of the input map.
        in_dim: Components of an input capsule (K).
        layer_types: Output capsule types of a layer on a map.
        capsule_dim: Components of an output capsule (D).
        dims: Axes of the map: 1 (lines), 2 (planes) or 3 (volumes).
        layer_kernel: Side of a window of a layer on a map, positions.
        layer_stride: Stride of a layer on a map, positions.
        layer_padding: Positions without capsules around the map, on each side; same: as many as ⌈size / stride⌉ outputs
            need, of which the smaller half is before the map, as in TensorFlow.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        compete_over: In a layer on a map, the output types of one position compete for an input capsule, or the output
            types of all windows that contain it.
        transform: The transform, which computes votes from capsules.
        routing: The routing algorithm, which computes output capsules from votes.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing" (ICLR).
    """

    def __init__(
        self,
        in_types: Size,
        in_dim: Size,
        layer_types: Width = 16,
        capsule_dim: Width = 16,
        *,
        dims: Axes = 2,
        layer_kernel: Pixels = 3,
        layer_stride: Pixels = 1,
        layer_padding: MapPadding = 0,
        pose_norm: bool = False,
        compete_over: Competition = "types",
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        size = LayerSize(in_types * layer_kernel**dims, in_dim, layer_types, capsule_dim)
        # windows that contain a capsule far from the edges
        windows = 1 if compete_over == "types" else max(1, round((layer_kernel / layer_stride) ** dims))
        super().__init__(
            Window(layer_kernel, layer_stride, layer_padding),
            dims,
            in_types,
            size,
            pose_norm=pose_norm,
            transform=transform,
            routing=routing,
            competitors=layer_types * windows,
        )
        self.compete_over = compete_over
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding

    @checked
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: votes and activations of the capsules of each of the B·L windows."""
        maps, dtype = self._maps(capsules)
        grid, mask, activations = capsules.grid, capsules.mask, capsules.activations
        assert grid is not None
        windows = self._windows(maps.flatten(1, 2))  # (B, T·K, kⁿ, L)
        windows = windows.unflatten(1, (self.in_types, self.in_dim)).permute(0, 4, 2, 1, 3)  # (B, L, K, T, kⁿ)
        votes = self._transformed(windows.flatten(0, 1).flatten(2).transpose(1, 2))
        votes.dtype = dtype
        if self.compete_over == "types-and-positions":
            votes.competition = MapCompetition(self.window_capsules(grid, maps.device), math.prod(grid) + 1)
        votes = votes.masked(None if mask is None else self._voting(mask.unflatten(1, grid)))
        return votes, None if activations is None else self._in_windows(activations.to(maps.dtype).unflatten(1, grid))

    def _voting(self, mask: Bool[Tensor, "B T *S"]) -> Bool[Tensor, "BL I"]:
        return self._in_windows(mask.to(torch.float32)) > 0

    def window_capsules(self, grid: Grid, device: torch.device | None = None) -> Int[Tensor, "L I"]:
        """Return the index on the map, counted from 1, of each capsule of each window; 0 outside the map."""
        number = torch.arange(1.0, math.prod(grid) + 1, device=device)  # exact up to 2^24
        return self._windows(number.view(1, *grid)).flatten(1, 2)[0].t().long()

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
