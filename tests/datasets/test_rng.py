from __future__ import annotations

import itertools

import torch

from torchcaps.datasets import rng


def drawn(which: int, *key: int) -> tuple[int, ...]:
    seed, epoch, batch = key
    return tuple(torch.randint(2**30, (4,), generator=rng.stream_of(which, (seed, epoch, batch))).tolist())


def test_every_key_has_a_stream_of_its_own_and_always_the_same() -> None:
    keys = list(itertools.product(range(10), *[range(3)] * 3))
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(3, 1, 2, 0) == drawn(3, 1, 2, 0)


def test_the_numbers_of_a_stream_stay() -> None:
    """Runs rest on them: whatever moves one is a break."""
    assert drawn(rng.ORDER, 7, 8, 0) == (462895825, 578387387, 783513397, 701069107)
    assert drawn(rng.SHIFTS, 7, 8, 9) == (758158248, 35676093, 86031727, 472166912)


def test_purposes_keep_their_numbers() -> None:
    """Runs rest on them: whatever moves one is a break."""
    names = "ORDER SHIFTS CROPS FLIPS BRIGHTNESS CONTRAST ROTATIONS SCALINGS PARTNERS PLACES"
    assert [getattr(rng, name) for name in names.split()] == list(range(10))
