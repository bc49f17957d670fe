"""A function called in a process of its own, so that each run has its own peak memory and no run can break the next."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, ParamSpec, TypeVar, cast

from torchcaps.training.signals import noted_signals

P = ParamSpec("P")
T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818  no error: the user asked for it
    """A signal stopped the work; what was done is kept.

    Args:
        exit_code: 128 + the signal's number.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def in_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a fresh process; what it returns or raises is as if it had been called here.

    Ctrl-C and SIGTERM are passed on to it as a SIGTERM, and it is waited for. A run that trains writes its checkpoint
    then; a second signal ends it at once, as it does ``torchcaps train``; each file is then as it was, or whole.

    Args:
        function: One that can be pickled, as can what it takes, returns and raises.
        *args: For the function.
        **kwargs: For the function.

    Raises:
        Interrupted: A signal stopped it.
        ChildProcessError: The process was killed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, function, args, kwargs))

    def forward() -> None:
        if process.is_alive():
            process.terminate()

    with noted_signals(forward) as received:
        _start(process)
        sender.close()
        if received:  # between the handlers and the start
            process.terminate()
        try:
            returned, value = receiver.recv()
        except EOFError:  # it ended without an answer
            returned, value = False, None
        process.join()
    if received:
        raise Interrupted(128 + received[0])
    if returned:
        return cast(T, value)
    if value is None:
        raise ChildProcessError(
            f"the process of a run ended with code {process.exitcode} before its work was done, perhaps for want of "
            "memory; the same command goes on from there"
        )
    raise value


def _serve(
    sender: Connection[Any, Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches the parent alone, which passes it on
    try:
        answer = True, function(*args, **kwargs)
    except Exception as error:
        error.add_note(traceback.format_exc())  # pickling leaves the traceback out
        answer = False, error
    sender.send(answer)


def _start(process: SpawnProcess) -> None:
    """Start a process that does not hear Ctrl-C before it has a process group of its own."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: signals go elsewhere
        process.start()
        return
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, previous)
