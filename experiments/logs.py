"""The folder of a run, ``RESULTS/TABLE/ROW/seed-N``: a run folder of torchcaps, whose weights git ignores.

```text
config.json      the run; torchcaps train --config runs it again
metrics.csv      each epoch
summary.json     test error, seconds, memory, hardware, versions
measures.json    what else was measured; written last: a run that has it is finished
diverged.json    in the place of the last two, where the loss became NaN or infinite
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.table import Row, Table
from torchcaps.datasets.sources.affnist import NUM_TEST
from torchcaps.errors import InputError
from torchcaps.files import read_json
from torchcaps.training.config import ELSEWHERE, TrainConfig, read_config

if TYPE_CHECKING:
    from torchcaps.analysis.curves import Metrics

CONFIG, METRICS, SUMMARY, MEASURES = "config.json", "metrics.csv", "summary.json", "measures.json"
DIVERGED, FINDINGS = "diverged.json", "findings.md"


@dataclass(frozen=True, eq=False)
class RunLog:
    """A finished run of a row."""

    folder: Path
    seed: int
    config: TrainConfig
    metrics: Metrics
    """The numbers of each epoch; without columns where the run diverged in the first."""
    summary: dict[str, Any]
    """Empty where it diverged, as the measures are."""
    measures: dict[str, Any]
    """What was measured beside the test error, by kind."""
    diverged: bool

    def error(self, which: str) -> float:
        """Test error of the ``"last"`` or the ``"best"`` (validation-chosen) epoch, percent."""
        return 100 * float(self.summary["test"][which]["error"])


#: The runs of each row, by its name.
Logs = Mapping[str, Sequence[RunLog]]


def whole(runs: Sequence[RunLog]) -> list[RunLog]:
    """The runs that did not diverge."""
    return [run for run in runs if not run.diverged]


def run_folder(results: Path, table: str, row: str, seed: int) -> Path:
    """The folder of a run."""
    return results / table / row / f"seed-{seed}"


def is_finished(folder: Path, row: Row) -> bool:
    """Whether a run diverged, or has all that its row asks for, measured on as many images."""
    if (folder / DIVERGED).exists() or not (folder / MEASURES).exists():
        return (folder / DIVERGED).exists()
    found = read_json(folder / MEASURES, "measures")
    test = read_json(folder / SUMMARY, "summary")["images"]["test"]
    for kind, wanted in row.measures.items():
        if kind not in found:
            return False
        number = found[kind].get("images", found[kind].get("num_images"))
        if not callable(wanted) and kind not in ("latency", "familiar"):  # these take one image, and all there are
            there = NUM_TEST if kind == "affnist" else test
            if number != min(there, wanted or there):
                return False
    return True


def same_run(config: TrainConfig, row: Row, seed: int) -> bool:
    """Whether a configuration is that of a row's run; where and how it is computed makes no difference."""
    elsewhere = {name: getattr(config, name) for name in ("precision", *ELSEWHERE)}
    return config == dataclasses.replace(row.config(seed), **elsewhere)


def read_logs(results: Path, table: Table, row: Row) -> tuple[list[RunLog], list[Path]]:
    """The finished runs of a row, by seed, and the folders of those that were made with other settings than it has.

    Raises:
        InputError: A file that is damaged.
    """
    logs, others = [], []
    for folder in (results / table.name / row.name).glob("seed-*"):
        seed = folder.name.removeprefix("seed-")
        if seed.isdecimal() and is_finished(folder, row):
            config = read_config(folder / CONFIG)
            if same_run(config, row, int(seed)):
                logs.append(_read_log(folder, int(seed), config))
            else:
                others.append(folder)
    return sorted(logs, key=lambda log: log.seed), sorted(others)


def _read_log(folder: Path, seed: int, config: TrainConfig) -> RunLog:
    from torchcaps.analysis import read_metrics

    metrics = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
    if (folder / DIVERGED).exists():
        return RunLog(folder, seed, config, metrics, {}, {}, diverged=True)
    if "validation_accuracy" not in metrics:
        raise InputError(f"{folder / METRICS} is missing, or has no column validation_accuracy")
    summary, measures = read_json(folder / SUMMARY, "summary"), read_json(folder / MEASURES, "measures")
    return RunLog(folder, seed, config, metrics, summary, measures, diverged=False)
