"""``torchcaps check``: find known mistakes in any capsule code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from torchcaps.analysis.results import Result, Styled, Table
from torchcaps.cli.options import Json, command
from torchcaps.cli.show import show
from torchcaps.errors import InputError, WrongType, reason_of, unknown_name
from torchcaps.plugins import import_file
from torchcaps.words import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcaps.testing import Finding

FOUND_ERRORS = 1
"""Exit code if a finding is an error."""
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@command(
    ("check layer.py:CapsuleLayer --shape 4,12,8", "4 images, 12 input capsules of 8 components"),
    ("check layer.py:build --shape 4,12,8 --json", "the module that a function without arguments returns"),
    ("check package.models:CapsNet --shape 4,1,28,28", "a network for images, from an importable module"),
    ("check interests.py:Interests --shape 6,20,16 --mask", "called with poses and a mask of 1 to 20 items"),
)
def check(
    module: str,
    *,
    shape: Annotated[tuple[int, ...], "Shape of the input: B,I,K of capsules or B,C,H,W of images; B at least 2."],
    mask: Annotated[bool, "Also pass a mask (B, I) whose rows hold 1 to I capsules."] = False,
    json: Json = False,
) -> int:
    """Look for known mistakes in any capsule layer or network; the exit code is 1 if an error is found.

    MODULE is FILE:CLASS or package.module:CLASS, and its code is run. The class is called without arguments. Instead of
    a class, name a function without arguments that returns the module. A layer maps (B, I, K) to (B, J, D), a network
    (B, C, H, W) to (B, J) or (B, J, D). The documentation of torchcaps.testing.diagnose lists all checks.
    """
    from torchcaps.testing import diagnose

    made = make(module)
    present_mask = rows_of_growing_length(shape) if mask else None
    found = Diagnosis(module, type(made).__name__, shape, mask, diagnose(made, shape, mask=present_mask))
    show(found, json=json)
    return FOUND_ERRORS if any(each.severity == "error" for each in found.findings) else 0


def make(named: str) -> nn.Module:
    """Build the module that ``FILE:CLASS`` or ``package.module:CLASS`` names, without arguments."""
    from torch import nn

    source, colon, name = named.rpartition(":")
    if not (source and colon and name):
        raise InputError(f"{named} must be FILE:CLASS or package.module:CLASS, such as layer.py:CapsuleLayer")
    here = str(Path.cwd())
    sys.path.append(here)  # modules in the current folder can be imported, as with python -m
    try:
        code = import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{source} cannot be loaded: {type(error).__name__}: {reason_of(error)}") from error
    finally:
        sys.path.remove(here)
    if not hasattr(code, name):
        raise unknown_name(
            f"class or function in {source}", name, (n for n, each in vars(code).items() if callable(each))
        )
    found = getattr(code, name)
    try:
        made = found if isinstance(found, nn.Module) else found()
    except (Exception, SystemExit) as error:
        raised = f"raises {type(error).__name__}: {reason_of(error)}"
        advice = "name a function without arguments that returns the module"
        raise InputError(f"{named}, called without arguments, {raised}; {advice}") from error
    if not isinstance(made, nn.Module):
        raise WrongType(f"{named} must give a torch.nn.Module, got a {type(made).__name__}")
    return made


def rows_of_growing_length(shape: tuple[int, ...]) -> Tensor:
    """Return a mask (B, I) with one capsule in the first row and all capsules in the last."""
    import torch

    rows, most = shape[:2]
    lengths = 1 + torch.arange(rows) * (most - 1) // max(rows - 1, 1)
    return torch.arange(most) < lengths.unsqueeze(1)


@dataclass(frozen=True)
class Diagnosis(Result):
    """The findings about one module.

    Args:
        module: The module as the user named it.
        class_name: Name of its class.
        shape: Shape of the input.
        mask: Whether it was called with a mask, too.
        findings: All findings.
    """

    module: str
    class_name: str
    shape: tuple[int, ...]
    mask: bool
    findings: list[Finding]

    def tables(self) -> Iterator[Table]:
        """Yield a summary, and each finding with its usual cause and cure."""
        with_mask = "poses and a mask" if self.mask else "images" if len(self.shape) == 4 else "poses"
        looked = f"{self.class_name} of {self.module.rpartition(':')[0]}, called with {with_mask} {self.shape}"
        number = len(self.findings)
        summary = "no mistake was found" if not number else counted(number, "finding")
        yield Table(note=(f"Checked {looked}: {summary}.", ""))
        for each in self.findings:
            rows = [("found", each.evidence), ("usual cause", each.cause), ("cure", each.cure)]
            yield Table(note=(Styled(f"{each.severity}: {each.name}", STYLES[each.severity]),))
            yield Table(rows)
