"""The leaderboard: a row for each head on each test of the zoo, from the recorded runs."""

from __future__ import annotations

import csv
import io
import statistics

from experiments.cells import NOTHING, percent, span
from experiments.page import TESTS, Page
from experiments.tables import SHIPPED
from experiments.zoo import HEADS

COLUMNS = ("test", "head", "error, chosen epoch", "error, last epoch", "seeds", "parameters", "command")


def leaderboard(page: Page) -> str:
    """Return the rows as CSV: the fewest errors of the chosen epoch first in each test, rows without runs last."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for test in TESTS:
        ordered = sorted(HEADS, key=lambda name: statistics.mean(_errors(page, f"{test}-{name}")[1] or [float("inf")]))
        writer.writerows(_cells(page, test, name) for name in ordered)
    return text.getvalue()


def _cells(page: Page, test: str, name: str) -> list[str]:
    row, runs = SHIPPED["zoo"][f"{test}-{name}"], page.rows[f"zoo/{test}-{name}"]
    last, chosen = (percent(errors) if errors else NOTHING for errors in _errors(page, row.name))
    command = f"python experiments/run.py zoo --row {row.name} --seeds {row.seeds}" + " --results runs/again" * bool(
        runs
    )
    size = span([run.summary["parameters"] for run in runs]).replace(",", "") if runs else NOTHING
    return [TESTS[test], HEADS[name][0], chosen if runs else "not run yet", last, str(len(runs)), size, command]


def _errors(page: Page, row: str) -> tuple[list[float], list[float]]:
    """Return the errors of a row at the last and at the chosen epoch; affNIST is only measured at the latter."""
    runs = page.rows[f"zoo/{row}"]
    if any("affnist" in run.measures for run in runs):
        return [], [100 * run.measures["affnist"]["error"] for run in runs]
    return [run.error() for run in runs], [run.error("best") for run in runs]
