"""Stratified splits: every class is split in the same proportion, and a seed gives the same split everywhere."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.datasets.rng import generator
from torchcaps.errors import InputError, shown
from torchcaps.ranges import Range, Seed
from torchcaps.words import counted


@checked
def stratified_split(
    labels: Int64[Tensor, "N"], size: int, *, seed: Seed, leave_one: bool = True
) -> tuple[Int64[Tensor, "rest"], Int64[Tensor, "size"]]:
    """Hold out ``size`` images at random, in proportion to the classes.

    A class with n of N images gives size·n/N images, rounded down or up so that the sum is ``size``. Each class gives
    at least one image if ``size`` allows it.

    Args:
        labels: Class of each image, (N,).
        size: Number of images to hold out, at least 1.
        seed: Random seed, 0 to 2³² - 1.
        leave_one: Keep at least one image of every class in the rest.

    Returns:
        Indices of the rest and of the held-out images, both ascending.

    Raises:
        TypeError: The labels are no int64 tensor.
        InputError: ``size`` is too large, or the seed is out of range.
    """
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    limit = len(labels) - leave_one * len(classes)
    if size not in Range(1, limit, whole=True):
        why = f" and leave one of each of the {len(classes)} classes" if leave_one else ""
        raise InputError(f"{shown(size)} of {counted(len(labels), 'image')} cannot be held out{why}: 1 to {limit} can")
    random = generator(seed)
    held = np.zeros(len(labels), dtype=bool)
    by_class = np.split(np.argsort(labels.numpy(), kind="stable"), np.cumsum(counts)[:-1])
    for members, quota in zip(by_class, _quotas(counts, size, leave_one), strict=True):
        held[random.permutation(members)[:quota]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def _quotas(counts: np.ndarray, size: int, leave_one: bool) -> np.ndarray:
    """Return the number of images to hold out of each class: largest remainders, within the bounds of each class."""
    highest = counts - leave_one
    lowest = np.minimum(highest, 1 if size >= len(counts) else 0)
    ideal = size * counts / counts.sum()
    quotas = np.clip(np.floor(ideal).astype(int), lowest, highest)
    while (missing := size - quotas.sum()) != 0:
        step = 1 if missing > 0 else -1
        free = quotas < highest if step > 0 else quotas > lowest
        # the class furthest from its share gives one more or one less; the lowest label if several are equal
        quotas[np.argmax(np.where(free, step * (ideal - quotas), -np.inf))] += step
    return quotas
