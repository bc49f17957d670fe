"""Images under random changes, and the maps of affine ones."""

from typing import Any

import pytest
import torch

from support import assert_close, assert_raises
from tiny_runs import image_set
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, fixed_pairs
from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.datasets.augmentation import Changes
from torchcaps.errors import InputError

KEY = (3, 1, 4)


def drawn(n: int = 4000, **options: Any) -> Changes:
    return Augmentation(**options).draw((1, 9, 7), n, KEY)


def one_batch(images: ImageSet, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Changes]:
    """All images in one batch: the batch's pixels, the images in its order, and the changes."""
    augmentation = Augmentation(**options)
    loader = BatchLoader(images, len(images), shuffle=True, augmentation=augmentation, seed=2)
    (batch,) = loader.batches(0)
    return batch.images, images.images[loader.order(0)], augmentation.draw(images.in_shape, len(images), (2, 0, 0))


def assert_uniform(values: torch.Tensor, middle: float, most: float) -> None:
    """4,000 numbers in ``middle`` ± ``most``: 400 expected in each tenth, 19 a standard deviation."""
    tenths = ((values - middle) / most * 5 + 5).long().bincount()
    assert len(tenths) == 10
    assert tenths.min() > 300
    assert tenths.max() < 500


def test_every_number_is_uniform_in_its_range() -> None:
    for name in ("brightness", "contrast"):
        assert_uniform(getattr(drawn(**{name: 0.8}), name), 0, 0.8)
    linear = drawn(max_rotation=20.0, max_scaling=0.3).linear
    angles, factors = torch.atan2(linear[:, 0, 1], linear[:, 0, 0]).rad2deg(), linear.det().sqrt()
    assert_uniform(angles, 0, 20)
    assert_uniform(factors, 1, 0.3)
    assert torch.corrcoef(torch.stack([angles, factors]))[0, 1].abs() < 0.06
    flips = drawn(flip=True).flips
    assert set(flips.tolist()) == {0, 1}
    assert 1850 < int(flips.sum()) < 2150
    corners = drawn(crop=5).corners  # of 9×7: 5 by 3 places
    counts = (corners[:, 0] * 3 + corners[:, 1]).bincount()
    assert len(counts) == 15
    assert 190 < counts.min() <= counts.max() < 345  # 267 expected, 16 a standard deviation


def test_each_change_is_the_same_whatever_else_is_done() -> None:
    assert drawn().corners.count_nonzero() == 0
    assert all(change is None for change in drawn()[1:])
    together = drawn(brightness=0.2, contrast=0.5, max_shift=2, flip=True, max_rotation=9.0)
    assert torch.equal(drawn(brightness=0.2).brightness, together.brightness)
    assert torch.equal(drawn(max_shift=2).corners, together.corners)
    # and none is another one in disguise
    assert torch.corrcoef(torch.stack([together.brightness, together.contrast]))[0, 1].abs() < 0.06


def test_recoloured_by_hand() -> None:
    """Contrast is about the mean of each channel, as in TensorFlow, which the authors' code for CIFAR-10 uses."""
    pixels = torch.tensor([[[[0, 102], [204, 102]]]]).byte().repeat(3, 1, 1, 1)  # 0, 0.4 and 0.8; the mean is 0.4
    corners = torch.zeros(3, 2).long()
    changes = Changes(corners, brightness=torch.tensor([0.1, 0.0, -0.3]), contrast=torch.tensor([0.0, -0.5, 1.0]))
    got = Augmentation().apply(pixels, changes)[:, 0]
    wanted = torch.tensor([[[0.1, 0.5], [0.9, 0.5]], [[0.2, 0.4], [0.6, 0.4]], [[0.0, 0.1], [0.9, 0.1]]])
    assert (got - wanted).abs().max() < 1e-6  # the last one clipped at 0: 0.4 - 0.8 - 0.3
    channels = torch.tensor([[[[0, 40]], [[100, 200]]]]).byte()  # means of 20 and 150
    got = Augmentation().apply(channels, Changes(corners[:1], contrast=torch.tensor([-0.5])))
    assert (got - torch.tensor([[[[10.0, 30.0]], [[125.0, 175.0]]]]) / 255).abs().max() < 1e-6
    white = torch.full((1, 1, 2, 2), 255).byte()
    assert (Augmentation().apply(white, Changes(corners[:1], brightness=torch.ones(1))) == 1).all()


