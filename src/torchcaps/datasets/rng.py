"""Random numbers of data. What is drawn for a batch depends on the seed, the epoch, the batch and the purpose alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

FIXED_SEED = 0
"""The seed of what must not follow the user's: test images, and the order of a folder's files."""

# The purpose of each stream, so that streams are independent. A new one goes to the end: runs depend on the numbers.
ORDER, SHIFTS, CROPS, FLIPS, BRIGHTNESS, CONTRAST, ROTATIONS, SCALINGS, PARTNERS, PLACES = range(10)

Key = tuple[int, int, int]
"""(seed, epoch, batch): everything random about a batch depends on these alone."""


def stream_of(which: int, key: Key) -> torch.Generator:
    """The generator of one of the streams for one batch, on the CPU; all of them give unrelated numbers."""
    seed, epoch, batch = key
    (state,) = np.random.SeedSequence((seed, epoch, which, batch)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), NumPy and Python; afterwards they are as they were."""
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
    """A generator whose numbers NumPy has frozen (NEP 19), so that splits never change; ``seed`` is 0 to 2³² - 1."""
    return np.random.RandomState(seed)
