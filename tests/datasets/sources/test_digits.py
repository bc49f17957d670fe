from __future__ import annotations

import hashlib

import torch
from sklearn.datasets import load_digits

from torchcaps.datasets import load_dataset


def test_sizes_shapes_and_classes() -> None:
    data = load_dataset("digits")
    assert (len(data.train), len(data.validation), len(data.test)) == (1293, 144, 360)
    assert data.in_shape == (1, 28, 28)
    assert data.class_names == tuple("0123456789")
    for part in (data.train, data.validation, data.test):
        counts, whole = part.labels.bincount(), torch.from_numpy(load_digits().target).bincount()
        assert (counts - len(part) * whole / 1797).abs().max() < 2  # stratified twice, rounded by less than 1 each time


def test_every_image_is_in_one_part_and_has_its_margin() -> None:
    data = load_dataset("digits")
    images = torch.cat([data.train.images, data.validation.images, data.test.images])
    assert len(images) == 1797
    assert len(images.flatten(1).unique(dim=0)) == len(
        {row.tobytes() for row in load_digits().images}
    )  # as many different images as there were
    inside = torch.zeros(28, 28, dtype=torch.bool)
    inside[4:24, 4:24] = True
    assert images[..., ~inside].max() == 0
    assert images.max() == 255


def test_an_image_is_its_original_enlarged() -> None:
    raw = load_digits()
    data = load_dataset("digits")
    originals = torch.from_numpy(raw.images)
    small = torch.nn.functional.adaptive_avg_pool2d(data.test.images[:, :, 4:24, 4:24].double(), 8)[:, 0]
    nearest = torch.cdist(small.flatten(1), originals.flatten(1) * 255 / 16).argmin(1)
    assert torch.equal(torch.from_numpy(raw.target)[nearest], data.test.labels)


def test_the_test_images_are_the_same_for_ever_and_the_seed_moves_validation_only() -> None:
    first, other = load_dataset("digits"), load_dataset("digits", seed=1, validation_size=50)
    assert torch.equal(first.test.images, other.test.images)
    assert len(other.validation) == 50
    assert not torch.equal(first.validation.images[:50], other.validation.images)
    # published results rest on this choice: whatever moves it is a break
    labels = bytes(first.test.labels.tolist())
    assert hashlib.sha256(labels).hexdigest() == "ca49e8505305eb83e7b1ea11fa0abe7a6e5088af1cd8cdfda1edeaed8ef1deb1"
