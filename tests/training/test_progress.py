"""Displays, loggers and stop signals."""

import re
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tiny_runs import judged
from torchcaps import signals
from torchcaps.errors import InputError
from torchcaps.training import PlainProgress, Progress, TerminalProgress
from torchcaps.training.progress import (
    NOTEBOOK_VARIABLES,
    choose_progress,
    duration,
    log_row,
    make_logger,
    noted_signals,
)
from torchcaps.training.state import VALIDATION_COLUMNS

ROW: dict[str, Any] = {"epoch": 2, "step": 12, "train_loss": 0.5, "train_accuracy": 0.75, "images_per_second": 1234.5}


@pytest.mark.parametrize(
    ("display", "between"),
    [(lambda: PlainProgress(0.0), True), (PlainProgress, False), (TerminalProgress, False)],
    ids=["a line a step", "plain", "terminal"],
)
def test_an_epoch_is_a_line(
    display: Any, between: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    progress, row = display(), ROW | judged(0.25, 0.875)
    progress.start(epochs=3, steps_per_epoch=6, done=0)
    progress.step(epoch=2, step=7, images_per_second=10.0, loss=0.5)
    progress.epoch(row | {"improved": True})
    progress.epoch(row | judged(0.25, 0.875, 0.5))
    progress.epoch(row | dict.fromkeys(VALIDATION_COLUMNS))
    progress.stop()
    said = capsys.readouterr().out
    assert said.count("/18  10 images/s  loss 0.5000  0 s, 0 s left") == between
    words = "loss 0.5000  train 75.00%  validation 87.50% (loss 0.2500)  1234 images/s  0 s, 0 s left  (improved)"
    assert f"epoch 2/3  {words}" in said
    assert "epoch 2/3  loss 0.5000  train 75.00%  1234 images/s  0 s, 0 s left" in said
    assert "validation 87.50% (balanced 50.00%, loss 0.2500)" in said


def test_lines_tell_the_time_passed_and_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run counts the steps of this process only."""
    clock = iter([0.0, 0.0, 30.0, 30.0, 30.0, 60.0, 60.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = PlainProgress(10.0)
    progress.start(epochs=2, steps_per_epoch=10, done=5)
    progress.step(epoch=1, step=10, images_per_second=1.0, loss=1.0)
    progress.epoch(ROW | dict.fromkeys(VALIDATION_COLUMNS) | {"step": 20})
    halfway, end = capsys.readouterr().out.splitlines()
    assert halfway.endswith("  30 s, 1 min 00 s left")
    assert end.endswith("images/s  1 min 00 s")


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_tells_the_time_left(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    progress = TerminalProgress()
    progress.start(epochs=1, steps_per_epoch=100, done=0)
    for step in range(1, 51):
        progress.step(epoch=1, step=step, images_per_second=10.0, loss=0.5)
    progress.stop()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).strip().splitlines()[-1]
    assert re.search(r"50/100 10 img/s  loss 0.5000 \d\d:\d\d left", last)


def test_the_base_class_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.start(epochs=1, steps_per_epoch=1, done=0)
    progress.step(epoch=1, step=1, images_per_second=1.0, loss=1.0)
    progress.epoch(ROW)
    progress.message("hello")
    progress.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, TerminalProgress), (False, PlainProgress)])
def test_the_display_suits_the_output(is_terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", *NOTEBOOK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert type(choose_progress()) is kind
    for name, value in (("TERM", "dumb"), *((name, "1") for name in NOTEBOOK_VARIABLES)):  # as in ! of a notebook
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert type(choose_progress()) is PlainProgress
    monkeypatch.setattr(sys, "stdout", None)  # a program without a console
    assert type(choose_progress()) is PlainProgress


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (7.4, "7 s"), (59.6, "1 min 00 s"), (130, "2 min 10 s"), (3599.5, "1 h 00 min"), (3900, "1 h 05 min")],
)
def test_a_duration_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Logger:
    """Remembers rows, and the folder that it gets."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir, self.rows, self.saved = save_dir, list[Any](), 0

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def save(self) -> None:
        self.saved += 1


def test_a_logger_gets_the_folder_and_the_rows(tmp_path: Path) -> None:
    logger: Any = make_logger(f"{__name__}.Logger", tmp_path)
    assert logger.save_dir == tmp_path
    log_row(logger, {"epoch": 2, "step": 12, "train_loss": 0.5, "validation_balanced_accuracy": None, "seconds": 3.0})
    assert logger.rows == [(12, {"train/loss": 0.5, "seconds": 3.0})]
    assert logger.saved == 1


@pytest.mark.parametrize("name", ["no_such", "torchcaps.NoSuch", "nowhere.Logger", ""])
def test_a_logger_that_does_not_exist_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"logger must be tensorboard or PACKAGE.CLASS, got '{name}'"):
        make_logger(name, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_handlers_come_back(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    before = signal.signal(number, lambda number, _: calls.append(number))
    try:
        with noted_signals() as received:
            for _ in range(3):
                signal.raise_signal(number)
            assert (received, calls) == ([number], []), "three at once are one stop"
            monkeypatch.setattr(signals, "REPEAT_SECONDS", 0)
            signal.raise_signal(number)
            assert calls == [number], "a later signal has its normal effect"
        signal.raise_signal(number)
        assert calls == [number] * 2
    finally:
        signal.signal(number, before)


def test_a_reaction_is_called_at_every_signal() -> None:
    calls: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with noted_signals(lambda: calls.append(1)) as received:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert (received, calls) == ([signal.SIGINT] * 2, [1, 1])
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), list[Any]()

    def work() -> None:
        with noted_signals() as received:
            found.append((list(received), signal.getsignal(signal.SIGINT)))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [([], before)]
