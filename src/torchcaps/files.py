"""Files, names and locks: what is written is never met half-written, even after a kill or a power cut."""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError, WrongType, reason_of, shown

if TYPE_CHECKING:
    from filelock import BaseFileLock

MOST_BYTES = 16 * 2**20
"""Of a text file that is read: far more than any run writes, and what JSON makes of it fits into 1 GiB."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``; it takes the place of ``path`` when the block ends well, else it is removed.

    The bytes are flushed to the disk before the rename, and the rename itself after it. An OSError (the folder cannot
    be written, or the disk is full) leaves ``path`` as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{path.suffix}")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        commit(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a write to a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(path: Path) -> None:
    """Remove what a killed process left of :func:`atomic_path`; nobody may be writing ``path`` now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????{glob.escape(path.suffix)}"):
        left.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Flush ``temporary`` to the disk and let it take the place of ``path``."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    if os.name == "posix":  # a folder cannot be opened on Windows
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all; the same bytes on every system."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def locked(lock: BaseFileLock) -> Iterator[None]:
    """Hold a lock, whose file is removed at the end; who waits for it then makes a new one.

    The file of a killed process stays, unlocked, until the next one has held it.
    """
    with lock:
        try:
            yield
        finally:
            if os.name == "posix":  # elsewhere it is removed when it is released
                Path(lock.lock_file).unlink(missing_ok=True)


def user_path(path: str | Path) -> Path:
    """A path that the user named; ``~`` and ``~name`` at its beginning stand for home folders that must be known."""
    check_path(str(path))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path} begins with the home folder of a user who is not known here") from None


def as_path(name: str, value: object) -> Path:
    """Return an argument of this name as a path.

    Raises:
        WrongType: It is no text and no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise WrongType(f"{name} must be a path, got {type(value).__name__}")
    return Path(value)


def check_path(text: str) -> None:
    """Raise InputError if a text is empty, or holds a character that no file's name can hold."""
    if not text:
        raise InputError("a path must not be empty; write . for the folder that you are in")
    try:
        fits = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InputError(f"a path must hold no NUL and no half of a character, got {shown(text)}")


def real(path: str | Path) -> Path:
    """The whole path, without links; one whose links go in a circle ends there, and nothing is found at it."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError before Python 3.13


def could_be_repository(path: Path) -> bool:
    """Whether a path may name a repository of the Hugging Face hub: an owner, of which no folder is here, and a name.

    So the hub is not asked for ``runs/sabour2017-mnst-1``, mistyped where there is a folder ``runs``.
    """
    return len(path.parts) == 2 and not path.anchor and ".." not in path.parts and not path.parent.is_dir()


def require_file(path: Path, what: str = "file", name: str | None = None) -> None:
    """Raise InputError for what is no file before anything opens it: reading a FIFO or a device may never end.

    ``what`` it should be and its ``name``, if it is not the path, are for the error. A link to a file is a file.
    """
    name = str(path) if name is None else name
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no {what} {name}") from None
    except (OSError, ValueError) as error:  # such as a NUL in it
        raise InputError(f"the {what} {name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise InputError(f"there is no {what} {name}: what is there is {kinds.get(stat.S_IFMT(mode), 'a device')}")


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Turn any error of reading or parsing a file, ``what`` the program itself wrote, into an InputError."""
    require_file(Path(path), what)
    try:
        yield
    except Exception as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else reason_of(error)
        raise InputError(f"{what} {path} is damaged or no {what}: {reason}") from error


def read_text(path: str | Path, what: str) -> str:
    """Read a text file, of which no more than ``MOST_BYTES`` are taken into memory; see :func:`reading`."""
    with reading(path, what), Path(path).open("rb") as file:
        contents = file.read(MOST_BYTES + 1)
        if len(contents) > MOST_BYTES:
            raise InputError(f"it must have at most {MOST_BYTES // 2**20} MiB, but is larger")
        return contents.decode("utf-8")


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON object; see :func:`read_text`."""
    text = read_text(path, what)
    with reading(path, what):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise InputError(f"it must hold a JSON object, got a {type(value).__name__}")
    return value
