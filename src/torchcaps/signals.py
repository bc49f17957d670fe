"""Ctrl-C that is sent several times at once, by a nervous user or by a terminal and a parent process, is one stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_SECONDS = 1.0
"""Time after a signal in which further ones belong to the same stop, seconds."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first SIGINT only, so that the code that ends the process is not interrupted.

    A later SIGINT, after ``REPEAT_SECONDS``, ends the process at once. In other threads than the main one, and if
    SIGINT has another handler than Python's, nothing is changed.
    """
    first: float | None = None

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  signature of signal handlers
        nonlocal first
        if first is None:
            first = time.monotonic()
            # an interrupt that comes in a destructor is printed by this hook, with a traceback
            sys.unraisablehook = lambda unraisable: (
                None if unraisable.exc_type is KeyboardInterrupt else sys.__unraisablehook__(unraisable)
            )
            raise KeyboardInterrupt
        if time.monotonic() - first > REPEAT_SECONDS:
            os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        if first is None:  # else further signals may come until the process has ended
            signal.signal(signal.SIGINT, signal.default_int_handler)
