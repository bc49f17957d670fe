"""Pairs of overlapping objects, made at random for training and fixed for validation."""

import pytest
import torch

from support import assert_raises
from tiny_runs import image_set
from torchcaps.datasets import BatchLoader, ImageSet, PairSet, fixed_pairs
from torchcaps.errors import InputError


def test_an_epoch_of_pairs_has_one_for_each_object() -> None:
    pairs = PairSet(image_set(30, classes=4), max_shift=2)
    loader = BatchLoader(pairs, 8, shuffle=True, seed=3)
    assert (loader.num_images, len(loader)) == (30, 4)
    batches = list(loader.batches(0))
    assert torch.equal(torch.cat([batch.labels for batch in batches])[:, 0], pairs.labels[loader.order(0)])
    for batch in batches:
        assert torch.equal(batch.images, (batch.parts * 255).round().sum(1).clamp(max=255) / 255)  # type: ignore[operator]


def test_pairs_by_hand() -> None:
    """Each object has its own shift down and to the right; sums are clipped at 255."""
    two = torch.tensor([[[[200, 10], [0, 3]]], [[[100, 20], [30, 255]]]], dtype=torch.uint8)
    made = PairSet(ImageSet(two, torch.tensor([0, 1])), max_shift=1)
    shifts = torch.tensor([[[0, 0], [0, 0]], [[-1, 1], [1, 0]]])
    images, labels, parts = made.compose(torch.tensor([0, 1]), torch.tensor([1, 0]), shifts)
    assert images[0, 0].tolist() == [[0, 0, 0, 0], [0, 255, 30, 0], [0, 30, 255, 0], [0, 0, 0, 0]]  # 300 and 258
    assert images[1, 0].tolist() == [[0, 0, 100, 20], [0, 0, 30, 255], [0, 200, 10, 0], [0, 0, 3, 0]]
    assert parts[1, 0, 0].tolist() == [[0, 0, 100, 20], [0, 0, 30, 255], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert parts[1, 1, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 200, 10, 0], [0, 0, 3, 0]]
    assert labels.tolist() == [[0, 1], [1, 0]]


def test_a_set_of_pairs_is_shown_and_resized() -> None:
    made = PairSet(image_set(12, (3, 6, 5)))
    assert (len(made), made.in_shape, made.num_objects) == (12, (3, 14, 13), 2)
    shown = made.preview(5)  # always the same
    assert torch.equal(shown.labels[:, 0], made.labels[:5])
    assert torch.equal(shown.images, made.preview(5).images)
    assert len(made.preview(100)) == 12
    small = made.resize((10, 9))
    images, _, parts = small.gather(torch.arange(12), (1, 2, 3), 12)
    assert small.in_shape == images.shape[1:] == (3, 10, 9)
    assert torch.equal(images, parts.int().sum(1).clamp(max=255).to(torch.uint8))


def test_partners_are_of_another_class_and_all_of_them_as_likely_and_so_are_shifts() -> None:
    labels = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 0])
    pixels = torch.arange(1, 10, dtype=torch.uint8).view(9, 1, 1, 1)  # one each, which tells the object and its shift
    made = PairSet(ImageSet(pixels, labels), max_shift=1)
    for i in range(9):
        _, classes, parts = made.gather(torch.full((8100,), i), (0, 0, i), 8100)
        partners = parts[:, 1].flatten(1).amax(1).long() - 1
        assert torch.equal(classes[:, 1], labels[partners])
        others = labels != labels[i]
        counts = partners.bincount(minlength=9)
        assert (counts[~others] == 0).all()
        assert (counts[others] / 8100 * others.sum() - 1).abs().max() < 0.15  # 5 standard deviations
        at = parts.flatten(2).argmax(2)  # 9 places of each of the two
        places = (9 * at[:, 0] + at[:, 1]).bincount()
        assert len(places) == 81
        assert places.min() > 50  # 100 expected, 10 a standard deviation
        assert places.max() < 150


@pytest.mark.parametrize("counts", [(9, 9, 8, 8), (5, 5), (1, 1), (3, 2, 1), (10, 4, 4, 2), (30, 1, 29)], ids=str)
def test_fixed_pairs_use_every_object_exactly_twice(counts: tuple[int, ...]) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    images = torch.arange(1, len(labels) + 1, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 2, 2)
    made = fixed_pairs(ImageSet(images, labels), max_shift=1)  # each object is known by its pixels
    assert (len(made), made.in_shape, made.num_objects) == (len(labels), (1, 4, 4), 2)
    used = made.parts.flatten(2).amax(2).long() - 1  # type: ignore[union-attr]  # (N, 2)
    for place in (0, 1):
        assert torch.equal(used[:, place].sort().values, torch.arange(len(labels)))
    assert torch.equal(labels[used], made.labels)
    assert (made.labels[:, 0] != made.labels[:, 1]).all()


def test_fixed_pairs_are_the_same_for_ever() -> None:
    first = fixed_pairs(image_set(12))
    # published results rest on this choice: whatever moves it is a break
    assert first.labels[:, 0].tolist() == [0, 2, 1, 1, 2, 2, 1, 1, 0, 0, 0, 2]
    assert first.labels[:, 1].tolist() == [2, 1, 2, 0, 0, 0, 2, 0, 2, 1, 1, 1]


def test_images_that_make_no_pairs() -> None:
    for make in (fixed_pairs, PairSet):
        with pytest.raises(InputError, match="pairs need images of two classes, but all images have the same class"):
            make(image_set(5, classes=1))
        assert_raises(InputError, make, fixed_pairs(image_set(6)), say="of one object, got 2 objects in each")
        assert_raises(InputError, make, image_set(6), say="max_shift must be 0 pixels or more, got -1", max_shift=-1)
    objects = ImageSet(torch.ones(5, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 0, 1, 2]))
    with pytest.raises(InputError, match=r"3 of 5 images have the same class, .* no class may have more than half"):
        fixed_pairs(objects)
    assert len(PairSet(objects)) == 5  # to train on they do
