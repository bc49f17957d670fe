"""Exceptions that end a run before its last epoch, and advice for their messages."""

from __future__ import annotations

import shlex
from pathlib import Path

from torch import nn

from torchcaps.plugins import loaded_plugins, plugin_options


class Interrupted(Exception):  # noqa: N818  requested by the user, so no error
    """A signal stopped the run. Its checkpoint is written.

    Args:
        out: The run folder.
        step: Number of finished steps.
        exit_code: 128 + the signal's number.
        resume_command: Command that resumes the run. None: ``torchcaps train --resume``.
    """

    def __init__(self, out: Path, step: int, exit_code: int, resume_command: str | None = None) -> None:
        if resume_command is None:
            words = ["torchcaps", "train", "--resume", str(out), *plugin_options(loaded_plugins())]
            resume_command = shlex.join(words)
        super().__init__(f"stopped after step {step}; resume with: {resume_command}")
        self.out, self.step, self.exit_code = out, step, exit_code


class Diverged(Exception):  # noqa: N818  the word the field uses
    """The loss became NaN or infinite. The last good checkpoint is kept."""

    exit_code = 1


def settings_to_try(network: nn.Module, rate: float, precision: str) -> list[str]:
    """Return settings that may keep a network from diverging, the most likely first."""
    modules = list(network.modules())
    to_try = [f"a smaller --learning-rate (now {rate:.2g})"]
    to_try += ["a smaller --weight-std"] * any(hasattr(each, "weight_std") for each in modules)
    to_try += ["--precision 32"] * ("bf16" in precision)
    foreign = {
        type(each).__name__ for each in modules if not type(each).__module__.startswith(("torch.", "torchcaps."))
    }
    if foreign:
        to_try.append(f"a check of {' and '.join(sorted(foreign))} for NaN and infinite numbers")
    return to_try
