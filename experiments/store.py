"""Read and write recorded runs: ``runs.jsonl`` has a line for each run, ``curves.csv`` a line for each epoch.

A run is named ``TABLE/ROW/SEED``. While it runs, its folder is ``TABLE/ROW/seed-SEED`` beside these files, which git
ignores. Weights are not recorded.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from experiments.table import Row, Table
from torchcaps.files import locked, reading, write_text
from torchcaps.parts import flat
from torchcaps.training.config import LOCATION_FIELDS, TrainConfig, make_config

RESULTS = Path("experiments/results")
RUNS, CURVES = "runs.jsonl", "curves.csv"
_KEPT = """precision epochs best_epoch parameters images validation test seconds peak_memory_mib hardware versions
           earlier_commits"""
_METRICS = """epoch step seconds images_per_second learning_rate train_loss train_classification_loss
              train_reconstruction_loss train_accuracy validation_loss validation_accuracy"""
#: Recorded keys of a run's ``summary.json`` (if present) and recorded columns of its ``metrics.csv``.
SUMMARY, COLUMNS = _KEPT.split(), _METRICS.split()


@dataclass(frozen=True)
class RunLog:
    """A recorded run, with the fields of its line in ``runs.jsonl``."""

    table: str
    row: str
    seed: int
    config: Mapping[str, Any]  # see settings
    summary: Mapping[str, Any] = field(default_factory=dict)  # see summary_of; empty if the run diverged
    measures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # see measures.py, by kind
    diverged: str = ""  # reason, if the run diverged

    @property
    def name(self) -> str:
        """``TABLE/ROW/SEED``."""
        return f"{self.table}/{self.row}/{self.seed}"

    def error(self, which: str = "last") -> float:
        """Test error of the ``"last"`` or the ``"best"`` (validation-chosen) epoch, percent."""
        return 100 * float(self.summary["test"][which]["error"])


def summary_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded part of a ``summary.json``. ``exact``: the commit is known, and no file differed from it."""
    commit = summary.get("commit") or ""
    exact = bool(commit) and not commit.endswith("-dirty")
    kept = {name: summary[name] for name in SUMMARY if summary.get(name) not in (None, [])}
    return kept | {"commit": commit.removesuffix("-dirty"), "exact": exact}


def settings(config: TrainConfig) -> dict[str, Any]:
    """Return the recorded settings of a run: the preset, and options that differ from it, by their flat names.

    The seed is left out, and so are settings of the machine except the plugins.
    """
    defaults = flat(TrainConfig.from_dict({"preset": config.preset}).fields).items()
    left_out = {"preset", "model", "recipe", "seed", "precision", *LOCATION_FIELDS} - {"plugins"}
    changed = {key: value for key, value in flat(config.fields).items() if (key, value) not in defaults}
    kept = {"preset": config.preset} | {key: value for key, value in changed.items() if key not in left_out}
    return dict(json.loads(json.dumps(kept)))


def is_run_of(found: Mapping[str, Any], row: Row, seed: int) -> bool:
    """Return True if recorded settings agree with a row and a seed."""
    return _agree(found, settings(row.config(seed)))


def _agree(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return True if recorded settings agree with those of a row.

    Values derived from the images are not compared. An option that is newer than the record counts as its default.
    """
    free = {"plugins", "fitted", *wanted.get("fitted", ())}
    if not wanted.keys() - found.keys() <= free:
        found = settings(make_config(**{name: value for name, value in found.items() if name not in free}))
    return all(found.get(name) == wanted.get(name) for name in {*found, *wanted} - free)


def is_finished(log: RunLog | None, row: Row) -> bool:
    """Return True if a run diverged, or has all measures of its row, on the same number of images or on all."""
    if log is None or log.diverged:
        return log is not None
    for kind, wanted in row.measures.items():
        found = log.measures.get(kind, {})
        number = found.get("images", found.get("num_images"))
        if not found or (isinstance(wanted, int) and number not in (wanted, log.summary["images"]["test"])):
            return False
    return True


def read_runs(results: Path) -> dict[str, RunLog]:
    """Return the recorded runs by name; raise InputError if the file is damaged."""
    path = results / RUNS
    if not path.exists():
        return {}
    with reading(path, "list of runs"):
        logs = [RunLog(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {log.name: log for log in logs}


def logs_of(table: Table, runs: Mapping[str, RunLog]) -> dict[str, list[RunLog]]:
    """Return the finished runs of each row, sorted by seed; runs whose settings differ from the row are left out."""
    found: dict[str, list[RunLog]] = {row.name: [] for row in table.rows}
    rows = {row.name: row for row in table.rows}
    wanted: dict[tuple[str, int], dict[str, Any]] = {}
    for log in sorted(runs.values(), key=lambda log: log.seed):
        row = rows.get(log.row) if log.table == table.name else None
        if row is None or not is_finished(log, row):
            continue
        seed = log.seed if "{seed}" in row.data else 0  # else the settings of all seeds are the same
        if (row.name, seed) not in wanted:
            wanted[row.name, seed] = settings(row.config(seed))
        if _agree(log.config, wanted[row.name, seed]):
            found[row.name].append(log)
    return found


def read_curves(results: Path) -> dict[str, list[dict[str, str]]]:
    """Return the epochs of each run, by name."""
    found: dict[str, list[dict[str, str]]] = {}
    if (results / CURVES).exists():
        with reading(results / CURVES, "list of epochs"), (results / CURVES).open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                found.setdefault(line["run"], []).append(line)
    return found


def add_run(results: Path, log: RunLog, metrics: Path) -> None:
    """Record a run, with the ``metrics.csv`` of its folder, and replace an earlier run with the same name.

    A lock lets one process write at a time. Each file is replaced atomically, ``runs.jsonl`` last, because its line
    marks the run as finished.
    """
    epochs = []
    if metrics.exists():  # missing if the run diverged in the first epoch
        with metrics.open(encoding="utf-8") as file:
            epochs = [
                {"run": log.name} | {each: _short(line[each]) for each in COLUMNS} for line in csv.DictReader(file)
            ]
    results.mkdir(parents=True, exist_ok=True)
    with locked(FileLock(results / ".lock")):
        curves = read_curves(results) | {log.name: epochs}
        lines = [["run", *COLUMNS], *(epoch.values() for of_run in curves.values() for epoch in of_run)]
        write_text(results / CURVES, "".join(",".join(line) + "\n" for line in lines))
        runs = read_runs(results) | {log.name: log}
        write_text(results / RUNS, "".join(_line(each) for each in runs.values()))


def _line(log: RunLog) -> str:
    values = {name: value for name, value in vars(log).items() if value not in ("", {})}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _short(value: str) -> str:
    return value if value.isdecimal() or not value else f"{float(value):.5g}"
