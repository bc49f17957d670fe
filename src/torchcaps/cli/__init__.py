"""The command line: ``torchcaps``, or ``python -m torchcaps``.

Commands read options, call :mod:`torchcaps.training`, :mod:`torchcaps.analysis` and :mod:`torchcaps.datasets`, and
print the results. A command is imported when it is called, and imports heavy packages only after it has read its
options, so ``--help`` and a mistyped option are answered at once. Only ``train`` and ``presets`` need all parts, so
they first import torch, which takes about a second.
"""

import os
import sys
from collections.abc import Sequence

from torchcaps.errors import install
from torchcaps.signals import one_interrupt

WAITING_TURNS = "1000"
"""Turns of the loop in which an OpenMP thread waits before it sleeps. A layer has many small parallel regions, and each
ends when its last thread is done. With libgomp's default, 300,000 turns, a step beside one busy program takes more than
four times as long as alone; with 1,000 turns it takes less than twice as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; say how to install the extra ``app`` if its packages are missing."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", WAITING_TURNS)  # read when torch is loaded, by child processes too
    try:
        with one_interrupt():
            from torchcaps.cli.app import main as run

            return run(arguments)
    except KeyboardInterrupt:  # while packages are imported, or while another error is printed
        print("Interrupted.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "torchcaps").partition(".")[0] == "torchcaps":
            raise
        print(f"torchcaps: the commands need {error.name}, which is not installed: {install('app')}", file=sys.stderr)
        return 2
