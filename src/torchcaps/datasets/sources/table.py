"""A user's own images: a table (.csv or .tsv) of image files and their labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

import numpy as np
import torch
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.features import LABEL_COLUMNS, SPLIT_COLUMNS, feature_columns, features_of
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.images import SUFFIXES, image_files_in, is_hidden
from torchcaps.datasets.registry import FEATURES_STAY, OPTIONS_OF_PIXELS, DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.sources.folder import PARTS, read_labelled
from torchcaps.datasets.sources.segmentation_folder import IMAGES, MASKS
from torchcaps.datasets.splits import FILE, GROUP, note_groups, read_groups
from torchcaps.datasets.table_file import MISSING, Table, numbers_of, read_table
from torchcaps.errors import InputError, names_shown, shown
from torchcaps.files import composed, groups_in_paths
from torchcaps.tasks import Task, find_task, guess_task

IMAGE_COLUMNS = ("image", "file", "filename", "file_name", "path", "filepath", "image_id", "img", "id", "name")
"""Usual names of the column with the image files."""
MISSING_TEXTS = MISSING - {"none", "inf", "-inf", ".", "-", "--"}
"""Labels, in small letters, that usually mean that there is none."""
MAX_NAMED = 20
"""Number of columns or missing files in an error."""


@register_dataset(
    "csv",
    title="your own images: a table of image files and their labels, .csv or .tsv",
    source="your table, beside its images; a column split (train, val, test) is used if present",
    licence="yours",
    takes_path=True,
    options=("skip_damaged", "scale", "pages"),
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
    - Without image files, all columns but the labels, ``split`` and the group are features: numbers, such as the
      embeddings of a pretrained network, which keep their values.
    - ``group`` of the request, if it is the name of a column: the group of each image.

    Hidden files are left out. Images are read as from a ``folder:``, in a fixed random order.

    Raises:
        InputError: The table is missing, larger than 16 MiB or damaged; a cell is empty; a file is listed twice,
            missing or unreadable; or the labels do not fit the task.
    """
    path = request.path
    files = _Files(path.parent)
    table = read_table(path, files.named_by)
    columns = dict(table.columns)
    split = next((name for name in columns if name.lower() in SPLIT_COLUMNS), None)
    group = request.group if request.group in columns else None
    image = _image_column(table, files, group)
    if image is None:
        return _load_features(table, split, group, request)
    if request.group is not None and group is None:
        try:
            groups_in_paths([columns[image][0]], request.group)
        except InputError as error:
            raise InputError(f"{error}; the columns of {path} are {names_shown(list(columns))}") from None
    others = [name for name in columns if name not in (image, split, group)]
    named = [name for name in others if name.lower() in LABEL_COLUMNS]
    if not others:
        raise InputError(f"{path} has no column of labels, only {image}")
    chosen = named if len(named) == 1 else others
    for name in chosen:
        if PureWindowsPath(columns[name][0]).suffix.lower() in SUFFIXES:
            raise InputError(
                f"{table.where(name, 0)}, an image file, but a table has one image a line; masks are read from a "
                f"folder:PATH with {IMAGES}/ and {MASKS}/"
            )
    row_files, hidden = _find_files(path, columns[image], table.lines, files)
    task, names, targets = _targets(table, chosen, request)
    parts = ["train"] * len(row_files) if split is None else _parts(path, columns[split], table.lines)
    rows = {
        part: [row for row in range(len(row_files)) if parts[row] == part and row not in hidden]
        for part in sorted(set(parts), key=("train", "validation", "test").index)
    }
    by_part = {part: [row_files[row] for row in of_part] for part, of_part in rows.items()}
    labels = {part: targets[of_part] for part, of_part in rows.items()}
    groups = {}
    if group is not None:
        groups[GROUP] = {part: _groups(table, group, of_part) for part, of_part in rows.items()}
    sets, damaged = read_labelled(by_part, labels, request, str(path), groups)
    if request.group is None and request.part is None and len(sets) < len(set(PARTS.values())):
        note_groups(str(path), {name: cells for name, cells in columns.items() if name in others and name not in named})
    skipped = (*(f"{path}, line {table.lines[row]}: {row_files[row]} is hidden" for row in sorted(hidden)), *damaged)
    return Splits.of(sets, names, skipped=skipped, task=task.name)


