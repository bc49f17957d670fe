"""Where a run is, and what it has seen so far: what a checkpoint holds besides weights and moments."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchcaps.errors import InputError
from torchcaps.files import COUNT, NUMBER

#: The columns of metrics.csv: integers, and numbers; one of these is None for a network without a decoder.
COUNTS = ("epoch", "step")
NUMBERS = (
    "seconds",
    "images_per_second",
    "learning_rate",
    "train_loss",
    "train_classification_loss",
    "train_reconstruction_loss",
    "train_accuracy",
    "validation_loss",
    "validation_accuracy",
)
OF_DECODER = "train_reconstruction_loss"


@dataclass
class EpochSums:
    """Sums over the images of the running epoch."""

    images: int = 0
    loss: float = 0.0
    classification_loss: float = 0.0
    reconstruction_loss: float = 0.0
    correct: float = 0.0


@dataclass
class Position:
    """Where a run is, and what it has seen so far."""

    epoch: int = 0
    """Finished epochs."""
    batch: int = 0
    """Finished batches of the running epoch."""
    step: int = 0
    """Finished steps."""
    seconds: float = 0.0
    """Spent in training and validation, over all sittings."""
    epoch_seconds: float = 0.0
    """Spent in the training steps of the running epoch."""
    sums: EpochSums = field(default_factory=EpochSums)
    history: list[dict[str, Any]] = field(default_factory=list)
    """The rows of metrics.csv."""
    peak_memory_mib: float | None = None
    """Of a process, over all sittings up to the last checkpoint; None where unknown."""
    commands: list[str] = field(default_factory=list)
    """What started the run, and what it went on with."""
    commits: list[str | None] = field(default_factory=list)
    """Of the source tree at each of these starts; None where torchcaps is installed, or where it was not noted."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            InputError: The values are not those of a position.
        """
        try:
            position = cls(**{**values, "sums": EpochSums(**values["sums"])})
        except (TypeError, KeyError) as error:
            raise InputError(f"the run's checkpoint is not of this version of torchcaps: {error}") from None
        if (wrong := position._wrong_field()) is not None:
            raise InputError(f"the run's checkpoint is none of torchcaps: its {wrong} is not valid")
        return position

    def _wrong_field(self) -> str | None:
        """The first field with an impossible value."""
        for name in ("epoch", "batch", "step"):
            if not COUNT.fits(getattr(self, name)):
                return name
        for name in ("seconds", "epoch_seconds"):
            if not NUMBER.fits(getattr(self, name)):
                return name
        sums = dataclasses.asdict(self.sums)
        if not COUNT.fits(sums.pop("images")) or not all(map(NUMBER.fits, sums.values())):
            return "sums"
        if not isinstance(self.history, list) or not all(
            _is_row(row, epoch) for epoch, row in enumerate(self.history, start=1)
        ):
            return "history"
        if self.peak_memory_mib is not None and not NUMBER.fits(self.peak_memory_mib):
            return "peak_memory_mib"
        if not isinstance(self.commands, list) or not all(isinstance(each, str) for each in self.commands):
            return "commands"
        if not isinstance(self.commits, list) or not all(
            each is None or isinstance(each, str) for each in self.commits
        ):
            return "commits"
        return None if len(self.history) == self.epoch else "history"

    def best(self, select: str) -> dict[str, Any]:
        """The row of the epoch that the validation images chose."""
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))

    def note_start(self, command: str, commit: str | None) -> None:
        """Remember what started a sitting, and the code that it runs: at its end there may be another commit."""
        not_noted: list[str | None] = [None] * (len(self.commands) - len(self.commits))  # by an earlier version
        self.commits += [*not_noted, commit]
        self.commands.append(command)

    def note_peak(self, mib: float | None) -> None:
        """Remember how much memory this sitting's process has needed so far."""
        known = [each for each in (self.peak_memory_mib, mib) if each is not None]
        self.peak_memory_mib = max(known, default=None)

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Add the row of the epoch that is done, and stand at the beginning of the next one."""
        self.history.append(row)
        self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_seconds, self.sums = 0.0, EpochSums()

    def metrics(self) -> str:
        """The text of metrics.csv: a line an epoch."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self.history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.history)
        return text.getvalue()


def _is_row(row: object, epoch: int) -> bool:
    """Whether this is the row of an epoch, counted from 1."""
    if not isinstance(row, Mapping) or row.keys() != {*COUNTS, *NUMBERS} or row["epoch"] != epoch:
        return False
    return all(COUNT.fits(row[name]) for name in COUNTS) and all(
        NUMBER.fits(row[name]) or (name == OF_DECODER and row[name] is None) for name in NUMBERS
    )
