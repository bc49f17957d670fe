"""The page of results and its figures, made from the logs alone: the same logs give the same bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock

from torchcaps.errors import InputError
from torchcaps.files import read_text, write_text
from torchcaps.locks import held
from torchcaps.reproduce.estimate import Timing, read_timings
from torchcaps.reproduce.jobs import row_command
from torchcaps.reproduce.logs import FINDINGS, RunLog, counted, read_logs
from torchcaps.reproduce.table import BUDGETS, Budget, MeasureKind, Row, Table
from torchcaps.reproduce.tables import get_table, list_tables
from torchcaps.training.progress import duration

IMAGES = "images"

_HEAD = """\
<!-- Written by `torchcaps reproduce --report` from the logs in results/; changes made here are lost. -->

# Results

Every figure on this page is computed from the logs in `results/`, one folder a run; answers and findings are written by
hand, in `results/TABLE/findings.md`.

In each table the best mean of a column is **bold**; where deviations overlap, it need not be better than the next. A
click on a heading sorts the table (on the documentation site).

**Protocol.** Each network is trained on the training images. The validation images choose an epoch. The test images
are looked at once, after the last epoch, with two networks: that of the *last* epoch and that of the *chosen* one. Both
are reported, as mean ± standard deviation (n − 1) over the seeds. A seed decides the initial weights, the order and
augmentation of the images, and which of them validate. *Seeds* counts every run; where some diverged it says so, and
means and figures are those of the others. *Time* is that of training and validation of one run, on cores that other
runs shared; *memory* is the peak of its process (on a GPU: of what was allocated there), the largest of the seeds.

