"""Backbones: modules that compute feature maps from images, for the primary capsules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError, install, reason_of, shown
from torchcaps.nn.convolutions import (
    ChannelNorm,
    ConvInit,
    ConvNorm,
    Convolution,
    Shift,
    check_one_each,
    conv_stem,
    convolve_relu,
    draw_layers,
)
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import OddKernel, Padding, Pixels, Range, ShareBelowOne, Size, Width


@register("backbone", "conv")
class ConvBackbone(nn.Module):
    """(Stem →) convolution (→ normalisation) → activation (→ dropout), the backbone of Sabour et al.

    Args:
        in_channels: Channels of the images.
        conv_channels: Channels of the first convolution.
        conv_kernel: Kernel of the first convolution, pixels.
        conv_stride: Stride of the first convolution, pixels.
        conv_activation: Activation after the first convolution.
        conv_init: Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); He et al.'s
            (truncated normal, bias 0); or the authors' code's (truncated normal of standard deviation 0.05 and 0.1,
            bias 0.1).
        stem_channels: Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have
            none.
        stem_strides: Strides of the stem's convolutions, pixels, one for each.
        stem_strides_across: Strides of the stem's convolutions along the width, one for each; default: stem_strides.
        conv_norm: Normalisation before the activations of all convolutions except the primary capsules': none, or
            layer normalisation over the channels of each location.
        conv_dropout: Probability of dropout after the stem and after each other convolution except the primary
            capsules'; it drops whole channels of an image.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Sabour, Frosst, Hinton 2017, section 4 (arXiv:1710.09829).
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: Size,
        *,
        conv_channels: Width = 256,
        conv_kernel: Pixels = 9,
        conv_stride: Pixels = 1,
        conv_activation: Literal["relu", "none"] = "relu",
        conv_init: ConvInit = "torch",
        stem_channels: tuple[Width, ...] = (),
        stem_strides: tuple[Pixels, ...] = (),
        stem_strides_across: tuple[Pixels, ...] = (),
        conv_norm: ConvNorm = "none",
        conv_dropout: ShareBelowOne = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.conv_channels, self.conv_kernel = in_channels, conv_channels, conv_kernel
        self.conv_stride, self.conv_activation, self.conv_init = conv_stride, conv_activation, conv_init
        self.stem_channels, self.stem_strides = tuple(stem_channels), tuple(stem_strides)
        self.stem_strides_across = tuple(stem_strides_across)
        self.conv_norm, self.conv_dropout = conv_norm, conv_dropout
        self.stem = conv_stem(
            in_channels, self.stem_channels, self.stem_strides, conv_norm, conv_dropout, self.stem_strides_across
        )
        before = (in_channels, *stem_channels)[-1]
        plain, is_module = conv_norm == "none", conv_activation == "relu" and not self.joins_relu
        self.conv = Convolution(before, conv_channels, conv_kernel, conv_stride, bias=plain)
        self.norm = nn.Identity() if plain else ChannelNorm(conv_channels)
        self.activation = nn.ReLU() if is_module else nn.Identity()
        self.dropout = nn.Dropout2d(conv_dropout) if conv_dropout else nn.Identity()

    @property
    def joins_relu(self) -> bool:
        """Whether the last convolution and its ReLU are computed as one, without a module for the ReLU."""
        return self.conv_norm == "none" and self.conv_activation == "relu"

    def init_weights(self) -> None:
        """Draw initial weights by ``conv_init``. A network calls this after all its parts are built."""
        draw_layers(self, self.conv_init, std=0.05)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Return feature maps of images."""
        maps = self.stem(images)
        if self.joins_relu:
            return self.dropout(convolve_relu(self.conv, maps))
        return self.dropout(self.activation(self.norm(self.conv(maps))))


@register("backbone", "stack")
class StackBackbone(nn.Sequential):
    """Convolutions with chosen kernels, each with a ReLU and optional batch normalisation.

    Args:
        in_channels: Channels of the images.
        stack_channels: Channels of the stack's convolutions.
        stack_kernels: Kernels of the stack's convolutions, pixels, one for each.
        stack_strides: Strides of the stack's convolutions, pixels, one for each.
        stack_strides_across: Strides of the stack's convolutions along the width, one for each; default:
            stack_strides.
        stack_padding: Zero padding on each side of the input of each convolution of the stack, pixels.
        stack_norm: Batch normalisation of the stack before each ReLU (PyTorch's; the convolutions have no bias then),
            the same without a learned scale (batch-shift, epsilon 1e-3), or after the ReLU (Keras's: epsilon 1e-3,
            running statistics that keep 0.99).
        stack_init: Initial weights of the stack's convolutions: torch's default; He et al.'s truncated normal, bias 0
            (Keras's he_normal); or a truncated normal of standard deviation 0.05, bias 0.1.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: Size,
        *,
        stack_channels: tuple[Width, ...] = (64,),
        stack_kernels: tuple[Pixels, ...] = (5,),
        stack_strides: tuple[Pixels, ...] = (2,),
        stack_strides_across: tuple[Pixels, ...] = (),
        stack_padding: Padding = 0,
        stack_norm: Literal["none", "batch", "batch-shift", "batch-after"] = "none",
        stack_init: Literal["torch", "he", "truncated-normal"] = "torch",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.stack_channels, self.stack_kernels = tuple(stack_channels), tuple(stack_kernels)
        self.stack_strides, self.stack_strides_across = tuple(stack_strides), tuple(stack_strides_across)
        self.stack_padding = stack_padding
        self.stack_norm, self.stack_init = stack_norm, stack_init
        across = self.stack_strides_across or self.stack_strides
        check_one_each(
            len(self.stack_channels),
            "convolution",
            stack_channels=self.stack_channels,
            stack_kernels=self.stack_kernels,
            stack_strides=self.stack_strides,
            stack_strides_across=across,
        )
        before, plain = in_channels, stack_norm in ("none", "batch-after")
        strides = zip(self.stack_strides, across, strict=True)
        for width, kernel, stride in zip(stack_channels, stack_kernels, strides, strict=True):
            convolution = Convolution(before, width, kernel, stride, stack_padding, bias=plain)
            draw_layers(convolution, stack_init, std=0.05)
            self.append(convolution)
            if stack_norm == "batch":
                self.extend([nn.BatchNorm2d(width), nn.ReLU()])
            elif stack_norm == "batch-shift":
                self.extend([nn.BatchNorm2d(width, eps=1e-3, affine=False), Shift(width), nn.ReLU()])
            elif stack_norm == "batch-after":
                self.append(nn.BatchNorm2d(width, eps=1e-3, momentum=0.01))
            before = width

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Return feature maps of images."""
        for number, layer in enumerate(self):
            is_norm = self.stack_norm == "batch-after" and number % 2 == 1
            has_relu = self.stack_norm in ("none", "batch-after") and not is_norm  # without a module for it
            images = convolve_relu(layer, images) if has_relu else layer(images)
        return images


@register("backbone", "sequence")
class SequenceBackbone(nn.Module):
    """Convolutions along sequences, each with layer normalisation over the channels of each position and a ReLU.

    NaN marks padding. Padding is replaced by zeros before each convolution, and each convolution pads both ends with
    zeros. Therefore the amount of padding never changes a result. The output has NaN at padded positions.

    Args:
        in_channels: Channels of the sequences.
        sequence_channels: Channels of the sequence convolutions.
        sequence_kernel: Kernel of the sequence convolutions, positions.
        sequence_stride: Stride of each sequence convolution, positions.
        conv_dropout: Probability of dropout after the stem and after each other convolution except the primary
            capsules'; it drops whole channels of an image.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: Size,
        *,
        sequence_channels: tuple[Width, ...] = (64, 64),
        sequence_kernel: OddKernel = 5,
        sequence_stride: Pixels = 1,
        conv_dropout: ShareBelowOne = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.sequence_channels, self.sequence_kernel = tuple(sequence_channels), sequence_kernel
        self.sequence_stride, self.conv_dropout = sequence_stride, conv_dropout
        kernel, stride, padding = (1, sequence_kernel), (1, sequence_stride), (0, sequence_kernel // 2)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, width, kernel, stride, padding, bias=False),
                ChannelNorm(width),
                nn.ReLU(),
                nn.Dropout2d(conv_dropout),
            )
            for before, width in itertools.pairwise([in_channels, *sequence_channels])
        )

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c H w"]:
        """Return feature maps of sequences along W."""
        for layer in self.layers:
            present = ~images.isnan().any(1, keepdim=True)
            maps = layer(images.where(present, 0))
            images = maps.where(present[..., :: self.sequence_stride], math.nan)
        return images


@register("backbone", "timm")
class TimmBackbone(nn.Module):
    """A feature map of a timm network. ``"timm:resnet50"`` is short for this backbone with that ``timm_model``.

    Pixels of 0..1 are standardised with the mean and standard deviation from the training of the network's weights.

    Args:
        in_channels: Channels of the images; timm adapts pretrained weights to any number.
        timm_model: Name of the network in timm.
        timm_map: Feature map of the timm network to use: 1 is the last and smallest, with a stride of 32 pixels in
            most networks, 2 the one before.
        pretrained: Download timm's pretrained weights; not needed for a network that is loaded from a file.
        freeze: Do not train the weights and batch statistics of the timm network.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Raises:
        InputError: timm is not installed, or cannot make the network.

    Source: Wightman 2019, PyTorch Image Models (https://github.com/huggingface/pytorch-image-models).
    """

    __call__: Callable[..., Tensor]

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        in_channels: Size,
        *,
        timm_model: str = "resnet18",
        timm_map: Annotated[int, Range(1, 9, whole=True)] = 1,
        pretrained: bool = False,
        freeze: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.timm_model, self.timm_map, self.pretrained, self.freeze = timm_model, timm_map, pretrained, freeze
        try:
            import timm
        except ModuleNotFoundError as error:
            raise InputError(f'the backbone "timm" needs timm: {install("timm")} ({reason_of(error)})') from error
        except Exception as error:  # for example, a torchvision built for another torch
            raise InputError(f"timm cannot be imported: {type(error).__name__}: {reason_of(error)}") from error
        planned = torch.get_default_device().type == "meta"  # without memory for weights
        how: dict[str, Any] = {"pretrained": pretrained and not planned, "in_chans": in_channels}
        try:
            self.model = timm.create_model(timm_model, features_only=True, out_indices=(-timm_map,), **how)
        except Exception as error:  # timm and its download raise many types
            raise InputError(f"timm cannot make {shown(timm_model)} with feature maps: {reason_of(error)}") from error
        for name in ("mean", "std"):
            self.register_buffer(name, torch.empty(in_channels, 1, 1))
        self.reset_parameters()
        self.requires_grad_(not freeze)
        self.train()

    def reset_parameters(self) -> None:
        """Set mean and standard deviation of the colours. The timm network draws its own weights."""
        for name, buffer in (("mean", self.mean), ("std", self.std)):
            colours = torch.tensor(self.model.pretrained_cfg[name], device=buffer.device)
            buffer.copy_((colours if len(colours) == len(buffer) else colours.mean())[..., None, None])

    def train(self, mode: bool = True) -> TimmBackbone:
        """Set the training mode, except for the layers of a frozen network."""
        super().train(mode)
        self.model.train(mode and not self.freeze)
        return self

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Return the feature map of images."""
        maps: Tensor = self.model((images - self.mean) / self.std)[0]
        return maps.permute(0, 3, 1, 2) if getattr(self.model, "output_fmt", None) == "NHWC" else maps
