"""The leaderboard and the presets beside their sources, from the recorded runs."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable

from experiments.cells import NOTHING, percent, span
from experiments.page import TESTS, Page
from experiments.tables import SHIPPED
from experiments.zoo import HEADS

COLUMNS = ("test", "head", "error, chosen epoch", "error, last epoch", "seeds", "parameters", "command")


#: Rows that train a preset as its source does, or for a part of its time.
PRESETS = (
    "mnist/sabour2017-3-epochs",
    "tutorials/tf-notebook",
    "tutorials/torch-tutorial-1-epoch",
    "tutorials/torch-notebook-1-epoch",
    "tutorials/keras-tutorial",
    "tutorials/keras-tutorial-r1",
    "tutorials/keras-tutorial-r0",
    "tutorials/keras-tutorial-outputs",
    "zoo/long-efficient-capsnet",
    "zoo/hinton2018-paper-8",
    "zoo/vb2020-8",
    "zoo/hahn2019-smallnet-short",
    "zoo/hinton2018-code-short",
)


def as_csv(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def leaderboard(page: Page) -> str:
    """Return a row for each head on each test: the fewest errors of the chosen epoch first, rows without runs last."""
    rows: list[Iterable[str]] = [COLUMNS]
    for test in TESTS:
        ordered = sorted(HEADS, key=lambda name: statistics.mean(_errors(page, f"{test}-{name}")[1] or [float("inf")]))
        rows += [_cells(page, test, name) for name in ordered]
    return as_csv(rows)


def beside_sources(page: Page) -> str:
    """Return a row for each preset that was trained: its test error, and the one that its source reports."""
    rows: list[Iterable[str]] = [("preset", "epochs × images", "test error, last epoch, %", "its source reports")]
    for row in PRESETS:
        rows.append((page.rows[row][0].config["preset"], page.length(row), page.error(row), page.published[row]))
    return as_csv(rows)


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