**Budgets.** *Small* rows are for a computer without a GPU: small networks, subsets, or few epochs, as stated. They
answer the same questions at another size, and their errors are not the paper's. *Full* rows are the published settings,
where there are any; they need a GPU.
"""

#: The most commands, and the most rows that were not run, that stand there one by one.
_MANY = 15

_NOTHING = "–"
Best = Callable[[Sequence[float]], float]


class _Column(NamedTuple):
    """A column of a table."""

    cell: Callable[[Row, Sequence[RunLog]], str]
    """Of a row and its runs."""
    best: Best | None = None
    """Which of its numbers is the best one: ``min`` or ``max``; None where none is."""


def default_page(results: Path) -> Path:
    """The page of the logs in a folder: that of the documentation for ``results``, else one of their own."""
    return Path("docs/results.md") if results == Path("results") else results / "results.md"


def write_report(
    results: str | Path = "results", page: str | Path | None = None, *, redraw: Collection[str] | None = None
) -> list[Path]:
    """Write the page and its figures, ``images/results-TABLE-BUDGET-FIGURE.png`` beside it.

    One process at a time does so, and reads the logs only then: a process that writes the page after it has added a log
    finds that log on the page.

    Args:
        results: Folder of the logs.
        page: The page; ``docs/results.md`` for the logs in ``results``, else ``RESULTS/results.md``, if None.
        redraw: Draw the figures of the tables of these names anew, and those that are missing; all if None.

    Returns:
        The page, and the figures on it.

    Raises:
        InputError: A log that is damaged; or the page is a folder.
        OSError: The page cannot be written.
    """
    results = Path(results)
    page = default_page(results) if page is None else Path(page)
    if page.is_dir():
        raise InputError(f"the page {page} is a folder; name a file")
    page.parent.mkdir(parents=True, exist_ok=True)
    with held(FileLock(page.with_name(f".{page.name}.lock"))):
        # all logs are read before anything is written: a damaged one leaves the page and its figures as they were
        chapters = [_read_chapter(results, get_table(name)) for name in list_tables()]
        figures = [chapter.draw(page.parent / IMAGES, redraw) for chapter in chapters]
        texts = [chapter.text(drawn) for chapter, drawn in zip(chapters, figures, strict=True)]
        # half of a character, which JSON may hold and UTF-8 not, is written out
        write_text(page, "\n".join([_HEAD, *texts]).encode(errors="backslashreplace").decode())
    return [page, *(file for drawn in figures for files in drawn.values() for file in files)]


def _read_chapter(results: Path, table: Table) -> _Chapter:
    """Read what the page says of a table."""
    findings = results / table.name / FINDINGS
    found = {row.name: read_logs(results, table, row) for row in table.rows}
    logs = {row.name: counted(found[row.name], row) for row in table.rows}
    others = [log.folder for name in found for log in found[name] if log not in logs[name]]
    words = read_text(findings, "text").strip() if findings.exists() else ""
    return _Chapter(table, logs, others, words, read_timings(results, table))


@dataclass(frozen=True)
class _Chapter:
    """What the page says of a table."""

    table: Table
    logs: Mapping[str, Sequence[RunLog]]
    """The logs of each row."""
    others: Sequence[Path]
    """The folders of logs that were made with other settings than the row has now."""
    findings: str
    """What was found, in words."""
    timings: Mapping[str, Timing]
    """How long runs of rows take."""

    def draw(self, folder: Path, redraw: Collection[str] | None) -> dict[Budget, list[Path]]:
        """The figures of each budget, drawn anew where they are asked for or missing."""
        return {budget: list(self._draw(budget, folder, redraw)) for budget in BUDGETS}

    def _draw(self, budget: Budget, folder: Path, redraw: Collection[str] | None) -> Iterator[Path]:
        from torchcaps.analysis import save_figure
        from torchcaps.reproduce.figures import DRAW

        shown = {row.name: whole for row in self.table.rows_of(budget) if (whole := _whole(self.logs[row.name]))}
        published = {row.name: row.published_error for row in self.table.rows if row.published_error is not None}
        for kind in self.table.figures if shown else ():
            file = folder / f"results-{self.table.name}-{budget}-{kind}.png"
            if file.exists() and redraw is not None and self.table.name not in redraw:
                yield file
            elif (figure := DRAW[kind](shown, published)) is not None:
                yield save_figure(figure, file)

    def text(self, figures: Mapping[Budget, Sequence[Path]]) -> str:
        """The text of the table."""
        parts = [f"## {self.table.title}", self.table.question]
        answer, _, findings = self.findings.partition("\n\n")
        if answer:
            parts.append(f"**Answer.** {answer}")
        if findings:
            parts += ["### What was found", findings]
        parts.append(_folded("Protocol", [self.table.protocol]))
        for budget in BUDGETS:
            if rows := self.table.rows_of(budget):
                parts += self._budget(budget, rows, figures[budget])
        if self.others:
            folders = ", ".join(f"`{'/'.join(folder.parts[-3:])}`" for folder in self.others)
            parts.append(f"Logs of runs with other settings than their rows have now, not counted above: {folders}.")
        return "\n\n".join(parts) + "\n"

    def _budget(self, budget: Budget, rows: Sequence[Row], figures: Sequence[Path]) -> Iterator[str]:
        run = [row for row in rows if self.logs[row.name]]
        missing = [row for row in rows if not self.logs[row.name]]
        yield f"### {budget.capitalize()} budget"
        yield f"{self.table.budgets[budget]} All of it: `torchcaps reproduce {self.table.name} --budget {budget}`."
        for file in figures:
            yield f"![{self.table.title}, {budget} budget: {file.stem.rpartition('-')[2]}]({IMAGES}/{file.name})"
        if run:
            groups = _groups(run)
            for group, members in groups:
                if group:
                    yield f"#### {group}"
                for columns in _tables(self.table, members, self.logs):
                    yield _grid(columns, members, self.logs)
            details = [part for group, members in groups for part in self._costs(group, members)]
            if any(_whole(self.logs[row.name]) for row in run):
                details.append(_hardware({row.name: self.logs[row.name] for row in run}))
            counts = {row.name: self.logs[row.name][-1].seed + 1 - row.first_seed for row in run}
            details.append(_commands(self.table, counts))
            yield _folded("Seeds, size, time, hardware, commands", details)
        if missing:
            details = [self._missing(missing)]
            if any(row.name in self.timings for row in missing):
                details.append(self._times(budget, missing))
            each = _seeds_of(budget, missing)
            yield _folded(f"Not run yet: {_plural(len(missing), 'row')}, {each} each", details)

    def _costs(self, group: str, rows: Sequence[Row]) -> Iterator[str]:
        """The grid of what a group of rows costs."""
        if group:
            yield f"**{group}**"
        yield _grid(_COST | _measured_columns(rows, self.logs, ("latency", "coupling")), rows, self.logs, titles=False)

    def _missing(self, rows: Sequence[Row]) -> str:
        """The rows that were not run, and how long they would train: one by one, or in short where there are many."""
        if len(rows) > _MANY:
            epochs = " or ".join(dict.fromkeys(_length(row) for row in rows))
            return f"Each trains {epochs}; `torchcaps reproduce {self.table.name} --list` names them."
        lines = []
        for row in rows:
            published = "" if row.published == "–" else f"; published: {row.published}"
            time = f", {_about(self.timings[row.name].seconds, [row])}" if row.name in self.timings else ""
            lines.append(f"- `{row.name}`: {row.title}, {_length(row)}{time}{published}")
        return "\n".join(lines)

    def _times(self, budget: Budget, rows: Sequence[Row]) -> str:
        """What the times of rows that were not run mean, and their sum where all are known, of one machine."""
        known = [(row, self.timings[row.name]) for row in rows if row.name in self.timings]
        machines = dict.fromkeys(_machine(each.hardware, each.versions) for _, each in known)
        seeds = _seeds_of(budget, rows)
        together = sum(len(row.seeds_of(budget)) * each.seconds for row, each in known)
        summed = len(known) == len(rows) and len(machines) == 1
        return (
            "Times of training that was not done are extrapolated from a timed step of each row, not measured, on "
            f"{' and '.join(machines)} (`torchcaps reproduce {self.table.name} --budget {budget} --estimate`); cores "
            "that are shared take longer." + (f" All of them with {seeds}: {_about(together, rows)}." * summed)
        )


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by the grid in which they stand."""
    return [(group, [row for row in rows if row.group == group]) for group in dict.fromkeys(row.group for row in rows)]


