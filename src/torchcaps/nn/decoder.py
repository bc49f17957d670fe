"""The decoder: from the capsules of the present classes back to the image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import get_args

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.nn.convolutions import Convolution, WeightStart, draw_layer
from torchcaps.ops.checks import (
    check_choice,
    check_classes,
    check_integers,
    check_one_device,
    check_size_lists,
    check_sizes,
    check_tensor,
)
from torchcaps.ops.losses import multi_hot
from torchcaps.ops.precision import in_full_precision


def mask_capsules(
    capsules: Float[Tensor, "B J D"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"] | None = None,
) -> Float[Tensor, "B J D"]:
    """Zero all capsules but those of the target classes, or, without targets, all but the longest.

    Args:
        capsules: Output capsules v_j.
        targets: Labels (B,) or (B, 1), multi-hot rows (B, J), or None. Of a single capsule, J = 1, targets (B, 1) are
            multi-hot.

    Raises:
        TypeError: Capsules that are not floating-point, or labels that are not integers.
        ValueError: Capsules that are not (B, J, D), or targets that do not fit them.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 (arXiv:1710.09829).
    """
    check_tensor("mask_capsules", "capsules", capsules, ("B", "J", "D"))
    if capsules.shape[1] == 0:
        raise ValueError(f"mask_capsules: capsules must be at least one, got shape {tuple(capsules.shape)}")
    squared_lengths = in_full_precision(capsules).square().sum(-1)
    if targets is None:
        targets = squared_lengths.argmax(-1)
    keep = multi_hot(squared_lengths, targets, "mask_capsules").to(capsules.dtype)
    return capsules * keep.unsqueeze(-1)


def separate_capsules(capsules: Float[Tensor, "B J D"], classes: Int[Tensor, "B P"]) -> Float[Tensor, "B P J D"]:
    """The capsules of P objects in an image, each alone: all others are zero.

    ``separate_capsules(capsules, classes).flatten(0, 1)`` is what :class:`Decoder` takes.

    Args:
        capsules: Output capsules v_j.
        classes: The classes of the objects, in 0..J-1.

    Raises:
        TypeError: Capsules that are not floating-point, or classes that are not integers.
        ValueError: Capsules that are not (B, J, D), or classes that are not (B, P), on another device or beyond J.

    Source: Sabour, Frosst, Hinton 2017, section 6 (arXiv:1710.09829).
    """
    check_tensor("separate_capsules", "capsules", capsules, ("B", "J", "D"))
    batch = capsules.shape[0]  # len() would fix the batch size of an exported graph
    check_integers("separate_capsules", "classes", classes)
    check_one_device("separate_capsules", capsules=capsules, classes=classes)
    if classes.ndim != 2 or classes.shape[0] != batch:
        raise ValueError(f"separate_capsules: classes must have shape ({batch}, P), got {tuple(classes.shape)}")
    if capsules.shape[1] == 0:
        raise ValueError(f"separate_capsules: capsules must be at least one, got shape {tuple(capsules.shape)}")
    check_classes("separate_capsules", "classes", classes, capsules.shape[1])
    keep = F.one_hot(classes.long(), capsules.shape[1]).to(capsules.dtype)  # (B, P, J)
    return capsules.unsqueeze(1) * keep.unsqueeze(-1)


class Decoder(nn.Module):
    """Fully connected decoder: J·D → 512 ReLU → 1024 ReLU → pixels, sigmoid; or one that ends in convolutions.

    With n ``channels``, the dense layers end in a map of H/2ⁿ × W/2ⁿ, rounded up, of ``channels[0]`` channels, ReLU. It
    is brought to twice its size, nearest neighbour, and convolved, 3×3, n times: to the other ``channels``, ReLU, and
    at last to the image, sigmoid. A convolution uses its weights at every place, so
    that large images need few of them.

    Args:
        num_capsules: J.
        capsule_dim: D.
        out_shape: Shape of an image (C, H, W); pixels come out in 0..1.
        hidden: Widths of the hidden layers.
        channels: Of the maps that convolutions make the image of, from the smallest map on; none if empty.
        init: How weights and biases start: ``"torch"``: as :class:`torch.nn.Linear` does; ``"glorot"``: as TensorFlow's
            and Keras's dense layers do, Glorot uniform with biases of 0; ``"truncated-normal"``: as in the authors'
            code, deviation 0.1, cut at two deviations, with biases of 0.1.

    Raises:
        TypeError: A size that is no integer, or capsules that are not floating-point.
        ValueError: A size below one, another ``init``, or capsules of another shape.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 and figure 2 (arXiv:1710.09829).
    """

    def __init__(
        self,
        num_capsules: int,
        capsule_dim: int,
        out_shape: Sequence[int],
        hidden: Sequence[int] = (512, 1024),
        *,
        channels: Sequence[int] = (),
        init: WeightStart = "torch",
    ) -> None:
        check_sizes("Decoder", num_capsules=num_capsules, capsule_dim=capsule_dim)
        check_size_lists("Decoder", out_shape=out_shape, hidden=hidden, channels=channels)
        check_choice("Decoder", "init", init, get_args(WeightStart))
        super().__init__()
        self.num_capsules, self.capsule_dim = num_capsules, capsule_dim
        self.out_shape = tuple(out_shape)
        if channels and len(self.out_shape) != 3:
            raise ValueError(f"Decoder: channels need an out_shape (C, H, W), got {self.out_shape}")
        #: height and width of the maps, from the smallest to the image
        sizes = [[-(-side // 2**n) for side in self.out_shape[1:]] for n in reversed(range(len(channels) + 1))]
        drawn = (channels[0], *sizes[0]) if channels else self.out_shape
        widths = [num_capsules * capsule_dim, *hidden, math.prod(drawn)]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        if channels:
            layers.append(nn.Unflatten(1, drawn))
            for size, (before, after) in zip(
                sizes[1:], itertools.pairwise([*channels, self.out_shape[0]]), strict=True
            ):
                layers += [nn.Upsample(tuple(size)), Convolution(before, after, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())
        for layer in self.layers:
            if isinstance(layer, nn.Linear | Convolution):
                draw_layer(layer, init, std=0.1)

    def forward(self, capsules: Float[Tensor, "B J D"]) -> Float[Tensor, "B C H W"]:
        """Decode capsules, of which all but the wanted ones are zero (:func:`mask_capsules`), to images in 0..1.

        Capsules of any floating dtype are brought to the decoder's own: routing returns float32 in a network that was
        converted to half precision.
        """
        shape, fixed_by = ("B", self.num_capsules, self.capsule_dim), ("", "num_capsules", "capsule_dim")
        check_tensor("Decoder", "capsules", capsules, shape, fixed_by=fixed_by)
        weight = next(self.parameters(), capsules)  # a quantised decoder has no parameters
        check_one_device("Decoder", capsules=capsules, weight=weight)
        images: Tensor = self.layers(capsules.flatten(1).to(weight.dtype))
        return images.unflatten(1, self.out_shape) if images.ndim == 2 else images
