"""The leaderboard: each test of the zoo with a row for each head, from the recorded runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from experiments.cells import NOTHING, percent, span
from experiments.page import TESTS, Page
from experiments.tables import SHIPPED
from experiments.zoo import HEADS

HEADINGS = "| head | error, last epoch | error, chosen epoch | seeds | parameters | command |"


def boards(page: Page) -> dict[str, str]:
    """Return the table of each test, by its title: the fewest errors first, rows without runs last."""
    return {title: "\n".join(_board(page, test)) for test, title in TESTS.items()}


def _board(page: Page, test: str) -> Iterator[str]:
    yield HEADINGS
    yield "|---|---|---|---|---|---|"
    names = [name for name in HEADS if page.rows[f"zoo/{test}-{name}"]]
    for name in sorted(names, key=lambda name: statistics.mean(_errors(page, f"{test}-{name}")[1])):
        runs = page.rows[f"zoo/{test}-{name}"]
        last, chosen = _errors(page, f"{test}-{name}")
        cells = [percent(last) if last else NOTHING, percent(chosen), str(len(runs))]
        cells += [span([run.summary["parameters"] for run in runs]), f"`{_command(test, name, again=True)}`"]
        yield f"| {HEADS[name][0]} | {' | '.join(cells)} |"
    for name in [name for name in HEADS if name not in names]:
        yield f"| {HEADS[name][0]} | not run yet | {NOTHING} | {NOTHING} | {NOTHING} | `{_command(test, name)}` |"


def _errors(page: Page, row: str) -> tuple[list[float], list[float]]:
    """Return the errors of a row at the last and at the chosen epoch; affNIST is only measured at the latter."""
    runs = page.rows[f"zoo/{row}"]
    if any("affnist" in run.measures for run in runs):
        return [], [100 * run.measures["affnist"]["error"] for run in runs]
    return [run.error() for run in runs], [run.error("best") for run in runs]


def _command(test: str, name: str, again: bool = False) -> str:
    row = SHIPPED["zoo"][f"{test}-{name}"]
    return f"python experiments/run.py zoo --row {row.name} --seeds {row.seeds}" + " --results runs/again" * again
