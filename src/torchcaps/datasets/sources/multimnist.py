"""MultiMNIST: pairs of MNIST digits, made on demand; and the digit of each pixel of such pairs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.pairs import PairSet, fixed_pairs
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.mnist import DIGITS, MADE_OF_MNIST, read_mnist


@register_dataset(
    "multimnist",
    title="MultiMNIST: two overlapping MNIST digits",
    source="Sabour, Frosst, Hinton (2017), arXiv:1710.09829; made here of MNIST",
    num_test=10_000,
    in_shape=(1, 36, 36),
    num_objects=2,
    **MADE_OF_MNIST,
)
def load_multimnist(request: DataRequest) -> Splits:
    """Load pairs of digits of different classes, each moved by up to 4 pixels, added and clipped at 255.

    Every epoch has new training pairs, one for each training digit (60,000 minus the validation digits), with a random
    partner. Validation pairs consist of digits that occur in no training pair, and test pairs of test digits. Both are
    fixed, with as many pairs as digits, and each digit occurs in exactly two of them.

    The paper has 1,000 test pairs for each digit, 10 million. Ten thousand are enough, because their standard error is
    0.22 points at an error of 5 %, and testing takes a thousandth of the time.
    """
    train, test = read_mnist(request)
    return Splits(train, fixed_pairs(test), DIGITS, as_train=PairSet, as_validation=fixed_pairs)


INK = 0.3
"""Brightness above which a pixel belongs to a digit, a share of 255."""
_OF_PIXELS: dict[str, Any] = MADE_OF_MNIST | {"class_names": ("background", *DIGITS), "num_train": 60_000}


@register_dataset(
    "multimnist-pixels",
    title="MultiMNIST with the digit of each pixel",
    source="Sabour, Frosst, Hinton (2017), arXiv:1710.09829; made here of MNIST",
    num_test=10_000,
    in_shape=(1, 36, 36),
    **_OF_PIXELS,
)
def load_multimnist_pixels(request: DataRequest) -> Splits:
    """Load fixed pairs of digits as in MultiMNIST, with masks: class 0 is the background, class j + 1 the digit j.

    A pixel belongs to the brighter digit if that is brighter than 0.3, else to the background. The validation pairs
    consist of the last 5,000 training digits, which occur in no training pair.
    """
    digits, test = read_mnist(request)
    left, held = torch.arange(len(digits)).tensor_split([len(digits) - len(digits) // 12])
    sets = [with_masks(fixed_pairs(each)) for each in (digits.select(left), test, digits.select(held))]
    return Splits(sets[0], sets[1], _OF_PIXELS["class_names"], sets[2], task="pixels")


def with_masks(pairs: ImageSet) -> ImageSet:
    """Return images of two objects with the class + 1 of the brighter object in each pixel, 0 where both are dark."""
    assert pairs.parts is not None
    masks = [_mask(*each) for each in zip(pairs.parts.split(1024), pairs.labels.split(1024), strict=True)]
    return ImageSet(pairs.images, torch.cat(masks))


def _mask(parts: UInt8[Tensor, "B 2 C H W"], labels: Tensor) -> UInt8[Tensor, "B H W"]:
    brightest, which = parts.amax(2).max(1)
    classes = labels.gather(1, which.flatten(1)).view_as(which) + 1
    return classes.masked_fill(brightest <= INK * 255, 0).to(torch.uint8)
