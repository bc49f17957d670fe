"""Backbones: from images to the feature maps that primary capsules are made of. Any module that gives a map is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import ChannelNorm, Convolution, ConvStem, draw_weight
from torchcaps.ops.checks import check_choice, check_size_lists, check_sizes


class ConvBackbone(nn.Module):
    """(Stem →) convolution (→ normalisation) → activation (→ dropout), as before the capsules of Sabour et al.

    Args:
        in_channels: Of the images.
        channels: Of the convolution.
        kernel_size: Of the convolution, pixels.
        stride: Of the convolution, pixels.
        stem_channels: Of the 3×3 convolutions before it, each with a ReLU; none if empty.
        stem_strides: Of each of them, pixels.
        norm: Put :class:`ChannelNorm` before each activation.
        dropout: Of whole channels, after the stem and after the convolution, a probability.
        activation: After the convolution.

    Raises:
        TypeError: A size that is no integer, or an option of another type.
        ValueError: A size or ``dropout`` out of its range, or not one stride for each convolution of the stem.

    Source: Sabour, Frosst, Hinton 2017, section 4 (arXiv:1710.09829).
    """

    def __init__(
        self,
        in_channels: int,
        channels: int = 256,
        kernel_size: int = 9,
        stride: int = 1,
        *,
        stem_channels: Sequence[int] = (),
        stem_strides: Sequence[int] = (),
        norm: bool = False,
        dropout: float = 0.0,
        activation: Literal["relu", "none"] = "relu",
    ) -> None:
        super().__init__()
        self.stem = (
            ConvStem(in_channels, stem_channels, stem_strides, norm=norm, dropout=dropout)
            if stem_channels
            else nn.Identity()
        )
        before = (in_channels, *stem_channels)[-1]
        relu = activation == "relu"
        self.conv = Convolution(before, channels, kernel_size, stride, bias=not norm, relu=relu and not norm)
        self.norm = ChannelNorm(channels) if norm else nn.Identity()
        self.activation = nn.ReLU(inplace=True) if relu and norm else nn.Identity()
        self.dropout = nn.Dropout2d(dropout) if dropout else nn.Identity()

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c h w"]:
        """Feature maps of images."""
        return self.dropout(self.activation(self.norm(self.conv(self.stem(images)))))


class StackBackbone(nn.Sequential):
    """Convolutions, each with a ReLU and, if wanted, batch normalisation.

    Args:
        in_channels: Of the images.
        channels: Of the convolutions, one after the other; at least one.
        kernel_sizes: Of each of them, pixels.
        strides: Of each of them, pixels.
        padding: Zeros on each side of what each of them sees, pixels.
        norm: ``"none"``; ``"batch"``: batch normalisation before each ReLU, as PyTorch has it, and convolutions without
            bias; ``"batch-after"``: after each ReLU, as Keras has it (epsilon 1e-3, running statistics that keep 0.99).
        init: PyTorch's own start; ``"he"``: Keras's ``he_normal`` with biases of 0; ``"truncated-normal"``: of
            deviation 0.05, cut at two deviations, with biases of 0.1.

    Raises:
        TypeError: A size that is no integer.
        ValueError: A size below one, not one kernel and stride for each convolution, or an unknown option.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
        *,
        padding: int = 0,
        norm: Literal["none", "batch", "batch-after"] = "none",
        init: Literal["torch", "he", "truncated-normal"] = "torch",
    ) -> None:
        name = "StackBackbone"
        check_sizes(name, in_channels=in_channels)
        check_sizes(name, least=0, padding=padding)
        check_size_lists(name, channels=channels, kernel_sizes=kernel_sizes, strides=strides)
        check_choice(name, "norm", norm, ("none", "batch", "batch-after"))
        check_choice(name, "init", init, ("torch", "he", "truncated-normal"))
        if not channels or not len(channels) == len(kernel_sizes) == len(strides):
            raise ValueError(
                f"{name}: channels, kernel_sizes and strides must be of one length of at least one, got "
                f"{len(channels)}, {len(kernel_sizes)} and {len(strides)}"
            )
        layers: list[nn.Module] = []
        widths = itertools.pairwise([in_channels, *channels])
        for (before, width), kernel, stride in zip(widths, kernel_sizes, strides, strict=True):
            convolution = Convolution(
                before, width, kernel, stride, padding, bias=norm != "batch", relu=norm != "batch"
            )
            _start(convolution, init)
            layers.append(convolution)
            if norm == "batch":
                layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            elif norm == "batch-after":
                layers.append(nn.BatchNorm2d(width, eps=1e-3, momentum=0.01))
        super().__init__(*layers)


def _start(convolution: Convolution, init: str) -> None:
    """Draw the weights of a convolution of a stack."""
    if init == "torch":
        return
    # a normal cut at two deviations has 0.8796 of its deviation: Keras draws a wider one for he_normal
    std = math.sqrt(2 / convolution.weight[0].numel()) / 0.87962566103423978 if init == "he" else 0.05
    draw_weight(convolution.weight, partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std))
    if convolution.bias is not None:
        nn.init.constant_(convolution.bias, 0.0 if init == "he" else 0.1)
