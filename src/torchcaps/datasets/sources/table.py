"""A user's own images: a table (.csv or .tsv) of image files and their labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.images import image_files_in, is_hidden
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.sources.folder import PARTS, read_files, to_image_set
from torchcaps.errors import InputError, shown
from torchcaps.files import one_sentence, read_text, require_file
from torchcaps.tasks import Task, find_task, guess_task
from torchcaps.words import counted

IMAGE_COLUMNS = ("image", "file", "filename", "file_name", "path", "filepath", "image_id", "img", "id", "name")
"""Usual names of the column with the image files."""
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
"""Usual names of the column with the labels, if the table has further columns."""
SPLIT_COLUMNS = ("split", "part", "subset", "set")
"""Usual names of the column with train, val or test."""
MAX_NAMED = 20
"""Number of columns or missing files in an error."""


class Table(NamedTuple):
    """Cells of a table by column, and the line of each row in the file."""

    columns: dict[str, list[str]]
    lines: list[int]


@register_dataset(
    "csv",
    title="your own images: a table of image files and their labels, .csv or .tsv",
    source="your table, beside its images; a column split (train, val, test) is used if present",
    licence="yours",
    takes_path=True,
    can_skip_damaged=True,
)
def load_table(request: DataRequest) -> Splits:
    """Read the images in a table, and their labels.

    The first line names the columns:

    - Image files: paths from the folder of the table, or names of files anywhere below it, with or without suffix.
    - Labels: the column ``label`` (or ``class``, ``category``, ``target``), otherwise all remaining columns. One column
    of
      texts or whole numbers holds classes, named by the texts; texts joined by ``|`` are several labels. Several
      columns are one-hot rows, several labels or numbers, by the task or by their content.
    - ``split``, optional: train, val or test.

    Hidden files are left out. Images are read as from a ``folder:``, in a fixed random order.

    Raises:
        InputError: The table is missing, larger than 16 MiB or damaged; a cell is empty; a file is listed twice,
            missing or unreadable; or the labels do not fit the task.
    """
    path = request.path
    table = _read_table(path)
    columns = dict(table.columns)
    files = _Files(path.parent)
    image = _image_column(path, columns, files)
    split = next((name for name in columns if name.lower() in SPLIT_COLUMNS), None)
    others = [name for name in columns if name not in (image, split)]
    named = [name for name in others if name.lower() in LABEL_COLUMNS]
    if not others:
        raise InputError(f"{path} has no column of labels, only {image}")
    chosen = named if len(named) == 1 else others
    found, hidden = _find_files(path, columns[image], table.lines, files)
    task, names, targets = _targets(path, {name: columns[name] for name in chosen}, table.lines, request)
    kept = [row for row in range(len(found)) if row not in hidden]
    images, damaged = read_files([found[row] for row in kept], request.image_size, skip=request.skip_damaged)
    parts = ["train"] * len(found) if split is None else _parts(path, columns[split], table.lines)
    sets = {}
    for part in sorted(set(parts), key=("train", "validation", "test").index):
        rows = [row for row in kept if parts[row] == part and found[row] in images]
        if not rows:
            raise InputError(f"{path}: no image for {part} can be read")
        order = [rows[n] for n in generator(FIXED_SEED).permutation(len(rows))]
        sets[part] = to_image_set([found[row] for row in order], images, targets[order])
    if "train" not in sets:
        raise InputError(f"{path}: the column {split} names no image for train")
    skipped = (*(f"{path}, line {table.lines[row]}: {found[row]} is hidden" for row in sorted(hidden)), *damaged)
    return Splits(sets["train"], sets.get("test"), names, sets.get("validation"), skipped=skipped, task=task.name)


def _read_table(path: Path) -> Table:
    require_file(path, "table")
    text = read_text(path, "table").removeprefix("\ufeff")
    if "\0" in text:
        raise InputError(f"{path} is no table, because it contains the character NUL")
    first = text.partition("\n")[0]
    delimiter = max((",", ";", "\t"), key=first.count)
    rows, line = list[tuple[int, list[str]]](), 0
    with one_sentence(f"{path} is no table"):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    cells: list[str] | None = []
    while cells is not None:
        with one_sentence(f"{path}, line {line + 1} is no line of a table"):
            cells = next(reader, None)
        line = reader.line_num
        if cells is not None and any(map(str.strip, cells)):
            rows.append((line, [cell.strip() for cell in cells]))
    if len(rows) < 2:
        raise InputError(f"{path} must have a line with the names of the columns, and a line for each image")
    header = rows[0][1]
    twice = next((name for n, name in enumerate(header) if name in header[:n]), None)
    if twice is not None or len(header) < 2:
        raise InputError(f"{path} must have columns with different names, separated by commas, got {shown(header)}")
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise InputError(
                f"{path}, line {line} has {counted(len(cells), 'cell')}, but there are {len(header)} columns"
            )
    cells_of = zip(*(cells for _, cells in rows[1:]), strict=True)
    return Table(
        {name: list(cells) for name, cells in zip(header, cells_of, strict=True)}, [line for line, _ in rows[1:]]
    )


def _image_column(path: Path, columns: Mapping[str, Sequence[str]], files: _Files) -> str:
    """Return the column with the image files: the first whose first cell is a file; usual names go first."""
    usual = [name for name in columns if name.lower() in IMAGE_COLUMNS]
    naming = [name for name in (*usual, *columns) if files.find(columns[name][0])]
    if naming:
        return naming[0]
    if usual:
        return usual[0]
    names = ", ".join(list(columns)[:MAX_NAMED])
    raise InputError(f"{path} has no column with image files in or below {path.parent}; its columns are {shown(names)}")


class _Files:
    """Image files of a folder and its sub-folders, by path, by name, and by name without suffix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: dict[str, list[Path]] = {}
        for file in image_files_in(folder, deep=True):
            for name in {file.name, file.stem}:
                self.named.setdefault(name, []).append(file)

    def find(self, name: str) -> list[Path]:
        """Return the files that a cell may refer to."""
        direct = self.folder / name
        try:
            if name and direct.is_file():
                return [direct]
        except (OSError, ValueError):  # the name is too long, or contains NUL
            return []
        return self.named.get(Path(name).name, [])


