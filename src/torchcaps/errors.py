"""What torchcaps says when its input is wrong: one sentence that names what, where, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LONGEST, LONGEST_REASON, LONGEST_LIST = 100, 300, 600
"""Characters of a value, of another error's words, and of the known names, that an error shows whole."""

# What a terminal obeys instead of showing it (C0, delete, C1), other line breaks, what turns the direction of text, and
# halves of characters. Names in files may hold any of it.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """Input that its giver can mend: a name, a file, a shape, a value.

    The message is one sentence that says what was wrong, where, and what would be right. The command line prints it as
    it is and exits with code 2.
    """


class WrongType(InputError, TypeError):  # noqa: N818  it says what is wrong
    """Input of another type than the one that is meant."""


def install(extra: str) -> str:
    """What brings the packages of an extra, as the end of a sentence."""
    return f'pip install "torchcaps[{extra}]", or in a checkout of torchcaps: pip install -e ".[{extra}]"'


def shown(value: object) -> str:
    """A value as errors show it: its ``repr``, of which the middle is left out where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in each other, thousands deep
        return f"a value of type {type(value).__name__} that is too long to be shown"
    return shortened(text)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text, of which the middle is left out where it is longer."""
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 4 :]}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not among the known ones of its kind, e.g. ``"preset"``, with the nearest one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else f"known: {shortened(', '.join(known), LONGEST_LIST)}."
    quoted = f'"{name}"' if len(name) <= LONGEST else shown(name)
    return InputError(f"there is no {kind} {quoted}; {hint}")


def reason_of(error: BaseException) -> str:
    """What an error says, as the end of a sentence: its words on one line, or its type where it has none."""
    try:
        words = " ".join(str(error).split())
    except (Exception, SystemExit):  # of a plugin, as it may be
        words = ""
    return shortened(words, LONGEST_REASON) or type(error).__name__


def visible(text: str) -> str:
    r"""A line of text that may be shown anywhere: control characters and line breaks are written out, as ``\x1b``."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
