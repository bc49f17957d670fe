"""Convolutions before the capsules, a stem of small ones, and normalisations."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.checks import checked
from torchcaps.errors import InputError, reason_of
from torchcaps.ops.convolution import compute
from torchcaps.ops.precision import check_one_dtype
from torchcaps.parts import Device, Dtype
from torchcaps.ranges import Padding, Pixels, Size
from torchcaps.tracing import has_hooks, is_fake
from torchcaps.words import counted

ConvInit = Literal["torch", "glorot", "he", "truncated-normal"]
"""Initial distribution of weights; see :func:`draw_layers`."""
KEPT_BY_CUT = 0.87962566103423978
"""Standard deviation of a normal distribution cut at two standard deviations, relative to the uncut one."""
ConvNorm = Literal["none", "channel"]
"""Normalisation before an activation: none, or :class:`ChannelNorm`."""


class Convolution(nn.Conv2d):
    """:class:`torch.nn.Conv2d` with the fastest algorithm for its sizes, :func:`torchcaps.ops.convolution.convolve`.

    It takes the arguments of :class:`torch.nn.Conv2d`, and its parameters have the names, shapes, memory layout and
    initial values of that class. With dilation, groups, or padding other than zeros, PyTorch computes it.

    Args:
        in_channels: Input channels (C).
        out_channels: Output channels (O).
        kernel_size: Side of the kernel, pixels, or (height, width).
        stride: Stride in pixels, one number or (down, across).
        padding: Zero padding on each side, pixels, one number or (down, across); or ``"same"`` or ``"valid"``.
        dilation: Distance of neighbouring weights of the kernel, pixels.
        groups: Number of groups of channels, each convolved separately.
        bias: Add a learned number to each output channel.
        padding_mode: Values around the maps, as for :class:`torch.nn.Conv2d`.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    @checked
    def __init__(
        self,
        in_channels: Size,
        out_channels: Size,
        kernel_size: Pixels | tuple[Pixels, Pixels],
        stride: Pixels | tuple[Pixels, Pixels] = 1,
        padding: Padding | tuple[Padding, Padding] | Literal["same", "valid"] = 0,
        dilation: Pixels | tuple[Pixels, Pixels] = 1,
        groups: Size = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        try:
            super().__init__(
                in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
                device, dtype,
            )  # fmt: skip
        except ValueError as error:  # channels that groups do not divide, a stride with padding "same"
            raise InputError(f"Convolution: {reason_of(error)}") from None
        down, across = self.stride
        is_plain = self.dilation == (1, 1) and groups == 1 and padding_mode == "zeros" and padding != "same"
        sides = (0, 0) if isinstance(self.padding, str) else self.padding
        self._windows = ((down, across), (sides[0], sides[1])) if is_plain else None

    @checked
    def forward(self, input: Float[Tensor, "B {self.in_channels} H W"], relu: bool = False) -> Float[Tensor, "B O h w"]:
        """Convolve; with ``relu`` also apply a ReLU, which then needs no extra memory."""
        if self._windows is None:
            maps = super().forward(input)
            return maps.relu_() if relu else maps
        return compute(input, self.weight, self.bias, *self._windows, relu)


def convolve_relu(convolution: nn.Module, features: Float[Tensor, "B C *S"]) -> Float[Tensor, "B O *s"]:
    """Apply a convolution, and then a ReLU; both as one operation, unless hooks or another class ask for the first.

    The convolution alone stays linear for tools that replace it by a sum of two, as LoRA does.
    """
    if type(convolution) is Convolution and not has_hooks(convolution):
        return convolution(features, relu=True)
    maps: Tensor = convolution(features)
    return maps.relu()


class MapModules(NamedTuple):
    """Modules for maps with one number of axes."""

    convolution: Callable[..., Any]
    transposed: Callable[..., Any]
    batch_norm: Callable[..., Any]
    max_pool: Callable[..., Any]


MAP_MODULES = {
    1: MapModules(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.MaxPool1d),
    2: MapModules(Convolution, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d),
    3: MapModules(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.MaxPool3d),
}
"""Modules of lines, planes and volumes, by the number of their axes."""


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each location, with a learned scale and shift for each channel.

    Unlike batch normalisation it treats each image separately, also in training. The result for an image depends
    neither on the other images of its batch nor on how the batch is divided among processes.

    Args:
        channels: Number of channels (C).
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450), placed as in Liu et al. 2022 (arXiv:2201.03545).
    """

    @checked
    def __init__(self, channels: Size, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(channels, device=device, dtype=dtype)
        self.channels = channels

    @checked
    def forward(self, input: Float[Tensor, "B {self.channels} H W"]) -> Float[Tensor, "B C H W"]:
        """Normalise feature maps."""
        if torch.float64 in (input.dtype, self.weight.dtype):  # half precision may be mixed with float32
            check_one_dtype("ChannelNorm: input and weight", input, self.weight)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class Shift(nn.Module):
    """Learned number that is added to each channel, after a normalisation without a learned scale.

    Args:
        channels: Number of channels, the second axis of the input.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the numbers to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, maps: Float[Tensor, "B C *S"]) -> Float[Tensor, "B C *S"]:
        """Add the numbers."""
        return maps + self.bias.reshape(-1, *[1] * (maps.ndim - 2)).to(maps.dtype)