def _seeds_of(budget: Budget, rows: Sequence[Row]) -> str:
    """How many seeds rows have in a budget, in words."""
    counts = [len(row.seeds_of(budget)) for row in rows]
    return f"{_range(counts)} seed{'s' * (max(counts) > 1)}"


def _folded(summary: str, parts: Sequence[str]) -> str:
    """What a reader opens by a click, on the documentation site and on GitHub."""
    return "\n\n".join([f"<details markdown>\n<summary>{summary}</summary>", *parts, "</details>"])


def _grid(
    columns: Mapping[str, _Column], rows: Sequence[Row], logs: Mapping[str, Sequence[RunLog]], *, titles: bool = True
) -> str:
    """A table in Markdown; a row begins with its name and, if ``titles``, what it is."""
    lines = [["row", *columns], ["---"] * (len(columns) + 1)]
    cells = [_marked([column.cell(row, logs[row.name]) for row in rows], column.best) for column in columns.values()]
    for row, *line in zip(rows, *cells, strict=True):
        lines.append([f"`{row.name}`<br>{row.title}" if titles else f"`{row.name}`", *line])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _marked(cells: Sequence[str], best: Best | None) -> list[str]:
    """The cells of a column, the best ones bold, by the number that each begins with."""
    numbers = [float(cell.split()[0]) for cell in cells if cell != _NOTHING] if best is not None else []
    if best is None or len(numbers) < 2:
        return list(cells)
    wanted = best(numbers)
    return [f"**{cell}**" if cell != _NOTHING and float(cell.split()[0]) == wanted else cell for cell in cells]


def _commands(table: Table, seeds: Mapping[str, int]) -> str:
    """What runs each row again, with all seeds up to its last one."""
    commands = [row_command(table.name, name, count) for name, count in seeds.items()]
    if len(commands) > _MANY:
        commands = [row_command(table.name, "ROW", max(seeds.values()))]
    return "\n".join(["Each row again, beside the runs and logs that there are:\n", "```bash", *commands, "```"])


def _about(seconds: float, rows: Sequence[Row]) -> str:
    """A time, as roughly as an extrapolated one is known; rows that end at a target may need fewer epochs."""
    words = "about" if all(row.config(0).recipe.stop_at is None for row in rows) else "at most about"
    hours = seconds / 3600
    return f"{words} {hours:,.0f} hours" if hours >= 10 else f"{words} {duration(seconds)}"


def _length(row: Row) -> str:
    recipe = row.config(0).recipe
    most = "up to " if recipe.stop_at is not None else ""
    return f"{most}{_plural(recipe.epochs, 'epoch')} at batch {recipe.batch_size}"


def _whole(runs: Sequence[RunLog]) -> list[RunLog]:
    """The runs that did not diverge."""
    return [run for run in runs if run.diverged is None]


# the cells of a row, from its logs


def _of_runs(cell: Callable[[Sequence[RunLog]], str], best: Best | None = None) -> _Column:
    """A column of what is computed from the runs that did not diverge."""
    return _Column(lambda _, runs: cell(whole) if (whole := _whole(runs)) else _NOTHING, best)


