"""``main``: runs a command and turns whatever goes wrong into one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from torchcaps._version import __version__
from torchcaps.cli.base import Group, Session, Stopped
from torchcaps.cli.show import is_main_process, say
from torchcaps.errors import InputError, reason_of, visible
from torchcaps.plugins import place_in_plugin

COMMANDS = {
    "train": ("train", "Train a network and test it."),
    "evaluate": ("measure", "Accuracy, error, loss, each class, confusion matrix."),
    "predict": ("look", "Classify image files."),
    "reconstruct": ("look", "Images above their reconstructions."),
    "perturb": ("look", "What each component of a capsule encodes."),
    "routing": ("look", "Where each class takes its input from."),
    "curves": ("look", "Loss and error of each epoch, of one run or several."),
    "presets": ("presets", "The published networks and how they differ."),
    "datasets": ("datasets", "The data sets and which of them are here."),
    "export": ("export", "Write an ONNX file, a torch program, or a folder to pass on."),
    "share": ("export", "Put a network and its model card on the Hugging Face hub."),
    "explore": ("explore", "Draw, and watch the capsules respond, in the browser."),
    "robustness": ("measure", "Accuracy on rotated and on adversarially changed images."),
    "probe": ("measure", "What a pose knows: factors of images read off it."),
    "detect": ("measure", "Images unlike those that were trained on: how many are found."),
}
"""The module of each command, and a line of help."""
WRONG_INPUT, BUG, INTERRUPTED = 2, 70, 130
# torch's words on the CPU, MPS and CUDA
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate memory|out of memory", re.IGNORECASE)


@click.group(cls=Group, later=COMMANDS, invoke_without_command=True)
@click.version_option(__version__, "--version", prog_name="torchcaps")
@click.pass_context
def app(context: click.Context) -> None:
    """Capsule networks with dynamic routing: train, judge, and see what each capsule encodes.

    Start with `torchcaps train`: it trains the paper's network on embedded digits, without any download.
    """
    if context.invoked_subcommand is None:
        say(*context.get_help().split("\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What stands after ``torchcaps``; the process's own arguments if None.

    Returns:
        The exit code: 0 done; 1 the training diverged; 2 wrong input, a file that cannot be used, or too little
        memory; 70 a bug in torchcaps; 130 interrupted by Ctrl-C, 143 by SIGTERM.

    Raises:
        SystemExit: With code 1, when the reader of the output (such as ``head``) has gone away.
    """
    session = Session(tuple(sys.argv[1:] if arguments is None else arguments))
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-; else the next file that is opened would take its number
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115  it stays open
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?" instead of failing
            stream.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app.main(args=list(session.arguments), prog_name="torchcaps", standalone_mode=False, obj=session)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and place_in_plugin(error) is None:
            raise
        if session.debug:
            say(*"".join(traceback.format_exception(error)).splitlines(), err=True)
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: BaseException) -> int:
    """Say in one line what went wrong; the exit code."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _say("Interrupted.")
        return INTERRUPTED
    if isinstance(error, Stopped):
        # codes above 128 are those of signals: what the user asked for is no error
        (_say if error.exit_code > 128 else _say_error)(*error.message.split("\n"))
        return error.exit_code
    code, lines = WRONG_INPUT, [reason_of(error)]
    if isinstance(error, InputError):
        lines = [str(error)]
    elif isinstance(error, click.ClickException):
        lines = error.format_message().split("\n")
    elif isinstance(error, OSError):
        lines = [describe_os_error(error)]
    elif is_out_of_memory(error):
        lines = ["there is not enough memory; take a smaller --batch-size, smaller images or a smaller network"]
    elif (place := place_in_plugin(error)) is not None:
        lines = [f"{place}: {type(error).__name__}: {reason_of(error)}; --debug shows the traceback"]
    else:
        code = BUG
        report = "This is a bug in torchcaps, please report it with the command; --debug shows the traceback."
        lines = [f"{type(error).__name__}: {reason_of(error)}", report]
    _say_error(*lines)
    return code


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch says so by a RuntimeError, on the CPU a plain one that only its words tell."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


def describe_os_error(error: OSError) -> str:
    """What the system says of a file, in one sentence that names it."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        reason = "no space left on the device; make room, or choose another place"
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the place in a library that Python would name."""
    _say(f"Warning: {message}")


def _say_error(*lines: str) -> None:
    _say(*lines, before=click.style("Error:", fg="red", bold=True) + " ")


def _say(*lines: str, before: str = "") -> None:
    if is_main_process():  # the other processes of a run meet the same errors
        click.echo(before + "\n".join(map(visible, lines)), err=True)
