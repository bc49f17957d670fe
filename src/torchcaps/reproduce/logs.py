"""The logs of reproduced runs in results/: written once a run is over, read to make the page.

```text
RESULTS/TABLE/findings.md             what was found, written by hand
              estimate.json            how long rows would take that were not run (timings.py)
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.files import (
    COUNT,
    NAMED_TEXTS,
    NUMBER,
    NUMBERS,
    TEXT,
    TEXTS,
    Kind,
    atomic_path,
    check_keys,
    optional,
    read_json,
    write_json,
)
from torchcaps.reproduce.table import Measure, Row, Table
from torchcaps.training.config import ELSEWHERE, TrainConfig, read_config

if TYPE_CHECKING:
    from torchcaps.analysis.curves import Metrics

CONFIG, METRICS, SUMMARY, MEASURES = "config.json", "metrics.csv", "summary.json", "measures.json"
DIVERGED, FINDINGS = "diverged.json", "findings.md"
#: Settings in which a run may differ from its row: the page says of each what it was computed on, and how.
NOT_COMPARED = ("precision", *ELSEWHERE)


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
    """Whether a log has all that its row asks for, on as many images, or says that the run diverged.

    Raises:
        InputError: A log that is damaged.
    """
    if (folder / DIVERGED).exists():
        return True
    if not (folder / MEASURES).exists():
        return False
    measures = _read_measures(folder)
    return all(measure.kind in measures and _is_on_its_images(folder, measures, measure) for measure in row.measures)


def _is_on_its_images(folder: Path, measures: Mapping[str, Any], measure: Measure) -> bool:
    """Whether as many images were measured as a row asks for, which are all of them where there are fewer."""
    found = measures[measure.kind]["images" if measure.kind == "affnist" else "num_images"]
    if found == measure.images:
        return True
    return (measure.images is None or measure.images > found) and found == _num_test_images(folder, measure)


def _num_test_images(folder: Path, measure: Measure) -> int:
    if measure.kind != "affnist":
        return int(_read_summary(folder)["images"]["test"])
    from torchcaps.datasets.affnist import NUM_TEST

    return NUM_TEST


def same_run(config: TrainConfig, row: Row, seed: int) -> bool:
    """Whether a configuration is that of a row's run; where and how it is computed makes no difference."""
    return config == dataclasses.replace(row.config(seed), **{name: getattr(config, name) for name in NOT_COMPARED})


def counted(logs: Sequence[RunLog], row: Row) -> list[RunLog]:
    """Those of a row's logs that were run with the settings that it has now."""
    return [log for log in logs if same_run(log.config, row, log.seed)]


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
    config, metrics = read_config(folder / CONFIG), read_metrics_so_far(folder)
    if (folder / DIVERGED).exists():
        reason = read_json(folder / DIVERGED, "divergence").get("reason")
        return RunLog(folder, seed, config, metrics, {}, {}, str(reason))
    if not metrics:
        raise InputError(f"there is no {folder / METRICS}, which a log must have unless its run diverged")
    return RunLog(folder, seed, config, metrics, _read_summary(folder), _read_measures(folder))


def read_metrics_so_far(folder: Path) -> Metrics:
    """The epochs of a run or a log; nothing where there is none yet.

    Raises:
        InputError: A file that is damaged.
    """
    from torchcaps.analysis import read_metrics

    if not (folder / METRICS).exists():
        return {}
    metrics = read_metrics(folder / METRICS)
    if "validation_accuracy" not in metrics:
        raise InputError(f'{folder / METRICS} has no column "validation_accuracy"')
    return metrics


# what the page takes from the files, so that a damaged one is named before


_SUMMARY_KEYS = {
    "precision": Kind('"32" or "bf16"', lambda value: value in ("32", "bf16")),
    "epochs": COUNT,
    "parameters": COUNT,
    "images.test": COUNT,
    "validation.best.accuracy": NUMBER,
    "test.last.error": NUMBER,
    "test.best.error": NUMBER,
    "seconds": NUMBER,
    "peak_memory_mib": optional(NUMBER),
    "hardware.processor": TEXT,
    "hardware.threads": COUNT,
    "versions": NAMED_TEXTS,
}
_AFFNIST_KEYS = {"accuracy": NUMBER, "images": COUNT, "source": TEXT}
_CURVE_KEYS = {"strengths": NUMBERS, "accuracy": NUMBERS, "num_images": COUNT}


def _read_summary(folder: Path) -> dict[str, Any]:
    return read_json(folder / SUMMARY, "summary", _SUMMARY_KEYS)


def _read_measures(folder: Path) -> dict[str, Any]:
    measures = read_json(folder / MEASURES, "measures")
    for kind, found in measures.items():
        where = f"{kind} of measures {folder / MEASURES}"
        if kind == "affnist":
            check_keys(found, _AFFNIST_KEYS, where)
            continue
        check_keys(found, {"kind": Kind(f'"{kind}"', kind.__eq__), **_CURVE_KEYS}, where)
        if not 0 < len(found["strengths"]) == len(found["accuracy"]):
            raise InputError(f'{where}: "strengths" and "accuracy" must have as many numbers, one at least')
    return measures


def publish(run: Path, folder: Path, measures: dict[str, Any], command: str) -> None:
    """Copy what a log holds from a finished run, without its weights, and without places on this machine.

    Args:
        run: The run folder.
        folder: Where the log goes.
        measures: What was measured beside the test error, by kind.
        command: What runs it again, in the place of what was typed, which may name such places.
    """
    _publish_start(run, folder)
    summary = read_json(run / SUMMARY, "summary", {"resumed_with": TEXTS})
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
