"""How commands print: tables, bars, JSON and the places they wrote to."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table


def console() -> Console:
    """Where commands print to: the terminal with its width and colours, or plain text."""
    from rich.console import Console

    return Console(highlight=False)


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that train together: the one that prints."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def table(*columns: str, left: int = 1, title: str | None = None) -> Table:
    """An empty table.

    Args:
        *columns: Headings.
        left: How many columns from the first hold words; those after them hold numbers, set to the right.
        title: What stands above it.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold"
    )
    for index, heading in enumerate(columns):
        made.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    return made


def add_row(to: Table, *cells: Any, style: str | None = None) -> None:
    """Add a row of plain text: brackets in names of files and classes are no markup."""
    from rich.text import Text

    to.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells), style=style)


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Lines of a name and what it is; long ones go on under themselves."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name, style="bold"), value if isinstance(value, Text) else Text(str(value)))
    console().print(grid)


def bar(share: float, width: int = 30) -> str:
    """A horizontal bar: ``share`` 0..1 of ``width`` characters, to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def percent(share: float) -> str:
    """0..1 as ``99.44 %``."""
    return f"{100 * share:.2f} %"


def count(number: int) -> str:
    """A number with its thousands apart."""
    return f"{number:,}"


def print_json(value: Any) -> None:
    """JSON for other programs, and nothing else."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_figure(figure: Figure, path: Path, *, quiet: bool = False) -> None:
    """Write a figure and say where.

    Args:
        figure: What to write.
        path: Its suffix gives the format.
        quiet: Say it on stderr, where stdout is for JSON.

    Raises:
        InputError: A suffix that is no figure's, or a place that cannot be written to.
    """
    from torchcaps.analysis import save_figure

    click.echo(f"wrote {save_figure(figure, path)}", err=quiet)


def command_line(*words: str | Path) -> str:
    """``torchcaps`` and its arguments as they are typed into a shell."""
    return shlex.join(["torchcaps", *map(str, words)])
