"""Capsule layers: from feature maps to primary capsules, and from capsules to capsules."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import Convolution
from torchcaps.nn.routing import DynamicRouting, Routing
from torchcaps.ops.checks import check_choice, check_flags, check_numbers, check_one_device, check_sizes, check_tensor
from torchcaps.ops.convolution import Shape, choose, convolve
from torchcaps.ops.precision import in_full_precision
from torchcaps.ops.squash import safe_norm, squash

Grouping = Literal["channels", "raster"]
PrimaryOutput = Literal["squash", "unit", "routed"]
WeightInit = Literal["balanced", "normal", "truncated-normal", "fan-in"]


class PrimaryCapsules(nn.Module):
    """A convolution whose channels are grouped into capsules: (B, C, H, W) → poses (B, I, K).

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
            one routing pass, which squashes s / num_types + bias, bias (num_types, K) starting at 0.1.
        eps: Epsilon of the squash or of the unit length.

    Raises:
        TypeError: A size that is no integer, or an option of another type.
        ValueError: A size below one, or an option that does not exist.

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
        eps: float = 1e-7,
    ) -> None:
        super().__init__()
        name = "PrimaryCapsules"
        check_choice(name, "activation", activation, ("none", "relu"))
        check_choice(name, "grouping", grouping, ("channels", "raster"))
        check_choice(name, "output", output, ("squash", "unit", "routed"))
        check_sizes(name, in_channels=in_channels, num_types=num_types, dim=dim, kernel_size=kernel_size, stride=stride)
        check_sizes(name, least=0, padding=padding)
        check_flags(name, separate_convs=separate_convs)
        self.in_channels, self.num_types, self.dim = in_channels, num_types, dim
        self.kernel_size, self.padding = kernel_size, padding
        self.activation, self.grouping, self.output, self.eps = activation, grouping, output, eps
        num_convs = dim if separate_convs else 1
        self.convs = nn.ModuleList(
            Convolution(
                in_channels,
                num_types * dim // num_convs,
                kernel_size,
                stride,
                padding,
                bias=output != "routed",
                relu=activation == "relu",
            )
            for _ in range(num_convs)
        )
        # separate convolutions stack their outputs (component, type); one convolution is read (type, component)
        self.component_major = separate_convs
        self.bias = nn.Parameter(torch.full((num_types, dim), 0.1)) if output == "routed" else None

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B I K"]:
        """Poses of the primary capsules; their memory is laid out as (B, K, I), as fast routing wants it.

        Args:
            features: Maps of ``in_channels`` channels, with the padding no smaller than the kernel.

        Raises:
            TypeError: Maps that are not floating-point.
            ValueError: Another number of channels, or maps smaller than the kernel.
        """
        check_tensor("PrimaryCapsules", "features", features, ("B", self.in_channels, "H", "W"))
        least = max(1, self.kernel_size - 2 * self.padding)
        if min(features.shape[2:]) < least:
            less = f" less {2 * self.padding} of padding" if self.padding else ""
            raise ValueError(
                f"PrimaryCapsules: features must have shape (B, {self.in_channels}, H, W) with H and W of at least "
                f"{least}, the kernel's size{less}, got {tuple(features.shape)}"
            )
        poses = self._group(in_full_precision(self._convolve(features)))  # (B, K, I)
        if self.bias is not None:
            locations = poses.shape[2] // self.num_types
            poses = poses / self.num_types + self.bias.t().repeat_interleave(locations, 1)
        if self.output == "unit":
            return (poses / safe_norm(poses, 1, keepdim=True, eps=self.eps)).transpose(1, 2)
        return squash(poses, 1, self.eps).transpose(1, 2)

    def is_wide(self, size: tuple[int, int], images: int) -> bool:
        """Whether features of so many images are convolved by products of planes where nothing is learned.

        Args:
            size: Height and width of the features.
            images: B.
        """
        first = self.convs[0]
        assert isinstance(first, Convolution)
        (k, l), (s, t) = first.kernel_size, first.stride
        height, width = (length + 2 * self.padding for length in size)
        shape = Shape(self.in_channels, self.num_types * self.dim, (height, width), (k, l), (s, t))
        return choose(shape, images, learning=False) == "transform"

    def _convolve(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B TK h w"]:
        """All convolutions; separate ones are one with their weights joined, which is faster than one by one."""
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


class DenseCapsules(nn.Module):
    """Fully connected capsule layer: every input capsule votes for every output capsule, routing decides.

    Usable alone and stacked: poses (B, I, K) in, capsules (B, J, D) out.

    A stack needs poses that are not too short: every squash shortens short capsules further. In an experiment with
    three stacked layers (32 → 16 → 8 → 4 capsules, default initialisation, Adam), fed with poses of length 0.1, both
    softmax axes stayed at their initial loss for 1,000 steps; of length 0.2, over outputs they trained, over inputs
    they stayed for 400 steps; of length 0.3, both trained, over outputs better.

    Args:
        in_capsules: I.
        in_dim: K.
        out_capsules: J.
        out_dim: D.
        routing: The routing algorithm; :class:`DynamicRouting` with its defaults if None.
        bias: Add a learned bias (J, D), starting at 0.1, before the squash.
        learn_prior: Learn the start of the routing logits (I, J), from zero.
        weight_init: ``"balanced"`` (default): normal, with the deviation that suits the sizes and the routing (see
            :meth:`balanced_std`), so that layers stack; ``"normal"`` or
            ``"truncated-normal"`` (cut at two deviations) with ``weight_std``; ``"fan-in"``: normal with variance
            2 / (I·K).
        weight_std: Standard deviation for ``"normal"`` and ``"truncated-normal"``.

    Raises:
        TypeError: A size that is no integer, or an option of another type.
        ValueError: A size below one, or an option that does not exist.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829).
    """

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        out_capsules: int,
        out_dim: int,
        *,
        routing: Routing | None = None,
        bias: bool = False,
        learn_prior: bool = False,
        weight_init: WeightInit = "balanced",
        weight_std: float = 0.1,
    ) -> None:
        super().__init__()
        name = "DenseCapsules"
        check_choice(name, "weight_init", weight_init, ("balanced", "normal", "truncated-normal", "fan-in"))
        check_sizes(name, in_capsules=in_capsules, in_dim=in_dim, out_capsules=out_capsules, out_dim=out_dim)
        check_flags(name, bias=bias, learn_prior=learn_prior)
        check_numbers(name, weight_std=weight_std)
        if not 0 <= weight_std < math.inf:
            raise ValueError(f"{name}: weight_std must be at least 0 and finite, got {weight_std}")
        if not isinstance(routing, Routing | None):
            raise TypeError(f"{name}: routing must be a Routing or None, got {type(routing).__name__}")
        self.in_capsules, self.in_dim = in_capsules, in_dim
        self.out_capsules, self.out_dim = out_capsules, out_dim
        self.weight_init, self.weight_std = weight_init, weight_std
        self.routing = DynamicRouting() if routing is None else routing
        # seen as (I, J, D, K), kept in memory as (J, D, K, I): every step of fast routing is then a matrix product
        memory = torch.empty(out_capsules, out_dim, in_dim, in_capsules)
        self.weight = nn.Parameter(memory.permute(3, 0, 1, 2))
        self.bias = nn.Parameter(torch.empty(out_capsules, out_dim)) if bias else None
        self.prior = nn.Parameter(torch.empty(in_capsules, out_capsules)) if learn_prior else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's random generator."""
        with torch.no_grad():
            if self.weight_init == "truncated-normal":
                std = self.weight_std
                nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
            else:
                stds = {
                    "balanced": self.balanced_std,
                    "normal": self.weight_std,
                    "fan-in": math.sqrt(2 / (self.in_capsules * self.in_dim)),
                }
                nn.init.normal_(self.weight, std=stds[self.weight_init])
            if self.bias is not None:
                nn.init.constant_(self.bias, 0.1)
            if self.prior is not None:
                nn.init.zeros_(self.prior)

    @property
    def balanced_std(self) -> float:
        """Deviation σ of W under which a layer's output capsules start neither short nor saturated.

        Under uniform coupling c the sum of votes has D components of variance I·c²·σ²·‖u‖², where c = 1/J (softmax
        over outputs), 1/I (over inputs) or 1 (no routing): σ = 1 / (c·√(I·D)) makes its length near one for inputs
        of length one. Too small a deviation halves the lengths again and again in a stack until nothing is left; too
        large a one saturates the squash.

        Over inputs, such votes are of length √I, of which the second iteration chooses a single one, and the squash
        is saturated. There the sum grows from one iteration to the next: of short sums, the t-th has about the length
        s_t = σ²·s²_{t-1}, and s_1 = σ·√(D/I). The last one, s_r, is of length one for σ = (I/D)^(1/(6 - 2^(3-r))).
        """
        routing = self.routing
        iterations = routing.num_iterations if isinstance(routing, DynamicRouting) else 1
        if iterations == 0:
            return (self.in_capsules * self.out_dim) ** -0.5
        if isinstance(routing, DynamicRouting) and routing.softmax_over == "inputs":
            return (self.in_capsules / self.out_dim) ** (1 / (6 - 2.0 ** (3 - iterations)))
        return self.out_capsules * (self.in_capsules * self.out_dim) ** -0.5

    def forward(self, poses: Float[Tensor, "B I K"]) -> Float[Tensor, "B J D"]:
        """Output capsules v_j.

        Raises:
            TypeError: Poses that are not floating-point.
            ValueError: Poses of another shape, or on another device.
        """
        self._check(poses)
        capsules, _ = self.routing(poses, self.weight, self.bias, self.prior)
        return capsules

    def forward_with_coupling(
        self, poses: Float[Tensor, "B I K"]
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B I J"] | None]:
        """Output capsules v_j and the coupling c_ij of the last iteration.

        Raises:
            TypeError: Poses that are not floating-point.
            ValueError: Poses of another shape, or on another device.
        """
        self._check(poses)
        return self.routing(poses, self.weight, self.bias, self.prior, return_coupling=True)

    def _check(self, poses: Tensor) -> None:
        check_tensor("DenseCapsules", "poses", poses, ("B", self.in_capsules, self.in_dim))
        check_one_device("DenseCapsules", poses=poses, weight=self.weight)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"I={self.in_capsules}, K={self.in_dim}, J={self.out_capsules}, D={self.out_dim}"
