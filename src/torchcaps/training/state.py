"""Progress of a run: its position and results so far, as stored in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, TypedDict

from torchcaps.checks import check_contents
from torchcaps.errors import InputError
from torchcaps.ranges import Amount, Finite, Index
from torchcaps.training.step import SUMS
from torchcaps.words import counted

VALIDATION_COLUMNS = ("validation_loss", "validation_accuracy", "validation_balanced_accuracy")
"""Results on the validation images after an epoch. Balanced accuracy is the mean of the classes' recalls."""


def column_of(select: str) -> str:
    """Return the column of metrics.csv that selects the best epoch."""
    return f"validation_{select.replace('-', '_')}"


class Row(TypedDict):
    """Results of an epoch, a row of metrics.csv. None: the network or run has no such number."""

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
    """Position and results of a run. A checkpoint holds them beside weights and moments."""

    epoch: Index = 0  # finished epochs
    batch: Index = 0  # finished batches of the current epoch
    step: Index = 0  # finished steps of all epochs
    seconds: Amount = 0.0  # of training and validation, over all starts of the run
    epoch_seconds: Amount = 0.0  # of the training steps of the current epoch
    sums: dict[str, Finite] = field(
        default_factory=lambda: dict.fromkeys(SUMS, 0.0)
    )  # of the current epoch, over all processes
    history: list[dict[str, Any]] = field(default_factory=list)  # the rows of metrics.csv
    peak_memory_mib: Amount | None = None  # of a process, up to the last checkpoint
    commands: list[str] = field(default_factory=list)  # that started and resumed the run
    commits: list[str | None] = field(default_factory=list)  # of the source tree, one for each command

    def best(self, select: str) -> dict[str, Any]:
        """Return the row of the best epoch on the validation images; without validation images, the last row."""
        if self.history[-1]["validation_loss"] is None:
            return self.history[-1]
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row[column_of(select)], -row["validation_loss"]))

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Add the row of the finished epoch and start the next epoch."""
        self.history.append(row)
        self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_seconds, self.sums = 0.0, dict.fromkeys(SUMS, 0.0)

    @classmethod
    def read(cls, contents: dict[str, Any], has_validation: bool) -> Self:
        """Read the progress from a checkpoint of a run with or without validation images.

        Raises:
            InputError: A value is missing, has a wrong type, is out of range, or contradicts another value.
        """
        check_contents("progress", contents, cls)
        if wrong := contents.keys() ^ cls.__dataclass_fields__.keys():
            raise InputError(f"its progress has wrong fields: {', '.join(sorted(map(str, wrong)))}")
        state = cls(**contents)
        for name in SUMS:
            if name not in state.sums:
                raise InputError(f"progress.sums has no {name}")
        for number, row in enumerate(state.history, 1):
            check_contents(f"row {number} of its history", row, Row)
            if row["epoch"] != number or any((row[name] is not None) != has_validation for name in VALIDATION_COLUMNS):
                raise InputError(f"row {number} of its history does not belong to epoch {number} of this run")
        if len(state.history) != state.epoch:
            raise InputError(
                f"it has finished {counted(state.epoch, 'epoch')}, but holds results of {len(state.history)}"
            )
        return state
