from __future__ import annotations

import itertools
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
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for y, x in itertools.product(range(height), range(width)):
        if 0 <= y - down < height and 0 <= x - right < width:
            result[:, y, x] = image[:, y - down, x - right]
    return result


def shifts_of(loader: BatchLoader, epoch: int, batch: int) -> torch.Tensor:
    """How far each image of a whole batch is moved (down, to the right)."""
    key, change = (loader.seed, epoch, batch), loader.augmentation
    return change.max_shift - change.draw((1, 6, 5), loader.batch_size, key).corners


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(first, second, strict=True)
    )


def loaded(images: ImageSet | PairSet, size: int = 8, epoch: int = 0, start: int = 0, **options: Any) -> list[Batch]:
    change = Augmentation(**options.pop("changes", {}))
    return list(BatchLoader(images, size, shuffle=True, augmentation=change, **options).batches(epoch, start))


def test_evaluation_gives_every_image_once_in_its_order_and_unmoved(make_set: MakeSet) -> None:
    images = make_set(11, (3, 6, 5))
    before, loader = images.images.clone(), BatchLoader(images, 4, shuffle=False)
    batches = list(loader.batches(0))
    assert [len(batch.labels) for batch in batches] == [4, 4, 3]
    assert len(loader) == 3
    assert torch.equal(torch.cat([batch.images for batch in batches]), images.images.float() / 255)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), images.labels)
    assert same(batches, list(loader.batches(7)))
    for batch in batches:  # they share no memory with the set
        batch.images.zero_()
    assert torch.equal(images.images, before)
    (batch,) = BatchLoader(images, 256, shuffle=False).batches(0)
    assert (len(batch.labels), batch.images.dtype, batch.parts) == (11, torch.float32, None)


def test_each_image_is_moved_by_its_own_shift(make_set: MakeSet) -> None:
    images = make_set(30, (3, 4, 7))
    loader = BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(3), seed=5)
    for number, batch in enumerate(loader.batches(2)):
        for place, i in enumerate(loader.order(2)[number * 8 : (number + 1) * 8]):
            down, right = shifts_of(loader, 2, number)[place].tolist()
            assert torch.equal(batch.images[place], moved(images.images[i], down, right).float() / 255)
            assert batch.labels[place] == images.labels[i]


def test_what_an_epoch_depends_on(make_set: MakeSet) -> None:
    images = make_set(40)
    a, b = (BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(2), seed=seed) for seed in (0, 1))
    orders = [a.order(0), a.order(1), b.order(0), b.order(1)]  # seed and epoch do not add up
    drawn = [shifts_of(*each) for each in ((a, 0, 0), (a, 0, 1), (a, 1, 0), (b, 0, 0), (b, 1, 0))]
    for values in (orders, drawn):
        assert all(not torch.equal(one, other) for i, one in enumerate(values) for other in values[:i])
    assert all(torch.equal(order.sort().values, torch.arange(40)) for order in orders)
    assert torch.equal(BatchLoader(images, 8, shuffle=True).order(0), a.order(0))  # however images are changed
    torch.manual_seed(1)  # the global state is neither read nor moved
    first, state = list(a.batches(0)), torch.random.get_rng_state()
    torch.manual_seed(2)
    assert same(first, list(a.batches(0)))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_resumed_epoch_goes_on_exactly(make_set: MakeSet) -> None:
    for images in (make_set(37), PairSet(make_set(37))):
        changes = {"max_shift": 2, "crop": 4, "flip": True, "max_rotation": 20.0}
        whole = loaded(images, epoch=4, changes=changes)
        assert len(whole) == 5
        for start in (0, 1, 4, 5):
            assert same(whole[start:], loaded(images, epoch=4, start=start, changes=changes))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 12), world=st.integers(1, 5), kind=st.sampled_from(["", "T", "P"]))
