"""``torchcaps check``: find known mistakes in any capsule code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchcaps._version import __version__
from torchcaps.analysis.results import Result, Styled, Table
from torchcaps.cli.options import Json, command
from torchcaps.cli.show import say, show
from torchcaps.errors import InputError, WrongType, reason_of, unknown_name
from torchcaps.files import check_targets, require_suffix, write_text
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
    ("check layer.py:CapsuleLayer --shape 4,12,8 --strict --badge capsules.svg", "for a README; fails for warnings"),
)
def check(
    module: str,
    *,
    shape: Annotated[tuple[int, ...], "Shape of the input: B,I,K of capsules or B,C,H,W of images; B at least 2."],
    mask: Annotated[bool, "Also pass a mask (B, I) whose rows hold 1 to I capsules."] = False,
    strict: Annotated[bool, "Exit with code 1 for warnings, too."] = False,
    badge: Annotated[Path | None, "Write a badge for a README, an SVG file, and print its line of Markdown."] = None,
    overwrite: Annotated[bool, "Replace the file of --badge."] = False,
    json: Json = False,
) -> int:
    """Look for known mistakes in any capsule layer or network; the exit code is 1 if an error is found.

    MODULE is FILE:CLASS or package.module:CLASS, and its code is run. The class is called without arguments. Instead of
    a class, name a function without arguments that returns the module. A layer maps (B, I, K) to (B, J, D), a network
    (B, C, H, W) to (B, J) or (B, J, D). The documentation of torchcaps.testing.diagnose lists all checks.
    """
    from torchcaps.testing import diagnose

    if overwrite and badge is None:
        raise InputError("--overwrite replaces the file of --badge; give --badge FILE.svg, or leave --overwrite out")
    if badge is not None:
        source = module.rpartition(":")[0]
        require_suffix(badge, ".svg", "--badge")
        check_targets([badge], [Path(source)] if source else [], option="--badge", overwrite=overwrite)
    made = make(module)
    present_mask = rows_of_growing_length(shape) if mask else None
    diagnosis = Diagnosis(module, type(made).__name__, shape, mask, diagnose(made, shape, mask=present_mask))
    show(diagnosis, json=json)
    if badge is not None:
        write_text(badge, draw_badge(diagnosis.summary, diagnosis.worst), new=not overwrite)
        say(f"![torchcaps check: {diagnosis.summary}]({badge.as_posix()})", err=json)
    failing = ("error", "warning") if strict else ("error",)
    return FOUND_ERRORS if diagnosis.worst in failing else 0


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
    member = getattr(code, name)
    try:
        made = member if isinstance(member, nn.Module) else member()
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

    @property
    def worst(self) -> str | None:
        """Severity of the worst finding; None without findings."""
        severities = {each.severity for each in self.findings}
        return next((severity for severity in STYLES if severity in severities), None)

    @property
    def summary(self) -> str:
        """Number of findings in words."""
        return "no mistake was found" if not self.findings else counted(len(self.findings), "finding")

    @property
    def sentence(self) -> str:
        """Sentence for the method section of a paper."""
        size = "×".join(map(str, self.shape))
        result = ": " + ", ".join(each.name for each in self.findings) if self.findings else ""
        return (
            f"{self.class_name} was checked for known mistakes with torchcaps {__version__} (torchcaps check, input "
            f"{size}{', with a mask' * self.mask}); {self.summary}{result}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, and the sentence for a method section."""
        return super().to_dict() | {"sentence": self.sentence}

    def tables(self) -> Iterator[Table]:
        """Yield a summary, each finding with its usual cause and cure, and a sentence for a method section."""
        with_mask = "poses and a mask" if self.mask else "images" if len(self.shape) == 4 else "poses"
        looked = f"{self.class_name} of {self.module.rpartition(':')[0]}, called with {with_mask} {self.shape}"
        yield Table(note=(f"Checked {looked}: {self.summary}.", ""))
        for each in self.findings:
            rows = [("found", each.evidence), ("usual cause", each.cause), ("cure", each.cure)]
            yield Table(note=(Styled(f"{each.severity}: {each.name}", STYLES[each.severity]),))
            yield Table(rows)
        yield Table(note=("For a method section:", self.sentence))


BADGE_COLOURS = {"error": "#b3261e", "warning": "#8a5a00", "note": "#1a7f37", None: "#1a7f37"}
"""Colours behind the summary on a badge, by the worst finding; white text on them has a contrast of 5 and more."""
CHARACTER_WIDTH, BADGE_MARGIN = 6.6, 8
"""Pixels of a character of a badge, on average, and beside its texts."""


def draw_badge(summary: str, worst: str | None) -> str:
    """Return an SVG of 20 pixels' height: "torchcaps check" beside a summary of the findings."""
    texts = ("torchcaps check", summary)
    left, right = (round(CHARACTER_WIDTH * len(text)) + 2 * BADGE_MARGIN for text in texts)
    label = f"{texts[0]}: {summary}"
    font = 'fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        f'<clipPath id="round"><rect width="{left + right}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{BADGE_COLOURS[worst]}"/></g>'
        f'<g {font}><text x="{left / 2}" y="14">{texts[0]}</text>'
        f'<text x="{left + right / 2}" y="14">{summary}</text></g></svg>\n'
    )
