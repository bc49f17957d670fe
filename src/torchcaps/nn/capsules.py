"""Primary capsules: from feature maps to capsules."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import Convolution
from torchcaps.nn.flow import Capsules
from torchcaps.ops.checks import check_choice, check_flags, check_sizes, check_tensor
from torchcaps.ops.convolution import Shape, choose, convolve
from torchcaps.ops.precision import in_full_precision
from torchcaps.ops.squash import exponential_squash, safe_norm, squash

Grouping = Literal["channels", "raster"]
PrimaryOutput = Literal["squash", "unit", "routed", "exponential", "linear"]
PrimaryNorm = Literal["none", "batch", "batch-learned"]


class PrimaryCapsules(nn.Module):
    """A convolution whose channels are grouped into capsules: (B, C, H, W) → capsules (B, I, K).

    With the grouping ``"channels"``, capsule ``i = (type · H' + y) · W' + x`` holds the K channels of its type at one
    location of the H'×W' output grid.

    Args:
        in_channels: C.
        num_types: Capsule types; I = num_types · H' · W'.
        dim: K, the components of a capsule.
        kernel_size: Of the convolution, pixels.
        stride: Of the convolution, pixels.
        padding: Zeros on each side of the features, pixels.
        activation: ``"none"`` (the paper) or ``"relu"`` on the convolution, before capsules are formed.
        grouping: ``"channels"`` as in the paper, or ``"raster"``: the map flattened (component, type, y, x) and cut
            into pieces of K, so that a capsule holds neighbouring locations of one channel, as several
            implementations do.
        separate_convs: One convolution a component instead of one for all; the same function, initialised apart.
        output: ``"squash"``; ``"unit"``: vectors of length one, s / √(‖s‖² + eps); ``"routed"``: the authors' code,
            one routing pass, which squashes s / num_types + bias, bias (num_types, K) starting at 0.1;
            ``"exponential"``: :func:`torchcaps.exponential_squash`; ``"linear"``: as the convolution gives them.
        norm: ``"batch"`` normalises the channels of the convolution over the batch, ``"batch-learned"`` with a learned
            scale and shift of each; the convolution has no bias then.
        activations: Capsules have activations, the sigmoid of one more channel for each type, normalised likewise.
        depthwise: Each channel of the convolution looks at one channel of the features, of which there are as many.
        eps: Epsilon of the squash or of the unit length.

    Raises:
        TypeError: A size that is no integer, an option of another type, or features that are not floating-point.
        ValueError: A size below one, an option that does not exist, or features of another number of channels or, with
            the padding, smaller than the kernel.

    Source: Sabour, Frosst, Hinton 2017, section 4 (arXiv:1710.09829).
    """

    def __init__(
        self,
        in_channels: int,
        num_types: int = 32,
        dim: int = 8,
        *,
        kernel_size: int = 9,
        stride: int = 2,
        padding: int = 0,
        activation: Literal["none", "relu"] = "none",
        grouping: Grouping = "channels",
        separate_convs: bool = False,
        output: PrimaryOutput = "squash",
        norm: PrimaryNorm = "none",
        activations: bool = False,
        depthwise: bool = False,
        eps: float = 1e-7,
    ) -> None:
        super().__init__()
        name = "PrimaryCapsules"
        check_choice(name, "activation", activation, ("none", "relu"))
        check_choice(name, "grouping", grouping, ("channels", "raster"))
        check_choice(name, "output", output, ("squash", "unit", "routed", "exponential", "linear"))
        check_choice(name, "norm", norm, ("none", "batch", "batch-learned"))
        check_sizes(name, in_channels=in_channels, num_types=num_types, dim=dim, kernel_size=kernel_size, stride=stride)
        check_sizes(name, least=0, padding=padding)
        check_flags(name, separate_convs=separate_convs, activations=activations, depthwise=depthwise)
        if depthwise and (separate_convs or in_channels != num_types * dim):
            raise ValueError(
                f"{name}: depthwise needs one convolution, and features of num_types·dim = {num_types * dim} "
                f"channels, got {in_channels}"
            )
        if grouping == "raster" and activations:
            raise ValueError(f'{name}: activations need the grouping "channels": a capsule must stand at one place')
        self.in_channels, self.num_types, self.dim = in_channels, num_types, dim
        self.kernel_size, self.padding = kernel_size, padding
        self.activation, self.grouping, self.output, self.eps = activation, grouping, output, eps
        self.depthwise = depthwise
        num_convs = dim if separate_convs else 1
        plain = norm == "none"
        self.convs = nn.ModuleList(
            Convolution(
                in_channels,
                num_types * dim // num_convs,
                kernel_size,
                stride,
                padding,
                bias=plain and output != "routed",
                relu=plain and activation == "relu",
            )
            for _ in range(0 if depthwise else num_convs)
        )
        self.each_channel = (
            nn.Conv2d(in_channels, in_channels, kernel_size, stride, padding, groups=in_channels, bias=plain)
            if depthwise
            else None
        )
        channels, learned = num_types * dim, norm == "batch-learned"
        self.norm = nn.Identity() if plain else nn.BatchNorm2d(channels, affine=learned)
        self.activity = (
            nn.Sequential(
                Convolution(in_channels, num_types, kernel_size, stride, padding, bias=plain),
                nn.Identity() if plain else nn.BatchNorm2d(num_types, affine=learned),
                nn.Sigmoid(),
            )
            if activations
            else None
        )
        # separate convolutions stack their outputs (component, type); one convolution is read (type, component)
        self.component_major = separate_convs
        self.bias = nn.Parameter(torch.full((num_types, dim), 0.1)) if output == "routed" else None

    def forward(self, features: Float[Tensor, "B C H W"]) -> Capsules:
        """Primary capsules; their poses' memory is laid out as (B, K, I), as fast routing wants it.

        Capsules of the grouping ``"raster"`` stand at no one place, so they have no grid.
        """
        shape = ("B", self.in_channels, "H", "W")
        check_tensor("PrimaryCapsules", "features", features, shape, fixed_by=("", "in_channels"))
        least = max(1, self.kernel_size - 2 * self.padding)
        if min(features.shape[2:]) < least:
            less = f" less {2 * self.padding} of padding" if self.padding else ""
            raise ValueError(
                f"PrimaryCapsules: features must have shape (B, {self.in_channels}, H, W) with H and W of at least "
                f"{least}, the kernel's size{less}, got {tuple(features.shape)}"
            )
        maps = self.norm(in_full_precision(self._convolve(features)))
        if self.activation == "relu" and not isinstance(self.norm, nn.Identity):
            maps = maps.relu()
        poses = self._group(maps)  # (B, K, I)
        if self.bias is not None:
            locations = poses.shape[2] // self.num_types
            poses = poses / self.num_types + self.bias.t().repeat_interleave(locations, 1)
        if self.output == "unit":
            poses = poses / safe_norm(poses, 1, keepdim=True, eps=self.eps)
        elif self.output == "exponential":
            poses = exponential_squash(poses, 1)
        elif self.output != "linear":
            poses = squash(poses, 1, self.eps)
        activations = None if self.activity is None else in_full_precision(self.activity(features)).flatten(1)
        grid = None if self.grouping == "raster" else (self.num_types, maps.shape[2], maps.shape[3])
        return Capsules(poses.transpose(1, 2), activations, grid)

    def is_wide(self, size: tuple[int, int], images: int) -> bool:
        """Whether features of this height and width are convolved by products of planes where nothing is learned."""
        if self.depthwise:
            return False
        first = self.convs[0]
        assert isinstance(first, Convolution)
        (k, l), (s, t) = first.kernel_size, first.stride
        height, width = (length + 2 * self.padding for length in size)
        shape = Shape(self.in_channels, self.num_types * self.dim, (height, width), (k, l), (s, t))
        return choose(shape, images, learning=False) == "transform"

    def _convolve(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B TK h w"]:
        """All convolutions; separate ones are one with their weights joined, which is faster than one by one."""
        if self.each_channel is not None:
            return self.each_channel(features)
        first = self.convs[0]
        assert isinstance(first, Convolution)
        if len(self.convs) == 1:
            return first(features)
        if any(conv._forward_hooks or conv._forward_pre_hooks for conv in self.convs):  # who listens, hears each
            return torch.cat([conv(features) for conv in self.convs], 1)
        weight, bias = (
            None if getattr(first, name) is None else torch.cat([getattr(conv, name) for conv in self.convs])
            for name in ("weight", "bias")
        )
        assert weight is not None
        return convolve(features, weight, bias, first.stride[0], self.padding, relu=first.relu)

    def _group(self, maps: Float[Tensor, "B TK H W"]) -> Float[Tensor, "B K I"]:
        """The one place where channels become capsules."""
        if self.grouping == "raster":
            return maps.flatten(1).unflatten(1, (-1, self.dim)).transpose(1, 2).contiguous()
        if self.component_major:
            return maps.flatten(1).unflatten(1, (self.dim, -1))
        by_type = maps.unflatten(1, (self.num_types, self.dim))  # (B, T, K, H, W)
        return by_type.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return (
            f"num_types={self.num_types}, dim={self.dim}, activation={self.activation!r}, grouping={self.grouping!r}, "
            f"output={self.output!r}, depthwise={self.depthwise}, eps={self.eps:g}"
        )
