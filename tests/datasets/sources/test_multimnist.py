from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from torchcaps.datasets import BatchLoader, PairSet, load_dataset


def test_every_part_is_of_pairs(small_mnist: Path) -> None:
    data = load_dataset("multimnist", data_dir=small_mnist, validation_size=30)
    assert isinstance(data.train, PairSet)
    assert (len(data.train), len(data.validation), len(data.test)) == (70, 30, 40)
    assert (data.in_shape, data.num_objects, data.num_classes) == ((1, 36, 36), 2, 10)
    for part in (data.validation, data.test):
        assert part.parts is not None
        assert (part.labels[:, 0] != part.labels[:, 1]).all()
        assert part.labels.flatten().bincount().tolist() == [2 * len(part) // 10] * 10
        assert torch.equal(part.images, part.parts.int().sum(1).clamp(max=255).to(torch.uint8))
        ink = part.parts.flatten(2).count_nonzero(2)
        assert (ink == 3 * 20 + 3 * 9).all()  # no shift has moved any over the edge


def test_the_test_pairs_are_the_same_whatever_the_seed(small_mnist: Path) -> None:
    first, other = (load_dataset("multimnist", data_dir=small_mnist, validation_size=30, seed=s) for s in (0, 1))
    assert torch.equal(first.test.images, other.test.images)
    assert isinstance(first.train, PairSet)
    assert isinstance(other.train, PairSet)
    assert not torch.equal(first.train.objects.images, other.train.objects.images)
    again = load_dataset("multimnist", data_dir=small_mnist, validation_size=30)
    assert torch.equal(first.validation.images, again.validation.images)


def test_limits_and_sizes(small_mnist: Path) -> None:
    whole = load_dataset("multimnist", data_dir=small_mnist)
    data = load_dataset("multimnist", data_dir=small_mnist, limit_train=20, limit_test=7, validation_size=20)
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 20, 7)
    assert torch.equal(data.test.images, whole.test.images[:7])
    small = load_dataset("multimnist", data_dir=small_mnist, image_size=24)
    assert small.in_shape == small.test.in_shape == (1, 24, 24)
    (batch, *_) = BatchLoader(small.train, 10, shuffle=True).batches(0)
    assert batch.images.shape == (10, 1, 24, 24)


@pytest.mark.mnist
def test_the_published_test_pairs(mnist_dir: Path) -> None:
    data = load_dataset("multimnist", data_dir=mnist_dir)
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, 10_000)
    assert data.test.labels.flatten().bincount().tolist() == [
        2 * n for n in (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    ]
    # published results rest on these pairs: whatever moves them is a break
    digest = hashlib.sha256(data.test.images.numpy()).hexdigest()
    assert digest == "f6448bdd8e249e39bbf5b013954e183030792c8242702879b133881a238600c6"
