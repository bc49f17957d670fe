"""Records, such as an EEG or the vibration of a machine: long sequences cut into windows, which become the images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Shaped

from torchcaps.errors import InputError, shown
from torchcaps.machine import check_memory
from torchcaps.tasks import TASKS, TaskName, find_task
from torchcaps.tasks.base import form_words
from torchcaps.tasks.classes import is_one_hot
from torchcaps.words import counted

LENGTHS = {"x": "lengths", "x_train": "lengths", "x_test": "lengths_test", "x_val": "lengths_val"}
"""Name of the array of the lengths of sequences, by the name of their array."""


class Windows(NamedTuple):
    """Windows of records."""

    images: Float32[np.ndarray, "M C 1 W"]
    record: Int[np.ndarray, "M"]
    """Number of the record of each window."""
    place: Int[np.ndarray, "M"]
    """Number of each window in its record."""
    start: Int[np.ndarray, "M"]
    """First step of each window in its record."""


def no_sequences(where: str) -> InputError:
    """Return the error about images, named ``where``, that windows cannot be cut from."""
    return InputError(
        f"{where} holds no sequences, which window (--window) cuts: numbers (N, L), or (N, C, L) with an array lengths "
        "(N,), the number of steps of each; for pictures leave out --window"
    )


def as_sequences(
    values: Shaped[np.ndarray, "..."], lengths: Shaped[np.ndarray, "N"] | None, where: str, name: str
) -> Float32[np.ndarray, "N C 1 L"]:
    """Return numbers (N, L), or (N, C, L) with the lengths of sequences, as sequences; ``name`` is that of the lengths.

    Raises:
        InputError: The array has another shape, or as for `pad_sequences`.
    """
    has_channels = lengths is not None
    if values.ndim != 2 + has_channels or values.dtype.kind not in "fiu" or 0 in values.shape:
        axes = "(N, C, L), channels and steps, because the file has lengths" if has_channels else "(N, L)"
        raise InputError(
            f"{where} must hold numbers in the shape {axes}, got {values.dtype} in the shape {shown(values.shape)}"
        )
    return pad_sequences(list(values if has_channels else values[:, None]), values.shape[-1], where, lengths, name)


def pad_sequences(
    sequences: Sequence[Float[np.ndarray, "C l"]],
    length: int,
    where: str,
    lengths: Shaped[np.ndarray, "N"] | None = None,
    name: str = "lengths",
) -> Float32[np.ndarray, "N C 1 L"]:
    """Pad sequences with NaN to one length; ``lengths``: the steps of each, after which it is padding.

    Raises:
        InputError: A number is NaN, infinite or beyond float32, or the lengths are no whole numbers from 1 to the last
            step; the message begins with ``where`` and calls the lengths ``name``.
    """
    count = len(sequences)
    if lengths is not None:
        is_whole = lengths.dtype.kind in "iu" and lengths.shape == (count,)
        if not is_whole or lengths.min() < 1 or lengths.max() > length:
            raise InputError(
                f"{where} must have {name}, whole numbers from 1 to {length}, one for each of {count} sequences"
            )
        sequences = [each[:, :steps] for each, steps in zip(sequences, lengths, strict=True)]
    padded = np.full((count, len(sequences[0]), 1, length), np.nan, np.float32)
    for row, each in zip(padded, sequences, strict=True):
        with np.errstate(over="ignore"):
            numbers = np.asarray(each, np.float32)
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{where} has a number that is NaN, infinite or beyond float32 before the end of its sequence"
            )
        row[:, 0, : each.shape[1]] = numbers
    return padded


def cut_records(records: Float32[np.ndarray, "N C 1 L"], window: int, stride: int | None, where: str) -> Windows:
    """Cut records into windows of ``window`` steps, ``stride`` apart; None: as many steps as a window has.

    The last window of a record ends with it, so no step is lost. A record that is shorter than a window becomes one
    window, which NaN pads.

    Args:
        records: Sequences, with NaN after the end of each.
        window: Steps of a window.
        stride: Steps between the beginnings of two windows.
        where: Name of the records, which begins errors.

    Raises:
        InputError: The images are no sequences, or their windows do not fit into memory.
    """
    if records.shape[2] != 1 or records.dtype.kind != "f":
        raise no_sequences(where)
    lengths = (~np.isnan(records[:, 0, 0])).sum(1).tolist()
    starts = [[*range(0, max(length - window, 0), stride or window), max(length - window, 0)] for length in lengths]
    record, place, start = np.array([(n, k, begin) for n, each in enumerate(starts) for k, begin in enumerate(each)]).T
    check_memory(4 * len(record) * records.shape[1] * window, f"{counted(len(record), 'window')} of {where}")
    missing = max(window - records.shape[-1], 0)
    padded = np.pad(records, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=np.nan)
    pieces = np.stack([padded[n, :, :, begin : begin + window] for n, begin in zip(record, start, strict=True)])
    return Windows(pieces, record, place, start)


def labels_of_windows(labels: np.ndarray, windows: Windows, task: TaskName | None, where: str) -> np.ndarray:
    """Return the label of each window.

    Args:
        labels: Labels of the records, (N,) or (N, J); or of their windows: class numbers (N, n) or rows (N, n, J),
            where n windows cut the longest record, and entries after the windows of a shorter one are not read.
        windows: The windows.
        task: Task of the labels; None: their form decides.
        where: Name of the records, which begins errors.

    Raises:
        InputError: The labels fit neither records nor windows.
    """
    most, count = int(windows.place.max()) + 1, int(windows.record.max()) + 1
    is_matrix = labels.ndim == 2 and labels.shape[1] > 1
    named = None if task is None else find_task(task)
    takes_rows = named is not None and named.could_be(np.zeros((2, 2)))  # labels or numbers rather than classes
    fits_rows = is_one_hot(labels) if named else any(each.could_be(labels) for each in TASKS.values())
    are_rows = is_matrix and (takes_rows or fits_rows)
    may_be_windows = labels.ndim > 1 and labels.shape[1] == most
    if are_rows and may_be_windows and not takes_rows:
        raise InputError(
            f"the labels of {where} could be rows of {counted(count, 'record')}, such as one-hot rows, or "
            f"labels of {counted(most, 'window')} each; write labels of windows as (N, {most}, 1), classes of records "
            'as (N,), and set task="labels" or "regression" (--task) for rows of records'
        )
    if not (is_matrix and not are_rows) and labels.ndim <= 2:
        return labels[windows.record]
    if not may_be_windows:
        raise InputError(
            f"the labels of {where} must be those of {counted(count, 'record')}, or a column for each of "
            f"{counted(most, 'window')}, got {form_words(labels)}"
        )
    return labels[windows.record, windows.place]
