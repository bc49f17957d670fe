"""The progress of a run: its place, and its results so far, as a checkpoint holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, TypedDict

from torchcaps.checks import check_contents
from torchcaps.errors import InputError
from torchcaps.ranges import Amount, Finite, Index
from torchcaps.training.step import SUMS

JUDGED = ("validation_loss", "validation_accuracy", "validation_balanced_accuracy")
"""What the validation images say after an epoch; the balanced accuracy is the mean of the classes' recalls."""


def column_of(select: str) -> str:
    """The column of metrics.csv that chooses the epoch."""
    return f"validation_{select.replace('-', '_')}"


class Row(TypedDict):
    """The results of an epoch, a row of metrics.csv; a network or a run without a number has None."""

    epoch: Index
    step: Index
    seconds: Amount
    images_per_second: Amount
    learning_rate: Amount
    train_loss: Finite
    train_classification_loss: Finite
    train_reconstruction_loss: Finite | None
    train_accuracy: Finite
    validation_loss: Finite | None
    validation_accuracy: Finite | None
    validation_balanced_accuracy: Finite | None


@dataclass
class ProgressState:
    """The progress of a run: its place, and its results so far. A checkpoint holds it beside weights and moments."""

    epoch: Index = 0  # finished
    batch: Index = 0  # finished, of the running epoch
    step: Index = 0  # finished, in all
    seconds: Amount = 0.0  # of training and validation, over all sittings
    epoch_seconds: Amount = 0.0  # of the training steps of the running epoch
    sums: dict[str, Finite] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))  # of it, over all processes
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of metrics.csv
    peak_memory_mib: Amount | None = None  # of a process, over all sittings up to the last checkpoint
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

    @classmethod
    def read(cls, contents: dict[str, Any], has_validation: bool) -> Self:
        """Return the progress that a checkpoint of a run with or without validation images holds.

        Raises:
            InputError: A value is missing, of another type, or out of its range, or the values contradict each other.
        """
        check_contents("progress", contents, cls)
        if wrong := contents.keys() ^ cls.__dataclass_fields__.keys():
            raise InputError(f"its progress has other fields than a run writes: {', '.join(sorted(map(str, wrong)))}")
        state = cls(**contents)
        for name in SUMS:
            if name not in state.sums:
                raise InputError(f"progress.sums has no {name}")
        for number, row in enumerate(state.history, 1):
            check_contents(f"row {number} of its history", row, Row)
            if row["epoch"] != number or any((row[name] is not None) != has_validation for name in JUDGED):
                raise InputError(f"row {number} of its history is not that of epoch {number} of this run")
        if len(state.history) != state.epoch:
            raise InputError(f"it has finished {state.epoch} epochs, but has the results of {len(state.history)}")
        return state