def _load_features(table: Table, split: str | None, group: str | None, request: DataRequest) -> Splits:
    """Read a table of features: columns of labels, perhaps of parts and of groups, and numbers in all others."""
    path, columns = table.path, list(table.columns)
    request.refuse(OPTIONS_OF_PIXELS, FEATURES_STAY)
    label = [name for name in columns if name.lower() in LABEL_COLUMNS]
    if len(label) != 1:
        raise InputError(
            f"{path} has no column with image files in or below {path.parent}, and a table of features has one column "
            f"called label (or class, category, target); its columns are {names_shown(columns)}"
        )
    if request.group != group:
        raise InputError(
            f"{path} has no column {shown(request.group)} (--group); its columns are {names_shown(columns)}"
        )
    names = feature_columns(table, [*label, split, group])
    features, (task, outputs, targets) = torch.from_numpy(features_of(table, names)), _targets(table, label, request)
    parts = np.array(["train"] * len(features) if split is None else _parts(path, table.columns[split], table.lines))
    sets = dict[str, ImageSet]()
    for part in sorted(set(parts.tolist()), key=("train", "validation", "test").index):
        rows = np.flatnonzero(parts == part)
        rows = rows[generator(FIXED_SEED).permutation(len(rows))]  # tables are often sorted by class
        of_rows = {FILE: tuple(f"{path.name}, line {table.lines[row]}" for row in rows)}
        of_rows |= {} if group is None else {GROUP: tuple(_groups(table, group, rows.tolist()))}
        sets[part] = ImageSet(features[rows], targets[rows], names=of_rows)
    return Splits.of(sets, outputs, task=task.name, channels=tuple(names))


def _image_column(table: Table, files: _Files, group: str | None) -> str | None:
    """Return the column with the image files: the first whose first cell is a file; usual names go first.

    None: no column has such a name or such cells, so the table has no images.
    """
    columns = {name: cells for name, cells in table.columns.items() if name != group}
    usual = [name for name in columns if name.lower() in IMAGE_COLUMNS]
    naming = [name for name in usual if PureWindowsPath(columns[name][0]).suffix.lower() in SUFFIXES]
    others = [name for name in columns if name.lower() not in (*LABEL_COLUMNS, *SPLIT_COLUMNS)]
    naming += [name for name in (*usual, *others) if files.find(columns[name][0])]
    return next(iter([*naming, *usual]), None)


