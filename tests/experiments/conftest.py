"""A table of tiny runs on the embedded digits, and records written by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.pages import values
from experiments.store import RESULTS, RunLog, add_run, settings
from experiments.table import Row, Table

SMALL = {"limit_train": 100, "limit_test": 40, "validation_size": 40, "batch_size": 50, "epochs": 2, "max_shift": 0}
CAPSULES = {"conv_channels": 4, "primary_types": 2, "decoder": False} | SMALL
CNN = {"channels": (4,), "hidden": (8,)} | SMALL | {"epochs": 1}
Record = Callable[..., RunLog]


@pytest.fixture(scope="session")
def recorded() -> Mapping[str, Any]:
    """What pages are made of, from the records of the repository."""
    return values(Path(__file__).parents[2] / RESULTS)


@pytest.fixture
def tiny() -> Table:
    measures = {"rotation": 10, "pgd-scores": 5}
    return Table(
        name="tiny",
        title="Tiny networks",
        rows=(
            Row("plain", "the plain", "sabour2017", CAPSULES, data="digits", published="0.25 %"),
            Row("measured", "the measured", "baseline-cnn", CNN, data="digits", measures=measures),
            Row("large", "large", "sabour2017", CAPSULES | {"epochs": 9}, full=True, data="digits", published="8.1 %"),
        ),
        source="tiny.py",
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def record() -> Record:
    """Record a run of a row; errors are percent."""

    def write(
        row: Row,
        seed: int = 0,
        *,
        last: float = 2.0,
        best: float = 1.5,
        measures: dict[str, Any] | None = None,
        diverged: str = "",
        **summary: Any,
    ) -> RunLog:
        values: dict[str, Any] = {
            "precision": "32",
            "epochs": 2,
            "parameters": 1234567,
            "images": {"train": 100, "validation": 40, "test": 40},
            "validation": {which: {"accuracy": 0.985, "loss": 0.05} for which in ("best", "last")},
            "test": {"last": {"error": last / 100}, "best": {"error": best / 100}},
            "seconds": 60.0 + seed,
            "peak_memory_mib": 500.4 + seed,
            "hardware": {"processor": "Abacus", "cores": 2, "threads": 1, "device": "cpu", "processes": 1},
            "versions": {"torchcaps": "9.9", "torch": "3.1", "python": "3.14"},
        }
        found = {} if diverged else values | summary
        log = RunLog("tiny", row.name, seed, settings(row.config(seed)), found, measures or {}, diverged)
        add_run(RESULTS, log, Path("there is none"))
        return log

    return write
