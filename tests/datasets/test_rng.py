from __future__ import annotations

import itertools

import torch

from torchcaps.datasets import rng


def drawn(*key: int) -> tuple[int, ...]:
    return tuple(torch.randint(2**30, (4,), generator=rng.stream(*key)).tolist())


def test_every_key_has_a_stream_of_its_own_and_always_the_same() -> None:
    seeds_and_epochs = list(itertools.product(range(3), repeat=2))
    keys = [(*key, rng.ORDER) for key in seeds_and_epochs]
    keys += [(*key, which, batch) for key in seeds_and_epochs for which in range(1, 10) for batch in range(3)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert drawn(1, 2) == drawn(1, 2, 0)  # which is why only the order, that needs no batch, has the number 0


def test_the_key_of_a_batch_and_its_purpose() -> None:
    for which in (rng.SHIFTS, rng.FLIPS):
        there = torch.randint(2**30, (4,), generator=rng.stream_of(which, (7, 8, 9)))
        assert tuple(there.tolist()) == drawn(7, 8, which, 9)


def test_purposes_keep_their_numbers() -> None:
    """Runs rest on them: whatever moves one is a break."""
    names = "ORDER SHIFTS CROPS FLIPS BRIGHTNESS CONTRAST ROTATIONS SCALINGS PARTNERS PLACES"
    assert [getattr(rng, name) for name in names.split()] == list(range(10))