_COST = {
    "seeds": _Column(lambda _, runs: _seeds(runs)),
    "epochs": _of_runs(lambda runs: _range([run.summary["epochs"] for run in runs])),
    "parameters": _of_runs(lambda runs: f"{runs[0].summary['parameters']:,}"),
    "time": _of_runs(lambda runs: duration(statistics.mean(run.summary["seconds"] for run in runs))),
    "of an epoch": _of_runs(
        lambda runs: duration(statistics.mean(run.summary["seconds"] / run.summary["epochs"] for run in runs))
    ),
    "memory, MiB": _of_runs(lambda runs: _memory(runs)),
}


def _tables(table: Table, rows: Sequence[Row], logs: Mapping[str, Sequence[RunLog]]) -> Iterator[dict[str, _Column]]:
    """The columns of each grid, by their headings: errors, rotations, attacks on the loss and on the scores."""
    if table.judged_on == "validation":
        last = [partial(_validated, which=which) for which in ("error", "loss")]
        yield {
            "validation error, last epoch": _of_runs(last[0], min),
            "validation loss, last epoch": _of_runs(last[1], min),
        }
        return
    columns = {
        "test error, last epoch": _of_runs(lambda runs: _percent([run.error("last") for run in runs]), min),
        "test error, chosen epoch": _of_runs(lambda runs: _percent([run.error("best") for run in runs]), min),
    }
    if any(row.config(0).recipe.stop_at is not None for row in rows):
        columns["validation accuracy reached"] = _of_runs(_reached)
    if any(row.compared_to for row in rows):
        columns["difference, 95 % interval"] = _Column(partial(_difference, logs=logs))
    columns |= _measured_columns(rows, logs, ("affnist", "familiar"))
    if any(row.published != _NOTHING for row in rows) or not rows[0].group:
        columns["published"] = _Column(lambda row, _: row.published)
    yield columns
    for group in (("rotation",), ("fgsm", "pgd"), ("fgsm-scores", "pgd-scores")):
        if measured := _measured_columns(rows, logs, group):
            yield measured


def _measured_columns(
    rows: Sequence[Row], logs: Mapping[str, Sequence[RunLog]], wanted: Collection[str]
) -> dict[str, _Column]:
    """The columns of those of some measures that rows ask for."""
    kinds = dict.fromkeys(measure.kind for row in rows for measure in row.measures)
    runs = [run for row in rows for run in logs[row.name]]
    columns: dict[str, _Column] = {}
    for kind in kinds:
        if kind in wanted:
            columns |= _measure_columns(kind, runs)
    return columns


def _measure_columns(kind: MeasureKind, runs: Sequence[RunLog]) -> dict[str, _Column]:
    """The columns of a measure: one for a number, a few for a curve."""
    if kind == "affnist":
        sources = sorted({run.measures[kind]["source"] for run in runs if kind in run.measures})
        return {
            f"affNIST accuracy ({source} images)": _of_runs(partial(_on_affnist, source=source), max)
            for source in sources
        }
    if kind == "familiar":
        return {"error on familiar views": _measured(kind, lambda found: 100 * float(found["error"]), min)}
    if kind == "latency":
        return {"one image, ms": _measured(kind, itemgetter("milliseconds"), None, _mean)}
    if kind == "coupling":
        names = {"entropy of coupling": "entropy", "dead capsules": "dead"}
        return {heading: _measured(kind, itemgetter(name), None, _mean) for heading, name in names.items()}
    from torchcaps.analysis.robustness import KINDS

    curves = [run.measures[kind] for run in runs if kind in run.measures]
    strengths = curves[0]["strengths"] if curves else []
    if kind == "rotation":
        return {
            f"accuracy, turned by ±{angle}°": _measured(kind, partial(_at, strengths=(-angle, angle)))
            for angle in (30, 60, 90)
            if angle in strengths and -angle in strengths
        }
    return {
        f"{KINDS[kind][0]}, ε = {epsilon:g}": _measured(kind, partial(_at, strengths=(epsilon,)))
        for epsilon in (0.1, 0.2)
        if epsilon in strengths
    }


def _reached(runs: Sequence[RunLog]) -> str:
    """The validation accuracy of the chosen epoch, and how many runs reached their target where some did not."""
    accuracies = [run.summary["validation"]["best"]["accuracy"] for run in runs]
    targets = [run.config.recipe.stop_at or 0.0 for run in runs]
    reached = sum(accuracy >= target for accuracy, target in zip(accuracies, targets, strict=True))
    missed = "" if reached == len(runs) else f"; {reached} of {len(runs)} reached the target"
    return _percent([100 * accuracy for accuracy in accuracies]) + missed


