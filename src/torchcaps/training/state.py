"""The progress of a run: its place, and its results so far, as a checkpoint holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchcaps.training.step import SUMS

JUDGED = ("validation_loss", "validation_accuracy", "validation_balanced_accuracy")
"""What the validation images say after an epoch; the balanced accuracy is the mean of the classes' recalls."""


def column_of(select: str) -> str:
    """The column of metrics.csv that chooses the epoch."""
    return f"validation_{select.replace('-', '_')}"


@dataclass
class ProgressState:
    """The progress of a run: its place, and its results so far. A checkpoint holds it beside weights and moments."""

    epoch: int = 0  # finished
    batch: int = 0  # finished, of the running epoch
    step: int = 0  # finished, in all
    seconds: float = 0.0  # of training and validation, over all sittings
    epoch_seconds: float = 0.0  # of the training steps of the running epoch
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))  # of it, over all processes
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of metrics.csv
    peak_memory_mib: float | None = None  # of a process, over all sittings up to the last checkpoint
    commands: list[str] = field(default_factory=list)  # the one that started the run, and those that resumed it
    commits: list[str | None] = field(default_factory=list)  # of the source tree at each of these starts

    def best(self, select: str) -> dict[str, Any]:
        """The row of the epoch that the validation images chose; without validation images the last one."""
        if self.history[-1]["validation_loss"] is None:
            return self.history[-1]
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row[column_of(select)], -row["validation_loss"]))

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Add the row of the finished epoch, and begin the next one."""
        self.history.append(row)
        self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_seconds, self.sums = 0.0, dict.fromkeys(SUMS, 0.0)
