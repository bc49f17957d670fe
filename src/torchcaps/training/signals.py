"""The signals that stop a run: Ctrl-C and SIGTERM. Nothing here imports torch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
        if react is None:
            put_back()
        else:
            react()

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield received
    finally:
        put_back()
