"""The decoder: reconstruct the image from the capsules of the present classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.nn.convolutions import ConvInit, Convolution, draw_layers
from torchcaps.ops.labels import one_hot
from torchcaps.ops.losses import ClassTargets, multi_hot
from torchcaps.ops.precision import in_full_precision
from torchcaps.parts import Device, Dtype, register
from torchcaps.ranges import Size, Width


@checked
def mask_capsules(capsules: Float[Tensor, "B J D"], targets: ClassTargets | None = None) -> Float[Tensor, "B J D"]:
    """Set all capsules to zero except the target classes, or except the longest capsule if ``targets`` is None.

    Args:
        capsules: Output capsules v_j.
        targets: Labels or multi-hot rows, :data:`~torchcaps.ops.losses.ClassTargets`, or None.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 (arXiv:1710.09829).
    """
    squared_lengths = in_full_precision(capsules).square().sum(-1)
    if targets is None:
        if capsules.shape[1] == 0:
            raise InputError("mask_capsules: capsules must be of at least one class, got none")
        targets = squared_lengths.argmax(-1)
    keep = multi_hot(squared_lengths, targets, "mask_capsules").to(capsules.dtype)
    return capsules * keep.unsqueeze(-1)


@checked
def separate_capsules(capsules: Float[Tensor, "B J D"], classes: Int[Tensor, "B P"]) -> Float[Tensor, "B P J D"]:
    """Copy the capsules once for each of P objects in an image, with all capsules but the object's set to zero.

    :class:`Decoder` takes ``separate_capsules(capsules, classes).flatten(0, 1)``.

    Args:
        capsules: Output capsules v_j.
        classes: Classes of the objects, in 0..J-1.

    Source: Sabour, Frosst, Hinton 2017, section 6 (arXiv:1710.09829).
    """
    keep = one_hot(classes, capsules.shape[1], "separate_capsules: classes").to(capsules.dtype)  # (B, P, J)
    return capsules.unsqueeze(1) * keep.unsqueeze(-1)


@register("decoder", "dense")
class Decoder(nn.Module):
    """Fully connected decoder: J·D → 512 ReLU → 1024 ReLU → pixels, sigmoid; optionally followed by convolutions.

    With n ``decoder_channels``, the dense layers end in a map with the first of these channels and a ReLU. Its size is
    H/2ⁿ × W/2ⁿ, rounded up. Then the map is doubled in size (nearest neighbour) and convolved (3×3), n times. Each
    convolution ends in a ReLU, except the last one, which ends in the image and a sigmoid. A convolution uses its
    weights at every position, so large images need few weights.

    Args:
        num_capsules: Number of capsules (J).
        capsule_dim: Components of a capsule (D).
        out_shape: Shape of an image (C, H, W); pixels are in 0..1.
        decoder_hidden: Widths of the decoder's hidden layers.
        decoder_channels: Channels of the maps of the decoder's 3x3 convolutions, each map twice as large as the one
            before: 64,32,16 suits colour images from 32 pixels on; the published networks have none.
        decoder_init: Initial weights of the decoder: torch's default; TensorFlow's and Keras's (Glorot uniform, bias
            0); He et al.'s (truncated normal, bias 0); or the authors' code's (truncated normal of standard deviation
            0.1, bias 0.1).
        decoder_mask: Capsule to decode: the label's in training and the longest at inference; always the label's (if
            there is a label); or always the longest.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 and figure 2 (arXiv:1710.09829).
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        num_capsules: Size,
        capsule_dim: Size,
        out_shape: tuple[Size, ...],
        *,
        decoder_hidden: tuple[Width, ...] = (512, 1024),
        decoder_channels: tuple[Width, ...] = (),
        decoder_init: ConvInit = "torch",
        decoder_mask: Literal["label-in-training", "label", "longest"] = "label-in-training",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.num_capsules, self.capsule_dim, self.out_shape = num_capsules, capsule_dim, tuple(out_shape)
        self.decoder_hidden, self.decoder_channels = tuple(decoder_hidden), tuple(decoder_channels)
        self.decoder_init, self.decoder_mask = decoder_init, decoder_mask
        if decoder_channels and len(out_shape) != 3:
            raise InputError(f"decoder_channels need an out_shape (C, H, W), got {self.out_shape}")
        maps = [*decoder_channels, out_shape[0]] if decoder_channels else []  # channels, from the smallest map on
        # height and width of the maps
        sizes = [tuple(-(-side // 2**n) for side in out_shape[1:]) for n in reversed(range(len(decoder_channels) + 1))]
        drawn = (maps[0], *sizes[0]) if maps else self.out_shape
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([num_capsules * capsule_dim, *decoder_hidden, math.prod(drawn)]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        if maps:
            layers.append(nn.Unflatten(1, drawn))
        for size, (before, after) in zip(sizes[1:], itertools.pairwise(maps), strict=True):
            layers += [nn.Upsample(size), Convolution(before, after, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())
        draw_layers(self.layers, decoder_init, std=0.1)

    @checked
    def forward(self, capsules: Float[Tensor, "B {self.num_capsules} {self.capsule_dim}"]) -> Float[Tensor, "B C H W"]:
        """Decode capsules to images in 0..1. Mask the capsules first with :func:`mask_capsules`.

        Capsules are converted to the dtype of the decoder, because routing returns float32 in a network that was
        converted to half precision.
        """
        weight = next(self.parameters(), capsules)  # a quantised decoder has no parameters
        images: Tensor = self.layers(capsules.flatten(1).to(weight.dtype))
        return images.unflatten(1, self.out_shape) if images.ndim == 2 else images
