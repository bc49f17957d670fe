"""The logs of reproduced runs in results/: written once a run is over, read to make the page.

```text
RESULTS/TABLE/findings.md             what was found, written by hand
              estimate.json            how long rows would take that were not run (estimate.py)
              ROW/seed-N/config.json     the run; torchcaps train --config runs it again
                         metrics.csv     each epoch
                         summary.json    test error, seconds, memory, hardware, versions
                         measures.json   what else was measured; written last, so that a log that has it is whole
                         diverged.json   instead of the last two, where the loss became NaN or infinite
```
"""

from __future__ import annotations

import dataclasses
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
    check_keys,
    optional,
    read_json,
    read_text,
    write_json,
    write_text,
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
    """The folder of the log."""
    seed: int
    """The run's seed."""
    config: TrainConfig
    """The configuration with which it was run."""
    metrics: Metrics
    """The numbers of each epoch; without columns where the run diverged in the first."""
    summary: dict[str, Any]
    """The run's summary; empty where it diverged."""
    measures: dict[str, Any]
    """What was measured beside the test error, by kind; empty where it diverged."""
    diverged: str | None = None
    """What happened, where the loss became NaN or infinite."""

    def error(self, which: str) -> float:
        """Test error of the ``"last"`` or the ``"best"`` (validation-chosen) epoch, percent."""
        return 100 * float(self.summary["test"][which]["error"])


def log_folder(results: Path, table: str, row: str, seed: int) -> Path:
    """The folder of a run's log."""
    return results / table / row / f"seed-{seed}"


def is_whole(folder: Path, row: Row) -> bool:
    """Whether a log has all that its row asks for, on as many images, or says that the run diverged."""
    if (folder / DIVERGED).exists() or not (folder / MEASURES).exists():
        return (folder / DIVERGED).exists()
    measures = _read_measures(folder)
    return all(_is_measured(folder, measures.get(measure.kind), measure) for measure in row.measures)


def _is_measured(folder: Path, found: Mapping[str, Any] | None, measure: Measure) -> bool:
    """Whether as many images were measured as a row asks for, which are all of them where there are fewer."""
    if found is None:
        return False
    if measure.kind in ("latency", "familiar"):  # of one image; of all that there are
        return True
    number = found["images" if measure.kind in _NUMBERS else "num_images"]
    if number == measure.images:
        return True
    if measure.kind == "affnist":
        from torchcaps.datasets.sources.affnist import NUM_TEST

        every = NUM_TEST
    else:
        every = _read_summary(folder)["images"]["test"]
    return bool(number == every and (measure.images is None or measure.images > every))


def same_run(config: TrainConfig, row: Row, seed: int) -> bool:
    """Whether a configuration is that of a row's run; where and how it is computed makes no difference."""
    return config == dataclasses.replace(row.config(seed), **{name: getattr(config, name) for name in NOT_COMPARED})


def counted(logs: Sequence[RunLog], row: Row) -> list[RunLog]:
    """The logs of a row's runs that were made with the settings that it has now."""
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
    from torchcaps.analysis import read_metrics

    config, diverged = read_config(folder / CONFIG), (folder / DIVERGED).exists()
    # a run that diverged in its first epoch has none
    metrics = {} if diverged and not (folder / METRICS).exists() else read_metrics(folder / METRICS)
    if metrics and "validation_accuracy" not in metrics:
        raise InputError(f'{folder / METRICS} has no column "validation_accuracy"')
    if diverged:
        reason = read_json(folder / DIVERGED, "divergence").get("reason")
        return RunLog(folder, seed, config, metrics, {}, {}, str(reason))
    return RunLog(folder, seed, config, metrics, _read_summary(folder), _read_measures(folder))


# what the page takes from the files: a damaged one is named before anything is written


_SUMMARY_KEYS = {
    "precision": Kind('"32" or "bf16"', ("32", "bf16").__contains__),
    **dict.fromkeys(("epochs", "parameters", "images.test", "hardware.threads"), COUNT),
    **dict.fromkeys(("validation.best.accuracy", "validation.last.accuracy", "validation.last.loss"), NUMBER),
    **dict.fromkeys(("test.last.error", "test.best.error", "seconds"), NUMBER),
    "peak_memory_mib": optional(NUMBER),
    "hardware.processor": TEXT,
    "versions": NAMED_TEXTS,
}
#: Of the measures that are numbers, not curves.
_NUMBERS: Mapping[str, dict[str, Kind]] = {
    "affnist": {"accuracy": NUMBER, "images": COUNT, "source": TEXT},
    "familiar": {"error": NUMBER, "images": COUNT},
    "latency": {"milliseconds": NUMBER},
    "coupling": {"entropy": NUMBER, "dead": NUMBER, "images": COUNT},
}
_CURVE_KEYS = {"strengths": NUMBERS, "accuracy": NUMBERS, "num_images": COUNT}


def _read_summary(folder: Path) -> dict[str, Any]:
    return read_json(folder / SUMMARY, "summary", _SUMMARY_KEYS)


def _read_measures(folder: Path) -> dict[str, Any]:
    measures = read_json(folder / MEASURES, "measures")
    for kind, found in measures.items():
        where = f"{kind} of measures {folder / MEASURES}"
        own_kind = {"kind": Kind(f'"{kind}"', kind.__eq__)}
        check_keys(found, _NUMBERS.get(kind, own_kind | _CURVE_KEYS), where)
        if kind not in _NUMBERS and not 0 < len(found["strengths"]) == len(found["accuracy"]):
            raise InputError(f'{where}: "strengths" and "accuracy" must have as many numbers, one at least')
    return measures


# what a finished run leaves in its log


def publish(run: Path, folder: Path, measures: dict[str, Any], command: str) -> None:
    """Copy what a log holds from a finished run, and write its measures: no weights, and no places on this machine.

    ``command`` runs it again; it replaces what was typed, which may name such places.
    """
    _publish_epochs(run, folder)
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
    _publish_epochs(run, folder)
    write_json(folder / DIVERGED, {"reason": reason})


def _publish_epochs(run: Path, folder: Path) -> None:
    config = read_config(run / CONFIG)
    write_json(folder / CONFIG, dataclasses.replace(config, data_dir=None).to_dict())
    if (run / METRICS).exists():
        write_text(folder / METRICS, read_text(run / METRICS, "metrics"))
