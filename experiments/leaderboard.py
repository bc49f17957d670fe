"""The leaderboard: each test of the zoo with a row for each head, from the recorded runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from experiments.cells import NOTHING, percent, span
from experiments.page import TESTS, Page
from experiments.tables import SHIPPED
from experiments.zoo import HEADS

HEADINGS = "| head | error, last epoch | error, chosen epoch | seeds | parameters |"


def boards(page: Page) -> dict[str, str]:
    """Return the table and the commands of each test, by its title: the fewest errors first, rows without runs last."""
    return {title: "\n".join(_board(page, test)) for test, title in TESTS.items()}


def _board(page: Page, test: str) -> Iterator[str]:
    yield HEADINGS
    yield "|---|---|---|---|---|"
    with_runs = [name for name in HEADS if page.rows[f"zoo/{test}-{name}"]]
    with_runs.sort(key=lambda name: statistics.mean(_errors(page, f"{test}-{name}")[1]))
    without = [name for name in HEADS if name not in with_runs]
    for name in with_runs:
        runs = page.rows[f"zoo/{test}-{name}"]
        last, chosen = _errors(page, f"{test}-{name}")
        cells = [percent(last) if last else NOTHING, percent(chosen), str(len(runs))]
        yield f"| {HEADS[name][0]} | {' | '.join(cells)} | {span([run.summary['parameters'] for run in runs])} |"
    for name in without:
        yield f"| {HEADS[name][0]} | not run yet | {NOTHING} | {NOTHING} | {NOTHING} |"
    commands = [_command(test, name, again=True) for name in with_runs] + [_command(test, name) for name in without]
    yield from ("", '<details markdown="1">', "<summary>The command of each row, in the same order</summary>", "")
    yield from ("```bash", *commands, "```", "", "</details>")


def _errors(page: Page, row: str) -> tuple[list[float], list[float]]:
    """Return the errors of a row at the last and at the chosen epoch; affNIST is only measured at the latter."""
    runs = page.rows[f"zoo/{row}"]
    if any("affnist" in run.measures for run in runs):
        return [], [100 * run.measures["affnist"]["error"] for run in runs]
    return [run.error() for run in runs], [run.error("best") for run in runs]


def _command(test: str, name: str, again: bool = False) -> str:
    row = SHIPPED["zoo"][f"{test}-{name}"]
    return f"python experiments/run.py zoo --row {row.name} --seeds {row.seeds}" + " --results runs/again" * again
