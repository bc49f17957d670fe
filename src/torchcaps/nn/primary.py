"""Primary capsules: modules that compute capsules from feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import MAP_AXES, checked
from torchcaps.errors import InputError
from torchcaps.nn.capsules import Capsules
from torchcaps.nn.convolutions import MAP_MODULES, ConvInit, Convolution, convolve_relu, draw_layers, normalise
from torchcaps.ops.convolution import Shape, choose, convolve
from torchcaps.ops.precision import in_full_precision
from torchcaps.ops.squash import exponential_squash, safe_norm, squash
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import Axes, Epsilon, Padding, Pixels, Size, Width
from torchcaps.tracing import has_hooks
from torchcaps.words import counted


@register("primary", "conv")
class PrimaryCapsules(nn.Module):
    """A convolution whose output channels form capsules: (B, C, H, W) → capsules (B, I, K).

    Feature maps may also be lines (B, C, W) or volumes (B, C, Z, H, W).

    With the grouping ``"channels"``, capsule ``i = (type · H' + y) · W' + x`` consists of the K channels of its type at
    one location of the H'×W' output grid. ``"raster"`` flattens the map (component, type, y, x) and cuts it into pieces
    of K, as several implementations do.

    Args:
        in_channels: Channels of the feature maps (C).
        dims: Axes of the map: 1 (lines), 2 (planes) or 3 (volumes).
        primary_types: Types of primary capsules. The number of primary capsules is types x height x width of the
            second convolution's output.
        primary_dim: Components of a primary capsule.
        primary_kernel: Kernel of the primary capsules' convolution, pixels.
        primary_stride: Stride of the primary capsules' convolution, pixels.
        primary_padding: Zero padding on each side of the input of the primary capsules' convolution, pixels.
        primary_activation: Activation after the primary capsules' convolution, before capsules are formed.
        primary_separate_convs: One convolution for each component of a primary capsule instead of one for all.
        grouping: Components of a primary capsule: the channels of one location (channels), or neighbouring locations
            of a flattened map (raster).
        primary_output: Function applied to primary capsules: squash; scaling to length one; votes/types + bias, then
            squash (authors' code); squash by 1 - e^-length; or none.
        primary_norm: Normalisation after the primary capsules' convolution: none, or batch normalisation, plain or
            with a learned scale and shift of each channel.
        primary_activations: Compute activations of primary capsules, the sigmoid of one more channel for each type;
            otherwise the lengths of the capsules are used.
        primary_depthwise: Convolve each channel separately; the feature maps must have as many channels as the
            primary capsules.
        squash_eps: Added under the squash's root. 1e-24 is practically zero: it changes no vector longer than 1e-8 in
            float32, and keeps the gradient of a zero vector finite.
        conv_init: Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); He et al.'s
            (truncated normal, bias 0); or the authors' code's (truncated normal of standard deviation 0.05 and 0.1,
            bias 0.1).
        primary_init: Initial weights of the primary capsules: by conv_init; or as in the matrix capsules' code, a
            truncated normal of standard deviation 0.5 for poses, bias 0, and of 3 for activations, bias -1.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Sabour, Frosst, Hinton 2017, section 4 (arXiv:1710.09829).
    """

    __call__: Callable[..., Capsules]

    def __init__(
        self,
        in_channels: Size,
        *,
        dims: Axes = 2,
        primary_types: Width = 32,
        primary_dim: Width = 8,
        primary_kernel: Pixels = 9,
        primary_stride: Pixels = 2,
        primary_padding: Padding = 0,
        primary_activation: Literal["none", "relu"] = "none",
        primary_separate_convs: bool = False,
        grouping: Literal["channels", "raster"] = "channels",
        primary_output: Literal["squash", "unit", "routed", "exponential", "linear"] = "squash",
        primary_norm: Literal["none", "batch", "batch-learned"] = "none",
        primary_activations: bool = False,
        primary_depthwise: bool = False,
        squash_eps: Epsilon = 1e-7,
        conv_init: ConvInit = "torch",
        primary_init: Literal["as-convolutions", "matrix-capsules"] = "as-convolutions",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        channels = primary_types * primary_dim
        if primary_padding >= primary_kernel:  # some capsules would see only zeros
            raise InputError(f"primary_padding must be below primary_kernel, {primary_kernel}, got {primary_padding}")
        if primary_depthwise and (primary_separate_convs or in_channels != channels):
            raise InputError(
                "primary_depthwise needs one convolution, and features of primary_types·primary_dim = "
                f"{counted(channels, 'channel')}, got {in_channels}"
            )
        if grouping == "raster" and primary_activations:
            raise InputError('primary_activations need grouping="channels", where a capsule has one position')
        self.in_channels, self.dims = in_channels, dims
        self.primary_types, self.primary_dim = primary_types, primary_dim
        self.primary_kernel, self.primary_stride, self.primary_padding = primary_kernel, primary_stride, primary_padding
        self.primary_activation, self.primary_separate_convs = primary_activation, primary_separate_convs
        self.grouping, self.primary_output, self.primary_norm = grouping, primary_output, primary_norm
        self.primary_activations, self.primary_depthwise = primary_activations, primary_depthwise
        self.squash_eps, self.conv_init, self.primary_init = squash_eps, conv_init, primary_init

        window = (primary_kernel, primary_stride, primary_padding)
        plain, learned = primary_norm == "none", primary_norm == "batch-learned"
        bias = plain and primary_output != "routed"
        convolution, norm = MAP_MODULES[dims].convolution, MAP_MODULES[dims].batch_norm
        num_convs = primary_dim if primary_separate_convs else 1
        self.convs = nn.ModuleList(
            convolution(in_channels, channels // num_convs, *window, bias=bias)
            for _ in range(0 if primary_depthwise else num_convs)
        )
        each_channel = nn.Conv2d if dims == 2 else convolution
        self.each_channel = (
            each_channel(in_channels, channels, *window, groups=in_channels, bias=plain) if primary_depthwise else None
        )
        self.norm = nn.Identity() if plain else norm(channels, affine=learned)
        self.activity: nn.Module | None = None
        if primary_activations:
            self.activity = nn.Sequential(
                convolution(in_channels, primary_types, *window, bias=plain),
                nn.Identity() if plain else norm(primary_types, affine=learned),
                nn.Sigmoid(),
            )
        self.bias = nn.Parameter(torch.empty(primary_types, primary_dim)) if primary_output == "routed" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to 0.1. The convolutions draw their own weights."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)

    def init_weights(self) -> None:
        """Draw the initial weights of the convolutions. A network calls this after all its parts are built."""
        if self.primary_init == "as-convolutions":
            draw_layers(self, self.conv_init, std=0.1)
        else:
            draw_layers(self, "truncated-normal", std=0.5, bias=0.0)
            if self.activity is not None:
                draw_layers(self.activity, "truncated-normal", std=3.0, bias=-1.0)

    @checked
    def forward(self, features: Float[Tensor, "B {self.in_channels} *S"]) -> Capsules:
        """Return primary capsules. Their poses lie in memory as (B, K, I), the order that fast routing reads.

        With the grouping ``"raster"`` capsules have no grid, because a capsule spans several positions.

        Raises:
            InputError: Features of other axes, or padded features that are smaller than the kernel.
        """
        if features.ndim != 2 + self.dims:
            axes = "B, C, " + ", ".join(MAP_AXES[-self.dims :])
            raise InputError(f"PrimaryCapsules: features must have shape ({axes}), got {tuple(features.shape)}")
        relu, plain = self.primary_activation == "relu", self.primary_norm == "none"
        maps = normalise(self.norm, in_full_precision(self._convolve(features, relu and plain)))
        maps = maps.relu() if relu and not plain else maps
        poses = self._group(maps)  # (B, K, I)
        if self.bias is not None:
            locations = poses.shape[2] // self.primary_types
            poses = poses / self.primary_types + self.bias.t().repeat_interleave(locations, 1)
        if self.primary_output == "unit":
            poses = poses / safe_norm(poses, 1, keepdim=True, eps=self.squash_eps)
        elif self.primary_output == "exponential":
            poses = exponential_squash(poses, 1)
        elif self.primary_output != "linear":
            poses = squash(poses, 1, self.squash_eps)
        activations = None if self.activity is None else in_full_precision(self.activity(features)).flatten(1)
        grid = None if self.grouping == "raster" else (self.primary_types, *maps.shape[2:])
        return Capsules(poses.transpose(1, 2), activations, grid)

    def is_wide(self, size: tuple[int, int], images: int) -> bool:
        """Return whether inference on maps of this size uses the fast transform of :mod:`torchcaps.ops.convolution`.

        Args:
            size: Height and width of the feature maps.
            images: Number of images in a batch.
        """
        kernel, stride = (self.primary_kernel,) * 2, (self.primary_stride,) * 2
        height, width = (length + 2 * self.primary_padding for length in size)
        shape = Shape(self.in_channels, self.primary_types * self.primary_dim, (height, width), kernel, stride)
        if self.dims != 2 or self.primary_depthwise:
            return False
        return choose(shape, images, learning=False) == "transform"

    def _convolve(self, features: Float[Tensor, "B C *S"], relu: bool) -> Float[Tensor, "B TK *s"]:
        """Apply all convolutions. Separate ones run as one convolution with joined weights, because that is faster."""
        convs = [cast(Convolution, conv) for conv in self.convs or [self.each_channel]]
        if len(convs) == 1 or any(type(conv) is not Convolution or has_hooks(conv) for conv in convs):
            maps = [convolve_relu(conv, features) if relu else conv(features) for conv in convs]
            return maps[0] if len(maps) == 1 else torch.cat(maps, 1)
        weight = torch.cat([conv.weight for conv in convs])
        bias = None if convs[0].bias is None else torch.cat([cast(Tensor, conv.bias) for conv in convs])
        return convolve(features, weight, bias, self.primary_stride, self.primary_padding, relu=relu)

    def _group(self, maps: Float[Tensor, "B TK *S"]) -> Float[Tensor, "B K I"]:
        """Group channels into capsules; nothing else does this."""
        if self.grouping == "raster":
            return maps.flatten(1).unflatten(1, (-1, self.primary_dim)).transpose(1, 2).contiguous()
        if self.primary_separate_convs:  # the channels are ordered (component, type)
            return maps.flatten(1).unflatten(1, (self.primary_dim, -1))
        by_type = maps.unflatten(1, (self.primary_types, self.primary_dim))  # (B, T, K, *S)
        return by_type.transpose(1, 2).flatten(2)


@register("primary", "sequence")
class SequenceCapsules(nn.Module):
    """A linear map from the channels of each position to squashed capsules. Positions with NaN are masked.

    Args:
        in_channels: Channels of the feature maps (C).
        primary_types: Types of primary capsules. The number of primary capsules is types x height x width of the
            second convolution's output.
        primary_dim: Components of a primary capsule.
        squash_eps: Added under the squash's root. 1e-24 is practically zero: it changes no vector longer than 1e-8 in
            float32, and keeps the gradient of a zero vector finite.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    __call__: Callable[..., Capsules]

    def __init__(
        self,
        in_channels: Size,
        *,
        primary_types: Width = 8,
        primary_dim: Width = 8,
        squash_eps: Epsilon = 1e-7,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.primary_types, self.primary_dim, self.squash_eps = primary_types, primary_dim, squash_eps
        self.linear = Convolution(in_channels, primary_types * primary_dim, 1)

    def forward(self, features: Float[Tensor, "B C H W"]) -> Capsules:
        """Return primary capsules on the map of the features."""
        present = ~features.isnan().any(1, keepdim=True)
        maps = in_full_precision(self.linear(features.where(present, 0)))
        by_type = maps.unflatten(1, (self.primary_types, self.primary_dim)).transpose(1, 2)  # (B, K, T, H, W)
        poses = squash(by_type.flatten(2), 1, self.squash_eps).transpose(1, 2)
        mask = present.expand(-1, self.primary_types, -1, -1).flatten(1)
        return Capsules(poses, None, (self.primary_types, *maps.shape[2:]), mask)


@register("primary", "positions")
class PositionCapsules(nn.Module):
    """The channels of each position are one capsule: (B, C, H, W) → capsules (B, H·W, C), without weights.

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136), section 3.
    """

    def forward(self, features: Float[Tensor, "B C H W"]) -> Capsules:
        """Return primary capsules on the map of the features, one type of capsule."""
        return Capsules(features.flatten(2).transpose(1, 2), None, (1, *features.shape[2:]))
