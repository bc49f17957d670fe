"""Handwritten digits of scikit-learn, converted to MNIST's format. The default data set."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED
from torchcaps.datasets.splits import stratified_split

_NUM_TEST = 360  # a fifth of 1,797
_CLASSES = tuple("0123456789")


@register_dataset(
    "digits",
    title="UCI handwritten digits, 8×8 resized to 28×28",
    source="scikit-learn's load_digits: the test part of the UCI optical recognition set, doi:10.24432/C50P49",
    licence="CC BY 4.0",
    num_train=1797 - _NUM_TEST,
    num_test=_NUM_TEST,
    in_shape=(1, 28, 28),
    class_names=_CLASSES,
    preparation=Preparation(centre="box"),
)
def load_digits(request: DataRequest) -> Splits:  # noqa: ARG001  these digits have no options
    """Load 1,797 digits of 8×8 pixels, resized to 20×20 with a margin of 4 pixels, as in MNIST.

    The 360 test images are a fixed stratified choice, the same for every seed. scikit-learn's copy does not name the
    writers, so training and test images may come from the same writer.
    """
    from sklearn.datasets import load_digits as read_digits

    raw = read_digits()
    small = torch.from_numpy(raw.images * (255 / 16)).float().round().to(torch.uint8)[:, None]  # (N, 1, 8, 8)
    digits = ImageSet(F.pad(resize_images(small, (20, 20)), (4, 4, 4, 4)), torch.from_numpy(raw.target).long())
    train, test = stratified_split(digits.labels, _NUM_TEST, seed=FIXED_SEED)
    return Splits(digits.select(train), digits.select(test), class_names=_CLASSES)
