"""Run a command; report an error as one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchcaps._version import __version__
from torchcaps.cli.options import SETTINGS, debug_option
from torchcaps.cli.show import is_main_process, say
from torchcaps.errors import InputError, reason_of, unknown_name, visible
from torchcaps.plugins import place_in_plugin

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "train": ("train", "Train a network and test it."),
    "evaluate": ("measure", "Measure accuracy, loss, each class, confusion matrix."),
    "predict": ("predict", "Classify image files."),
    "reconstruct": ("look", "Draw images above their reconstructions."),
    "perturb": ("look", "Draw the effect of each component of a capsule."),
    "routing": ("look", "Draw which input capsules each class listens to."),
    "curves": ("look", "Draw loss and error of each epoch, of one run or several."),
    "presets": ("presets", "List the published networks and how they differ."),
    "datasets": ("datasets", "List the data sets and which are on this machine."),
    "export": ("export", "Write an ONNX file, a torch program, or a folder to share."),
    "share": ("export", "Put a network and its model card on the Hugging Face hub."),
    "explore": ("explore", "Draw in the browser and watch the capsules respond."),
    "robustness": ("measure", "Measure accuracy on rotated and on attacked images."),
    "probe": ("measure", "Linear probes: how well a pose encodes rotation, scale and other factors."),
    "detect": ("measure", "Detection rate of out-of-distribution and attacked images."),
    "check": ("check", "Look for known mistakes in anybody's capsule code."),
}
"""Module and one-line help of each command."""
DIVERGED, WRONG_INPUT, BUG, INTERRUPTED = 1, 2, 70, 130
# torch reports exhausted memory by these words on the CPU, MPS and CUDA
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate memory|out of memory", re.IGNORECASE)


class Group(click.Group):
    """Import each command when it is called; for an unknown one, suggest the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name in COMMANDS:
            module = importlib.import_module(f"torchcaps.cli.{COMMANDS[cmd_name][0]}")
            command: click.Command = getattr(module, cmd_name)
            return command
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        raise unknown_name("command", cmd_name, COMMANDS)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002  click's
        """Return the commands that begin with ``incomplete``, without importing them."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's
        """Write one line for each command, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


@click.group(cls=Group, invoke_without_command=True, context_settings=SETTINGS, params=[debug_option()])
@click.version_option(__version__, "--version", prog_name="torchcaps")
@click.pass_context
def app(context: click.Context) -> None:
    """Capsule networks with dynamic routing: train, test, and look into capsules.

    Start with `torchcaps train`: it trains a small network on built-in digits, in a minute and without any download.
    """
    if context.invoked_subcommand is None:
        say(*context.get_help().split("\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after ``torchcaps``; None: the arguments of this process.

    Returns:
        The exit code: 0 done; 1 the training diverged, or check found an error; 2 wrong input, a file that cannot be
        used, or too little memory; 70 a bug in torchcaps; 130 interrupted by Ctrl-C, 143 by SIGTERM.

    Raises:
        SystemExit: With code 1, if the reader of the output (such as ``head``) has closed it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by >&-; the next file opened would otherwise take its number
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115  stays open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for a character that the terminal lacks
            stream.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warn_once = cache(_say)  # several files may have one fault
            warnings.showwarning = lambda message, *_, **__: warn_once(f"Warning: {message}")
            code = app.main(args=words, prog_name="torchcaps", standalone_mode=False, obj=tuple(words))
            return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and place_in_plugin(error) is None:
            raise
        if "--debug" in words:
            say(*"".join(traceback.format_exception(error)).splitlines(), err=True)
        code, *lines = describe(error)
        # codes above 128 report a signal, such as Ctrl-C, which is not an error
        _say(*lines, before="" if code > 128 else click.style("Error:", fg="red", bold=True) + " ")
        return code


def describe(error: BaseException) -> tuple[int, *tuple[str, ...]]:
    """Return the exit code of an error, and one or two lines that say what went wrong."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED, "Interrupted."
    if isinstance(error, click.ClickException):
        return WRONG_INPUT, *error.format_message().split("\n")
    if isinstance(error, InputError):
        return WRONG_INPUT, *re.split(r"\n(?=  )", str(error))  # a list of damaged images
    if isinstance(code := getattr(error, "exit_code", None), int):  # a stopped or a diverged run
        return code, str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = "no space left on the device; free some space or choose another folder"
        return WRONG_INPUT, reason if error.filename is None else f"{error.filename}: {reason}"
    # torch raises a plain RuntimeError if the CPU's memory is exhausted; only its message tells
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
        advice = "use a smaller --batch-size, smaller images or a smaller network"
        return WRONG_INPUT, f"there is not enough memory; {advice}"
    said = f"{type(error).__name__}: {reason_of(error)}"
    if (place := place_in_plugin(error)) is not None:
        return WRONG_INPUT, f"{place}: {said}; --debug shows the traceback"
    report = "This is a bug in torchcaps, please report it with the command; --debug shows the traceback."
    return BUG, said, report


def _say(*lines: str, before: str = "") -> None:
    if is_main_process():  # other processes of a distributed run have the same errors
        click.echo(before + "\n".join(map(visible, lines)), err=True)
