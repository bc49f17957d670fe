"""Parts of networks that answer each pixel of lines, planes and volumes: the first and the last convolutions."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.nn.convolutions import MAP_MODULES, ConvInit, check_one_each, draw_layers
from torchcaps.parts import Device, Dtype, placed, register
from torchcaps.ranges import OddKernel, Pixels, Size, Width
from torchcaps.tracing import is_graph_capture


class InstanceNorm(nn.Module):
    """Instance normalisation: each channel of each image has mean 0 and variance 1 over its positions.

    Unlike :class:`torch.nn.InstanceNorm2d` it takes any number of spatial axes, and maps of a single position, which
    become zero.

    Args:
        channels: Number of channels (C).
        learned: Learn a scale and a shift for each channel.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Ulyanov, Vedaldi, Lempitsky 2016 (arXiv:1607.08022).
    """

    @checked
    @placed
    def __init__(self, channels: Size, *, learned: bool = False, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.channels, self.learned = channels, learned
        self.weight = nn.Parameter(torch.empty(channels)) if learned else None
        self.bias = nn.Parameter(torch.empty(channels)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scales to one, and the shifts to zero."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.channels}, learned={self.learned}"

    def forward(self, maps: Float[Tensor, "B C *S"]) -> Float[Tensor, "B C *S"]:
        """Normalise feature maps."""
        if not is_graph_capture() and len(maps) == 0:  # torch.instance_norm refuses them
            return F.group_norm(maps, maps.shape[1], self.weight, self.bias)
        return torch.instance_norm(maps, self.weight, self.bias, None, None, True, 0.0, 1e-5, False)


@register("backbone", "pixels")
class PixelBackbone(nn.Sequential):
    """Convolutions with stride 1 and padding that keep the size of a line, a plane or a volume.

    Args:
        in_channels: Channels of the images.
        in_shape: Shape of an image (C, *S), whose number of axes decides the kind of convolution.
        pixel_channels: Channels of the convolutions that keep the size of the image.
        pixel_kernels: Kernels of these convolutions, pixels, one for each.
        pixel_dilations: Distances between neighbouring weights of these kernels, pixels, one for each.
        pixel_norm: Normalisation after each of these convolutions: none, or instance normalisation without learned
            numbers; with it the convolutions have no bias.
        pixel_activation: Activation after these convolutions: ReLU; or PReLU, and tanh after the last one.
        conv_init: Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); He et al.'s
            (truncated normal, bias 0); or the authors' code's (truncated normal of standard deviation 0.05, bias 0.1).
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    def __init__(
        self,
        in_channels: Size,
        in_shape: tuple[Size, ...],
        *,
        pixel_channels: tuple[Width, ...] = (16,),
        pixel_kernels: tuple[OddKernel, ...] = (5,),
        pixel_dilations: tuple[Pixels, ...] = (1,),
        pixel_norm: Literal["none", "instance"] = "none",
        pixel_activation: Literal["relu", "prelu-tanh"] = "relu",
        conv_init: ConvInit = "torch",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.pixel_channels, self.pixel_kernels = tuple(pixel_channels), tuple(pixel_kernels)
        self.pixel_dilations, self.pixel_norm = tuple(pixel_dilations), pixel_norm
        self.pixel_activation, self.conv_init = pixel_activation, conv_init
        names = ("pixel_channels", "pixel_kernels", "pixel_dilations")
        check_one_each(len(pixel_channels), "convolution", **{name: getattr(self, name) for name in names})
        # not Convolution, whose algorithms suit other sizes
        convolution, plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(in_shape) - 2], pixel_norm == "none"
        pairs = itertools.pairwise([in_channels, *pixel_channels])
        for (before, width), kernel, dilation in zip(pairs, pixel_kernels, pixel_dilations, strict=True):
            padding = dilation * (kernel // 2)
            self.append(convolution(before, width, kernel, padding=padding, dilation=dilation, bias=plain))
            self.extend([] if plain else [InstanceNorm(width)])
            self.append(nn.ReLU() if pixel_activation == "relu" else nn.PReLU())
        if pixel_activation == "prelu-tanh":
            self[-1] = nn.Tanh()

    def init_weights(self) -> None:
        """Draw initial weights by ``conv_init``. A network calls this after all its parts are built."""
        draw_layers(self, self.conv_init, std=0.05)


@register("decoder", "pixels")
class PixelDecoder(nn.Sequential):
    """Decoder with convolutions of size 1, each with a ReLU, the last with a sigmoid: it draws each pixel by itself.

    Args:
        in_channels: Numbers at each pixel that the image is drawn from.
        out_shape: Shape of an image (C, *S); pixels are in 0..1.
        decoder_hidden: Widths of the decoder's hidden layers.
        decoder_init: Initial weights of the decoder: torch's default; Keras's (Glorot uniform, bias 0); He et al.'s
            (truncated normal, bias 0); or a truncated normal of standard deviation 0.1, bias 0.1.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: LaLonde, Bagci 2018 (arXiv:1804.04241).
    """

    def __init__(
        self,
        in_channels: Size,
        out_shape: tuple[Size, ...],
        *,
        decoder_hidden: tuple[Width, ...] = (64, 128),
        decoder_init: ConvInit = "torch",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.decoder_hidden, self.decoder_init = tuple(decoder_hidden), decoder_init
        for before, width in itertools.pairwise([in_channels, *decoder_hidden, out_shape[0]]):
            self.extend([MAP_MODULES[len(out_shape) - 1].convolution(before, width, 1), nn.ReLU()])
        self[-1] = nn.Sigmoid()
        draw_layers(self, decoder_init, std=0.1)
