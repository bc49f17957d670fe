"""Read the cells of a table (.csv or .tsv), as spreadsheets write them, and numbers among the cells."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchcaps.errors import InputError, shown
from torchcaps.files import composed, one_sentence, read_bytes, require_file
from torchcaps.words import counted

DELIMITERS = ("\t", ";", ",")
"""Characters between cells. The first one that fits is taken, because numbers may have commas."""
MISSING = frozenset({"na", "n/a", "#n/a", "nan", "null", "none", "nil", "-", "--", "?", ".", "inf", "-inf", "missing"})
"""Cells, in small letters, that stand for a missing number. Without other numbers in the column they are texts."""
WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""First bytes of workbooks: .xlsx and .ods, and .xls."""
ROWS_TO_TRY = 20
"""Rows that decide on the delimiter."""
GROUP_WORDS = {"patient", "subject", "case", "participant", "person", "donor", "animal", "individual", "proband"}
GROUP_WORDS |= {"specimen", "lesion", "scene", "session", "recording", "record", "machine", "writer", "speaker", "id"}
"""Words, in small letters, in the usual names of columns of groups."""
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")


class Table(NamedTuple):
    """Cells of a table by column, and the line of each row in the file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]
    delimiter: str

    def where(self, name: str, row: int) -> str:
        """Return the name of a cell in errors: file, line and column."""
        return f"{self.path}, line {self.lines[row]}: the column {name} has {shown(self.columns[name][row])}"


def read_table(path: Path, image_of: Callable[[str], Path | None]) -> Table:
    """Read a table, UTF-8 or UTF-16, whose first line names the columns. A table of two columns may lack this line.

    ``image_of`` returns the image file that a cell of the first line names; None: it names none.

    Raises:
        InputError: The file is missing, too large or no table, or its columns have no names.
    """
    require_file(path, "table")
    text, delimiter = _text_of(path), None
    if told := re.match(r"sep=(.)\r?\n", text):  # a line for Excel
        delimiter, text = told[1], "\n" + text[told.end() :]
    delimiter = delimiter or _delimiter_of(path, text)
    rows = _rows(path, text, delimiter)
    header = rows[0][1] if rows else []
    empty = {n for n in range(len(header)) if all(len(cells) > n and not cells[n] for _, cells in rows)}
    if empty:  # columns that a spreadsheet has beside the table
        rows = [(line, [cell for n, cell in enumerate(cells) if n not in empty]) for line, cells in rows]
        header = rows[0][1]
    images = [image_of(cell) for cell in header]
    if len(images) == 2 and any(file is not None and header[n] == file.name for n, file in enumerate(images)):
        header = ["image", "label"] if images[0] is not None else ["label", "image"]
    elif len(images) > 1 and any(images):
        name = next(name for name, image in zip(header, images, strict=True) if image is not None)
        raise InputError(
            f"{path}, line {rows[0][0]} must name the columns, such as image,label, but {shown(name)} is an image; add "
            "a line with names above it, or, if it is a name, choose another one"
        )
    else:
        rows = rows[1:]
    if not rows:
        raise InputError(f"{path} must have a line with the names of the columns, and a line for each image")
    twice = next((name for n, name in enumerate(header) if name in header[:n]), None)
    if twice is not None or len(header) < 2:
        raise InputError(f"{path} must have columns with different names, separated by commas, got {shown(header)}")
    for line, cells in rows:
        if len(cells) != len(header):
            raise InputError(
                f"{path}, line {line} has {counted(len(cells), 'cell')}, but there are {len(header)} columns"
            )
    columns = {name: [cells[n] for _, cells in rows] for n, name in enumerate(header)}
    return Table(path, columns, [line for line, _ in rows], delimiter)


def _text_of(path: Path) -> str:
    """Return the text of a table in UTF-8 or UTF-16."""
    contents = read_bytes(path, "table")
    if contents.startswith(WORKBOOKS):
        raise InputError(f"{path} is a workbook of a spreadsheet; save its sheet as a table, in Excel as CSV UTF-8")
    if contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        with one_sentence(f"{path} is no table in UTF-16"):
            text = contents.decode("utf-16")
    else:
        try:
            text = contents.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = contents.count(b"\n", 0, error.start)
            cells = contents.split(b"\n")[line].decode("cp1252", "replace").strip()
            raise InputError(
                f"{path}, line {line + 1}, {shown(cells)}, is not UTF-8; save the table as UTF-8, in Excel as the type "
                "CSV UTF-8"
            ) from None
    if "\0" in text:
        raise InputError(f"{path} is no table in UTF-8, because it contains the character NUL")
    return text


def _delimiter_of(path: Path, text: str) -> str:
    """Return the first delimiter by which the first rows have the same number of cells, 2 at least."""
    head = "\n".join(text.split("\n", ROWS_TO_TRY)[:ROWS_TO_TRY])
    for delimiter in DELIMITERS:
        with one_sentence(f"{path} is no table"):
            rows = list(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter))
        counts = {len(cells) for cells in rows if any(map(str.strip, cells))}
        if len(counts) == 1 and counts != {1}:
            return delimiter
    return max(reversed(DELIMITERS), key=text.lstrip("\n").partition("\n")[0].count)


def _rows(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the cells of each row that is not empty, and the line of its end."""
    rows, line = list[tuple[int, list[str]]](), 0
    cells: list[str] | None = []
    with one_sentence(f"{path} is no table"):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while cells is not None:
        with one_sentence(f"{path}, line {line + 1} is no line of a table"):
            cells = next(reader, None)
        line = reader.line_num
        if cells is not None and any(map(str.strip, cells)):
            rows.append((line, [composed(cell.strip()) for cell in cells]))
    return rows


def numbers_of(table: Table, name: str, *, must: bool = False) -> np.ndarray | None:
    """Return a column as integers or floats; None if it holds texts, which ``must`` refuses.

    Commas are decimal points unless they end cells.

    Raises:
        InputError: Among numbers, some of which are fractions, is a text; or among any numbers a sign of a missing one.
    """
    cells = table.columns[name]
    has_points = table.delimiter == ","
    values = [None if "," in cell and has_points else _with_point(cell) for cell in cells]
    others = [row for row, value in enumerate(values) if value is None]
    if not others:
        for kind in (np.int64, np.float64):
            try:
                return np.array(values).astype(kind)
            except (ValueError, OverflowError):
                continue
    are_fractions = any(value is not None and not value.lstrip("+-").isdecimal() for value in values)
    are_missing = len(others) < len(cells) and all(cells[row].lower() in MISSING for row in others)
    if others and (must or are_fractions or are_missing or all(_with_point(cells[row]) for row in others)):
        raise InputError(
            f"{table.where(name, others[0])} in place of a number, written like 1.5; correct the cell, or remove the "
            "line"
        )
    return None


def _with_point(cell: str) -> str | None:
    """Return a number with a decimal point, also if it has a comma; None for other texts."""
    return cell.replace(",", ".") if _NUMBER.fullmatch(cell) else None


def is_group_name(name: str) -> bool:
    """Return True for a usual name of a column of groups, such as patient or subjectID."""
    words = set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
    return bool(words & GROUP_WORDS)
