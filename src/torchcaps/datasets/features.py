"""Features without images, such as the embeddings of a pretrained network, and sequences: rows of arrays and tables.

An exported network reads them too, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Shaped

from torchcaps.datasets.matching import note_order
from torchcaps.datasets.reading import list_arrays, read_arrays
from torchcaps.datasets.records import LENGTHS, as_sequences, cut_records
from torchcaps.datasets.table_file import Table, is_group_name, numbers_of, read_table
from torchcaps.errors import InputError, names_shown, shown
from torchcaps.words import counted

FEATURES = "features"
"""Name of the array of an .npz file."""
SUFFIXES = (".npz", ".csv", ".tsv")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
"""Usual names of the column with the labels, if the table has further columns."""
SPLIT_COLUMNS = ("split", "part", "subset", "set")
"""Usual names of the column with train, val or test."""


class Rows(NamedTuple):
    """Rows of features, or sequences, from a file."""

    names: Sequence[str]
    """Name of each row: the file, with its line or its number."""
    inputs: Float32[np.ndarray, "M C 1 L"]
    """Inputs of a network: the rows, or the windows of each."""
    row: Int[np.ndarray, "M"]
    """Number of the row of each input."""


def are_features(in_shape: Sequence[int]) -> bool:
    """Return True for the shape of features, (F, 1, 1)."""
    return tuple(in_shape[1:]) == (1, 1)


def as_features(values: Shaped[np.ndarray, "..."], where: str) -> Float32[np.ndarray, "N F 1 1"]:
    """Return numbers (N, F) in the form of images with F channels; their values stay.

    Raises:
        InputError: The array has another shape, or a number is NaN, infinite or beyond float32.
    """
    if values.ndim != 2 or values.dtype.kind not in "fiu" or 0 in values.shape:
        raise InputError(
            f"{where} must hold numbers in the shape (N, F), got {values.dtype} in the shape {shown(values.shape)}"
        )
    with np.errstate(over="ignore"):
        features = values.astype(np.float32)
    if not np.isfinite(features).all():
        raise InputError(f"{where} has a number that is NaN, infinite or beyond float32")
    return features[:, :, None, None]


def features_of(table: Table, names: Sequence[str]) -> Float32[np.ndarray, "N F 1 1"]:
    """Return columns of a table as features.

    Raises:
        InputError: A cell holds no number.
    """
    return as_features(np.stack([_numbers(table, name) for name in names], 1), str(table.path))


def feature_columns(table: Table, others: Sequence[str | None]) -> list[str]:
    """Return the columns of features of a table without image files: all but ``others``.

    Raises:
        InputError: There is no such column, one has no name, or its name is that of groups, such as patients.
    """
    names = [name for name in table.columns if name not in others]
    if not names:
        raise InputError(f"{table.path} has no columns of features, only {shown(list(table.columns))}")
    for name in names:
        if is_group_name(name) or not name:
            what = f"the column {name}" if name else "a column without a name, such as pandas adds"
            advice = f"rename or remove it, or split by it with --group {name}" if name else "name or remove it"
            raise InputError(f"{table.path} has {what}, which would be read as a feature; {advice}")
    return names


def _numbers(table: Table, name: str) -> Shaped[np.ndarray, "N"]:
    """Return the numbers of a column; raise InputError for other cells."""
    numbers = numbers_of(table, name, must=True)
    assert numbers is not None
    return numbers


def read_rows(path: Path, about: Any) -> list[Rows]:
    """Return the features or the sequences of each array of an .npz file, or of a table, as the input of a network.

    Args:
        path: A file with arrays ``features`` or ``x`` (of sequences, with ``lengths``), also those of the test and
            validation part; or a table whose first line names its columns.
        about: ``ImageSpec`` of the network. Tables have its channels as columns, or without names its features beside
            labels. Sequences are cut into its windows.

    Raises:
        InputError: The file is damaged, or its rows do not fit the network.
    """
    if path.suffix.lower() == ".npz":
        columns, parts = None, _read_arrays(path, about)
    else:
        table = read_table(path, lambda _: None)
        others = [name for name in table.columns if name.lower() in (*LABEL_COLUMNS, *SPLIT_COLUMNS)]
        columns = feature_columns(table, others) if about.channels is None else about.channels
        if missing := [name for name in columns if name not in table.columns]:
            raise InputError(f"{path} has no column {names_shown(missing)}, which the network takes")
        parts = [([f"{path}, line {line}" for line in table.lines], features_of(table, columns))]
    (channels, _, steps), rows = about.in_shape, list[Rows]()
    for names, inputs in parts:
        if inputs.shape[1] != channels:
            kind = "feature" if are_features(about.in_shape) else "channel"
            raise InputError(f"{path} has {counted(inputs.shape[1], kind)} in a row, but the network takes {channels}")
        note_order(columns, about.channels, str(path), "feature")
        if about.window is None and inputs.shape[-1] > steps and not np.isnan(inputs[..., steps:]).all():
            raise InputError(f"{path} has sequences of more than {steps} steps, which the network takes; cut them")
        windows = cut_records(inputs[..., : None if about.window else steps], steps, about.stride, str(path))
        rows.append(Rows(names, windows.images, windows.record))
    return rows


def _read_arrays(path: Path, about: Any) -> list[tuple[list[str], Float32[np.ndarray, "N C 1 L"]]]:
    """Return the rows of each array of features, or of sequences, and their names."""
    held, takes_features = list_arrays(path), are_features(about.in_shape)
    usual = [FEATURES, f"{FEATURES}_test", f"{FEATURES}_val"] if takes_features else list(LENGTHS)
    if not (keys := [key for key in usual if key in held]):
        raise InputError(f'{path} has no array "{usual[0]}"; it holds {names_shown(map(shown, held))}')
    lengths = () if takes_features else {LENGTHS[key] for key in keys} & held.keys()
    arrays, parts = read_arrays(path, {key: held[key] for key in (*keys, *lengths)}), []
    for key in keys:
        values, where = arrays[key], f"{path}: {key}"
        if takes_features:
            rows = as_features(values, where)
        else:
            steps = arrays.get(LENGTHS[key], np.full(len(values), values.shape[-1])) if values.ndim == 3 else None
            rows = as_sequences(values, steps, where, LENGTHS[key])
        first = path if key in (FEATURES, "x", "x_train") else where
        parts.append(([f"{first}[{n}]" for n in range(len(rows))], rows))
    return parts
