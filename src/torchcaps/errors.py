"""Errors of wrong input: one sentence that names the fault, its place, and a value that would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_VALUE_CHARACTERS, MAX_REASON_CHARACTERS, MAX_LIST_CHARACTERS = 100, 300, 600
"""Characters of a value, of another error's message and of a list of names that an error shows in full."""
MAX_NAMES_CHARACTERS = 200
"""Characters of names that are one part of a sentence."""

# Control codes of terminals (C0, delete, C1), other line breaks, marks that turn the direction of text, and halves of
# characters. Names in files may hold any of these.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """Wrong input that the caller can correct: a name, a file, a shape, a value.

    The message is one sentence with the fault, its place, and a value that would be right. The command line prints it
    unchanged and exits with code 2.
    """


class WrongType(InputError, TypeError):  # noqa: N818  the name is the fault
    """Input of the wrong type."""


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra, as the end of a sentence."""
    return f'pip install "torchcaps[{extra}]", or in a checkout of torchcaps: pip install -e ".[{extra}]"'


def shown(value: object) -> str:
    """Return a value as errors show it: its ``repr`` on one line, without the middle if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists nested thousands deep
        return f"a value of type {type(value).__name__} that is too long to show"
    return shortened(re.sub(r"\s*\n\s*", " ", text))


def shortened(text: str, max_characters: int = MAX_VALUE_CHARACTERS) -> str:
    """Return a text without its middle if it has more than ``max_characters``."""
    return text if len(text) <= max_characters else f"{text[: max_characters // 2]} … {text[-max_characters // 4 :]}"


def names_shown(names: Iterable[str], separator: str = ", ") -> str:
    """Return names for an error, without the middle of a long list."""
    return shortened(separator.join(names), MAX_NAMES_CHARACTERS)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name of a kind, e.g. ``"preset"``; it suggests the nearest known name."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else f"known: {shortened(', '.join(known), MAX_LIST_CHARACTERS)}."
    quoted = f'"{name}"' if len(name) <= MAX_VALUE_CHARACTERS else shown(name)
    return InputError(f"there is no {kind} {quoted}; {hint}")


def reason_of(error: BaseException) -> str:
    """Return the message of an error on one line, as the end of a sentence; its type if it has no message."""
    try:
        message = " ".join(str(error).split())
    except (Exception, SystemExit):  # a plugin's error may fail to make its message
        message = ""
    return shortened(message, MAX_REASON_CHARACTERS) or type(error).__name__


def visible(text: str) -> str:
    r"""Return a text with control characters and line breaks written out, as ``\x1b``, safe to show anywhere.

    So are bytes of a file's name that are not UTF-8, which Python reads as halves of characters.
    """
    return CONTROL.sub(lambda character: _written_out(character[0]), text)


def _written_out(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else ascii(character)[1:-1]
