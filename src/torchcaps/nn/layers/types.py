"""Capsule layers in which each input type has one vote for an output: convolutions and transposed convolutions."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.kernels.maps import Window, repeated, window_sums
from torchcaps.nn.capsules import Activations, Capsules, LayerSize, Routed
from torchcaps.nn.layers.base import RoutingSpec, TransformSpec
from torchcaps.nn.layers.maps import MapLayer, MapPadding
from torchcaps.nn.routing.dynamic import DynamicRouting
from torchcaps.nn.transforms import Dense, Shared, Transform
from torchcaps.nn.votes import Votes
from torchcaps.nn.votes.columns import VotesOfTypes, in_slabs, route_columns, rows_of
from torchcaps.parts import Device, Dtype, build, register
from torchcaps.ranges import Axes, Pixels, Size, Width
from torchcaps.tracing import has_hooks

Upsampling = Literal["transposed", "nearest"]
"""How a map becomes larger: by a transposed convolution, or by repeating positions before a convolution."""


class TypesLayer(MapLayer):
    """Base class of layers on a map in which each input type has one vote for an output.

    The vote of type t for component d of output j at position p is a convolution of the type's map, so the kernel lies
    inside the vote: V[t, j, d, p] = Σ_k Σ_q W[j, d, k, q] u[t, k, s·p + q - before], with the stride s and the padding
    before the map.

    The votes of a large map are computed and routed slab by slab, within :func:`torchcaps.set_working_memory`, and
    again in the backward pass. Dynamic routing without further options never keeps votes on a CPU. All votes are
    computed at once if the coupling is requested, if the routing is not :attr:`~torchcaps.nn.Routing.by_row`, and for
    exports, ``torch.compile`` and ``torch.func``, except for dynamic routing compiled on a CPU.

    Args:
        window: The kernel.
        dims: Axes of the map.
        size: Types of the input map (T), their components (K), types of the output map (J), their components (D).
        transform: The transform.
        vote_bias: Add a learned number to each component of a vote.
        **options: The other arguments of :class:`MapLayer`.
    """

    def __init__(
        self, window: Window, dims: int, size: LayerSize, *, transform: TransformSpec, vote_bias: bool, **options: Any
    ) -> None:
        transform = build("transform", transform)
        if isinstance(transform, Transform) and type(transform) not in (Shared, Dense):
            name = type(transform).__name__
            raise InputError(
                f'{type(self).__name__}: votes of types need the transform "shared" or "dense", got {name}'
            )
        area = window.kernel**dims
        summed = max(area / window.stride**dims, 1) if window.up else area  # capsules in the vote of a type
        inside = size._replace(in_dim=size.in_dim * area)
        options |= {"transform": transform, "transform_size": inside, "summed": summed}
        super().__init__(window, dims, size.in_capsules, size, **options)
        self.vote_bias = vote_bias
        kernels = size.in_capsules if isinstance(self.transform, Dense) else 1
        self.bias = nn.Parameter(torch.empty(kernels, *size[2:])) if vote_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias of the votes to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @checked
    def votes(self, capsules: Capsules) -> tuple[Votes, Activations]:
        """Return the inputs of the routing: votes and activations of the types for each of the B·L positions."""
        maps, dtype = self._maps(capsules)
        votes, activations = self._votes_of_types(maps, capsules).all_rows()
        votes.dtype = dtype
        return votes, activations

    def _route_in_full_precision(
        self, capsules: Capsules | Float[Tensor, "B I K"], return_coupling: bool = False
    ) -> tuple[Routed, torch.dtype]:
        """Route the positions of a large map slab by slab, so that only the votes of a slab are in memory."""
        if return_coupling or not isinstance(capsules, Capsules):
            return super()._route_in_full_precision(capsules, return_coupling)
        maps, dtype = self._maps(capsules)
        votes, routing = self._votes_of_types(maps, capsules), self.routing
        if not routing.by_row or has_hooks(routing):  # hooks see one call with all votes
            return self._routed(*votes.all_rows()), dtype
        if isinstance(routing, DynamicRouting) and routing.has_map_kernel and votes.mask is None:
            bias = None if routing.bias is None else routing.bias.to(maps)
            poses = route_columns(votes, bias, routing.num_iterations, routing.squash_eps, routing.backend)
            return Routed(rows_of(poses.flatten(3))), dtype
        return in_slabs(self._routed, votes), dtype

    def _voting(self, mask: Bool[Tensor, "B T *S"]) -> Bool[Tensor, "BL I"]:
        return rows_of(self.window_sums(mask.to(torch.float32)).flatten(2)) > 0

    def _learned(self) -> list[Tensor]:
        return super()._learned() + ([] if self.bias is None else [self.bias])

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
        of_each_type = matrices.ndim == 4  # (T, J, D, K), of the transform "dense"
        kernel = matrices.to(like).unflatten(-1, (self.in_dim, *side))  # (J, D, K, *k), or (T, J, D, K, *k)
        kernel = kernel.flatten(-self.dims - 3, -self.dims - 2)
        kernel = kernel.transpose(-self.dims - 2, -self.dims - 1) if self.window.up else kernel
        bias = None if self.bias is None else self.bias.to(like).flatten()
        return (kernel.flatten(0, 1), bias, self.in_types) if of_each_type else (kernel, bias, 1)

    def _prepared(self, maps: Float[Tensor, "*more *S"]) -> Float[Tensor, "*more *S"]:
        """Return maps as the window needs them: with each position repeated, and with zeros around them."""
        return self.window.padded(repeated(maps, self.dims, self.repeat), self.dims)

    def window_sums(self, numbers: Float[Tensor, "B T *S"]) -> Float[Tensor, "B T *S"]:
        """Return the sum of the numbers of a type's capsules that each output position sees."""
        sizes = [self.window.outputs(size * self.repeat) for size in numbers.shape[2:]]
        sums = window_sums(self._prepared(numbers).flatten(0, 1), self.window, [self.window.cut] * self.dims, sizes)
        return sums.unflatten(0, numbers.shape[:2])


