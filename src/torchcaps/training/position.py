"""Where a run is, and what it has seen so far: what a checkpoint holds besides weights and moments."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any

from torchcaps.errors import InputError


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
            return cls(**{**values, "sums": EpochSums(**values["sums"])})
        except (TypeError, KeyError) as error:
            raise InputError(f"the run's checkpoint is not of this version of torchcaps: {error}") from None

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
