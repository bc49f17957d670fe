"""Backbones: from images to the feature maps that primary capsules are made of. Any module that gives a map is one."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError, install, reason_of, shown
from torchcaps.nn.convolutions import ChannelNorm, ConvInit, ConvNorm, Convolution, conv_stem, draw_layers
from torchcaps.parts import register
from torchcaps.ranges import OddKernel, Padding, Pixels, Range, ShareBelowOne, Size, Width

KEPT_BY_CUT = 0.87962566103423978
"""Share of its deviation that a normal distribution keeps if it is cut at two deviations."""


@register("backbone", "conv")
class ConvBackbone(nn.Module):
    """(Stem →) convolution (→ normalisation) → activation (→ dropout), as before the capsules of Sabour et al.

    Args:
        in_channels: Channels of the images.
        conv_channels: Channels of the first convolution.
        conv_kernel: Kernel of the first convolution, pixels.
        conv_stride: Stride of the first convolution, pixels.
        conv_activation: Activation after the first convolution.
        conv_init: Initial weights of the convolutions: torch's default; Keras's (Glorot uniform, bias 0); or the
            authors' code's (truncated normal of deviation 0.05 and 0.1, bias 0.1).
        stem_channels: Channels of 3x3 convolutions with ReLU before the first convolution; the published networks have
            none.
        stem_strides: Their strides, pixels, one for each.
        stem_strides_across: Their strides along the width, one for each; none given: as stem_strides.
        conv_norm: What comes before the activations of all convolutions except the primary capsules': nothing, or
            layer normalisation over the channels of each location.
        conv_dropout: Probability of dropout after the stem and after each other convolution except the primary
            capsules'; it drops whole channels of an image.

    Source: Sabour, Frosst, Hinton 2017, section 4 (arXiv:1710.09829).
    """

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
        plain, relu = conv_norm == "none", conv_activation == "relu"
        self.conv = Convolution(before, conv_channels, conv_kernel, conv_stride, bias=plain, relu=relu and plain)
        self.norm = nn.Identity() if plain else ChannelNorm(conv_channels)
        self.activation = nn.ReLU() if relu and not plain else nn.Identity()
        self.dropout = nn.Dropout2d(conv_dropout) if conv_dropout else nn.Identity()

    def init_weights(self) -> None:
        """Draw the weights as ``conv_init`` says; a network calls it once all of it stands."""
        draw_layers(self, self.conv_init, std=0.05)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Feature maps of images."""
        return self.dropout(self.activation(self.norm(self.conv(self.stem(images)))))


@register("backbone", "stack")
class StackBackbone(nn.Sequential):
    """Convolutions of any kernels, each with a ReLU and, if wanted, batch normalisation.

    Args:
        in_channels: Channels of the images.
        stack_channels: Channels of the stack's convolutions.
        stack_kernels: Their kernels, pixels, one for each.
        stack_strides: Their strides, pixels, one for each.
        stack_strides_across: Their strides along the width, one for each; none given: as stack_strides.
        stack_padding: Zeros on each side of what each convolution of the stack sees, pixels.
        stack_norm: Batch normalisation of the stack before each ReLU (PyTorch's; the convolutions have no bias then),
            or after it (Keras's: epsilon 1e-3, running statistics that keep 0.99).
        stack_init: How the stack's convolutions start: torch's default; He et al.'s truncated normal, bias 0 (Keras's
            he_normal); or a truncated normal of deviation 0.05, bias 0.1.
    """

    def __init__(
        self,
        in_channels: Size,
        *,
        stack_channels: tuple[Width, ...] = (64,),
        stack_kernels: tuple[Pixels, ...] = (5,),
        stack_strides: tuple[Pixels, ...] = (2,),
        stack_strides_across: tuple[Pixels, ...] = (),
        stack_padding: Padding = 0,
        stack_norm: Literal["none", "batch", "batch-after"] = "none",
        stack_init: Literal["torch", "he", "truncated-normal"] = "torch",
    ) -> None:
        super().__init__()
        self.stack_channels, self.stack_kernels = tuple(stack_channels), tuple(stack_kernels)
        self.stack_strides, self.stack_strides_across = tuple(stack_strides), tuple(stack_strides_across)
        self.stack_padding = stack_padding
        self.stack_norm, self.stack_init = stack_norm, stack_init
        across = self.stack_strides_across or self.stack_strides
        wanted = len(self.stack_channels) or "at least one"
        for name, given in (
            ("stack_channels", self.stack_channels),
            ("stack_kernels", self.stack_kernels),
            ("stack_strides", self.stack_strides),
            ("stack_strides_across", across),
        ):
            if len(given) != wanted:
                raise InputError(f"{name} must be {wanted} numbers, one for each convolution, got {len(given)}")
        before, plain, he = in_channels, stack_norm != "batch", stack_init == "he"
        strides = zip(self.stack_strides, across, strict=True)
        for width, kernel, stride in zip(stack_channels, stack_kernels, strides, strict=True):
            convolution = Convolution(before, width, kernel, stride, stack_padding, bias=plain, relu=plain)
            if stack_init != "torch":
                std = math.sqrt(2 / convolution.weight[0].numel()) / KEPT_BY_CUT if he else 0.05
                draw_layers(convolution, "truncated-normal", std, bias=0.0 if he else 0.1)
            self.append(convolution)
            if stack_norm == "batch":
                self.extend([nn.BatchNorm2d(width), nn.ReLU()])
            elif stack_norm == "batch-after":
                self.append(nn.BatchNorm2d(width, eps=1e-3, momentum=0.01))
            before = width