def _find_files(path: Path, cells: Sequence[str], lines: Sequence[int], files: _Files) -> tuple[list[Path], set[int]]:
    """Return the image file of each row, and the rows with hidden files."""
    found, hidden, first = list[Path](), set[int](), dict[Path, int]()
    for row, (cell, line) in enumerate(zip(cells, lines, strict=True)):
        if not cell:
            raise InputError(f"{path}, line {line} names no image file")
        candidates = files.find(cell) or [path.parent / cell]  # reading a missing file raises the error
        if len(candidates) > 1:
            both = " and ".join(str(each.relative_to(path.parent)) for each in candidates[:2])
            raise InputError(f"{path}, line {line}: {cell} may be {both}; write paths from the folder of the table")
        (file,) = candidates
        if file in first:
            raise InputError(f"{path} names {file} twice, in lines {first[file]} and {line}")
        first[file] = line
        if any(is_hidden(Path(part)) for part in Path(cell).parts if part not in (".", "..")):
            hidden.add(row)
        found.append(file)
    return found, hidden


def _parts(path: Path, cells: Sequence[str], lines: Sequence[int]) -> list[str]:
    """Return the part of each row."""
    for cell, line in zip(cells, lines, strict=True):
        if cell.lower() not in PARTS:
            raise InputError(f"{path}, line {line}: the split must be train, val or test, got {shown(cell)}")
    return [PARTS[cell.lower()] for cell in cells]


def _targets(
    path: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[int], request: DataRequest
) -> tuple[Task, tuple[str, ...], Tensor]:
    """Return the task, the names of its outputs, and the targets."""
    where = f"{path}: {', '.join(columns)}"
    requested = None if request.task is None else find_task(request.task)
    if len(columns) == 1:
        (cells,) = columns.values()
        texts, joined = np.array(cells), any("|" in cell for cell in cells)
        numbers = None if joined else _numbers(cells)
        if numbers is None and (joined or (requested is not None and not requested.could_be(texts))):
            names = tuple(sorted({each for cell in cells for each in cell.split("|") if each}))
            rows = np.array([[name in cell.split("|") for name in names] for cell in cells], np.int64)
            return _of_rows(rows, names, requested, where)
        _require_cells(path, cells, lines)
        task = requested or guess_task(texts if numbers is None else numbers, where)
        if task.could_be(texts):  # classes are named by the texts
            if numbers is not None and numbers.dtype.kind == "f":
                task.convert_targets(numbers, None, where)  # raises for fractions
            names = tuple(sorted(set(cells), key=lambda name: (int(name) if name.isdecimal() else 0, name)))
            return task, names, task.convert_targets(texts, len(names), where, names)
        return task, tuple(columns), task.convert_targets(texts if numbers is None else numbers, None, where)
    values = []
    for name, cells in columns.items():
        _require_cells(path, cells, lines)
        if (numbers := _numbers(cells)) is None:
            raise InputError(
                f"{path} has several columns beside the image files, but {name} holds texts; name the column of the "
                "labels label, or remove columns that are no labels"
            )
        values.append(numbers)
    return _of_rows(np.stack(values, 1), tuple(columns), requested, where)


def _of_rows(
    rows: np.ndarray, names: tuple[str, ...], requested: Task | None, where: str
) -> tuple[Task, tuple[str, ...], Tensor]:
    """Return the task, names and targets of rows of numbers with a column for each output."""
    task = requested or guess_task(rows, where)
    task.names(rows, where)  # raises if the rows do not fit the task
    return task, names, task.convert_targets(rows, len(names), where)


def _require_cells(path: Path, cells: Sequence[str], lines: Sequence[int]) -> None:
    for cell, line in zip(cells, lines, strict=True):
        if not cell:
            raise InputError(f"{path}, line {line} has no label")


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return cells as integers or floats; None if one is no number."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(cells).astype(kind)
        except (ValueError, OverflowError):
            continue
    return None
