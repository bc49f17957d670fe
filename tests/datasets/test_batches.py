from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcaps.datasets import Augmentation, Batch, BatchLoader, ImageSet, PairSet
from torchcaps.errors import InputError

MakeSet = Callable[..., ImageSet]


def moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """The image (C, H, W) moved pixel by pixel, zeros moving in."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result


def test_moved_by_hand() -> None:
    image = torch.tensor([[[1, 2], [3, 4]]])
    assert moved(image, 1, 0).tolist() == [[[0, 0], [1, 2]]]
    assert moved(image, 0, -1).tolist() == [[[2, 0], [4, 0]]]
    assert moved(image, 1, 1).tolist() == [[[0, 0], [0, 1]]]


def shifts_of(loader: BatchLoader, epoch: int, batch: int) -> torch.Tensor:
    """How far each image of a whole batch is moved (down, to the right)."""
    return loader.augmentation.max_shift - loader.changes(epoch, batch).corners


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(first, second, strict=True)
    )


def test_evaluation_gives_every_image_once_in_its_order_and_unmoved(make_set: MakeSet) -> None:
    images = make_set(11, (3, 6, 5))
    loader = BatchLoader(images, 4, shuffle=False)
    batches = list(loader.batches(0))
    assert len(loader) == len(batches) == 3
    assert [len(batch.labels) for batch in batches] == [4, 4, 3]
    assert torch.equal(torch.cat([batch.images for batch in batches]), images.images.float() / 255)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), images.labels)
    assert batches[0].images.dtype == torch.float32
    assert same(batches, list(loader.batches(7)))


def test_pixels_run_from_0_to_1() -> None:
    images = ImageSet(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.zeros(1).long())
    (batch,) = BatchLoader(images, 1, shuffle=False).batches(0)
    assert torch.equal(batch.images.flatten(), torch.arange(256) / 255)


@pytest.mark.parametrize("shape", [(1, 6, 5), (3, 4, 7)])
def test_each_image_is_moved_by_its_own_shift(make_set: MakeSet, shape: tuple[int, int, int]) -> None:
    images = make_set(30, shape)
    loader = BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(3), seed=5)
    for number, batch in enumerate(loader.batches(2)):
        index = loader.order(2)[number * 8 : (number + 1) * 8]
        shifts = shifts_of(loader, 2, number)
        for place, i in enumerate(index):
            down, right = shifts[place].tolist()
            assert torch.equal(batch.images[place], moved(images.images[i], down, right).float() / 255)
            assert batch.labels[place] == images.labels[i]


def test_shifts_are_uniform_over_the_whole_range_on_both_axes(make_set: MakeSet) -> None:
    loader = BatchLoader(make_set(6000, (1, 5, 5)), 6000, shuffle=True, augmentation=Augmentation(2))
    shifts = shifts_of(loader, 0, 0)
    pairs = (shifts[:, 0] + 2) * 5 + shifts[:, 1] + 2
    counts = pairs.bincount(minlength=25)
    assert len(counts) == 25
    assert counts.min() > 160  # 240 expected, 15 a standard deviation
    assert counts.max() < 320


def test_an_epoch_is_a_new_order_of_all_images(make_set: MakeSet) -> None:
    loader = BatchLoader(make_set(50), 10, shuffle=True)
    orders = [loader.order(epoch) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(50))
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])


def test_the_same_seed_gives_the_same_batches_and_another_one_others(make_set: MakeSet) -> None:
    first, again, other = (
        list(BatchLoader(make_set(40), 8, shuffle=True, augmentation=Augmentation(1), seed=seed).batches(3))
        for seed in (1, 1, 2)
    )
    assert same(first, again)
    assert not same(first, other)


def test_seed_and_epoch_do_not_add_up(make_set: MakeSet) -> None:
    """Seed 1's epoch 0 is not seed 0's epoch 1, or runs that should be independent would share their orders."""
    a, b = (BatchLoader(make_set(40), 8, shuffle=True, augmentation=Augmentation(2), seed=seed) for seed in (0, 1))
    assert not torch.equal(a.order(1), b.order(0))
    assert not torch.equal(shifts_of(a, 1, 0), shifts_of(b, 0, 0))
    assert not torch.equal(shifts_of(a, 0, 1), shifts_of(a, 1, 0))


def test_the_order_does_not_depend_on_whether_images_are_shifted(make_set: MakeSet) -> None:
    plain, shifted = (BatchLoader(make_set(40), 8, shuffle=True, augmentation=Augmentation(m)) for m in (0, 2))
    assert torch.equal(plain.order(0), shifted.order(0))


def test_global_random_state_is_neither_read_nor_moved(make_set: MakeSet) -> None:
    loader = BatchLoader(make_set(40), 8, shuffle=True, augmentation=Augmentation(2))
    torch.manual_seed(1)
    first = list(loader.batches(0))
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert same(first, list(loader.batches(0)))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_a_resumed_epoch_goes_on_exactly(make_set: MakeSet, start: int) -> None:
    loader = BatchLoader(make_set(37), 8, shuffle=True, augmentation=Augmentation(2))
    whole = list(loader.batches(4))
    assert len(whole) == 5
    assert same(whole[start:], list(loader.batches(4, start)))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 12), world=st.integers(1, 5), shuffle=st.booleans())
def test_many_processes_see_together_what_one_sees(n: int, batch: int, world: int, shuffle: bool) -> None:
    if shuffle:
        batch *= world
        n += batch
    images = ImageSet(torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8), torch.arange(n))

    def batches(rank: int, size: int) -> list[Batch]:
        loader = BatchLoader(
            images,
            batch,
            shuffle=shuffle,
            augmentation=Augmentation(2 * shuffle),
            rank=rank,
            world_size=size,
            seed=n,
        )
        return list(loader.batches(1))

    alone = batches(0, 1)
    shares = [batches(rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {len(alone)}
    for number, whole in enumerate(alone):
        parts = [share[number] for share in shares]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        sizes = [len(part.labels) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_the_last_batch_can_be_dropped(make_set: MakeSet) -> None:
    loader = BatchLoader(make_set(11), 4, shuffle=True, drop_last=True)
    assert [len(batch.labels) for batch in loader.batches(0)] == [4, 4]
    assert len(loader) == 2
    assert len(BatchLoader(make_set(12), 4, shuffle=True, drop_last=True)) == 3


def test_batches_do_not_share_memory_with_the_set(make_set: MakeSet) -> None:
    images = make_set()
    before = images.images.clone()
    for batch in BatchLoader(images, 12, shuffle=False).batches(0):
        batch.images.zero_()
        batch.labels.zero_()
    assert torch.equal(images.images, before)
    assert images.labels.max() > 0


def test_evaluation_batches_may_be_larger_than_the_set(make_set: MakeSet) -> None:
    (batch,) = BatchLoader(make_set(5), 256, shuffle=False).batches(0)
    assert len(batch.labels) == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 13, "shuffle": True}, "batch size is 13, but there are only 12 images"),
        ({"batch_size": 13, "shuffle": False, "drop_last": True}, "only 12 images"),
        ({"batch_size": 0, "shuffle": True}, "batch_size must be 1 to .*, got 0"),
        ({"batch_size": 4, "shuffle": True, "world_size": 3}, "3 processes cannot share evenly.*multiple of 3"),
        ({"batch_size": 4, "shuffle": True, "world_size": 2, "rank": 2}, "rank must be from 0.*got 2"),
        ({"batch_size": 4, "shuffle": False, "augmentation": Augmentation(2)}, "only training images"),
        (
            {"batch_size": 4, "shuffle": True, "augmentation": Augmentation(5)},
            "5 pixels can be moved by 0 to 4",
        ),
        ({"batch_size": 4, "shuffle": True, "augmentation": Augmentation(-1)}, "max_shift is -1"),
        ({"batch_size": torch.ones(2, 2), "shuffle": True}, "batch_size must be 1 to .*, got tensor"),
        ({"batch_size": 4, "shuffle": torch.ones(2, 2)}, "shuffle must be True or False, got a tensor"),
        ({"batch_size": 4, "shuffle": True, "drop_last": 1}, "drop_last must be True or False, got 1"),
        ({"batch_size": 2.5, "shuffle": True}, "batch_size must be a whole number.* got 2.5"),
        ({"batch_size": 4, "shuffle": True, "world_size": "2"}, "world_size must be 1 to .*, got '2'"),
        ({"batch_size": 4, "shuffle": True, "seed": -1}, "seed must be 0 to 4294967295, got -1"),
    ],
)
def test_options_that_cannot_be(make_set: MakeSet, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        BatchLoader(make_set(12), **options)


@pytest.mark.parametrize(
    ("epoch", "start", "words"),
    [
        *[(-1, 0, "epoch must be 0 to .*, got -1"), (0, 4, "3 batches"), (0, -1, "-1")],
        *[(torch.ones(2), 0, "epoch must be 0 to .*, got tensor"), (0, 0.5, "start must be a whole number.* got 0.5")],
    ],
)
def test_epochs_and_starts_that_cannot_be(make_set: MakeSet, epoch: Any, start: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):  # at the call, not at the first batch
        BatchLoader(make_set(12), 4, shuffle=True).batches(epoch, start)


def test_an_epoch_of_pairs_has_one_for_each_object(make_set: MakeSet) -> None:
    pairs = PairSet(make_set(30, classes=4), max_shift=2)
    loader = BatchLoader(pairs, 8, shuffle=True, seed=3)
    assert (loader.num_images, len(loader)) == (30, 4)
    order, batches = loader.order(0), list(loader.batches(0))
    labels = torch.cat([batch.labels for batch in batches])
    assert torch.equal(labels[:, 0], pairs.labels[order])
    assert (labels[:, 0] != labels[:, 1]).all()
    for batch in batches:
        assert batch.parts is not None
        assert batch.parts.dtype == torch.float32
        assert torch.equal(batch.images, (batch.parts * 255).round().sum(1).clamp(max=255) / 255)
    first = batches[0].parts
    assert first is not None
    for place, i in enumerate(order[:8]):  # the first object of each pair, somewhere on the canvas
        assert first[place, 0].sum().item() == pytest.approx(pairs.objects.images[i].sum().item() / 255, rel=1e-5)


def test_pairs_are_new_in_every_epoch_and_the_same_for_a_seed(make_set: MakeSet) -> None:
    pairs = PairSet(make_set(30), max_shift=2)

    def batches(seed: int, epoch: int, start: int = 0) -> list[Batch]:
        return list(BatchLoader(pairs, 10, shuffle=True, seed=seed).batches(epoch, start))

    assert same(batches(1, 0), batches(1, 0))
    assert same(batches(1, 0)[1:], batches(1, 0, 1))
    assert not same(batches(1, 0), batches(1, 1))
    assert not same(batches(1, 1), batches(2, 0))


def test_every_batch_of_pairs_has_shifts_and_partners_of_its_own() -> None:
    images = torch.zeros(40, 1, 1, 1, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(1, 41)  # one pixel each, which tells the object and its shift
    loader = BatchLoader(PairSet(ImageSet(images, torch.arange(40) % 2), max_shift=2), 20, shuffle=True)
    seen = [batch.parts for epoch in (0, 1) for batch in loader.batches(epoch)]
    places = [parts.flatten(2).argmax(2) for parts in seen if parts is not None]  # (20, 2)
    partners = [parts.flatten(2).amax(2)[:, 1] for parts in seen if parts is not None]
    for values in (places, partners):
        assert len(values) == 4
        assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    for shifts in places:
        assert not torch.equal(shifts[:, 0], shifts[:, 1])


@pytest.mark.parametrize("options", [{}, {"max_shift": 1, "crop": 7, "flip": True}, {"max_rotation": 10.0}])
def test_many_processes_see_the_same_pairs(make_set: MakeSet, options: dict[str, float]) -> None:
    pairs = PairSet(make_set(26), max_shift=2)

    def batches(rank: int, size: int) -> list[Batch]:
        loader = BatchLoader(pairs, 9, shuffle=True, rank=rank, world_size=size, augmentation=Augmentation(**options))  # type: ignore[arg-type]
        return list(loader.batches(1))

    shares = [batches(rank, 3) for rank in range(3)]
    for number, whole in enumerate(batches(0, 1)):
        for which in range(3):
            assert torch.equal(torch.cat([share[number][which] for share in shares]), whole[which])  # type: ignore[misc]


def test_pairs_do_not_depend_on_what_else_is_done(make_set: MakeSet) -> None:
    pairs = PairSet(make_set(12), max_shift=2)
    (plain,), (mirrored,) = (
        BatchLoader(pairs, 12, shuffle=True, augmentation=Augmentation(flip=flip)).batches(0) for flip in (False, True)
    )
    assert torch.equal(plain.labels, mirrored.labels)
    whole = (plain.images == mirrored.images).flatten(1).all(1)
    turned = (plain.images.flip(-1) == mirrored.images).flatten(1).all(1)
    assert (whole | turned).all()
    assert 0 < turned.sum() < 12


def test_pairs_made_on_the_fly_judge_nothing(make_set: MakeSet) -> None:
    with pytest.raises(InputError, match=r"for training only \(shuffle=True\); judge by fixed_pairs"):
        BatchLoader(PairSet(make_set(12)), 4, shuffle=False)


def test_images_of_one_object_have_no_parts(make_set: MakeSet) -> None:
    for shuffle in (True, False):
        assert all(batch.parts is None for batch in BatchLoader(make_set(12), 4, shuffle=shuffle).batches(0))


def test_batches_are_those_of_earlier_versions() -> None:
    """A run that began with an earlier version goes on with the same batches: whatever moves them is a break."""
    images = torch.arange(1, 13, dtype=torch.uint8).view(12, 1, 1, 1).repeat(1, 1, 3, 3)
    loader = BatchLoader(ImageSet(images, torch.arange(12)), 6, shuffle=True, augmentation=Augmentation(1), seed=5)
    assert loader.order(2).tolist() == [0, 11, 4, 9, 6, 8, 5, 1, 10, 7, 3, 2]
    assert shifts_of(loader, 2, 1).tolist() == [[0, 1], [0, -1], [0, 1], [-1, -1], [-1, 0], [0, 0]]


@pytest.mark.gpu
def test_the_same_batches_on_the_gpu(make_set: MakeSet) -> None:
    cpu, gpu = (
        BatchLoader(make_set(40), 8, shuffle=True, augmentation=Augmentation(2), device=d) for d in ("cpu", "cuda")
    )
    for a, b in zip(cpu.batches(1), gpu.batches(1), strict=True):
        assert b.images.is_cuda
        assert b.labels.is_cuda
        torch.testing.assert_close(b.images.cpu(), a.images, rtol=0, atol=1e-7)
        assert torch.equal(b.labels.cpu(), a.labels)


def test_an_augmentation_is_no_mapping(make_set: MakeSet) -> None:
    with pytest.raises(TypeError, match="BatchLoader: augmentation must be an Augmentation"):
        BatchLoader(make_set(12), 4, shuffle=True, augmentation={"max_shift": 2})  # type: ignore[arg-type]
