"""The exceptions that end a run before its last epoch."""

from __future__ import annotations

import shlex
from pathlib import Path

from torchcaps.plugins import loaded_plugins, plugin_options


class Interrupted(Exception):  # noqa: N818  the user asked for it, so it is no error
    """A signal stopped the run after ``step`` steps; its checkpoint is written.

    ``exit_code`` is 128 + the signal's number; ``again`` goes on with the run, ``torchcaps train --resume`` if None.
    """

    def __init__(self, out: Path, step: int, exit_code: int, again: str | None = None) -> None:
        if again is None:
            again = shlex.join(["torchcaps", "train", "--resume", str(out), *plugin_options(loaded_plugins())])
        super().__init__(f"stopped after step {step}; go on with: {again}")
        self.out, self.step, self.exit_code = out, step, exit_code


class Diverged(Exception):  # noqa: N818  the word the field uses
    """The loss became NaN or infinite; the last good checkpoint stays."""

    exit_code = 1