def normalise(norm: nn.Module, maps: Tensor) -> Tensor:
    """Apply batch normalisation in the dtype of the maps, which is float32 in a network of half precision."""
    if next(norm.buffers(), maps).dtype == maps.dtype:
        return norm(maps)
    state = norm.state_dict(keep_vars=True)
    state = {name: value.to(maps.dtype) if value.is_floating_point() else value for name, value in state.items()}
    out: Tensor = functional_call(norm, state, maps)
    if norm.training:
        for name, running in norm.named_buffers():
            running.copy_(state[name])
    return out


def check_one_each(count: int, owner: str, *, may_be_empty: bool = False, **options: Sequence[int]) -> None:
    """Raise InputError unless each option has a number for each of ``count`` convolutions.

    Args:
        count: Number of convolutions.
        owner: End of the error: "one for each ...".
        may_be_empty: There may be no convolution.
        **options: Values of the options by their names.
    """
    for name, values in options.items():
        if len(values) != count or not (count or may_be_empty):
            numbers = counted(count, "number") if count or may_be_empty else "at least one number"
            raise InputError(f"{name} must be {numbers}, one for each {owner}, got {len(values)}")


def conv_stem(
    in_channels: int,
    stem_channels: Sequence[int],
    stem_strides: Sequence[int],
    conv_norm: ConvNorm,
    conv_dropout: float,
    stem_strides_across: Sequence[int] = (),
) -> nn.Module:
    """Build 3×3 convolutions without padding, each with a ReLU; an identity if ``stem_channels`` is empty.

    The arguments are the options of :class:`ConvBackbone` with the same names.
    """
    across = stem_strides_across or stem_strides
    strides = {"stem_strides": stem_strides, "stem_strides_across": across}
    check_one_each(len(stem_channels), "of stem_channels", may_be_empty=True, **strides)
    if not stem_channels:
        return nn.Identity()
    layers: list[nn.Module] = []
    widths = itertools.pairwise([in_channels, *stem_channels])
    for (before, width), stride in zip(widths, zip(stem_strides, across, strict=True), strict=True):
        layers.append(Convolution(before, width, 3, stride, bias=conv_norm == "none"))
        layers += [nn.ReLU()] if conv_norm == "none" else [ChannelNorm(width), nn.ReLU()]
    if conv_dropout:
        layers.append(nn.Dropout2d(conv_dropout))
    return nn.Sequential(*layers)


def draw_layers(module: nn.Module, init: ConvInit, std: float, bias: float = 0.1) -> None:
    """Draw the weights of every convolution and dense layer in a module.

    Args:
        module: Module that contains the layers.
        init: ``"torch"``: keep PyTorch's initial weights; ``"glorot"``: Keras's, Glorot uniform with biases of 0;
            ``"he"``: Keras's he_normal, a truncated normal of variance 2 / fan-in with biases of 0; or
            ``"truncated-normal"``.
        std: Standard deviation of the truncated normal, which is cut at two standard deviations.
        bias: Initial biases with the truncated normal; 0.1 in Sabour et al.'s code.
    """
    if init == "torch":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            # torch's layers draw in reset_parameters, also after a deferred initialisation
            reset = functools.partial(_draw_layer, layer, init, std, bias)
            layer.reset_parameters = reset  # type: ignore[method-assign]
            reset()


@torch.no_grad()
def _draw_layer(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, init: ConvInit, std: float, bias: float) -> None:
    if init == "glorot":
        nn.init.xavier_uniform_(layer.weight)
    else:
        he = math.sqrt(2 / layer.weight[0].numel()) / KEPT_BY_CUT
        draw_truncated(layer.weight, he if init == "he" else std)
    if layer.bias is not None:
        layer.bias.fill_(bias if init == "truncated-normal" else 0.0)


def draw_truncated(tensor: Tensor, std: float) -> None:
    """Fill a tensor with normal numbers, cut at two standard deviations. Skip fake tensors, which hold no numbers."""
    if not is_fake(tensor):  # trunc_normal_ reads the numbers, because it draws some of them again
        nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
