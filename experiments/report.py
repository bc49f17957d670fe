"""Print a table of runs, or write the page of results and its figures.

    python experiments/report.py robustness          # or a file of your own
    python experiments/report.py                     # docs/results.md, from results.md.jinja beside this script

Both are made only from RESULTS/runs.jsonl and curves.csv, so the same runs give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for imports of experiments

from experiments.cells import NOTHING, Runs, difference, interval, markdown, mean, number, percent, span, time
from experiments.store import RESULTS, RunLog, logs_of, read_runs
from experiments.table import Row, Table
from experiments.tables import SHIPPED, load_table
from torchcaps.analysis.robustness import KINDS
from torchcaps.errors import InputError
from torchcaps.plugins import load_plugin

#: A number of a run, and the function that formats the numbers of several runs.
Shown = tuple[float, Callable[[Sequence[float]], str]]


def numbers(run: RunLog) -> Iterator[tuple[str, Shown]]:
    """Yield the numbers of a run by heading."""
    found = run.summary
    if found["images"]["test"] == 1:  # a search, which must not see test images
        last = found["validation"]["last"]
        yield "validation error, last epoch", (100 - 100 * last["accuracy"], percent)
        yield "validation loss, last epoch", (last["loss"], partial(mean, digits=4))
    else:
        yield "test error, last epoch", (run.error(), percent)
        yield "test error, chosen epoch", (run.error("best"), percent)
    if "stop_at" in run.config:
        yield "validation accuracy reached", (100 * found["validation"]["best"]["accuracy"], percent)
    yield "epochs", (found["epochs"], span)
    yield "parameters", (found["parameters"], span)
    yield "time", (found["seconds"], time)
    yield "of an epoch", (found["seconds"] / found["epochs"], time)
    yield "memory, MiB", (found["peak_memory_mib"], lambda values: f"{max(values):,.0f}")
    for kind, values in run.measures.items():
        yield from measured(kind, values)


def measured(kind: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Shown]]:
    """Yield the numbers of a measure by heading."""
    if kind == "affnist":
        yield f"affNIST accuracy ({found['source']} images)", (100 * found["accuracy"], percent)
    elif kind == "familiar":
        yield "error on familiar views", (100 * found["error"], percent)
    elif kind == "latency":
        yield "one image, ms", (found["milliseconds"], mean)
    elif kind == "coupling":
        yield "entropy of coupling", (found["entropy"], mean)
        yield "dead capsules", (found["dead"], mean)
    elif kind not in KINDS:  # a function of the user
        yield from ((f"{kind}: {name}", (value, number)) for name, value in found.items())
    else:
        at = dict(zip(found["strengths"], found["accuracy"], strict=True))
        if kind == "rotation":
            for angle in (each for each in (30, 60, 90) if {each, -each} <= at.keys()):
                yield f"accuracy, turned by ±{angle}°", (50 * (at[-angle] + at[angle]), percent)
        else:
            for each in (size for size in (0.1, 0.2) if size in at):
                yield f"{KINDS[kind][0]}, ε = {each:g}", (100 * at[each], percent)


def grid(rows: Sequence[Row], logs: Mapping[str, Runs]) -> str:
    """Rows as a table in Markdown; a column for each heading that one of their runs has."""
    found = {run.name: dict(numbers(run)) for row in rows for run in whole(logs[row.name])}
    columns = {heading: shown for each in found.values() for heading, (_, shown) in each.items()}
    lines = [["row", "", "seeds", *columns, "difference, 95 % interval", "published"]]
    for row in rows:
        runs = whole(logs[row.name])
        diverged = len(logs[row.name]) - len(runs)
        cells = [f"`{row.name}`", row.title, f"{len(runs)}" + f" and {diverged} diverged" * bool(diverged)]
        for heading, shown in columns.items():
            values = [found[run.name][heading][0] for run in runs if heading in found[run.name]]
            few = f"; {plural(len(values), 'seed')}" * (len(values) < len(runs))
            cells.append(shown(values) + few if values else NOTHING)
        other = whole(logs[row.compared_to]) if row.compared_to else []
        lines.append([*cells, interval(*difference(runs, other)), row.published or NOTHING])
    return markdown(lines)


def show(table: Table, results: Path) -> Iterator[str]:
    """Yield the paragraphs of a table: rows, hardware, and the command that repeats each row."""
    logs = logs_of(table, read_runs(results))
    yield f"# {table.title}"
    run = [row for row in table.rows if logs[row.name]]
    for group in dict.fromkeys(row.group for row in run):
        yield from [f"## {group}"] * bool(group)
        yield grid([row for row in run if row.group == group], logs)
    if machines := dict.fromkeys(machine(each) for row in run for each in whole(logs[row.name])):
        yield f"Computed on {'; '.join(machines)}."
    last = [(row, logs[row.name][-1]) for row in run]
    lines = [table.again(row, log.seed, log.summary.get("precision", "auto")) for row, log in last]
    yield "\n".join(["Each row again:", "", "```bash", *lines, "```"])
    if missing := [row.name for row in table.rows if not logs[row.name]]:
        yield f"Not run yet: {', '.join(missing)}."


def machine(run: RunLog) -> str:
    on = run.summary["hardware"]
    where = on.get("gpu") or f"{on['processor']}, {plural(on['threads'], 'thread')}"
    processes = "" if on["processes"] == 1 else f", {on['processes']} processes"
    precision = {"32": "float32", "bf16": "bfloat16"}[run.summary["precision"]]
    return f"{where}{processes}, {precision}, {', '.join(map(' '.join, run.summary['versions'].items()))}"


def whole(runs: Runs) -> list[RunLog]:
    """Return the runs that did not diverge."""
    return [run for run in runs if not run.diverged]


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help=f"{', '.join(SHIPPED)}, or a file of your own")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=f"folder of the runs ({RESULTS})")
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"), help="where to write the page")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help="registers parts of your own")
    given = parser.parse_args(arguments)
    try:
        for each in given.plugin:
            load_plugin(each)
        if given.table is not None:
            print("\n\n".join(show(load_table(given.table), given.results)))
        else:
            from experiments.page import write_page

            print("wrote", *write_page(given.results, given.page))
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
