"""A table of tiny runs on the embedded digits, and logs written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.logs import run_folder
from experiments.table import Row, Table
from torchcaps.files import write_json, write_text

SMALL = {
    "limit_train": 100,
    "limit_test": 40,
    "validation_size": 40,
    "batch_size": 50,
    "epochs": 2,
    "max_shift": 0,
}
CAPSULES = {"conv_channels": 4, "primary_types": 2, "decoder": False} | SMALL
CNN = {"channels": (4,), "hidden": (8,)} | SMALL | {"epochs": 1}
WriteLog = Callable[..., Path]


@pytest.fixture
def tiny() -> Table:
    measures = {"rotation": 10, "pgd-scores": 5}
    return Table(
        name="tiny",
        title="Tiny networks",
        rows=(
            Row("plain", "the plain", "sabour2017", CAPSULES, data="digits", published_error=0.25),
            Row("measured", "the measured", "baseline-cnn", CNN, data="digits", measures=measures),
            Row("large", "large", "sabour2017", CAPSULES | {"epochs": 9}, full=True, data="digits", published="8.1 %"),
        ),
        figures=(),
        source="tiny.py",
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write_log() -> WriteLog:
    """Write a log as a run of a row would; errors are percent."""

    def write(
        table: Table,
        name: str,
        seed: int = 0,
        *,
        last: float = 2.0,
        best: float = 1.5,
        diverged: bool = False,
        measures: dict[str, Any] | None = None,
        **summary: Any,
    ) -> Path:
        (chosen,) = (each for each in table.rows if each.name == name)
        config = dataclasses.replace(chosen.config(seed), precision="32")
        folder = run_folder(Path("results"), table.name, name, seed)
        write_json(folder / "config.json", config.to_dict())
        if diverged:
            write_json(folder / "diverged.json", {"reason": "NaN"})
            return folder
        lines = ["epoch,validation_accuracy", *(f"{n},{0.9 + 0.01 * n}" for n in range(1, config.recipe.epochs + 1))]
        write_text(folder / "metrics.csv", "\n".join(lines) + "\n")
        values: dict[str, Any] = {
            "precision": config.precision,
            "epochs": config.recipe.epochs,
            "parameters": 1234567,
            "images": {"train": 100, "validation": 40, "test": 40},
            "validation": {which: {"accuracy": 0.985, "loss": 0.05} for which in ("best", "last")},
            "test": {"last": {"error": last / 100}, "best": {"error": best / 100}},
            "seconds": 60.0 + seed,
            "peak_memory_mib": 500.4 + seed,
            "hardware": {"processor": "Abacus", "cores": 2, "threads": 1, "device": "cpu", "processes": 1},
            "versions": {"torchcaps": "9.9", "torch": "3.1", "python": "3.14"},
        }
        write_json(folder / "summary.json", values | summary)
        write_json(folder / "measures.json", measures or {})
        return folder

    return write
