"""Features without images, such as the embeddings of a pretrained network: rows of numbers, from arrays and tables.

An exported network reads them too, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Shaped

from torchcaps.datasets.matching import note_order
from torchcaps.datasets.reading import list_arrays, read_arrays
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
    """Rows of features from a file."""

    names: Sequence[str]
    """Name of each row: the file, with its line or its number."""
    features: Float32[np.ndarray, "N F 1 1"]


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


def read_rows(path: Path, in_shape: Sequence[int], names: Sequence[str] | None) -> Rows:
    """Read the features of an .npz file, or of a table, as the input of a network.

    Args:
        path: A file with an array ``features``, or a table whose first line names its columns.
        in_shape: Shape of the network's input, (F, 1, 1).
        names: Names of the features of the network; None: they have no names, and a table has F columns beside labels.

    Raises:
        InputError: The file is damaged, or lacks features of the network.
    """
    if path.suffix.lower() == ".npz":
        held = list_arrays(path)
        if FEATURES not in held:
            raise InputError(f'{path} has no array "{FEATURES}"; it holds {shown(list(held))}')
        features = as_features(read_arrays(path, {FEATURES: held[FEATURES]})[FEATURES], f"{path}: {FEATURES}")
        rows = [f"{path}[{n}]" for n in range(len(features))]
        columns = None
    else:
        table = read_table(path, lambda _: None)
        others = [name for name in table.columns if name.lower() in (*LABEL_COLUMNS, *SPLIT_COLUMNS)]
        columns = feature_columns(table, others) if names is None else names
        if missing := [name for name in columns if name not in table.columns]:
            raise InputError(f"{path} has no column {names_shown(missing)}, which the network takes")
        features, rows = features_of(table, columns), [f"{path}, line {line}" for line in table.lines]
    if features.shape[1:] != tuple(in_shape):
        has = counted(features.shape[1], "feature")
        raise InputError(f"{path} has {has} in a row, but the network takes {in_shape[0]}")
    note_order(columns, names, str(path), "feature")
    return Rows(rows, features)
