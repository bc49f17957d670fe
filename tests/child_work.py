"""Functions that tests call in another process, which must be able to import them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torchcaps.errors import InputError
from torchcaps.training.signals import noted_signals


def answer(number: int) -> tuple[int, int]:
    """The number of the process, and the next number."""
    return os.getpid(), number + 1


def threads(_: object) -> str | None:
    """How many threads the environment asks for."""
    return os.environ.get("OMP_NUM_THREADS")


def fail(message: str) -> None:
    """Raise an error of the user's."""
    raise InputError(message)


def die_at(number: int, fatal: int = 1) -> int:
    """Return a number, or end as the system ends a process that takes too much memory."""
    if number == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for_a_signal(folder: str) -> None:
    """Go on until a SIGTERM comes, then write a file as a run writes its checkpoint."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    Path(folder, "started").touch()
    while not received:
        time.sleep(0.01)
    Path(folder, "stopped").touch()


def number_or_wait(argument: int | str) -> int | None:
    """The next number; or go on until a SIGTERM comes, where a folder is given."""
    if isinstance(argument, int):
        return argument + 1
    wait_for_a_signal(argument)
    return None


def wait_for_two_signals(folder: str) -> None:
    """Note the first signal as a run does, and go on; the second one acts as usual."""
    with noted_signals() as received:
        Path(folder, "started").touch()
        while True:
            if received:
                Path(folder, "noted").touch()
            time.sleep(0.01)
