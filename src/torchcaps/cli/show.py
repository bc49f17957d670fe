"""Print tables, JSON, and the files that a command wrote."""

from __future__ import annotations

import itertools
import json as json_
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from torchcaps.analysis.results import Result, Styled, Table
from torchcaps.errors import CONTROL, visible

if TYPE_CHECKING:
    from rich.text import Text

# strings in JSON cannot contain line breaks, so these patterns match the layout only
PLAIN_LIST, LINE_BREAK = re.compile(r"\[\n\s*([^][{}]*?)\n\s*\]"), re.compile(r"\n\s*")


def say(*lines: str, err: bool = False) -> None:
    """Print lines as plain text; control characters are escaped by :func:`~torchcaps.errors.visible`."""
    click.echo("\n".join(map(visible, lines)), err=err)


def is_main_process() -> bool:
    """Return whether this process prints: it is the only one, or the first of a distributed run."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def command_line(*words: str | Path) -> str:
    """Return ``torchcaps`` and its arguments, quoted for a shell."""
    return shlex.join(["torchcaps", *map(str, words)])


def typed() -> str:
    """Return the running command, quoted for a shell."""
    return command_line(*(click.get_current_context().find_root().obj or ()))


def by(shape: Sequence[int]) -> str:
    """Return a shape as text: ``1×28×28``."""
    return "×".join(map(str, shape))


def show(
    result: Result,
    *,
    json: bool = False,
    figure: Path | None = None,
    about: Mapping[str, Any] | Sequence[Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Print a result, and draw it to a file if one is named.

    Args:
        result: Its numbers, tables and figures.
        json: Print JSON instead of tables.
        figure: File of the figures, which must be new; None: draw nothing.
        about: Further entries of the JSON object; a list of them if the result is a list.
    """
    if json:
        values = result.to_dict()
        if isinstance(values, list):
            abouts = [about] * len(values) if isinstance(about, Mapping) else about
            print_json([dict(each) | part for each, part in zip(abouts, values, strict=True)])
        else:
            assert isinstance(about, Mapping)
            print_json(dict(about) | values)
    else:
        for each in result.tables():
            print_table(each)
    if figure is not None:
        draw(result, figure, err=json)


def draw(result: Result, figure: Path, *, err: bool = False) -> None:
    """Draw a result to a file, and print its name, to standard error if ``err``."""
    from torchcaps.analysis.figures import save_figures

    for place in save_figures(result.figures(), figure):
        say(f"wrote {place}", err=err)


def print_json(value: Any) -> None:
    """Print JSON for other programs, with each list of plain values on one line.

    All control characters are escaped, also the ones that JSON allows.
    """
    text = json_.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    text = CONTROL.sub(lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text)
    click.echo(PLAIN_LIST.sub(lambda match: f"[{LINE_BREAK.sub(' ', match[1])}]", text))


def print_table(shown: Table) -> None:
    """Print a table under its title and notes; without columns, one name and value a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    to = Console(highlight=False)
    for line in ([Styled(shown.title, "bold")] if shown.title else []) + list(shown.note):
        to.print(_text(line), soft_wrap=True)  # not wrapped, so that paths can be copied
    whole = _unbroken(shown, to.width)
    if whole is None:  # too narrow for numbers in one piece
        wrap = textwrap.TextWrapper(to.width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
        wrap.break_on_hyphens = False
        for name, *cells in (row or ("",) for row in shown.rows):
            to.print(_text(name), soft_wrap=bool(cells))
            values = zip(shown.columns[1:], map(_text, cells), strict=False)
            parts = [
                f"{visible(' '.join(heading.split()))}: {cell}" for heading, cell in values if str(cell).strip("·")
            ]
            joined = ", ".join(part.replace(" ", "\xa0") if len(part) < to.width - 2 else part for part in parts)
            for line in wrap.wrap(joined):
                to.print(Text(line.replace("\xa0", " ")), soft_wrap=True)
    elif shown.columns:
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for index, heading in enumerate(shown.columns):
            lines = Text("\n".join(map(visible, heading.split("\n"))))
            justify: Any = "left" if index < shown.text_columns else "right"
            grid.add_column(lines, justify=justify, overflow="fold", width=whole.get(index))
        for row in shown.rows:
            if row:
                grid.add_row(*map(_text, row))
            else:
                grid.add_section()
        to.print(grid)
    elif shown.rows:
        indent = max(len(str(name)) for name, _ in shown.rows) + 2
        wrap = textwrap.TextWrapper(max(to.width - indent, 20), break_long_words=False, break_on_hyphens=False)
        for name, value in shown.rows:  # continue a long value below itself; do not break paths
            first, *others = map(visible, wrap.wrap(str(value)) or [""])
            to.print(Text.assemble((f"{name:{indent}}", "bold"), first), soft_wrap=True)
            for line in others:
                to.print(Text(" " * indent + line), soft_wrap=True)
    if shown.title or shown.columns or shown.rows:
        to.print()


def _unbroken(table: Table, width: int) -> dict[int, int] | None:
    """Return widths for columns of single words if the table is wider than the terminal; None: words would break."""
    if not table.columns:
        return {}
    cells = itertools.zip_longest(table.columns, *table.rows, fillvalue="")
    columns = [[str(_text(cell)) for cell in column] for column in cells]
    gaps = 2 * len(columns) - 1
    natural = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    words = [max((len(word) for cell in column[1:] for word in cell.split()), default=0) for column in columns]
    if sum(natural) + gaps <= width:
        return {}
    if (spare := width - gaps - sum(words)) < 0:
        return None
    more = [
        max(0, *(len(line) - word for line in column[0].split("\n")))
        for column, word in zip(columns, words, strict=True)
    ]
    for n in sorted(range(len(columns)), key=more.__getitem__):  # headings break before numbers do, the longest first
        words[n], spare = words[n] + min(more[n], spare), spare - min(more[n], spare)
    return {n: words[n] for n, column in enumerate(columns) if not any(" " in cell for cell in column[1:])}


def _text(cell: str | Styled) -> Text:
    """Return a cell as plain text, in which brackets are no markup."""
    from rich.text import Text

    return Text(visible(cell.text), style=cell.style) if isinstance(cell, Styled) else Text(visible(cell))
