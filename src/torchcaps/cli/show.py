"""How commands print: tables, bars, JSON and the places they wrote to."""

from __future__ import annotations

import json as json_
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from torchcaps.analysis.results import Result, Styled, Table
from torchcaps.errors import CONTROL, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table as RichTable

# strings in JSON hold no line breaks, so that only those of the layout are found
PLAIN_LIST, LINE_BREAK = re.compile(r"\[\n\s*([^][{}]*?)\n\s*\]"), re.compile(r"\n\s*")


def say(*lines: str, err: bool = False) -> None:
    """Print lines of plain text, whatever is in them; see :func:`~torchcaps.errors.visible`."""
    click.echo("\n".join(map(visible, lines)), err=err)


def console() -> Console:
    """Where commands print to: the terminal with its width and colours, or plain text.

    What is printed here must have gone through :func:`visible`, and be ``Text``, in which brackets are no markup.
    """
    from rich.console import Console

    return Console(highlight=False)


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that train together: the one that prints."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def table(*columns: str, left: int = 1) -> RichTable:
    """An empty table of these headings.

    The first ``left`` columns hold words; those after them hold numbers, set to the right.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(columns):
        shown = Text("\n".join(map(visible, heading.split("\n"))))
        made.add_column(shown, justify="left" if index < left else "right", overflow="fold")
    return made


def add_row(to: RichTable, *cells: Any, style: str | None = None) -> None:
    """Add a row of plain text, one line a cell: brackets in names of files and classes are no markup."""
    from rich.text import Text

    shown = (Text(visible(cell.text), style=cell.style) if isinstance(cell, Styled) else cell for cell in cells)
    to.add_row(*(cell if isinstance(cell, Text) else Text(visible(str(cell))) for cell in shown), style=style)


def print_title(text: str) -> None:
    """What the lines below it are about; never cut, so that paths in it can be copied."""
    console().print(visible(text), style="bold", markup=False, soft_wrap=True)


def print_table(rows: RichTable, title: str | None = None) -> None:
    """A table under its title, and an empty line."""
    if title is not None:
        print_title(title)
    to = console()
    to.print(rows)
    to.print()


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Lines of a name and what it is, and an empty line.

    Long values go on under themselves, though no path is cut; a list's items stand each on a line of its own, whole.
    """
    from rich.text import Text

    pairs, to = list(pairs), console()
    indent = max(len(name) for name, _ in pairs) + 2
    wrap = textwrap.TextWrapper(max(to.width - indent, 20), break_long_words=False, break_on_hyphens=False)
    for name, value in pairs:
        first, *others = map(visible, value if isinstance(value, list) else wrap.wrap(str(value)) or [""])
        to.print(Text.assemble((f"{name:{indent}}", "bold"), first), soft_wrap=True)
        for line in others:
            to.print(Text(" " * indent + line), soft_wrap=True)
    to.print()


def count(number: int) -> str:
    """A number with its thousands apart."""
    return f"{number:,}"


def by(shape: tuple[int, ...]) -> str:
    """A shape as ``1×28×28``."""
    return "×".join(map(str, shape))


def print_json(value: Any) -> None:
    """JSON for other programs, and nothing else; lists of plain values stand on one line each.

    Control characters are escaped as JSON does it, also those that it allows as they are.
    """
    text = json_.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    text = CONTROL.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
    click.echo(PLAIN_LIST.sub(lambda found: f"[{LINE_BREAK.sub(' ', found[1])}]", text))


def write_figure(figures: Figure | Mapping[str, Figure], path: Path, *, quiet: bool = False) -> None:
    """Write figures, over no other file, and say where; ``quiet``, on stderr, where stdout is for JSON."""
    from torchcaps.analysis.figures import save_figures

    for place in save_figures(figures if isinstance(figures, Mapping) else {"": figures}, path):
        say(f"wrote {place}", err=quiet)


def show(
    result: Result,
    *,
    json: bool = False,
    figure: Path | None = None,
    about: Mapping[str, Any] | Sequence[Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Print the result of an analysis, and draw it where asked to.

    Args:
        result: Its numbers, tables and figures.
        json: Print the numbers as JSON, and nothing else.
        figure: Where the figures go; nothing is drawn if None.
        about: What the JSON says besides: of the result, or of each of its parts where it is a list.
    """
    if json:
        found = result.to_dict()
        if isinstance(about, Mapping):
            print_json([dict(about) | each for each in found] if isinstance(found, list) else dict(about) | found)
        else:
            print_json([dict(each) | part for each, part in zip(about, found, strict=True)])
    else:
        for each in result.tables():
            _print(each)
    if figure is not None:
        write_figure(result.figures(), figure, quiet=json)


def _print(shown: Table) -> None:
    from rich.text import Text

    if shown.title:
        print_title(shown.title)
    for line in shown.note:
        style = line.style if isinstance(line, Styled) else ""
        console().print(Text(visible(line.text if isinstance(line, Styled) else line), style=style), soft_wrap=True)
    if shown.columns:
        rows = table(*shown.columns, left=shown.left)
        for row in shown.rows:
            if row:
                add_row(rows, *row)
            else:
                rows.add_section()
        console().print(rows)
    elif shown.rows:
        return print_pairs((str(name), str(value)) for name, value in shown.rows)
    return say("") if shown.title or shown.columns else None


def command_line(*words: str | Path) -> str:
    """``torchcaps`` and its arguments as they are typed into a shell."""
    return shlex.join(["torchcaps", *map(str, words)])
