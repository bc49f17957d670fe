"""Splits of images: each class in the same proportion, no group on two sides, and the same for a seed everywhere.

A group is a set of images that belong together: those of a patient, the windows of a long recording, the pixels of a
block of a scene. :func:`groups_of` finds them, and every split of a data set is made here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.table_file import MISSING, is_group_name
from torchcaps.errors import InputError, shortened, shown
from torchcaps.files import composed
from torchcaps.ranges import Range, Seed
from torchcaps.tasks.base import form_words
from torchcaps.words import counted, each_of

FILE, GROUP, RECORD = "file", "group", "record"
"""Kinds of names of images, in ``ImageSet.names``."""
PLACE, START = ("row", "column"), "start"
"""Factors of the pixels of a scene, their place in it; and of windows, their first step in their record."""
ORDERS = 3
"""Random orders in which groups are tried; the one whose held-out images are nearest to their share is taken."""
MAX_NAMES_CHARACTERS = 100
"""Characters of a list of groups that an error shows in full."""


def groups_of(names: Mapping[str, Sequence[str]]) -> Int64[Tensor, "N"] | None:
    """Return the number of the group of each image, by the names of an image set; None if it has no groups."""
    texts = group_names(names)
    return None if texts is None else torch.from_numpy(np.unique(np.array(texts), return_inverse=True)[1])


def group_names(names: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
    """Return the name of the group of each image, by the names of an image set; None if it has no groups.

    Without groups of its own, the windows of one record are a group.
    """
    return names.get(GROUP, names.get(RECORD))


def read_groups(
    values: Any, count: int, where: str, entry: Callable[[int], str] = "image {} (counted from 0)".format
) -> tuple[str, ...]:
    """Return numbers or texts (N,) as names of groups, so that the same group has the same name in all parts.

    Whole floats, as of a column with gaps, are written like integers.

    Args:
        values: An array, a tensor or a list.
        count: Number of images (N).
        where: Name of the values, which begins errors.
        entry: Returns the name of an image in errors, by its number.

    Raises:
        InputError: The values have another form, or an image has no group: images without one are not one group.
    """
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except ValueError:
        raise InputError(f"{where} must be one array, got rows of different lengths") from None
    if array.dtype.kind not in "iufUSbO" or array.size != count or len(np.atleast_1d(array)) != count:
        raise InputError(
            f"{where} must be numbers or texts, one for {each_of(count, 'image')}, got {form_words(array)}"
        )
    texts = list[str]()
    for n, value in enumerate(array.reshape(-1).tolist()):
        is_whole = isinstance(value, float) and value.is_integer()
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(int(value) if is_whole else value)
        texts.append(composed(text.strip()))
        if not isinstance(value, Real | str | bytes) or not text.strip() or text.strip().lower() in MISSING:
            raise InputError(
                f"{where}: {entry(n)} has {shown(value)} in place of a group; name its group, or leave the image out"
            )
    return tuple(texts)


def note_groups(where: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Warn if a column of a table, or an array, that is not read looks like groups, which a split may then divide.

    Args:
        where: Name of the data set, which begins the warning.
        columns: Cells of each column. Groups have several images.
    """
    for name, cells in columns.items():
        if is_group_name(name) and 1 < len(set(cells)) < len(cells):
            warnings.warn(
                f"{where} has {name}, but images of one {name} may be both in training and in the test. If they are "
                f"alike, as those of a patient are, split by it with group={name!r} (--group {name}).",
                stacklevel=2,
            )


