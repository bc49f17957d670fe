"""Images of a data set that cannot be used: named in one error, or left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from torchcaps.datasets.images import image_files_in
from torchcaps.datasets.scaling import UnknownRange
from torchcaps.errors import InputError
from torchcaps.words import counted

Item = TypeVar("Item")
Value = TypeVar("Value")
MAX_NAMED = 20
"""Largest number of images that an error or a message names."""


def read_each(
    items: Iterable[Item],
    read: Callable[[Item], Value],
    *,
    skip: bool,
    faults: Sequence[str] = (),
    check: Callable[[tuple[Item, Value], tuple[Item, Value]], None] = lambda *_: None,
) -> tuple[dict[Item, Value], list[str]]:
    """Read all items, and name all that cannot be used in one error; ``skip`` leaves them out, without an error.

    Args:
        items: The items, such as files.
        read: Function that reads an item; an InputError says that it cannot be used.
        skip: Leave out items that cannot be used.
        faults: Sentences about further items that cannot be used.
        check: Compares the first item and what was read of it with each later one; its errors end the reading.

    Returns:
        What was read of each item, and a sentence for each that is left out.
    """
    values, damaged, unknown = dict[Item, Value](), list(faults), list[UnknownRange]()
    for item in items:
        try:
            values[item] = read(item)
        except InputError as error:
            damaged.append(str(error))
            unknown += [error] if isinstance(error, UnknownRange) else []
        else:
            check(next(iter(values.items())), (item, values[item]))
    if len(unknown) == len(damaged) > 1 and not skip:  # one option is missing
        where = f"each of {len(unknown)} files, such as {unknown[0].where},"
        low, high = min(each.low for each in unknown), max(each.high for each in unknown)
        raise UnknownRange.of(where, unknown[0].dtype, low, high)
    refuse_damaged(damaged, len(values) + len(damaged), skip=skip)
    return values, damaged


def refuse_damaged(damaged: Sequence[str], total: int, *, skip: bool) -> None:
    """Raise InputError if images cannot be used, unless they are left out (``skip``).

    ``damaged`` has a sentence for each of them; ``total`` is the number of all images.
    """
    if skip or not damaged:
        return
    if len(damaged) == 1:
        raise InputError(f"{damaged[0]} (--skip-damaged leaves it out)")
    raise InputError(
        listed(
            f"{len(damaged)} of {total} images cannot be used; repair or remove them, or leave them out by "
            "--skip-damaged:",
            damaged,
        )
    )


def listed(first: str, damaged: Sequence[str]) -> str:
    """Return a line, and below it the first sentences about images that cannot be used."""
    return "\n  ".join([first, *damaged[:MAX_NAMED], *["…"] * (len(damaged) > MAX_NAMED)])


def note_unread(root: Path, files: Iterable[Path], why: str) -> None:
    """Warn if a folder has images beside ``files``, such as in sub-folders; ``why`` says where they belong."""
    others = sorted({*image_files_in(root, deep=True)} - {*files})
    if others:
        warnings.warn(
            f"{root} has {counted(len(others), 'image')} that {'are' if len(others) > 1 else 'is'} not read, such as "
            f"{others[0].relative_to(root)}; {why}",
            stacklevel=2,
        )
