"""What a run shows, where it logs, and the signals that stop it. Nothing here imports torch."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError, install, reason_of
from torchcaps.tasks import find_task, task_of

if TYPE_CHECKING:
    from lightning_fabric.loggers.logger import Logger
    from torch import nn


class Progress:
    """Shows the progress of a run; the training loop calls its methods. Subclass it for a display of your own.

    A method that a subclass does not override shows nothing.
    """

    def network(self, network: nn.Module) -> None:
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


class PlainProgress(Progress):
    """Prints a line an epoch, and one every half minute (``interval``, seconds) between, for logs and pipes."""

    def __init__(self, interval: float = 30.0) -> None:
        self.interval, self._last, self._metric = interval, time.monotonic(), find_task(None).metric

    def network(self, network: nn.Module) -> None:
        """Remember the metric of the network's task."""
        self._metric = task_of(network).metric

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:  # noqa: ARG002  the call all share
        """Remember the totals."""
        self._epochs, self._total = epochs, epochs * steps_per_epoch

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Print a line if the last one is old enough."""
        if time.monotonic() - self._last >= self.interval:
            self._last, place = time.monotonic(), f"epoch {epoch}/{self._epochs}  step {step}/{self._total}"
            self.message(f"{place}  {images_per_second:.0f} images/s  loss {loss:.4f}")

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Print a line."""
        self._last, judged, show = time.monotonic(), "", self._metric.say
        if row["validation_loss"] is not None:
            balanced = row["validation_balanced_accuracy"]
            is_even = abs(balanced - row["validation_accuracy"]) < 0.01
            balanced = "" if is_even else f"balanced {show(balanced)}, "
            judged = f"validation {show(row['validation_accuracy'])} ({balanced}loss {row['validation_loss']:.4f})  "
        self.message(
            f"epoch {row['epoch']}/{self._epochs}  loss {row['train_loss']:.4f}  train {show(row['train_accuracy'])}  "
            f"{judged}{row['images_per_second']:.0f} images/s{'  (improved)' if row.get('improved') else ''}"
        )

    def message(self, text: str) -> None:
        """Print a line, without buffering."""
        print(text, flush=True)


class TerminalProgress(PlainProgress):
    """A live bar with epoch, step, images/s and loss; finished epochs scroll up above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} img/s  loss {task.fields[loss]}"),
        )

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Show the bar."""
        super().start(epochs=epochs, steps_per_epoch=steps_per_epoch, done=done)
        first: dict[str, Any] = {"epoch": 1, "epochs": epochs, "rate": 0.0, "loss": "–"}
        self._task = self._bar.add_task("", total=self._total, completed=done, **first)
        self._bar.start()

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, epoch=epoch, rate=images_per_second, loss=f"{loss:.4f}")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()


def choose_progress() -> Progress:
    """A live display if the output is a terminal, else plain lines."""
    return TerminalProgress() if sys.stdout is not None and sys.stdout.isatty() else PlainProgress()


def duration(seconds: float) -> str:
    """Seconds in words: ``1 h 05 min``, ``2 min 10 s``, ``7 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def make_logger(name: str, out: Path) -> Logger:
    """A logger of a run folder, which it is given as ``root_dir`` or ``save_dir``.

    Args:
        name: ``tensorboard``, or any of Lightning's by ``PACKAGE.CLASS``.
        out: The run folder.

    Raises:
        InputError: There is no such class, or its package is not installed.
    """
    options: dict[str, Any] = {"root_dir": out, "save_dir": out}
    path, needed = name, ""
    if name == "tensorboard":
        path, needed = "lightning_fabric.loggers.TensorBoardLogger", f"; {install(name)}"
        options |= {"name": name, "version": ""}
    module, _, cls = path.rpartition(".")
    try:
        kind: type[Logger] = getattr(importlib.import_module(module), cls)
        return kind(**{key: each for key, each in options.items() if key in inspect.signature(kind).parameters})
    except (ImportError, AttributeError, ValueError) as error:
        words = f"logger must be tensorboard or PACKAGE.CLASS, got {name!r}"
        raise InputError(f"{words}: {reason_of(error)}{needed}") from None


def log_row(logger: Logger, row: Mapping[str, Any]) -> None:
    """Hand an epoch's row of metrics.csv to a logger: ``train_loss`` as ``train/loss``, at the row's step."""
    metrics = {name.replace("_", "/", 1): each for name, each in row.items() if name not in ("epoch", "step")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as about a folder that is not empty when a run goes on
        logger.log_metrics({name: each for name, each in metrics.items() if each is not None}, step=row["step"])
        logger.save()


@contextmanager
def noted_signals(react: Callable[[], object] | None = None) -> Iterator[list[int]]:
    """Note the numbers of stop signals in a list instead of stopping; the code in the context must look at the list.

    Outside the main thread, where no signal arrives, the list stays empty.

    Args:
        react: Called at every signal. Without it, only the first signal is noted, and a second one acts as usual.
    """
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def put_back() -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature signal handlers have
        received.append(number)
        put_back() if react is None else react()

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield received
    finally:
        put_back()