def check_apart(groups: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise InputError if a group has images in two parts of a data set; the error begins with ``where``."""
    for first, second in itertools.combinations(groups, 2):
        if shared := sorted({*groups[first]} & {*groups[second]}):
            groups_shown = shortened(", ".join(shared), MAX_NAMES_CHARACTERS)
            raise InputError(
                f"{where} has images of {counted(len(shared), 'group')} both in its {first} part and in its {second} "
                f"part: {groups_shown}; move them to one part, or leave the parts out, so that groups are split here"
            )


@checked
def stratified_split(
    labels: Int64[Tensor, "N"],
    size: int,
    *,
    seed: Seed,
    leave_one: bool = True,
    groups: Int64[Tensor, "N"] | None = None,
) -> tuple[Int64[Tensor, "rest"], Int64[Tensor, "size"]]:
    """Hold out ``size`` images at random, in proportion to the classes.

    A class with n of N images gives size·n/N images, rounded down or up so that the sum is ``size``. Each class gives
    at least one image if ``size`` allows it. With groups, whole groups are held out, so the number of images is about
    ``size``, and each class stays in the rest.

    Args:
        labels: Class of each image, (N,).
        size: Number of images to hold out, at least 1.
        seed: Random seed, 0 to 2³² - 1.
        leave_one: Keep at least one image of every class in the rest.
        groups: Group of each image, such as its patient; None: each image is a group.

    Returns:
        Indices of the rest and of the held-out images, both ascending.

    Raises:
        TypeError: The labels are no int64 tensor.
        InputError: ``size`` is too large, the seed is out of range, or no group can be held out.
    """
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    limit = len(labels) - leave_one * len(classes)
    if size not in Range(1, limit, whole=True):
        why = f" and leave one of each of the {len(classes)} classes" if leave_one else ""
        raise InputError(f"{shown(size)} of {counted(len(labels), 'image')} cannot be held out{why}: 1 to {limit} can")
    random = generator(seed)
    held = np.zeros(len(labels), dtype=bool)
    if groups is not None:
        held = _held_groups(labels, groups, size / len(labels), random)
    else:
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


@checked
def stratified_folds(
    labels: Int64[Tensor, "N"], folds: int, groups: Int64[Tensor, "N"] | None = None
) -> Int64[Tensor, "N"]:
    """Return the fold of each image, 0 to ``folds`` - 1: each class in the same proportion, no group in two folds.

    Args:
        labels: Class of each image, (N,).
        folds: Number of folds, at least 2.
        groups: Group of each image; None: each image is a group.

    Raises:
        InputError: There are fewer images or groups than folds.
    """
    Range(2, len(labels), whole=True).check("folds", folds)
    random = generator(FIXED_SEED)
    if groups is None:
        order = random.permutation(len(labels))
        order = order[np.argsort(labels.numpy()[order], kind="stable")]
        numbers = np.empty(len(labels), np.int64)
        numbers[order] = np.arange(len(labels)) % folds
        return torch.from_numpy(numbers)
    counts, members = _counts_of_groups(labels, groups)
    if len(counts) < folds:
        raise InputError(f"{counted(len(counts), 'group')} cannot be split into {folds} folds")
    order = random.permutation(len(counts))
    order = order[np.argsort(-counts[order].sum(1), kind="stable")]  # the small ones fill the gaps of the large ones
    return torch.from_numpy(_assigned(counts, order, np.full(folds, 1 / folds))[members])


def _held_groups(labels: Tensor, groups: Tensor, share: float, random: np.random.RandomState) -> Any:
    """Return True for images of groups that are held out, about ``share`` of each class; the rest keeps all classes.

    A class that is in no held-out group gives its smallest one, if at most twice the share is held out then.
    """
    counts, members = _counts_of_groups(labels, groups)
    images, sizes = counts.sum(0), counts.sum(1)
    tries = list[tuple[float, np.ndarray]]()
    for _ in range(ORDERS):
        order = random.permutation(len(counts))
        held = _assigned(counts, order, np.array([1 - share, share]), keeps_all=True) == 1
        tries.append((float(((counts[held].sum(0) - share * images) ** 2 / images).sum()), held))
    held = min(tries, key=lambda each: each[0])[1]
    for stratum in np.flatnonzero(counts[held].sum(0) == 0):
        rest = counts[~held].sum(0)
        # groups whose classes all have images in other groups of the rest, too
        free = [n for n in order[~held[order]] if counts[n, stratum] and ((rest > counts[n]) | (counts[n] == 0)).all()]
        if free:
            smallest = min(free, key=lambda n: sizes[n])
            if not held.any() or sizes[held].sum() + sizes[smallest] <= 2 * share * len(labels):
                held[smallest] = True
    if not held.any():
        why = "each has a class that no other group has" if len(counts) > 1 else "no other group is left to train on"
        raise InputError(f"none of {counted(len(counts), 'group')} can be held out, because {why}; give more groups")
    return held[members]


def _counts_of_groups(labels: Tensor, groups: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of images of each group and class (G, C), and the row of each image's group (N,)."""
    _, classes = np.unique(labels.numpy(), return_inverse=True)
    numbers, members = np.unique(groups.numpy(), return_inverse=True)
    counts = np.zeros((len(numbers), classes.max() + 1), np.int64)
    np.add.at(counts, (members, classes), 1)
    return counts, members


def _assigned(counts: np.ndarray, order: np.ndarray, shares: np.ndarray, *, keeps_all: bool = False) -> np.ndarray:
    """Return the part of each group, so that each part has about its share of each class.

    One group after another goes to the part where it adds least to Σ n² / expected n, over parts and classes: χ² of
    the final numbers n, but for a constant.

    Args:
        counts: Number of images of each group and class.
        order: Order in which groups are assigned.
        shares: Share of each part, in sum 1.
        keeps_all: The first group of a class goes to part 0, so that this has all classes.
    """
    parts = np.empty(len(counts), np.int64)
    filled, expected = np.zeros((len(shares), counts.shape[1])), np.outer(shares, counts.sum(0))
    for group in order:
        added = counts[group]
        costs = ((2 * filled + added) * added / expected).sum(1)
        is_needed = keeps_all and bool(((filled[0] == 0) & (added > 0)).any())
        parts[group] = 0 if is_needed else np.lexsort((filled.sum(1), costs))[0]  # of equal ones, the emptiest
        filled[parts[group]] += added
    return parts
