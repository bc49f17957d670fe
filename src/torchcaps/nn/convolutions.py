"""Convolutions before the capsules, a stem of small ones, and a normalisation that knows one image at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.ops.checks import (
    check_flags,
    check_numbers,
    check_one_device,
    check_one_dtype,
    check_size_lists,
    check_sizes,
    check_tensor,
)
from torchcaps.ops.convolution import LAYOUTS, convolve

WeightStart = Literal["torch", "glorot", "truncated-normal"]
STEM_KERNEL = 3
"""Of the stem's convolutions, pixels."""


class Convolution(nn.Conv2d):
    """:class:`torch.nn.Conv2d` in the fastest way for its sizes, :func:`torchcaps.ops.convolution.convolve`.

    Parameters have the names, shapes and starting values of PyTorch's; the weight's channels come last in memory.

    Args:
        in_channels: C.
        out_channels: O.
        kernel_size: Pixels, down and across.
        stride: Pixels.
        padding: Zeros on each side, pixels.
        bias: Add a learned number to each output channel.
        relu: Also apply a ReLU, which then takes no memory of its own.

    Raises:
        TypeError: A size that is no integer, an option of another type, or maps that are not floating-point.
        ValueError: A size out of its range, or maps that do not fit.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        *,
        bias: bool = True,
        relu: bool = False,
    ) -> None:
        check_sizes("Convolution", in_channels=in_channels, out_channels=out_channels)
        check_sizes("Convolution", kernel_size=kernel_size, stride=stride)
        check_sizes("Convolution", least=0, padding=padding)
        check_flags("Convolution", bias=bias, relu=relu)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.relu = relu
        #: zeros on each side, down and across
        self.zeros = (padding, padding)

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's random generator, as :class:`torch.nn.Conv2d` does."""
        self.weight.data = self.weight.data.contiguous(memory_format=torch.channels_last)
        self.draw(partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)

    def draw(self, initialise: Callable[[Tensor], object]) -> None:
        """See :func:`draw_weight`."""
        draw_weight(self.weight, initialise)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B O h w"]:
        """Convolve."""
        check_tensor("Convolution", "input", input, ("B", self.in_channels, "H", "W"), LAYOUTS, ("", "in_channels"))
        (stride, across), (padding, beside) = self.stride, self.zeros
        return convolve(input, self.weight, self.bias, (stride, across), (padding, beside), relu=self.relu)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return super().extra_repr() + ", relu=True" * self.relu


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each location, with a learned scale and shift for each channel.

    Unlike batch normalisation it sees one image at a time, in training too: the result for an image depends neither on
    the other images of its batch nor on how the batch is divided among processes.

    Args:
        channels: C.

    Raises:
        TypeError: ``channels`` is no integer, or the maps are not floating-point.
        ValueError: ``channels`` is below one, or the maps are not (B, C, H, W).

    Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450), placed as in Liu et al. 2022 (arXiv:2201.03545).
    """

    def __init__(self, channels: int) -> None:
        check_sizes("ChannelNorm", channels=channels)
        super().__init__(channels)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Normalise feature maps."""
        check_tensor("ChannelNorm", "input", input, ("B", self.normalized_shape[0], "H", "W"))
        check_one_device("ChannelNorm", input=input, weight=self.weight)
        if input.dtype == torch.float64 or self.weight.dtype == torch.float64:  # shorter ones go together
            check_one_dtype("ChannelNorm", input=input, weight=self.weight)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class ConvStem(nn.Sequential):
    """3×3 convolutions without padding, each with a ReLU, from images to feature maps.

    Args:
        in_channels: Of the images.
        channels: Of the convolutions, one after the other; at least one.
        strides: Of each of them, pixels; 1 if none are given.
        norm: Put :class:`ChannelNorm` before each ReLU.
        dropout: Of whole channels of the last maps, a probability.

    Raises:
        TypeError: A size that is no integer, an option of another type, or images that are not floating-point.
        ValueError: A size or ``dropout`` out of its range, no convolution, not one stride for each, or images of
            another number of channels or smaller than a kernel.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        check_sizes("ConvStem", in_channels=in_channels)
        check_size_lists("ConvStem", channels=channels, strides=() if strides is None else strides)
        check_flags("ConvStem", norm=norm)
        check_numbers("ConvStem", dropout=dropout)
        if not channels:
            raise ValueError("ConvStem: channels must name at least one convolution, got none")
        if strides and len(strides) != len(channels):
            raise ValueError(f"ConvStem: strides must be {len(channels)}, one for each of channels, got {len(strides)}")
        if not 0 <= dropout < 1:
            raise ValueError(f"ConvStem: dropout must be at least 0 and below 1, got {dropout}")
        layers: list[nn.Module] = []
        widths = itertools.pairwise([in_channels, *channels])
        for (before, width), stride in zip(widths, strides or [1] * len(channels), strict=True):
            layers.append(Convolution(before, width, STEM_KERNEL, stride, bias=not norm))
            layers += [ChannelNorm(width), nn.ReLU()] if norm else [nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout2d(dropout))
        super().__init__(*layers)
        self.in_channels = in_channels

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Feature maps of images."""
        check_tensor("ConvStem", "input", input, ("B", self.in_channels, "H", "W"), fixed_by=("", "in_channels"))
        return super().forward(input)


def draw_convolutions(network: nn.Module, init: WeightStart, std: float, bias: float = 0.1) -> None:
    """Draw the weights of every convolution in a module, as :func:`draw_layer` does."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            draw_layer(layer, init, std, bias)


def draw_layer(layer: nn.Conv2d | nn.Linear, init: WeightStart, std: float, bias: float = 0.1) -> None:
    """Draw the weights of a layer.

    Args:
        layer: Holds them.
        init: PyTorch's own start, which is left as it is; Keras's, Glorot uniform with biases of 0; or a truncated
            normal.
        std: Deviation of the truncated normal, cut at two deviations.
        bias: What the biases are with the truncated normal; 0.1 in Sabour et al.'s code.
    """
    if init == "torch":
        return
    if init == "glorot":
        draw_weight(layer.weight, nn.init.xavier_uniform_)
    else:
        draw_weight(layer.weight, partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std))
    if layer.bias is not None:
        nn.init.constant_(layer.bias, 0.0 if init == "glorot" else bias)


def draw_weight(weight: Tensor, initialise: Callable[[Tensor], object]) -> None:
    """Draw a weight in the order of its axes, whatever that of its memory is; ``initialise`` fills a tensor."""
    drawn = torch.empty_like(weight, memory_format=torch.contiguous_format)
    initialise(drawn)
    with torch.no_grad():
        weight.copy_(drawn)
