"""Splits that keep the share of each class, the same on every machine for the same seed."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.datasets.rng import generator
from torchcaps.errors import InputError, shown
from torchcaps.ranges import Range, Seed


@checked
def stratified_split(
    labels: Int64[Tensor, "N"], size: int, *, seed: Seed, leave_one: bool = True
) -> tuple[Int64[Tensor, "rest"], Int64[Tensor, "size"]]:
    """Hold out ``size`` images at random, from each class its share.

    A class of n among N images gives size·n/N of them, rounded down or up so that the sum is ``size``; at least one if
    ``size`` allows it, and never its last one if ``leave_one`` is set.

    Args:
        labels: The class of each image, (N,).
        size: How many images to hold out, from 1.
        seed: Chooses the images of a class, 0 to 2³² - 1.
        leave_one: Whether every class keeps an image in the rest.

    Returns:
        The indices of the rest and of those held out, both ascending, so that images stay in their order.

    Raises:
        TypeError: The labels are no int64 tensor.
        InputError: So many images cannot be held out, or the seed is out of its range.
    """
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    most = len(labels) - leave_one * len(classes)
    if size not in Range(1, most, whole=True):
        why = f" and leave one of each of the {len(classes)} classes" if leave_one else ""
        raise InputError(f"{shown(size)} of {len(labels)} images cannot be held out{why}: 1 to {most} can")
    random = generator(seed)
    held = np.zeros(len(labels), dtype=bool)
    by_class = np.split(np.argsort(labels.numpy(), kind="stable"), np.cumsum(counts)[:-1])
    for members, quota in zip(by_class, _quotas(counts, size, leave_one), strict=True):
        held[random.permutation(members)[:quota]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def _quotas(counts: np.ndarray, size: int, leave_one: bool) -> np.ndarray:
    """How many of each class to hold out: the largest remainders, within the bounds of each class."""
    highest = counts - leave_one
    lowest = np.minimum(highest, 1 if size >= len(counts) else 0)
    ideal = size * counts / counts.sum()
    quotas = np.clip(np.floor(ideal).astype(int), lowest, highest)
    while (missing := size - quotas.sum()) != 0:
        step = 1 if missing > 0 else -1
        free = quotas < highest if step > 0 else quotas > lowest
        # the class that is furthest from its share gives one more or one less, the lowest label of equals first
        quotas[np.argmax(np.where(free, step * (ideal - quotas), -np.inf))] += step
    return quotas
