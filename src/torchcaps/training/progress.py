"""How a run shows its progress: a live display on a terminal, plain lines elsewhere, and TensorBoard events."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError, install

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from torchcaps.models import Network


class Progress:
    """Shows the progress of a run; the training loop calls its methods. Subclass it for a display of your own.

    A method that a subclass does not override shows nothing.
    """

    def network(self, network: Network) -> None:
        """Called before :meth:`start` with the network that is trained, to be read between steps and left as it is."""

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Called when the run begins, or goes on after ``done`` steps."""

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Called after a step: ``step`` of all, in ``epoch`` (from 1), with its loss."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Called after an epoch with its row of metrics.csv and ``"improved"``: whether it is the best one so far.

        The validation images decide that, by the recipe's ``select``; the first epoch always is the best so far.
        """

    def message(self, text: str) -> None:
        """Called with a text for the user."""

    def stop(self) -> None:
        """Called when the run ends, also after an error."""


class Silence(Progress):
    """Shows nothing: for processes other than the first, and for tests."""


class PlainProgress(Progress):
    """Prints a line an epoch, and one every half minute between, for logs and pipes.

    Args:
        interval: Shortest time between two lines within an epoch, seconds.
    """

    def __init__(self, interval: float = 30.0) -> None:
        self.interval = interval
        self._last = time.monotonic()

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Remember the totals, and where and when the run goes on."""
        self._epochs, self._total = epochs, epochs * steps_per_epoch
        self._done, self._begin = done, time.monotonic()

    def _left(self, step: int) -> str:
        """The time left, in words, estimated from the steps since the start."""
        if step <= self._done:
            return "?"
        return duration((time.monotonic() - self._begin) / (step - self._done) * (self._total - step))

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Print a line if the last one is old enough."""
        if time.monotonic() - self._last < self.interval:
            return
        self._last = time.monotonic()
        self.message(
            f"epoch {epoch}/{self._epochs}  step {step}/{self._total}  {images_per_second:.0f} images/s  "
            f"loss {loss:.4f}  {self._left(step)} left"
        )

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Print a line."""
        self._last = time.monotonic()
        self.message(f"epoch {row['epoch']}/{self._epochs}  {describe(row)}")

    def message(self, text: str) -> None:
        """Print a line, without buffering."""
        print(text, flush=True)


class TerminalProgress(PlainProgress):
    """A live bar with epoch, step, images/s, loss and time left; finished epochs scroll up above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} img/s  loss {task.fields[loss]}  {task.fields[left]} left"),
        )

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Show the bar."""
        super().start(epochs=epochs, steps_per_epoch=steps_per_epoch, done=done)
        self._task = self._bar.add_task(
            "", total=self._total, completed=done, epoch=1, epochs=epochs, rate=0.0, loss="–", left="?"
        )
        self._bar.start()

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Move the bar."""
        left = self._left(step)
        self._bar.update(self._task, completed=step, epoch=epoch, rate=images_per_second, loss=f"{loss:.4f}", left=left)

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()


def choose_progress() -> Progress:
    """A live display if the output is a terminal, else plain lines."""
    return TerminalProgress() if sys.stdout.isatty() else PlainProgress()


def duration(seconds: float) -> str:
    """Seconds in words: ``1 h 05 min``, ``2 min 10 s``, ``7 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def describe(row: Mapping[str, Any]) -> str:
    """An epoch's metrics in words, and whether it is better than all epochs before it."""
    return (
        f"loss {row['train_loss']:.4f}  train {row['train_accuracy']:.2%}  "
        f"validation {row['validation_accuracy']:.2%} (loss {row['validation_loss']:.4f})  "
        f"{row['images_per_second']:.0f} images/s{'  (improved)' if row.get('improved') else ''}"
    )


class Events:
    """Writes each epoch's metrics as TensorBoard events.

    Args:
        out: The run folder.
        wanted: Whether to write events at all.
    """

    def __init__(self, out: Path, wanted: bool) -> None:
        self._writer: SummaryWriter | None = None
        if wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(out / "tensorboard"))

    @staticmethod
    def check() -> None:
        """Raise InputError if TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError(f"--tensorboard needs the package tensorboard: {install('tensorboard')}")

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Write an epoch's metrics."""
        if self._writer is None:
            return
        for name, value in row.items():
            if name not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(name.replace("_", "/", 1), value, row["step"])
        self._writer.flush()
