"""MultiMNIST: pairs of MNIST digits, made on the fly."""

from __future__ import annotations

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.pairs import PairSet, fixed_pairs
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.mnist import DIGITS, MADE_OF_MNIST, read_mnist


@register_dataset(
    "multimnist",
    title="MultiMNIST: two MNIST digits on each other",
    source="Sabour, Frosst, Hinton (2017), arXiv:1710.09829; made here of MNIST",
    num_test=10_000,
    in_shape=(1, 36, 36),
    num_objects=2,
    **MADE_OF_MNIST,
)
def load_multimnist(request: DataRequest) -> Splits:
    """Two digits of different classes, each moved by up to 4 pixels each way, added and clipped at 255.

    Every epoch has new training pairs, one for each training digit with a random other digit: 60,000 less the
    validation digits. Validation pairs are made of training digits that are in no training pair, test pairs of the test
    digits; both are fixed, as many as there are digits, with each digit in exactly two of them.

    The paper has 1,000 test pairs a digit, 10 million. Ten thousand are enough: at an error of 5 % their standard error
    is 0.22 points, and they are judged in a thousandth of the time.
    """
    train, test = read_mnist(request)
    return Splits(train, fixed_pairs(test), DIGITS, as_train=PairSet, as_validation=fixed_pairs)
