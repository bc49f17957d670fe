"""Random numbers of data. A batch's numbers depend only on the seed, the epoch, the batch and the purpose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

FIXED_SEED = 0
"""Seed of choices that must not depend on the user's seed: test images, and the order of a folder's files."""

# The purpose of each independent stream. Append new ones at the end, because runs depend on the numbers.
ORDER, SHIFTS, CROPS, FLIPS, BRIGHTNESS, CONTRAST, ROTATIONS, SCALINGS, PARTNERS, PLACES, PATCHES, PUBLISHED = range(12)

Key = tuple[int, int, int]
"""(seed, epoch, batch), which determine all random numbers of a batch."""


def stream_of(stream: int, key: Key) -> torch.Generator:
    """Return the CPU generator of one stream for one batch. Streams are statistically independent."""
    seed, epoch, batch = key
    (state,) = np.random.SeedSequence((seed, epoch, stream, batch)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), NumPy and Python; restore their states afterwards."""
    kept = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number % 2**63)
            np.random.seed(number % 2**32)
            random.seed(number)
            yield
    finally:
        np.random.set_state(kept[0])
        random.setstate(kept[1])


def generator(seed: int) -> np.random.RandomState:
    """Return a generator whose numbers never change between versions of NumPy (NEP 19); ``seed`` is 0 to 2³² - 1."""
    return np.random.RandomState(seed)
