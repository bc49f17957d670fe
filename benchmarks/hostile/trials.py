"""A trial: something odd that is tried in a process of its own, and the rules by which its end is judged."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import ClassVar

DONE, DIVERGED, WRONG_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130
TEMPORARY = "tmp"
"""The folder in a trial's own that is its system's temporary folder."""
MOST_MEMORY = 1024
"""MiB that a trial may take on top of what its process began with, where its rules bound it."""

TRACEBACK = "Traceback (most recent call last)"
CASE, FAULT = "case: ", "fault: "
"""What lines on stdout begin with that say more of what is tried, and what is wrong with it."""
ERROR = re.compile(r"^(?:Error: )?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))\b", re.MULTILINE)
LEAKED_WARNING = re.compile(r"\b[A-Z]\w*Warning: ")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HALF_WRITTEN = re.compile(r"(^|/)\.[^/]*\.[a-z0-9_]{8}(\.[^/.]*)?(/|$)|\.tmp$|\.part$")
"""Names that temporary files have: of tempfile's beside their target, and others."""
WORDS = {
    DONE: "done",
    DIVERGED: "diverged",
    WRONG_INPUT: "refused",
    BUG: "exit 70",
    INTERRUPTED: "interrupted",
}

Snapshot = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a trial may do."""

    interrupt: float | None = None
    """Seconds after which it gets a SIGINT, for what may rightly take long; None: it must end by itself."""
    speaks: bool = False
    """Whether it must have said something before the SIGINT, so that its user knows that it works."""
    timeout: float = 20.0
    """Seconds that it may take, from the SIGINT where it gets one."""
    writes: tuple[str, ...] = ()
    """Patterns of the files in its folder that it may write where it is not refused."""
    bounded: bool = True
    """Whether its memory is bounded where it is not refused, too."""
    terminal: bool = True
    """Whether control characters are looked for on stderr, too, and not on stdout alone."""
    same_output: str | None = None
    """What it must print on stdout if it is not refused."""
    says_faults: bool = False
    """Whether its lines on stdout that begin with ``fault:`` are faults: it judges what it has tried by itself."""
    no_nan: bool = False
    """Whether it must not print a loss or an accuracy that is NaN."""


@dataclass(frozen=True)
class Trial:
    """Something odd to try."""

    number: int
    """Of the case in its part."""
    what: str
    """In words."""
    work: Callable[[], int]
    """What is done, in a process of its own; returns the exit code."""
    folder: Path
    """Where it works."""
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    code: int
    """Exit code; minus the number of the signal that killed it."""
    seconds: float
    """It took."""
    memory_mib: float
    """On top of what its process began with, at most."""
    out: str
    """stdout."""
    err: str
    """stderr."""
    hung: bool = False
    """It did not end, and was killed."""
    interrupted: bool = False
    """It got a SIGINT."""
    processes: int = 1
    """At most at a time."""


def say(faults: list[str]) -> int:
    """Print the faults that a trial found by itself; its exit code."""
    for fault in faults:
        print(f"{FAULT}{ascii(fault)[1:-1]}")
    return BUG if faults else DONE


class Part:
    """A kind of trials. Used as a context: its servers run inside.

    Args:
        fixtures: Folder of the valid files, see :mod:`hostile.fixtures`.
        timeout: Seconds that a trial may take.
    """

    name: ClassVar[str]
    cases: ClassVar[int]
    """How many are tried at scale 1."""
    share: ClassVar[float]
    """Of the time."""
    alone: ClassVar[bool] = False
    """Whether its trials run one after the other."""

    def __init__(self, fixtures: Path, timeout: float) -> None:
        self.fixtures, self.timeout = fixtures, timeout

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """The trial of one number; the same for the same random numbers."""
        raise NotImplementedError

    def at_the_end(self) -> list[str]:
        """What is wrong when all trials are over, in words; called within the context, which it may close."""
        return []


def describe(trial: Trial, ended: Ended) -> str:
    """What was tried; the trial itself may know better, once it is made."""
    first = ended.out.partition("\n")[0]
    return first.removeprefix(CASE) if first.startswith(CASE) else trial.what


def judge(trial: Trial, ended: Ended, before: Snapshot) -> tuple[str, list[str]]:
    """What a trial came to, and what was wrong with it, one word or few for each fault."""
    rules, text, code = trial.rules, ended.out + ended.err, ended.code
    faults = []
    if ended.hung:
        faults.append("too many processes" if ended.processes > most_processes() else "hang")
    if TRACEBACK in text:
        faults.append(f"traceback {_error_in(text[text.index(TRACEBACK) :])}".rstrip())
    elif code == BUG and rules.says_faults:
        faults += [line.removeprefix(FAULT) for line in ended.out.splitlines() if line.startswith(FAULT)] or ["exit 70"]
    elif code == BUG:
        faults.append(f"exit 70 {_error_in(ended.err)}".rstrip())
    elif not ended.hung and not _is_allowed(code, ended, text):
        faults.append(f"killed by signal {-code}" if code < 0 else f"exit {code}")
    if warning := LEAKED_WARNING.search(text):
        faults.append(f"leaked {warning[0].rstrip(': ')}")
    if CONTROL.search(ended.out) or (rules.terminal and CONTROL.search(ended.err)):
        faults.append("control characters")
    no_memory = "not enough memory" in ended.err
    if ended.memory_mib > MOST_MEMORY and (rules.bounded or (code == WRONG_INPUT and not no_memory)):
        faults.append("memory")
    if rules.speaks and code == INTERRUPTED and not text.strip():
        faults.append("silent")
    if code == DONE and rules.same_output is not None and ended.out != rules.same_output:
        faults.append("damage unnoticed")
    if code == DONE and rules.no_nan and re.search(r"\bnan\b", ended.out, re.IGNORECASE):
        faults.append("NaN printed")
    if not ended.hung and not no_memory:
        writes = () if code == WRONG_INPUT else rules.writes
        faults += _check_files(before, snapshot(trial.folder), writes)
    failed = code == DIVERGED and faults
    return ("hang" if ended.hung else f"exit {code}" if failed else WORDS.get(code, f"exit {code}")), faults


def _error_in(text: str) -> str:
    """The kind of error that is named last."""
    found = ERROR.findall(text)
    return found[-1] if found else ""


def _is_allowed(code: int, ended: Ended, text: str) -> bool:
    if code == DIVERGED:
        return "became NaN or infinite" in text
    return code in (DONE, WRONG_INPUT) or (code == INTERRUPTED and ended.interrupted)


def most_processes() -> int:
    """How many processes a trial may have at a time."""
    return (os.cpu_count() or 1) + 4


def snapshot(folder: Path) -> Snapshot:
    """What lies in a folder: paths below it, with a hash of what each holds."""
    return {os.path.relpath(path, folder): _contents(path) for path in _walk(folder)}


def _walk(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


def _contents(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"-> {path.readlink()}"
    if not stat.S_ISREG(mode):
        return stat.filemode(mode)[0]
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _check_files(before: Snapshot, after: Snapshot, writes: tuple[str, ...]) -> list[str]:
    """Files that were left, changed or removed and should not have been."""
    touched = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    faults = []
    if left := sorted(path for path in touched if path.startswith(f"{TEMPORARY}/")):
        faults.append(f"left in the temporary folder: {_few(left)}")
    touched -= set(left)
    half = sorted(path for path in touched & after.keys() if HALF_WRITTEN.search(path))
    if half:
        faults.append(f"left half-written: {_few(half)}")
    wrong = sorted(path for path in touched - set(half) if not any(fnmatchcase(path, each) for each in writes))
    if wrong:
        faults.append(f"files touched: {_few(wrong)}")
    return faults


def _few(paths: list[str]) -> str:
    return ", ".join(map(ascii, paths[:3])) + (" …" if len(paths) > 3 else "")