@register("backbone", "sequence")
class SequenceBackbone(nn.Module):
    """Convolutions along sequences, each with layer normalisation over the channels of each place and a ReLU.

    A place with a NaN is not there, as after the end of a sequence that is padded: zeros stand for it before each
    convolution, which has zeros at both ends too, so that no result depends on how far a sequence is padded. Maps have
    NaN there.

    Args:
        in_channels: Channels of the sequences.
        sequence_channels: Channels of the convolutions.
        sequence_kernel: Their kernel, places.
        sequence_stride: Stride of each of them, places.
        conv_dropout: Probability of dropout after the stem and after each other convolution except the primary
            capsules'; it drops whole channels of an image.
    """

    def __init__(
        self,
        in_channels: Size,
        *,
        sequence_channels: tuple[Width, ...] = (64, 64),
        sequence_kernel: OddKernel = 5,
        sequence_stride: Pixels = 1,
        conv_dropout: ShareBelowOne = 0.0,
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
        """Feature maps of sequences along W."""
        for layer in self.layers:
            there = ~images.isnan().any(1, keepdim=True)
            maps = layer(images.where(there, 0))
            images = maps.where(there[..., :: self.sequence_stride], math.nan)
        return images


@register("backbone", "timm")
class TimmBackbone(nn.Module):
    """A map of features by a network of timm; ``"timm:resnet50"`` is short for one with that ``timm_model``.

    Pixels of 0..1 are standardised with the mean and the deviation that the network's weights were trained with.

    Args:
        in_channels: Channels of the images; pretrained weights are brought to any number by timm.
        timm_model: The network's name in timm.
        timm_map: Which of its maps of features: 1 is the last and smallest, with a stride of 32 pixels in most
            networks, 2 the one before.
        pretrained: Start from the weights that timm downloads; a network that is read from its own files needs none.
        freeze: Its weights and statistics stay as they are, in training too.

    Raises:
        InputError: timm is not installed, or cannot make the network.

    Source: Wightman 2019, PyTorch Image Models (https://github.com/huggingface/pytorch-image-models).
    """

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
    ) -> None:
        super().__init__()
        self.timm_model, self.timm_map, self.pretrained, self.freeze = timm_model, timm_map, pretrained, freeze
        try:
            import timm
        except ModuleNotFoundError as error:
            raise InputError(f'the backbone "timm" needs timm: {install("timm")} ({reason_of(error)})') from error
        except Exception as error:  # such as a torchvision of another torch
            raise InputError(f"timm cannot be imported: {type(error).__name__}: {reason_of(error)}") from error
        planned = torch.get_default_device().type == "meta"  # without memory for weights
        how: dict[str, Any] = {"pretrained": pretrained and not planned, "in_chans": in_channels}
        try:
            self.model = timm.create_model(timm_model, features_only=True, out_indices=(-timm_map,), **how)
        except Exception as error:  # of any kind, and of the download
            raise InputError(
                f"timm cannot make {shown(timm_model)} with maps of features: {reason_of(error)}"
            ) from error
        for name in ("mean", "std"):
            colours = torch.tensor(self.model.pretrained_cfg[name])
            if len(colours) != in_channels:
                colours = colours.mean().expand(in_channels)
            self.register_buffer(name, colours[:, None, None].clone())
        self.requires_grad_(not freeze)
        self.train()

    def train(self, mode: bool = True) -> TimmBackbone:
        """Training mode, but for the layers of a frozen network."""
        super().train(mode)
        self.model.train(mode and not self.freeze)
        return self

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """The map of images."""
        maps: Tensor = self.model((images - self.mean) / self.std)[0]
        return maps.permute(0, 3, 1, 2) if getattr(self.model, "output_fmt", None) == "NHWC" else maps
