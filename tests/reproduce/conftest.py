"""A table of tiny runs on the embedded digits, and logs written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchcaps.files import write_json, write_text
from torchcaps.registry import Registry
from torchcaps.reproduce import Measure, Row, Table
from torchcaps.reproduce.logs import log_folder

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


def row(name: str, **fields: Any) -> Row:
    defaults = {"title": f"the {name}", "preset": "sabour2017", "data": "digits", "overrides": CAPSULES}
    return Row(**(defaults | {"name": name, "budgets": ("small",)} | fields))


@pytest.fixture
def tiny() -> Table:
    return Table(
        name="tiny",
        title="Tiny networks",
        question="Is it small?",
        protocol="As little as can be.",
        budgets={"small": "Seconds.", "full": "Minutes."},
        rows=(
            row("plain", published="0.25 %", published_error=0.25),
            row(
                "measured",
                preset="baseline-cnn",
                overrides=CNN,
                measures=(Measure(kind="rotation", images=10), Measure(kind="pgd-scores", images=5)),
            ),
            row("large", budgets=("full",), overrides=CAPSULES | {"epochs": 9}, published="8.1 %"),
        ),
        figures=(),
    )


@pytest.fixture
def only_tiny(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The only table that is registered."""
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": tiny}))
    return tiny


@pytest.fixture
def drawn_tiny(tiny: Table, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The only table that is registered, with figures."""
    table = dataclasses.replace(tiny, figures=("errors", "iterations", "epochs", "robustness"))
    monkeypatch.setattr("torchcaps.reproduce.tables._TABLES", Registry("table", {"tiny": table}))
    return table


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WriteLog = Callable[..., Path]


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
        diverged: str | None = None,
        measures: dict[str, Any] | None = None,
        results: Path = Path("results"),
        **summary: Any,
    ) -> Path:
        (chosen,) = (each for each in table.rows if each.name == name)
        config = dataclasses.replace(chosen.config(seed), precision="32")
        folder = log_folder(results, table.name, name, seed)
        write_json(folder / "config.json", config.to_dict())
        if diverged is not None:
            write_json(folder / "diverged.json", {"reason": diverged})
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