@register("layer", "conv-types")
class ConvTypeCapsules(TypesLayer):
    """Capsule layer on a map: each input type has one vote for each output, by a convolution of its map.

    The votes of a type's capsules in a window are summed to one vote, and the types compete. The kernel is one for all
    input types with the transform ``"shared"`` (J, D, K·kⁿ), and one for each with ``"dense"``. Routings that look at
    input capsules, not only at votes, get the mean pose and activation of the type's capsules in the window. A type is
    masked where all its capsules in the window are.

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
        vote_bias: Add a learned number, initially 0, to each component of a vote.
        pose_norm: After a layer on a map, batch normalisation of each component of each type of poses, with a learned
            scale and shift.
        transform: The transform: shared (one kernel for all input types) or dense (one for each).
        routing: The routing algorithm, which computes output capsules from votes.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: LaLonde, Bagci 2018, "Capsules for Object Segmentation" (arXiv:1804.04241), for one kernel for all types;
    Nguyen, Hua, Le 2021, "3D-UCaps" (arXiv:2203.08965), for one kernel each.
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
        vote_bias: bool = False,
        pose_norm: bool = False,
        transform: TransformSpec = "dense",
        routing: RoutingSpec = "dynamic",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(
            Window(layer_kernel, layer_stride, layer_padding),
            dims,
            LayerSize(in_types, in_dim, layer_types, capsule_dim),
            vote_bias=vote_bias,
            pose_norm=pose_norm,
            transform=transform,
            routing=routing,
        )
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding


@register("layer", "deconv")
class DeconvCapsules(TypesLayer):
    """Capsule layer that enlarges a map: each input type has one vote for each output, by a transposed convolution.

    The layer is :class:`ConvTypeCapsules` in the other direction: a map of size S becomes one of size stride·S.

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
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        up = upsampling == "transposed"
        super().__init__(
            Window(layer_kernel, layer_stride if up else 1, layer_padding, up),
            dims,
            LayerSize(in_types, in_dim, layer_types, capsule_dim),
            repeat=1 if up else layer_stride,
            vote_bias=vote_bias,
            pose_norm=pose_norm,
            transform=transform,
            routing=routing,
        )
        self.upsampling = upsampling
        self.layer_kernel, self.layer_stride, self.layer_padding = layer_kernel, layer_stride, layer_padding
