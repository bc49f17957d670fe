"""MultiMNIST: pairs of MNIST digits, made on demand."""

from __future__ import annotations

from torchcaps.datasets.dataset import Splits
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
