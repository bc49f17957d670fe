"""The tables of docs/speed.md: every ratio with its goal, a column an instruction set, from the files of all runs.

A run leaves `figures.json` and CSVs in a folder named after what torch computed with (`avx512`, `avx2`); each part of
the benchmark replaces what it found before and nothing else. The page is made from all of these folders, so a run
changes its own column only, and a goal may change without measuring again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measuring import Part, Ratio, Record

COLUMNS = {"avx2": "AVX2", "avx512": "AVX-512"}
"""Instruction sets that the page always has a column of, measured or not."""
FIGURES = "figures.json"
TABLES = ("figures", "errors", "choice")
NOT_MEASURED = "not measured"


class Row(NamedTuple):
    """A ratio of the table, and what it should come to."""

    part: str
    what: str
    goal: float | None = None
    """None: it is shown for comparison."""
    at_least: bool = False
    """The goal is a lower bound, else an upper one."""

    @property
    def bound(self) -> str:
        """The goal as the table shows it."""
        return "" if self.goal is None else f"{'≥' if self.at_least else '≤'} {self.goal:g}"

    def reached(self, value: float) -> str:
        """Whether a value keeps to the goal, as the table shows it."""
        if self.goal is None:
            return ""
        return "yes" if (value >= self.goal if self.at_least else value <= self.goal) else "**no**"


PRIMARY = "primary convolution, forward + backward: torchcaps ÷ F.conv2d"
PRIMARY_TURNED = "primary convolution, likewise, all tensors in PyTorch's memory order: torchcaps ÷ F.conv2d"
FIRST = "first convolution, forward + backward: torchcaps ÷ F.conv2d"
PRIMARY_FORWARD = "primary convolution, forward only, weights unchanged: torchcaps ÷ F.conv2d"
CHOICE = "the way that is chosen ÷ the fastest way, worst of all shapes"
STEP = "step, full: torchcaps ÷ convolutions alone"
STEP_NAIVE = {mode: f"step, {mode}: naive ÷ torchcaps" for mode in ("stopped", "full")}
STEP_BF16 = "step, full: torchcaps (bf16) ÷ torchcaps (float32)"
STEP_MEMORY = "step, peak memory: torchcaps ÷ naive"
ONE_IMAGE = "one image, inference: torchcaps ÷ convolutions alone"
MANY_IMAGES = "512 images, inference: naive ÷ torchcaps"
EPOCH = "epoch, its training steps: torchcaps ÷ convolutions alone"
SQUASH = {
    (case, name): f"squash, {case}: {name} ÷ torchcaps"
    for case in ("forward", "forward + backward")
    for name in ("as printed", "XifengGuo")
}
ROUTING_CASES = ("forward", "forward + backward, stopped", "forward + backward, full")
ROUTING = {case: f"routing, {case}: naive ÷ torchcaps" for case in ROUTING_CASES}
OWN_ROUTING = {case: f"routing, {case}: one's own, three lines ÷ torchcaps" for case in ROUTING_CASES}
LARGE_MEMORY = "large layer, peak memory: torchcaps ÷ naive"
LARGE_TIME = "large layer, time: torchcaps ÷ naive"

ROWS = (
    Row("convolution", PRIMARY, 0.25),
    Row("convolution", PRIMARY_TURNED),
    Row("convolution", FIRST, 0.25),
    Row("convolution", PRIMARY_FORWARD, 0.35),
    Row("choice", CHOICE, 1.25),
    Row("training_step", STEP, 0.45),
    Row("training_step", STEP_NAIVE["stopped"], 5, at_least=True),
    Row("training_step", STEP_NAIVE["full"], 4.5, at_least=True),
    Row("training_step", STEP_BF16),
    Row("training_step", STEP_MEMORY, 0.33),
    Row("training_step", ONE_IMAGE, 1.1),
    Row("training_step", MANY_IMAGES, 6, at_least=True),
    Row("epoch", EPOCH, 0.5),
    *(Row("squash", what) for what in SQUASH.values()),
    Row("routing", ROUTING["forward"], 18, at_least=True),
    Row("routing", ROUTING["forward + backward, stopped"], 25, at_least=True),
    Row("routing", ROUTING["forward + backward, full"], 18, at_least=True),
    *(Row("routing", what, 2) for what in OWN_ROUTING.values()),
    Row("routing", LARGE_MEMORY, 0.06),
    Row("routing", LARGE_TIME, 0.06),
)
BY_NAME = {row.what: row for row in ROWS}


def as_read(figure: float | Ratio) -> dict[str, float]:
    """A figure as `figures.json` keeps it."""
    return figure._asdict() if isinstance(figure, Ratio) else {"value": figure}


def write_part(folder: Path, name: str, part: Part, facts: Record) -> None:
    """Put a part's CSVs and figures in the place of those before.

    Args:
        folder: Of the instruction set.
        name: The part's.
        part: What it found.
        facts: What its times depend on.
    """
    for table, records in {name: part.records, **part.tables}.items():
        write_csv(folder / f"{table}.csv", [record | facts for record in records])
    found = read_figures(folder)
    measured = {BY_NAME[what].what: as_read(figure) for what, figure in part.figures.items()}
    found[name] = {"facts": facts, "measured": measured, "left_out": part.left_out}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (folder / FIGURES).write_text(text + "\n", encoding="utf-8")


def write_csv(path: Path, records: Sequence[Record]) -> None:
    columns = list(dict.fromkeys(name for record in records for name in record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def read_figures(folder: Path) -> dict[str, Any]:
    """What the parts have found with an instruction set, by part; empty before its first run."""
    path = folder / FIGURES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- the page


def place(text: str, table: str, new: str) -> str:
    """``text`` with ``new`` where it has the table.

    Raises:
        SystemExit: The text does not mark the place.
    """
    begin, end = f"<!-- {table}: written by benchmarks/run.py -->\n", f"<!-- end of {table} -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"the page has no place for the table: a line {begin.strip()} and, after it, {end.strip()}")
    return f"{before}{begin}\n{new}\n{end}{after}"


def write_page(path: Path, folder: Path) -> None:
    """Write all tables of the page from the runs in ``folder``."""
    text = path.read_text(encoding="utf-8")
    for table, new in tables(folder).items():
        text = place(text, table, new)
    path.write_text(text, encoding="utf-8")


def check_page(path: Path) -> None:
    """Raise SystemExit where the page lacks the place for a table."""
    text = path.read_text(encoding="utf-8")
    for table in TABLES:
        place(text, table, "")


def tables(folder: Path) -> dict[str, str]:
    """The tables of the page, in Markdown, by name."""
    more = sorted(path.parent.name for path in folder.glob(f"*/{FIGURES}") if path.parent.name not in COLUMNS)
    columns = COLUMNS | {name: name.upper() for name in more}
    return {
        "figures": _figures({title: read_figures(folder / name) for name, title in columns.items()}),
        "errors": _errors(
            {title: read_csv(folder / name / "convolution_errors.csv") for name, title in columns.items()}
        ),
        "choice": _choice({title: read_csv(folder / name / "choice.csv") for name, title in columns.items()}),
    }


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def _figures(columns: Mapping[str, dict[str, Any]]) -> str:
    header = ["ratio", "goal"]
    for title in columns:
        header += [title, f"{title}: middle half", "reached"]
    rows = []
    for row in ROWS:
        cells = [row.what, row.bound]
        for found in columns.values():
            cells += _cells(row, found.get(row.part, {}))
        rows.append(cells)
    facts = [f"{title}: {line}." for title, found in columns.items() for line in _facts(found)]
    return markdown(header, rows) + "\n" + "\n\n".join(facts) + "\n"


def _cells(row: Row, part: Mapping[str, Any]) -> list[str]:
    figure = part.get("measured", {}).get(row.what)
    if figure is None:
        return [part.get("left_out", {}).get(row.what, NOT_MEASURED), "", ""]
    spread = f"{figure['low']:.3g} to {figure['high']:.3g}" if "low" in figure else ""
    return [f"{figure['value']:.3g}", spread, row.reached(figure["value"])]


def _facts(found: Mapping[str, Any]) -> list[str]:
    """What the figures of a column depend on: a line a run, with the parts that it measured where there are several."""
    if not found:
        return [NOT_MEASURED]
    lines: dict[str, list[str]] = {}
    for name, part in found.items():
        line = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in part["facts"].items() if value != "")
        lines.setdefault(line, []).append(name.replace("_", " "))
    return [line if len(lines) == 1 else f"({', '.join(names)}) {line}" for line, names in lines.items()]


def _errors(columns: Mapping[str, list[dict[str, str]]]) -> str:
    header = ["convolution", "input", "error of"]
    for title in columns:
        header += [f"{title}: sum of squares", f"{title}: largest"]
    keys = dict.fromkeys(
        (row["convolution"], row["input"], row["of"]) for records in columns.values() for row in records
    )
    rows = []
    for key in keys:
        cells = list(key)
        for records in columns.values():
            row = next((row for row in records if (row["convolution"], row["input"], row["of"]) == key), None)
            cells += (
                [NOT_MEASURED, ""]
                if row is None
                else [f"{float(row[what]):.1e} ({float(row[f'{what}_conv2d']):.1e})" for what in ("squares", "largest")]
            )
        rows.append(cells)
    return markdown(header, rows) if rows else f"{NOT_MEASURED.capitalize()}.\n"


def _choice(columns: Mapping[str, list[dict[str, str]]]) -> str:
    rows_of = {
        title: [row for row in records if row["backend"] == "auto"] for title, records in columns.items() if records
    }
    if not rows_of:
        return f"{NOT_MEASURED.capitalize()}.\n"
    batches = list(dict.fromkeys(row["batch"] for rows in rows_of.values() for row in rows))
    header = ["convolution", "pass", *(f"{title}, batch {batch}" for title in rows_of for batch in batches)]
    keys = dict.fromkeys((row["convolution"], row["pass"]) for rows in rows_of.values() for row in rows)
    lines = []
    for key in keys:
        cells = list(key)
        for rows in rows_of.values():
            found = {row["batch"]: row for row in rows if (row["convolution"], row["pass"]) == key}
            for batch in batches:
                row = found.get(batch)
                cells.append("" if row is None else f"{float(row['auto_over_best']):.2f} {row['best']}")
        lines.append(cells)
    return markdown(header, lines)
