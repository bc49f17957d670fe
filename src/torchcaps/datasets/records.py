"""Records, such as an EEG or the vibration of a machine: long sequences cut into windows, which become the images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor

from torchcaps.datasets.registry import DataRequest
from torchcaps.errors import InputError
from torchcaps.machine import check_memory
from torchcaps.tasks import TASKS, find_task
from torchcaps.tasks.base import form_words
from torchcaps.tasks.classes import is_one_hot
from torchcaps.words import counted


class Windows(NamedTuple):
    """Windows of records, with a label for each."""

    images: Float32[Tensor, "M C 1 W"]
    labels: np.ndarray
    record: np.ndarray
    """Number of the record of each window, (M,)."""


def no_sequences(where: str) -> InputError:
    """Return the error about images, named ``where``, that windows cannot be cut from."""
    return InputError(
        f"{where} holds no sequences, which window (--window) cuts: numbers (N, L), or (N, C, L) with an array lengths "
        "(N,), the number of steps of each; for pictures leave out --window"
    )


def cut_records(records: Tensor, labels: np.ndarray, request: DataRequest, where: str) -> Windows:
    """Cut records into windows of ``request.window`` steps, ``request.stride`` apart.

    The last window of a record ends with it, so no step is lost. A record that is shorter than a window becomes one
    window, which NaN pads.

    Args:
        records: Sequences (N, C, 1, L), with NaN after the end of each.
        labels: Labels of the records, (N,) or (N, J); or of their windows: class numbers (N, n) or rows (N, n, J),
            where n windows cut the longest record, and entries after the windows of a shorter one are not read.
        request: Options of the data set.
        where: Name of the records, which begins errors.

    Raises:
        InputError: The images are no sequences, or the labels fit neither records nor windows.
    """
    window, stride = request.window, request.stride or request.window
    assert window is not None
    assert stride is not None
    if records.shape[2] != 1 or not records.is_floating_point():
        raise no_sequences(where)
    lengths = (~records[:, 0, 0].isnan()).sum(1).tolist()
    starts = [[*range(0, max(length - window, 0), stride), max(length - window, 0)] for length in lengths]
    record, place = np.array([(n, k) for n, each in enumerate(starts) for k in range(len(each))]).T
    check_memory(4 * len(record) * records.shape[1] * window, f"{counted(len(record), 'window')} of {where}")
    padded = F.pad(records, (0, max(window - records.shape[-1], 0)), value=torch.nan)
    pieces = [padded[n, :, :, starts[n][k] : starts[n][k] + window] for n, k in zip(record, place, strict=True)]
    most = max(map(len, starts))
    is_matrix = labels.ndim == 2 and labels.shape[1] > 1
    named = None if request.task is None else find_task(request.task)
    takes_rows = named is not None and named.could_be(np.zeros((2, 2)))  # labels or numbers rather than classes
    fits_rows = is_one_hot(labels) if named else any(task.could_be(labels) for task in TASKS.values())
    are_rows = is_matrix and (takes_rows or fits_rows)
    may_be_windows = labels.ndim > 1 and labels.shape[1] == most
    if are_rows and may_be_windows and not takes_rows:
        raise InputError(
            f"the labels of {where} could be rows of {counted(len(lengths), 'record')}, such as one-hot rows, or "
            f"labels of {counted(most, 'window')} each; write labels of windows as (N, {most}, 1), classes of records "
            'as (N,), and set task="labels" or "regression" (--task) for rows of records'
        )
    if (is_matrix and not are_rows) or labels.ndim > 2:
        if not may_be_windows:
            raise InputError(
                f"the labels of {where} must be those of {counted(len(lengths), 'record')}, or a column for each of "
                f"{counted(most, 'window')}, got {form_words(labels)}"
            )
        labels = labels[record, place]
    else:
        labels = labels[record]
    return Windows(torch.stack(pieces), labels, record)
