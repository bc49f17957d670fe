"""The command line: ``torchcaps``, or ``python -m torchcaps``.

It reads options, calls :mod:`torchcaps.training`, :mod:`torchcaps.analysis` and :mod:`torchcaps.datasets`, and prints.
A command is imported when it is called, and imports nothing heavy before its options are read, so that ``--help`` and
a mistyped option answer at once; only ``train`` and ``presets`` must know all parts, and wait the second for torch.
"""

import sys
from collections.abc import Sequence

from torchcaps.errors import install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code; without the packages of the extra ``app``, say how to get them."""
    try:
        from torchcaps.cli.app import main as run

        return run(arguments)
    except KeyboardInterrupt:  # while the packages load, or while another error is printed
        print("Interrupted.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "torchcaps").partition(".")[0] == "torchcaps":
            raise
        print(f"torchcaps: the commands need {error.name}, which is not installed: {install('app')}", file=sys.stderr)
        return 2
