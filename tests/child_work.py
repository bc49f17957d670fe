"""Functions that tests call in another process, which must be able to import them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torchcaps.errors import InputError
from torchcaps.training.signals import noted_signals


def answer(number: int, *, plus: int) -> tuple[int, int]:
    """Which process it is, and a sum."""
    return os.getpid(), number + plus


def fail(message: str) -> None:
    """An error of the user's."""
    raise InputError(message)


def die() -> None:
    """As the system ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_signal(started: str, stopped: str) -> None:
    """Go on until a SIGTERM comes, then write a file as a run writes its checkpoint."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    Path(started).touch()
    while not received:
        time.sleep(0.01)
    Path(stopped).touch()


def wait_for_two_signals(started: str, noted: str) -> None:
    """Note the first signal as a run does, and go on; the second one acts as usual."""
    with noted_signals() as received:
        Path(started).touch()
        while True:
            if received:
                Path(noted).touch()
            time.sleep(0.01)
