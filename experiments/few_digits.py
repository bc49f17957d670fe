"""Overlapping digits of two classes, with the digit of each pixel: a data set that small networks learn in minutes.

torchcaps train segcaps --plugin experiments/few_digits.py --data few-digits
"""

from __future__ import annotations

import torch

from torchcaps.datasets import DataRequest, ImageSet, Splits, register_dataset
from torchcaps.datasets.pairs import fixed_pairs
from torchcaps.datasets.sources.mnist import MADE_OF_MNIST, read_mnist
from torchcaps.datasets.sources.multimnist import with_masks

DIGITS = ("0", "1")


@register_dataset(
    "few-digits",
    title="MultiMNIST with the digit of each pixel, a zero and a one in each image",
    source="Sabour, Frosst, Hinton (2017), arXiv:1710.09829; made here of MNIST",
    in_shape=(1, 36, 36),
    **MADE_OF_MNIST | {"class_names": ("background", *DIGITS), "num_train": None},
)
def load_few_digits(request: DataRequest) -> Splits:
    """Load pairs as ``multimnist-pixels`` does, but only of zeros and ones.

    The validation pairs consist of the last 5,000 training digits, which occur in no training pair.
    """
    digits, test = read_mnist(request)
    left, held = torch.arange(len(digits)).tensor_split([len(digits) - len(digits) // 12])
    parts = map(of_few_classes, (digits.select(left), test, digits.select(held)))
    sets = [with_masks(fixed_pairs(each)) for each in parts]
    return Splits(sets[0], sets[1], ("background", *DIGITS), sets[2], task="pixels")


def of_few_classes(digits: ImageSet) -> ImageSet:
    """Return the first images of each digit in `DIGITS`, as many of each, in their order."""
    found = [(digits.labels == label).nonzero()[:, 0] for label in range(len(DIGITS))]
    most = min(map(len, found))
    return digits.select(torch.cat([each[:most] for each in found]).sort().values)