class _Files:
    """Image files of a folder and its sub-folders, by path, by name, and by name without suffix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: dict[str, list[Path]] = {}
        for file in image_files_in(folder, deep=True):
            for name in {file.name, file.stem, file.relative_to(folder).as_posix()}:
                self.named.setdefault(composed(name), []).append(file)

    def find(self, name: str) -> list[Path]:
        """Return the files that a cell may refer to; folders may be separated by backslashes."""
        for path in dict.fromkeys((name, name.replace("\\", "/"))):
            try:
                if path and (self.folder / path).is_file():
                    return [self.folder / path]
            except (OSError, ValueError):  # the name is too long, or contains NUL
                return []
        return self.named.get(PureWindowsPath(name).as_posix()) or self.named.get(PureWindowsPath(name).name, [])

    def named_by(self, cell: str) -> Path | None:
        """Return the file of a cell in the first line of a table; None for the name of a column."""
        if PureWindowsPath(cell).suffix.lower() in SUFFIXES:
            return Path(cell)
        is_usual = cell.lower() in {*IMAGE_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS}
        return None if is_usual else next(iter(self.find(cell)), None)


def _find_files(path: Path, cells: Sequence[str], lines: Sequence[int], files: _Files) -> tuple[list[Path], set[int]]:
    """Return the image file of each row, and the rows with hidden files."""
    row_files, hidden, first = list[Path](), set[int](), dict[Path, int]()
    for row, (cell, line) in enumerate(zip(cells, lines, strict=True)):
        if not cell:
            raise InputError(f"{path}, line {line} names no image file")
        # reading a missing file raises the error
        candidates = files.find(cell) or [path.parent / cell.replace("\\", "/")]
        if len(candidates) > 1:
            both = " and ".join(str(each.relative_to(path.parent)) for each in candidates[:2])
            raise InputError(f"{path}, line {line}: {cell} may be {both}; write paths from the folder of the table")
        (file,) = candidates
        if file in first:
            raise InputError(f"{path} names {file} twice, in lines {first[file]} and {line}")
        first[file] = line
        if any(is_hidden(Path(part)) for part in PureWindowsPath(cell).parts if part not in (".", "..")):
            hidden.add(row)
        row_files.append(file)
    return row_files, hidden


def _parts(path: Path, cells: Sequence[str], lines: Sequence[int]) -> list[str]:
    """Return the part of each row."""
    for cell, line in zip(cells, lines, strict=True):
        if cell.lower() not in PARTS:
            raise InputError(f"{path}, line {line}: the split must be train, val or test, got {shown(cell)}")
    return [PARTS[cell.lower()] for cell in cells]


def _groups(table: Table, name: str, rows: Sequence[int]) -> tuple[str, ...]:
    """Return the group of each of some rows, in the column ``name``."""
    lines = [f"line {table.lines[row]}" for row in rows]
    cells = [table.columns[name][row] for row in rows]
    return read_groups(cells, len(cells), f"{table.path}: the column {name}", lines.__getitem__)


def _targets(table: Table, names: Sequence[str], request: DataRequest) -> tuple[Task, tuple[str, ...], Tensor]:
    """Return the task, the names of its outputs, and the targets in these columns."""
    where = f"{table.path}: {', '.join(names)}"
    requested = None if request.task is None else find_task(request.task)
    needs_numbers = requested is not None and requested.could_be(np.zeros(1))
    if len(names) == 1:
        (name,) = names
        cells = table.columns[name]
        texts, joined = np.array(cells), any("|" in cell for cell in cells)
        numbers = None if joined else numbers_of(table, name, must=needs_numbers)
        if numbers is None and (joined or (requested is not None and not requested.could_be(texts))):
            labels = tuple(sorted({each for cell in cells for each in cell.split("|") if each}))
            rows = np.array([[label in cell.split("|") for label in labels] for cell in cells], np.int64)
            return _of_rows(rows, labels, requested, where)
        _require_cells(table, name)
        task = requested or guess_task(texts if numbers is None else numbers, where)
        if not task.could_be(texts):
            return task, (name,), task.convert_targets(texts if numbers is None else numbers, None, where)
        if numbers is not None and numbers.dtype.kind == "f":
            task.convert_targets(numbers, None, where)  # raises for fractions
            cells = [str(int(number)) for number in numbers]  # 1.0 of a column with gaps is the class 1
            texts = np.array(cells)
        classes = tuple(sorted(set(cells), key=lambda name: (int(name) if name.isdecimal() else 0, name)))
        classes = task.in_order(classes, where)
        for each in MISSING_TEXTS.intersection(map(str.lower, classes)):
            row = [cell.lower() for cell in cells].index(each)
            warnings.warn(
                f"{table.where(name, row)}, which is a class like the others. If it stands for a missing label, remove "
                "its lines.",
                stacklevel=2,
            )
        if len(classes) == len(cells) > 2:
            raise InputError(
                f"{table.where(name, 0)}, and every line has another text; classes repeat, and numbers to predict need "
                "--task regression"
            )
        return task, classes, task.convert_targets(texts, len(classes), where, classes)  # texts name the classes
    values = []
    for name in names:
        _require_cells(table, name)
        if not name:
            raise InputError(
                f"{table.path} has a column without a name, such as pandas adds; name the column of the labels label, "
                "or write the table without an index"
            )
        if (numbers := numbers_of(table, name)) is None:
            raise InputError(
                f"{table.where(name, 0)}, a text, but the table has several columns beside the image files; "
                "name the column of the labels label, or remove columns that are no labels"
            )
        values.append(numbers)
    return _of_rows(np.stack(values, 1), tuple(names), requested, where)


def _of_rows(
    rows: np.ndarray, names: tuple[str, ...], requested: Task | None, where: str
) -> tuple[Task, tuple[str, ...], Tensor]:
    """Return the task, names and targets of rows of numbers with a column for each output."""
    task = requested or guess_task(rows, where)
    task.names(rows, where)  # raises if the rows do not fit the task
    return task, names, task.convert_targets(rows, len(names), where)


def _require_cells(table: Table, name: str) -> None:
    for row, cell in enumerate(table.columns[name]):
        if not cell:
            raise InputError(f"{table.path}, line {table.lines[row]} has no label")
