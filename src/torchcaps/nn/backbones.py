"""Backbones: from images to the feature maps that primary capsules are made of. Any module that gives a map is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.nn.convolutions import ChannelNorm, Convolution, ConvStem


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