def _validated(runs: Sequence[RunLog], which: Literal["error", "loss"]) -> str:
    """Error or loss of the last epoch on the validation images."""
    last = [run.summary["validation"]["last"] for run in runs]
    if which == "error":
        return _percent([100 - 100 * each["accuracy"] for each in last])
    return f"{statistics.mean(each['loss'] for each in last):.4f}"


def _difference(row: Row, runs: Sequence[RunLog], logs: Mapping[str, Sequence[RunLog]]) -> str:
    """By how much a row's error is above that of the row it is compared to, in pairs of the same seed.

    Beside the mean stands the interval of Student's t that holds it with a probability of 95 %.
    """
    others = {run.seed: run.error("last") for run in _whole(logs.get(row.compared_to or "", []))}
    pairs = [run.error("last") - others[run.seed] for run in _whole(runs) if run.seed in others]
    if not pairs:
        return _NOTHING
    mean = statistics.mean(pairs)
    if len(pairs) == 1:
        return f"{mean:+.2f}"
    from scipy.stats import t

    half = float(t.ppf(0.975, len(pairs) - 1)) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"


def _measured(
    kind: MeasureKind,
    number: Callable[[Mapping[str, Any]], float],
    best: Best | None = max,
    shown: Callable[[Sequence[float]], str] | None = None,
) -> _Column:
    """A number taken from a measure, of the runs that have it; as a percentage unless it is said how it is shown."""

    def cell(runs: Sequence[RunLog]) -> str:
        found = [number(run.measures[kind]) for run in runs if kind in run.measures]
        return (shown or _percent)(found) if found else _NOTHING

    return _of_runs(cell, best)


def _on_affnist(runs: Sequence[RunLog], source: str) -> str:
    """The accuracy of those runs that were tested on images of a source, which are other images than another's."""
    found = [run.measures["affnist"] for run in runs if "affnist" in run.measures]
    accuracies = [100 * float(each["accuracy"]) for each in found if each["source"] == source]
    if not accuracies:
        return _NOTHING
    return _percent(accuracies) + ("" if len(accuracies) == len(runs) else f"; {_plural(len(accuracies), 'seed')}")


def _at(curve: Mapping[str, Any], strengths: Collection[float]) -> float:
    """Mean accuracy at some strengths, percent."""
    pairs = zip(curve["strengths"], curve["accuracy"], strict=True)
    return 100 * statistics.mean(accuracy for strength, accuracy in pairs if strength in strengths)


def _seeds(runs: Sequence[RunLog]) -> str:
    diverged = sum(run.diverged is not None for run in runs)
    return f"{len(runs)}, of which {diverged} diverged" if diverged else str(len(runs))


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}"


def _percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation; a single value alone."""
    mean = statistics.mean(values)
    digits = 3 if mean < 1 and len(values) > 1 else 2
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{spread} %"


def _memory(runs: Sequence[RunLog]) -> str:
    known = [run.summary["peak_memory_mib"] for run in runs if run.summary["peak_memory_mib"] is not None]
    return f"{max(known):,.0f}" if known else _NOTHING


def _range(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}–{max(numbers)}"


def _hardware(rows: Mapping[str, Sequence[RunLog]]) -> str:
    """What the rows were computed on, those on the same together."""
    groups: dict[str, list[str]] = {}
    for name, runs in rows.items():
        for words in dict.fromkeys(_computed(run) for run in _whole(runs)):
            groups.setdefault(words, []).append(f"`{name}`")
    if len(groups) == 1:
        return f"Computed on {next(iter(groups))}."
    return "\n".join(["Computed on:\n", *(f"- {words}: {', '.join(names)}" for words, names in groups.items())])


def _computed(run: RunLog) -> str:
    precision = {"32": "float32", "bf16": "bfloat16"}[run.summary["precision"]]
    return _machine(run.summary["hardware"], run.summary["versions"], f", {precision}")


def _machine(hardware: Mapping[str, Any], versions: Mapping[str, str], precision: str = "") -> str:
    where = hardware.get("gpu") or f"{hardware['processor']}, {_plural(hardware['threads'], 'thread')}"
    processes = "" if hardware.get("processes", 1) == 1 else f", {hardware['processes']} processes"
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{where}{processes}{precision}; {made}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"
