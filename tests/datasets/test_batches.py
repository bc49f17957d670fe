"""Batches of images."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_runs import image_set
from torchcaps.datasets import Augmentation, Batch, BatchLoader, ImageSet, PairSet
from torchcaps.errors import InputError


def moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """The image (C, H, W) moved by up to 9 pixels each way, zeros moving in."""
    _, height, width = image.shape
    return F.pad(image, (9,) * 4)[:, 9 - down : 9 - down + height, 9 - right : 9 - right + width]


def shifts_of(loader: BatchLoader, epoch: int, batch: int) -> torch.Tensor:
    """How far each image of a whole batch is moved (down, to the right)."""
    key, change = (loader.seed, epoch, batch), loader.augmentation
    return change.max_shift - change.draw((1, 6, 5), loader.batch_size, key).corners


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(first, second, strict=True)
    )


def test_evaluation_gives_every_image_once_in_its_order_and_unmoved() -> None:
    images = image_set(11, (3, 6, 5))
    before, loader = images.images.clone(), BatchLoader(images, 4, shuffle=False)
    batches = list(loader.batches(0))
    assert [len(batch.labels) for batch in batches] == [4, 4, 3]
    assert (len(loader), batches[0].images.dtype, batches[0].parts) == (3, torch.float32, None)
    assert torch.equal(torch.cat([batch.images for batch in batches]), images.images.float() / 255)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), images.labels)
    assert same(batches, list(loader.batches(7)))
    for batch in batches:  # they share no memory with the set
        batch.images.zero_()
    assert torch.equal(images.images, before)


def test_each_image_is_moved_by_its_own_shift_and_mirrored_or_not() -> None:
    images = image_set(30, (3, 4, 7))
    loader = BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(3, flip=True), seed=5)
    for number, batch in enumerate(loader.batches(2)):
        flips = loader.augmentation.draw(images.in_shape, 8, (5, 2, number)).flips
        assert flips is not None
        for place, i in enumerate(loader.order(2)[number * 8 : (number + 1) * 8]):
            down, right = shifts_of(loader, 2, number)[place].tolist()
            wanted = moved(images.images[i], down, right)
            assert torch.equal(batch.images[place], (wanted.flip(-1) if flips[place] else wanted) / 255)
            assert batch.labels[place] == images.labels[i]


def test_what_an_epoch_depends_on() -> None:
    images = image_set(40)
    a, b = (BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(2), seed=seed) for seed in (0, 1))
    orders = [a.order(0), a.order(1), b.order(0), b.order(1)]  # seed and epoch do not add up
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(torch.equal(order.sort().values, torch.arange(40)) for order in orders)
    torch.manual_seed(1)  # the global state is neither read nor moved
    first, state = list(a.batches(0)), torch.random.get_rng_state()
    torch.manual_seed(2)
    assert same(first, list(a.batches(0)))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


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


def test_options_epochs_and_sets_that_cannot_be() -> None:
    options: dict[str, Any]
    for options, named in (
        ({"batch_size": 13}, "batch size is 13, but an epoch has only 12 images"),
        ({"batch_size": 13, "shuffle": False, "drop_last": True}, "only 12 images"),
        ({"world_size": 3}, "3 processes cannot share evenly; choose a multiple of 3"),
        ({"world_size": 2, "rank": 2}, "rank must be from 0.*got 2"),
        ({"shuffle": False, "augmentation": Augmentation(crop=4)}, "only training images"),
        ({"augmentation": Augmentation(5)}, "5 pixels can be moved by 0 to 4"),
        ({"augmentation": Augmentation(-1)}, "max_shift is -1"),
        ({"augmentation": Augmentation(crop=6)}, "crop is 6 pixels, but squares of 1 to 5 can be cut out"),
        ({"augmentation": {"max_shift": 2}}, "augmentation must be an Augmentation"),
        *(({name: value}, name) for name, value in (("batch_size", 2.5), ("shuffle", torch.ones(2)), ("seed", -1))),
    ):
        with pytest.raises(InputError, match=named):
            BatchLoader(image_set(12), **{"batch_size": 4, "shuffle": True} | options)
    loader = BatchLoader(image_set(12), 4, shuffle=True)
    for epoch, start, named in ((-1, 0, "epoch"), (0, 4, "3 batches"), (0, 0.5, "start")):
        with pytest.raises(InputError, match=named):  # at the call, not at the first batch
            loader.batches(epoch, start)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"for training only \(shuffle=True\); validate with fixed_pairs"):
        BatchLoader(PairSet(image_set(12)), 4, shuffle=False)


def test_batches_are_those_of_earlier_versions() -> None:
    """A run that began with an earlier version goes on with the same batches: whatever moves them is a break."""
    images = torch.arange(1, 13, dtype=torch.uint8).view(12, 1, 1, 1).repeat(1, 1, 3, 3)
    loader = BatchLoader(ImageSet(images, torch.arange(12)), 6, shuffle=True, augmentation=Augmentation(1), seed=5)
    assert loader.order(2).tolist() == [0, 11, 4, 9, 6, 8, 5, 1, 10, 7, 3, 2]
    assert shifts_of(loader, 2, 1).tolist() == [[0, 1], [0, -1], [0, 1], [-1, -1], [-1, 0], [0, 0]]


@pytest.mark.gpu
def test_the_same_batches_on_the_gpu() -> None:
    images = image_set(40, (3, 8, 8))
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
