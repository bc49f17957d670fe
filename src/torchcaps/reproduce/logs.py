"""The logs of reproduced runs in results/: written once a run is over, read to make the page.

```text
RESULTS/TABLE/findings.md             what was found, written by hand
              ROW/seed-N/config.json     the run; torchcaps train --config runs it again
                         metrics.csv     each epoch
                         summary.json    test error, seconds, memory, hardware, versions
                         measures.json   what else was measured; written last, so that a log that has it is whole
                         diverged.json   instead of the last two, where the loss became NaN or infinite
```
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.files import atomic_path, read_json, write_json
from torchcaps.reproduce.table import Row, Table
from torchcaps.training.config import ELSEWHERE, TrainConfig, read_config

if TYPE_CHECKING:
    from torchcaps.analysis.curves import Metrics

CONFIG, METRICS, SUMMARY, MEASURES = "config.json", "metrics.csv", "summary.json", "measures.json"
DIVERGED, FINDINGS = "diverged.json", "findings.md"


@dataclass(frozen=True, eq=False)
class RunLog:
    """The log of one seed of a row."""

    folder: Path
    """Where it lies."""
    seed: int
    """Of the run."""
    config: TrainConfig
    """As it was run."""
    metrics: Metrics
    """Each epoch; without columns where the run diverged in the first."""
    summary: dict[str, Any]
    """Of the run; empty where it diverged."""
    measures: dict[str, Any]
    """By kind."""
    diverged: str | None = None
    """What happened, where the loss became NaN or infinite."""

    @property
    def row(self) -> str:
        """The name of its row."""
        return self.folder.parent.name

    def error(self, which: str) -> float:
        """Test error of the ``"last"`` or the ``"best"`` (validation-chosen) epoch, percent."""
        return 100 * float(self.summary["test"][which]["error"])


def log_folder(results: Path, table: str, row: str, seed: int) -> Path:
    """Where the log of a run lies."""
    return results / table / row / f"seed-{seed}"


def is_whole(folder: Path, row: Row) -> bool:
    """Whether a log has all that its row asks for, or says that the run diverged."""
    if (folder / DIVERGED).exists():
        return True
    if not (folder / MEASURES).exists():
        return False
    return {measure.kind for measure in row.measures} <= read_json(folder / MEASURES, "measures").keys()


def same_run(config: TrainConfig, row: Row, seed: int) -> bool:
    """Whether a run is the one that its row describes; where and how it was computed makes no difference."""
    wanted = row.config(seed)
    for name in ELSEWHERE:
        wanted = dataclasses.replace(wanted, **{name: getattr(config, name)})
    if row.stop_at is not None:  # its number of epochs is found, not given
        wanted = dataclasses.replace(wanted, recipe=dataclasses.replace(wanted.recipe, epochs=config.recipe.epochs))
    return config == wanted


def read_logs(results: Path, table: Table, row: Row) -> list[RunLog]:
    """The whole logs of a row, by seed; those of runs that are not over are left out.

    Raises:
        InputError: A log that is damaged.
    """
    folders = {}
    for folder in (results / table.name / row.name).glob("seed-*"):
        number = folder.name.removeprefix("seed-")
        if number.isdecimal() and is_whole(folder, row):
            folders[int(number)] = folder
    return [_read_log(folder, seed) for seed, folder in sorted(folders.items())]


def _read_log(folder: Path, seed: int) -> RunLog:
    from torchcaps.analysis import read_metrics

    config = read_config(folder / CONFIG)
    metrics = read_metrics(folder / METRICS) if (folder / METRICS).exists() else {}
    if (folder / DIVERGED).exists():
        reason = read_json(folder / DIVERGED, "divergence").get("reason")
        return RunLog(folder, seed, config, metrics, {}, {}, str(reason))
    summary = read_json(folder / SUMMARY, "summary")
    try:
        (summary["test"]["last"]["error"], summary["test"]["best"]["error"], summary["parameters"])
    except (KeyError, TypeError):
        raise InputError(f"summary {folder / SUMMARY} is not one of torchcaps: it must hold test errors") from None
    return RunLog(folder, seed, config, metrics, summary, read_json(folder / MEASURES, "measures"))


def publish(run: Path, folder: Path, measures: dict[str, Any], command: str) -> None:
    """Copy what a log holds from a finished run, without its weights, and without places on this machine.

    Args:
        run: The run folder.
        folder: Where the log goes.
        measures: What was measured beside the test error, by kind.
        command: What runs it again, in the place of what was typed, which may name such places.
    """
    _publish_start(run, folder)
    summary = read_json(run / SUMMARY, "summary")
    summary |= {
        "out": "/".join(("runs/reproduce", *folder.parts[-3:])),
        "command": command,
        "resumed_with": [command for _ in summary["resumed_with"]],
    }
    write_json(folder / SUMMARY, summary)
    write_json(folder / MEASURES, measures)


def publish_divergence(run: Path, folder: Path, reason: str) -> None:
    """Log a run whose loss became NaN or infinite."""
    _publish_start(run, folder)
    write_json(folder / DIVERGED, {"reason": reason})


def _publish_start(run: Path, folder: Path) -> None:
    config = read_config(run / CONFIG)
    write_json(folder / CONFIG, dataclasses.replace(config, data_dir=None).to_dict())
    if (run / METRICS).exists():
        with atomic_path(folder / METRICS) as temporary:
            shutil.copyfile(run / METRICS, temporary)
