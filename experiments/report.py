"""The page of results and its figures, made from the folders of the runs alone: the same runs give the same bytes.

``python experiments/report.py [TABLE.py ...] [--results DIR] [--page FILE] [--plugin FILE]``
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the package; that of this script is there

from experiments.figures import DRAW
from experiments.logs import FINDINGS, Logs, RunLog, read_logs, whole
from experiments.table import SHIPPED, Row, Table, load_table
from torchcaps.analysis import save_figure
from torchcaps.analysis.robustness import KINDS
from torchcaps.errors import InputError
from torchcaps.files import read_text, write_text
from torchcaps.plugins import load_plugin, loaded_plugins, plugin_options
from torchcaps.training.progress import duration

HEAD = """\
<!-- Written by `python experiments/report.py` from the logs in results/; changes made here are lost. -->

# Results

Every figure on this page is computed from the logs in `results/`, one folder a run; the words are written by hand, in
`results/TABLE/findings.md`.

In each table the best mean of a column is **bold**; where deviations overlap, it need not be better than the next. A
click on a heading sorts the table (on the documentation site).

**Protocol.** Each network is trained on the training images. The validation images choose an epoch. The test images
are looked at once, after the last epoch, with two networks: that of the *last* epoch and that of the *chosen* one. Both
are reported, as mean ± standard deviation (n − 1) over the seeds. A seed decides the initial weights, the order and
augmentation of the images, and which of them validate. *Seeds* counts every run; where some diverged it says so, and
means and figures are those of the others. *Time* is that of training and validation of one run, on cores that other
runs shared; *memory* is the peak of its process (on a GPU: of what was allocated there), the largest of the seeds.

**Small and full rows.** Small rows are for a computer without a GPU: small networks, subsets, or few epochs, as stated.
They answer the same questions at another size, and their errors are not the paper's. Full rows are the published
settings; they need a GPU.
"""
NOTHING = "–"


def command(table: Table, *words: object) -> str:
    """A command that runs a table, with the plugins of this process."""
    plugins = plugin_options(loaded_plugins())
    return shlex.join(["python", "experiments/run.py", table.source, *map(str, words), *plugins])


def row_command(table: Table, row: str, seeds: int, precision: str = "auto") -> str:
    """The command that runs a row again, beside the runs that there are."""
    numbers = [] if precision == "auto" else ["--precision", precision]
    return command(table, "--row", row, "--seeds", seeds, *numbers, "--results", "runs/again")


def write_report(tables: Sequence[Table], results: Path, page: Path) -> list[Path]:
    """Write the page and its figures, ``images/results-TABLE-FIGURE.png`` beside it; all these files.

    Raises:
        InputError: A log that is damaged; the page is then as it was.
    """
    files = [page]
    texts = ["\n\n".join(chapter(table, results, page.parent / "images", files)) + "\n" for table in tables]
    write_text(page, "\n".join([HEAD, *texts]))
    return files


def chapter(table: Table, results: Path, images: Path, files: list[Path]) -> Iterator[str]:
    """The paragraphs of a table; its figures are drawn, and added to ``files``."""
    found = {row.name: read_logs(results, table, row) for row in table.rows}
    logs = {name: of_row for name, (of_row, _) in found.items()}
    yield f"## {table.title}"
    findings = results / table.name / FINDINGS
    if findings.exists():
        yield read_text(findings, "text").strip()
    yield f"### Runs\n\n`{command(table)}` makes those of the small rows."
    shown = {row.name: runs for row in table.rows if (runs := whole(logs[row.name]))}
    errors = {row.name: row.published_error for row in table.rows if row.published_error is not None}
    for kind in table.figures if shown else ():
        if (figure := DRAW[kind](shown, errors)) is not None:
            files.append(save_figure(figure, images / f"results-{table.name}-{kind}.png"))
            yield f"![{table.title}: {kind}](images/{files[-1].name})"
    run = [row for row in table.rows if logs[row.name]]
    costs = []
    for group in dict.fromkeys(row.group for row in run):
        members = [row for row in run if row.group == group]
        if group:
            yield f"#### {group}"
            costs.append(f"**{group}**")
        for columns in columns_of(table, members, logs):
            yield grid(columns, members, logs)
        costs.append(grid(COSTS | measured(members, logs, ("latency", "coupling")), members, logs, titles=False))
    if run:
        costs.append(f"`{row_command(table, 'ROW', 3)}` makes the runs of a row again.")
        computed = dict.fromkeys(machine(each) for runs in shown.values() for each in runs)
        costs += [f"Computed on {'; '.join(computed)}."] if computed else []
        yield folded("Seeds, size, time, hardware, commands", costs)
    if missing := [row for row in table.rows if not logs[row.name]]:
        yield f"Not run yet: {plural(len(missing), 'row')}, which `{command(table, '--list')}` names."
    if others := [f"`{'/'.join(each.parts[-3:])}`" for _, folders in found.values() for each in folders]:
        yield f"Logs of runs with other settings than their rows have now, not counted above: {', '.join(others)}."


def published(row: Row, otherwise: str = "") -> str:
    return row.published or (otherwise if row.published_error is None else f"{row.published_error} %")


def machine(run: RunLog) -> str:
    on = run.summary["hardware"]
    where = on.get("gpu") or f"{on['processor']}, {plural(on['threads'], 'thread')}"
    processes = "" if on.get("processes", 1) == 1 else f", {on['processes']} processes"
    precision = {"32": "float32", "bf16": "bfloat16"}[run.summary["precision"]]
    return f"{where}{processes}, {precision}, {', '.join(map(' '.join, run.summary['versions'].items()))}"


# ---- numbers and texts


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation; a single value alone."""
    mean = statistics.mean(values)
    digits = 3 if mean < 1 and len(values) > 1 else 2
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{deviation} %"


