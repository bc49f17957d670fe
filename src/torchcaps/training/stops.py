"""The exceptions that end a run before its last epoch, and what to try then."""

from __future__ import annotations

import shlex
from pathlib import Path

from torch import nn

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


def settings_to_try(network: nn.Module, rate: float, precision: str) -> list[str]:
    """Return what may keep a network from diverging, the most likely first."""
    modules = list(network.modules())
    to_try = [f"a smaller --learning-rate (now {rate:.2g})"]
    to_try += ["a smaller --weight-std"] * any(hasattr(each, "weight_std") for each in modules)
    to_try += ["--precision 32"] * ("bf16" in precision)
    own = {type(each).__name__ for each in modules if not type(each).__module__.startswith(("torch.", "torchcaps."))}
    if own:
        to_try.append(f"to mend what is not finite in {' and '.join(sorted(own))}")
    return to_try