def test_turned_without_a_turn_is_the_window() -> None:
    """The interpolated way agrees with the other one: shifts and crops of odd and even sizes."""
    images = image_set(8, (2, 9, 6))
    for options in (
        {},
        {"max_shift": 3},
        {"max_shift": 5, "fill": "edge"},
        {"crop": 4},
        {"crop": 5, "max_shift": 2},
        {"crop": 6, "max_shift": 5, "fill": "edge"},
    ):
        plain = Augmentation(**options)  # type: ignore[arg-type]
        changes = plain.draw(images.in_shape, 8, KEY)
        still = torch.eye(2, dtype=torch.float64).repeat(8, 1, 1)
        warped = plain.apply(images.images, changes._replace(linear=still))
        assert (warped - plain.apply(images.images, changes)).abs().max() < 1e-5


def test_images_are_turned_about_their_own_middle_before_they_are_moved_and_cropped() -> None:
    got, images, changes = one_batch(image_set(8, (1, 9, 9)), max_shift=2, crop=5, max_rotation=30.0, max_scaling=0.2)
    assert changes.linear is not None
    whole = warp(images, inverse_maps(changes.linear, torch.zeros(8, 2)), (13, 13))  # as wide as a shift by 2 can lead
    for i, (y, x) in enumerate(changes.corners.tolist()):
        assert (got[i] - whole[i, :, y : y + 5, x : x + 5] / 255).abs().max() < 1e-5


def test_parts_go_where_their_image_goes() -> None:
    pairs = fixed_pairs(image_set(12, (2, 6, 6)), max_shift=1)
    assert pairs.parts is not None
    for options in ({"max_shift": 1, "crop": 5, "flip": True}, {"max_rotation": 90.0}):
        (batch,) = BatchLoader(pairs, 12, shuffle=True, seed=2, augmentation=Augmentation(**options)).batches(0)  # type: ignore[arg-type]
        assert batch.parts is not None
        if "crop" in options:  # interpolated after the clipping, an image is not the sum of its parts any more
            assert (batch.images - batch.parts.sum(1).clamp(max=1)).abs().max() < 1e-6
        for i in range(2):
            alone, *_ = one_batch(ImageSet(pairs.parts[:, i], pairs.labels[:, i]), **options)
            assert torch.equal(batch.parts[:, i], alone)
    batches = list(BatchLoader(pairs, 5, shuffle=False).batches(0))
    assert torch.equal(torch.cat([batch.parts for batch in batches]), pairs.parts / 255)  # type: ignore[misc]


def test_changes_that_cannot_be() -> None:
    wrong = {"brightness": -0.1, "contrast": 1.5, "max_rotation": 181.0, "fill": "mean", "max_scaling": 1.0}
    for name, value in wrong.items():
        assert_raises(InputError, Augmentation, say=name, **{name: value})
    for option in ("brightness", "contrast"):
        with pytest.raises(InputError, match="are for images of one object, got 2 objects in each"):
            one_batch(fixed_pairs(image_set(12)), **{option: 0.1})
    got, *_ = one_batch(image_set(40, (1, 28, 28)), max_scaling=0.9999999, max_shift=20)
    assert ((got >= 0) & (got <= 1)).all(), "very small they may be made"


def test_maps_by_hand() -> None:
    linear = linear_maps(torch.tensor([90.0, 0.0]), torch.tensor([[2.0, 3.0], [1.0, 1.0]]), torch.tensor([0.5, 0.25]))
    right, down = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    # scaled to (2, 0) and turned counterclockwise, which is up
    assert_close(linear[0] @ right, [0, -2], 1e-12)
    # scaled to (0, 3), sheared to (1.5, 3), turned: to the right becomes up, down becomes to the right
    assert_close(linear[0] @ down, [3, -1.5], 1e-12)
    assert_close(linear[1] @ down, [0.25, 1], 1e-12)
    assert linear_maps(torch.zeros(1), torch.ones(1, 2)).tolist() == [[[1, 0], [0, 1]]]