def test_many_processes_see_together_what_one_sees(n: int, batch: int, world: int, kind: str) -> None:
    """In evaluation, in training and of pairs."""
    if kind:
        batch *= world
        n += batch + 1
    images: ImageSet | PairSet = ImageSet(torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8), torch.arange(n))
    if kind == "P":
        images = PairSet(images, max_shift=1)
    colours = {"brightness": 0.2, "contrast": 0.5} if kind == "T" else {}
    change = Augmentation(2, flip=True, max_rotation=20.0, max_scaling=0.1, **colours) if kind else None

    def batches(rank: int, size: int) -> list[Batch]:
        place = {"rank": rank, "world_size": size, "seed": n}
        return list(BatchLoader(images, batch, shuffle=bool(kind), augmentation=change, **place).batches(1))

    alone = batches(0, 1)
    shares = [batches(rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {len(alone)}
    for number, whole in enumerate(alone):
        for each, wanted in enumerate(whole):
            if wanted is not None:
                assert torch.equal(torch.cat([share[number][each] for share in shares]), wanted)  # type: ignore[misc]
        sizes = [len(share[number].labels) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_the_last_batch_can_be_dropped(make_set: MakeSet) -> None:
    assert [len(batch.labels) for batch in loaded(make_set(11), 4, drop_last=True)] == [4, 4]
    assert [len(BatchLoader(make_set(n), 4, shuffle=True, drop_last=True)) for n in (11, 12)] == [2, 3]


def test_options_epochs_and_sets_that_cannot_be(make_set: MakeSet) -> None:
    options: dict[str, Any]
    for options, named in (
        ({"batch_size": 13}, "batch size is 13, but there are only 12 images"),
        ({"batch_size": 13, "shuffle": False, "drop_last": True}, "only 12 images"),
        ({"world_size": 3}, "3 processes cannot share evenly.*multiple of 3"),
        ({"world_size": 2, "rank": 2}, "rank must be from 0.*got 2"),
        ({"shuffle": False, "augmentation": Augmentation(crop=4)}, "only training images"),
        ({"augmentation": Augmentation(5)}, "5 pixels can be moved by 0 to 4"),
        ({"augmentation": Augmentation(-1)}, "max_shift is -1"),
        ({"augmentation": Augmentation(crop=6)}, "crop is 6 pixels, but squares of 1 to 5 can be cut out"),
        ({"augmentation": {"max_shift": 2}}, "augmentation must be an Augmentation"),
        *(({name: value}, name) for name, value in (("batch_size", 2.5), ("shuffle", torch.ones(2)), ("seed", -1))),
    ):
        with pytest.raises(InputError, match=named):
            BatchLoader(make_set(12), **{"batch_size": 4, "shuffle": True} | options)
    loader = BatchLoader(make_set(12), 4, shuffle=True)
    for epoch, start, named in ((-1, 0, "epoch"), (0, 4, "3 batches"), (0, 0.5, "start")):
        with pytest.raises(InputError, match=named):  # at the call, not at the first batch
            loader.batches(epoch, start)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"for training only \(shuffle=True\); judge by fixed_pairs"):
        BatchLoader(PairSet(make_set(12)), 4, shuffle=False)


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
        assert torch.equal(batch.images, (batch.parts * 255).round().sum(1).clamp(max=255) / 255)
    first = batches[0].parts
    assert first is not None
    for place, i in enumerate(order[:8]):  # the first object of each pair, somewhere on the canvas
        assert first[place, 0].sum().item() == pytest.approx(pairs.objects.images[i].sum().item() / 255, rel=1e-5)


def test_batches_are_those_of_earlier_versions() -> None:
    """A run that began with an earlier version goes on with the same batches: whatever moves them is a break."""
    images = torch.arange(1, 13, dtype=torch.uint8).view(12, 1, 1, 1).repeat(1, 1, 3, 3)
    loader = BatchLoader(ImageSet(images, torch.arange(12)), 6, shuffle=True, augmentation=Augmentation(1), seed=5)
    assert loader.order(2).tolist() == [0, 11, 4, 9, 6, 8, 5, 1, 10, 7, 3, 2]
    assert shifts_of(loader, 2, 1).tolist() == [[0, 1], [0, -1], [0, 1], [-1, -1], [-1, 0], [0, 0]]


@pytest.mark.gpu
def test_the_same_batches_on_the_gpu(make_set: MakeSet) -> None:
    images = make_set(40, (3, 8, 8))
    still = {"max_shift": 1, "crop": 4, "flip": True, "brightness": 0.2, "contrast": 0.5}
    sets: list[tuple[ImageSet | PairSet, dict[str, Any]]] = [(images, still), (PairSet(images), {})]
    for data, options in (*sets, (images, still | {"max_rotation": 20.0, "max_scaling": 0.1})):
        cpu, gpu = (
            BatchLoader(data, 8, shuffle=True, device=device, augmentation=Augmentation(**options))
            for device in ("cpu", "cuda")
        )
        for a, b in zip(cpu.batches(1), gpu.batches(1), strict=True):
            assert b.images.is_cuda
            torch.testing.assert_close(b.images.cpu(), a.images, rtol=0, atol=1e-6)
            assert torch.equal(b.labels.cpu(), a.labels)
