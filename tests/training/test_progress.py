"""What is said of each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_runs import tiny_config
from torchcaps.analysis import Evaluation
from torchcaps.models import Network
from torchcaps.training import PlainProgress, TerminalProgress, resume, train
from torchcaps.training.data import Batches
from torchcaps.training.loop import Trainer
from torchcaps.training.progress import Progress, describe

ROW = {
    "epoch": 2,
    "step": 12,
    "train_loss": 0.5,
    "train_accuracy": 0.75,
    "validation_loss": 0.25,
    "validation_accuracy": 0.875,
    "images_per_second": 1234.5,
}
WORDS = "loss 0.5000  train 75.00%  validation 87.50% (loss 0.2500)  1234 images/s"


class Rows(Progress):
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


def test_an_epoch_that_is_better_than_all_before_says_so() -> None:
    assert describe(ROW) == WORDS
    assert describe(ROW | {"improved": False}) == WORDS
    assert describe(ROW | {"improved": True}) == f"{WORDS}  (improved)"


@pytest.mark.parametrize("kind", [PlainProgress, TerminalProgress])
def test_it_stands_beside_the_epochs_line(
    kind: type[Progress], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    progress = kind()
    progress.start(epochs=3, steps_per_epoch=6, done=0)
    progress.epoch(ROW | {"improved": True})
    progress.epoch(ROW | {"improved": False})
    progress.stop()
    said = capsys.readouterr().out
    assert said.count(f"epoch 2/3  {WORDS}") == 2
    assert said.count(f"epoch 2/3  {WORDS}  (improved)") == 1


@pytest.mark.parametrize(
    ("select", "improved"),
    [("accuracy", [True, False, True, False, True, False]), ("loss", [True, True, False, False, True, False])],
)
def test_improved_is_measured_as_the_best_epoch_is_chosen_and_over_all_sittings(
    bars: Path, tmp_path: Path, select: str, improved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Trainer.judge
    results = {0: (50, 0.5), 1: (40, 0.4), 2: (60, 0.6), 3: (60, 0.6), 4: (60, 0.3), 5: (60, 0.3)}

    def judge(trainer: Trainer, network: Network, batches: Batches) -> Evaluation:
        if batches is not trainer.data.validation:
            return own(trainer, network, batches)
        right, loss = results[trainer.state.epoch]
        return Evaluation(np.array([[right, 100 - right, 0], [0, 0, 0], [0, 0, 0]]), 100 * loss, ("0", "1", "2"))

    monkeypatch.setattr(Trainer, "judge", judge)
    first, second = Rows(), Rows()
    train(tiny_config(bars, select=select), tmp_path / "run", progress=first, figures=False)
    summary = resume(tmp_path / "run", overrides={"epochs": 6}, progress=second, figures=False)
    assert [row["improved"] for row in first.rows + second.rows] == improved
    assert summary["best_epoch"] == 5
    assert "improved" not in (tmp_path / "run" / "metrics.csv").read_text()
