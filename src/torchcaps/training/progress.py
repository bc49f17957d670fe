"""Display of the progress, loggers, and stop signals. This file does not import torch."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchcaps import signals
from torchcaps.errors import InputError, install, reason_of
from torchcaps.tasks import find_task, task_of

if TYPE_CHECKING:
    from lightning_fabric.loggers.logger import Logger
    from torch import nn


NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "COLAB_RELEASE_TAG")
"""Environment variables of commands that a notebook runs. They have a terminal, but it shows each refresh of a bar."""


class Progress:
    """Base class of displays. The training loop calls its methods. Subclass it for another display.

    Methods that a subclass does not override show nothing.
    """

    def network(self, network: nn.Module) -> None:
        """Called before :meth:`start` with the trained network. Read it between steps, but do not change it."""

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Called when the run starts, or resumes after ``done`` steps."""

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Called after a step. ``step`` counts the steps of the run, ``epoch`` counts from 1."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Called after an epoch with its row of metrics.csv and ``"improved"``, True if it is the best so far.

        The recipe's ``select`` names the validation metric for this. The first epoch is always the best so far.
        """

    def message(self, text: str) -> None:
        """Called with a message for the user."""

    def stop(self) -> None:
        """Called at the end of the run, even after an error."""


class PlainProgress(Progress):
    """Plain lines for logs and pipes: one after each epoch, and one every ``interval`` seconds in between."""

    def __init__(self, interval: float = 30.0) -> None:
        self.interval, self._last, self._metric = interval, time.monotonic(), find_task(None).metric

    def network(self, network: nn.Module) -> None:
        """Remember the metric of the network's task."""
        self._metric = task_of(network).metric

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Remember the numbers of epochs and steps, and the time."""
        self._epochs, self._total = epochs, epochs * steps_per_epoch
        self._started, self._begun = time.monotonic(), done

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Print a line if the last one is old enough."""
        if time.monotonic() - self._last >= self.interval:
            self._last, place = time.monotonic(), f"epoch {epoch}/{self._epochs}  step {step}/{self._total}"
            self.message(f"{place}  {images_per_second:.0f} images/s  loss {loss:.4f}  {self._times(step)}")

    def _times(self, step: int) -> str:
        """Return the time since the start of this process, and the time left at its mean speed."""
        elapsed = time.monotonic() - self._started
        left = elapsed * (self._total - step) / max(step - self._begun, 1)
        return duration(elapsed) + f", {duration(left)} left" * (step < self._total)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Print the results of the epoch."""
        self._last, validated, show = time.monotonic(), "", self._metric.say
        if row["validation_loss"] is not None:
            balanced = row["validation_balanced_accuracy"]
            is_even = abs(balanced - row["validation_accuracy"]) < 0.01
            balanced = "" if is_even else f"balanced {show(balanced)}, "
            validated = f"validation {show(row['validation_accuracy'])} ({balanced}loss {row['validation_loss']:.4f})  "
        self.message(
            f"epoch {row['epoch']}/{self._epochs}  loss {row['train_loss']:.4f}  train {show(row['train_accuracy'])}  "
            f"{validated}{row['images_per_second']:.0f} images/s  {self._times(row['step'])}"
            f"{'  (improved)' if row.get('improved') else ''}"
        )

    def message(self, text: str) -> None:
        """Print a line, without buffering."""
        print(text, flush=True)


class TerminalProgress(PlainProgress):
    """A live bar with epoch, step, images/s, loss and the time left; finished epochs scroll up above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} img/s  loss {task.fields[loss]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("left"),
            speed_estimate_period=300.0,  # seconds; a validation between epochs takes part in the mean
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
        """End the live display."""
        self._bar.stop()


def choose_progress() -> Progress:
    """Return a live display if the output is a terminal outside a notebook, else plain lines."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalProgress() if is_terminal and os.environ.keys().isdisjoint(NOTEBOOK_VARIABLES) else PlainProgress()


def duration(seconds: float) -> str:
    """Format seconds as ``1 h 05 min``, ``2 min 10 s`` or ``7 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def make_logger(name: str, out: Path) -> Logger:
    """Create a logger. If it takes ``root_dir`` or ``save_dir``, it gets the run folder.

    Args:
        name: ``tensorboard``, or the ``PACKAGE.CLASS`` of a Lightning logger.
        out: The run folder.

    Raises:
        InputError: The class does not exist, or its package is not installed.
    """
    options: dict[str, Any] = {"root_dir": out, "save_dir": out}
    path, advice = name, ""
    if name == "tensorboard":
        path, advice = "lightning_fabric.loggers.TensorBoardLogger", f"; {install(name)}"
        options |= {"name": name, "version": ""}
    module, _, cls = path.rpartition(".")
    try:
        kind: type[Logger] = getattr(importlib.import_module(module), cls)
        return kind(**{key: each for key, each in options.items() if key in inspect.signature(kind).parameters})
    except (ImportError, AttributeError, ValueError) as error:
        words = f"logger must be tensorboard or PACKAGE.CLASS, got {name!r}"
        raise InputError(f"{words}: {reason_of(error)}{advice}") from None


def log_row(logger: Logger, row: Mapping[str, Any]) -> None:
    """Log a row of metrics.csv at its step, with names such as ``train/loss`` for ``train_loss``."""
    metrics = {name.replace("_", "/", 1): each for name, each in row.items() if name not in ("epoch", "step")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as about the files of a resumed run
        logger.log_metrics({name: each for name, each in metrics.items() if each is not None}, step=row["step"])
        logger.save()


@contextmanager
def noted_signals(react: Callable[[], object] | None = None) -> Iterator[list[int]]:
    """Collect the numbers of stop signals in a list. The code in the context must check the list and stop.

    Signals arrive only in the main thread. In another thread, the list stays empty.

    Args:
        react: Function to call at every signal. None: a second signal, after ``REPEAT_SECONDS``, has its normal effect.
    """
    received: list[int] = []
    first = 0.0
    previous: dict[signal.Signals, Any] = {}

    def restore_handlers() -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  signature of signal handlers
        nonlocal first
        if react is not None:
            received.append(number)
            react()
        elif not received:
            first = time.monotonic()
            received.append(number)
        elif time.monotonic() - first > signals.REPEAT_SECONDS:  # an earlier one belongs to the same stop
            restore_handlers()
            signal.raise_signal(number)

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield received
    finally:
        restore_handlers()
