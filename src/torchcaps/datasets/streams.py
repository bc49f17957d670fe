"""The random streams of the loader: what is drawn depends on the seed, the epoch, the batch and the purpose alone."""

from __future__ import annotations

import numpy as np
import torch

# What a stream is for, so that each is independent of the others. A new one goes to the end: runs rest on the numbers.
ORDER, SHIFTS, CROPS, FLIPS, BRIGHTNESS, CONTRAST, ROTATIONS, SCALINGS, PARTNERS, PLACES = range(10)

Key = tuple[int, int, int]
"""(seed, epoch, batch): what everything random about a batch depends on."""


def stream(*key: int) -> torch.Generator:
    """A generator on the CPU, whatever the device, for one key; those of keys that differ are unrelated.

    Zeros at the end of a key make no difference.
    """
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def stream_of(which: int, key: Key) -> torch.Generator:
    """The generator of one of the streams for one batch."""
    seed, epoch, batch = key
    return stream(seed, epoch, which, batch)