def number(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{deviation}"


def two_digits(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}"


def span(numbers: Sequence[float]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}–{max(numbers)}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def folded(summary: str, parts: Sequence[str]) -> str:
    """Paragraphs that a reader opens by a click, on the documentation site and on GitHub."""
    return "\n\n".join([f"<details markdown>\n<summary>{summary}</summary>", *parts, "</details>"])


# ---- tables


class Column(NamedTuple):
    """A number of each run that did not diverge, which it may lack."""

    value: Callable[[RunLog], float | None]
    shown: Callable[[Sequence[float]], str] = percent
    """The numbers of a row as one text."""
    best: Callable[[Sequence[float]], float] | None = None
    """``min`` or ``max``, where one of the texts is the best."""


Columns = dict[str, Column | Callable[[Row, Sequence[RunLog]], str]]


def grid(columns: Columns, rows: Sequence[Row], logs: Logs, *, titles: bool = True) -> str:
    """A table in Markdown; a row begins with its name and, if ``titles``, its title."""
    names = [f"`{row.name}`<br>{row.title}" if titles else f"`{row.name}`" for row in rows]
    cells = []
    for column in columns.values():
        if isinstance(column, Column):
            cells.append(marked([text(column, whole(logs[row.name])) for row in rows], column.best))
        else:
            cells.append([column(row, logs[row.name]) for row in rows])
    lines = [["row", *columns], ["---"] * (len(columns) + 1), *zip(names, *cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(column: Column, runs: Sequence[RunLog]) -> str:
    values = [value for run in runs if (value := column.value(run)) is not None]
    few = f"; {plural(len(values), 'seed')}" if len(values) < len(runs) else ""
    return column.shown(values) + few if values else NOTHING


def marked(cells: list[str], best: Callable[[Sequence[float]], float] | None) -> list[str]:
    """The cells of a column, the best ones bold, by the number that each begins with."""
    numbers = [float(cell.split()[0]) for cell in cells if cell != NOTHING] if best is not None else []
    if best is None or len(numbers) < 2:
        return cells
    wanted = best(numbers)
    return [f"**{cell}**" if cell != NOTHING and float(cell.split()[0]) == wanted else cell for cell in cells]


def columns_of(table: Table, rows: Sequence[Row], logs: Logs) -> Iterator[Columns]:
    """The columns of each grid, by their headings: errors, rotations, attacks on the loss and on the scores."""
    if table.judged_on == "validation":

        def last(name: str) -> Callable[[RunLog], float]:
            return lambda run: float(run.summary["validation"]["last"][name])

        yield {
            "validation error, last epoch": Column(lambda run: 100 - 100 * last("accuracy")(run), best=min),
            "validation loss, last epoch": Column(last("loss"), lambda each: f"{statistics.mean(each):.4f}", min),
        }
        return
    columns: Columns = {
        "test error, last epoch": Column(lambda run: run.error("last"), best=min),
        "test error, chosen epoch": Column(lambda run: run.error("best"), best=min),
    }
    if any(row.config(0).recipe.stop_at is not None for row in rows):
        columns["validation accuracy reached"] = reached
    if any(row.compared_to for row in rows):
        columns["difference, 95 % interval"] = lambda row, runs: difference(runs, logs.get(row.compared_to or "", []))
    own = [kind for row in rows for kind, wanted in row.measures.items() if callable(wanted)]
    columns |= measured(rows, logs, ("affnist", "familiar", *own))
    if any(map(published, rows)) or not rows[0].group:
        columns["published"] = lambda row, _: published(row, NOTHING)
    yield columns
    for kinds in (("rotation",), ("fgsm", "pgd"), ("fgsm-scores", "pgd-scores")):
        if any(kind in row.measures for kind in kinds for row in rows):
            yield measured(rows, logs, kinds)


def measured(rows: Sequence[Row], logs: Logs, wanted: Sequence[str]) -> Columns:
    """The columns of those of some measures that rows ask for."""
    columns: Columns = {}
    for kind in dict.fromkeys(kind for row in rows for kind in row.measures if kind in wanted):
        found = [run.measures[kind] for row in rows for run in whole(logs[row.name]) if kind in run.measures]
        columns |= measure_columns(kind, found)
    return columns


def measure_columns(kind: str, found: Sequence[Mapping[str, Any]]) -> Columns:
    """The columns of a measure: one for a number, a few for a curve."""

    def column(value: Callable[[Any], float | None], *more: Any) -> Column:
        return Column(lambda run: value(run.measures[kind]) if kind in run.measures else None, *more)

    def at(*strengths: float) -> Column:
        def mean(curve: Mapping[str, Any]) -> float:
            pairs = zip(curve["strengths"], curve["accuracy"], strict=True)
            return 100 * statistics.mean(accuracy for strength, accuracy in pairs if strength in strengths)

        return column(mean, percent, max)

    def accuracy_on(source: str) -> Column:
        return column(lambda each: 100 * each["accuracy"] if each["source"] == source else None, percent, max)

    strengths = found[0].get("strengths", ()) if found else ()
    if kind == "affnist":
        return {f"affNIST accuracy ({each} images)": accuracy_on(each) for each in sorted({m["source"] for m in found})}
    if kind == "familiar":
        return {"error on familiar views": column(lambda each: 100 * each["error"], percent, min)}
    if kind == "latency":
        return {"one image, ms": column(itemgetter("milliseconds"), two_digits)}
    if kind == "coupling":
        names = {"entropy of coupling": "entropy", "dead capsules": "dead"}
        return {heading: column(itemgetter(name), two_digits) for heading, name in names.items()}
    if kind == "rotation":
        angles = [angle for angle in (30, 60, 90) if {angle, -angle} <= set(strengths)]
        return {f"accuracy, turned by ±{angle}°": at(-angle, angle) for angle in angles}
    if kind in KINDS:
        return {f"{KINDS[kind][0]}, ε = {each:g}": at(each) for each in (0.1, 0.2) if each in strengths}
    return {f"{kind}: {name}": column(itemgetter(name), number) for each in found for name in each}  # of one's own


def reached(_: Row, runs: Sequence[RunLog]) -> str:
    """The validation accuracy of the chosen epoch, and how many runs reached their target where some did not."""
    runs = whole(runs)
    accuracies = [run.summary["validation"]["best"]["accuracy"] for run in runs]
    targets = [run.config.recipe.stop_at or 0.0 for run in runs]
    count = sum(accuracy >= target for accuracy, target in zip(accuracies, targets, strict=True))
    missed = "" if count == len(runs) else f"; {count} of {len(runs)} reached the target"
    return percent([100 * accuracy for accuracy in accuracies]) + missed if runs else NOTHING


def difference(runs: Sequence[RunLog], others: Sequence[RunLog]) -> str:
    """By how much the errors of a row are above those of another one, in pairs of the same seed.

    Beside the mean stands the interval of Student's t that holds it with a probability of 95 %.
    """
    errors = {run.seed: run.error("last") for run in whole(others)}
    pairs = [run.error("last") - errors[run.seed] for run in whole(runs) if run.seed in errors]
    if len(pairs) < 2:
        return f"{pairs[0]:+.2f}" if pairs else NOTHING
    from scipy.stats import t

    mean = statistics.mean(pairs)
    half = float(t.ppf(0.975, len(pairs) - 1)) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def seeds_of(_: Row, runs: Sequence[RunLog]) -> str:
    diverged = len(runs) - len(whole(runs))
    return f"{len(runs)}, of which {diverged} diverged" if diverged else str(len(runs))


COSTS: Columns = {
    "seeds": seeds_of,
    "epochs": Column(lambda run: run.summary["epochs"], span),
    "parameters": Column(lambda run: run.summary["parameters"], lambda each: f"{each[0]:,}"),
    "time": Column(lambda run: run.summary["seconds"], lambda each: duration(statistics.mean(each))),
    "of an epoch": Column(
        lambda run: run.summary["seconds"] / run.summary["epochs"], lambda each: duration(statistics.mean(each))
    ),
    "memory, MiB": Column(lambda run: run.summary["peak_memory_mib"], lambda each: f"{max(each):,.0f}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the shipped tables, or of one's own."""
    parser = argparse.ArgumentParser(description="Write the page of results and its figures from the runs.")
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE.py", help="tables of your own, in place of the shipped ones"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs")
    parser.add_argument("--page", type=Path, help="the page; docs/results.md for results, else RESULTS/results.md")
    parser.add_argument("--plugin", action="append", default=[], help="a file that registers parts of your own")
    given = parser.parse_args(arguments)
    try:
        for each in given.plugin:
            load_plugin(each)
        is_ours = given.results == Path("results") and not given.tables
        page = given.page or (Path("docs/results.md") if is_ours else given.results / "results.md")
        files = write_report(list(map(load_table, given.tables or SHIPPED)), given.results, page)
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")
    print(f"wrote {files[0]} and {plural(len(files) - 1, 'figure')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
