"""Files and their names: written so that a reader never meets a half-written one, even after a kill or a power cut."""

from __future__ import annotations

import glob
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError, shown

MOST_BYTES = 16 * 2**20
"""Of a text file that is read: far more than any run writes, and what JSON makes of it fits into 1 GiB."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``; it takes the place of ``path`` when the block ends well, else it is removed.

    The bytes are flushed to the disk before the rename, and the rename itself after it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; ``path`` is then as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
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
    random = "?" * 8  # mkstemp's
    for left in path.parent.glob(f".{glob.escape(path.name)}.{random}{glob.escape(path.suffix)}"):
        left.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Flush ``temporary`` to the disk and let it take the place of ``path``."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    # mkstemp makes files that nobody else may read; results are as readable as any other file of the user's
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o666 & ~umask)
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


def user_path(path: str | Path) -> Path:
    """A path that the user named; ``~`` and ``~name`` at its beginning stand for home folders.

    Raises:
        InputError: As for :func:`check_path`; or there is no user of that name.
    """
    check_path(str(path))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path} begins with the home folder of a user who is not known here") from None


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


@contextmanager
def named_in_utf8(path: Path) -> Iterator[Path]:
    """A path to a file for libraries that want UTF-8; on Linux one that is not UTF-8 is reached by its open file."""
    if str(path).isprintable() or not Path("/proc/self/fd").is_dir():
        yield path
        return
    with path.open("rb") as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def require_file(path: Path, what: str = "file", name: str | None = None) -> None:
    """Refuse what is no file before anything opens it: reading a FIFO or a device may never end.

    Args:
        path: What is to be read; a link to a file is one.
        what: What it should be, for the error.
        name: What errors call it; its path if None.

    Raises:
        InputError: There is nothing, or a folder, FIFO, socket or device; or it cannot be looked at.
    """
    name = str(path) if name is None else name
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no {what} {name}") from None
    except ValueError as error:  # such as a NUL in it
        raise InputError(f"there is no {what} {name!r}: {error}") from None
    except OSError as error:
        raise InputError(f"the {what} {name} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise InputError(f"there is no {what} {name}: what is there is {kinds.get(stat.S_IFMT(mode), 'a device')}")


def could_be_repository(path: Path) -> bool:
    """Whether a path may name a repository of the Hugging Face hub: an owner, of which no folder is here, and a name.

    So the hub is not asked for ``runs/sabour2017-mnst-1``, mistyped where there is a folder ``runs``.
    """
    return len(path.parts) == 2 and not path.anchor and ".." not in path.parts and not path.parent.is_dir()


def read_text(path: str | Path, what: str) -> str:
    """Read a text file, of which no more than ``MOST_BYTES`` are taken into memory.

    Args:
        path: The file.
        what: What it is, for the error, e.g. ``"configuration"``.

    Raises:
        InputError: There is no such file; or it is a folder, a pipe or a device, too large, or no text.
    """
    path = Path(path)
    require_file(path, what)
    with path.open("rb") as file:
        contents = file.read(MOST_BYTES + 1)
    if len(contents) > MOST_BYTES:
        raise InputError(f"{what} {path} must have at most {MOST_BYTES // 2**20} MiB, but is larger")
    try:
        return contents.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path} is no text: {error}") from None


def read_json(path: str | Path, what: str, keys: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        what: What it is, for the error, e.g. ``"configuration"``.
        keys: What must be in it; see :func:`check_keys`.

    Raises:
        InputError: As for :func:`read_text`; or the file holds no JSON object, or one that lacks a key.
    """
    text = read_text(path, what)
    try:
        value = json.loads(text)
    except RecursionError:
        raise InputError(f"{what} {path} is not valid JSON: it has too many brackets in each other") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{what} {path} is not valid JSON: {error}") from None
    except ValueError:  # Python's, of an integer
        raise InputError(f"{what} {path} is not valid JSON: a number in it has too many digits") from None
    if not isinstance(value, dict):
        raise InputError(f"{what} {path} must hold a JSON object, got a {type(value).__name__}")
    check_keys(value, keys or {}, f"{what} {path}")
    return value


@dataclass(frozen=True)
class Kind:
    """What a value in a JSON file must be, in words, and how to see that it is."""

    words: str
    fits: Callable[[Any], bool]


NUMBER = Kind("a number", lambda value: type(value) in (int, float) and -1e38 < value < 1e38)
COUNT = Kind("a whole number", lambda value: type(value) is int and 0 <= value < 2**63)
TEXT = Kind("a text", lambda value: isinstance(value, str))
LIST = Kind("a list", lambda value: isinstance(value, list))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.fits, value)))
NUMBERS = Kind("a list of numbers", lambda value: isinstance(value, list) and all(map(NUMBER.fits, value)))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NAMED_TEXTS = Kind("an object of texts", lambda value: isinstance(value, dict) and all(map(TEXT.fits, value.values())))


def optional(kind: Kind) -> Kind:
    """That kind, or null."""
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.fits(value))


def check_keys(values: Any, keys: Mapping[str, Kind], where: str) -> None:
    """Raise unless an object has all keys and their values fit.

    Args:
        values: As JSON has it.
        keys: What each key's value must be; a dot stands for an object in an object, as in ``"images.test"``.
        where: What the object is, and its file, for the error.

    Raises:
        InputError: A key is missing, or its value does not fit.
    """
    for key, kind in keys.items():
        found = values
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise InputError(f'{where} has no "{key}", which must be {kind.words}')
            found = found[part]
        if not kind.fits(found):
            raise InputError(f'{where}: "{key}" must be {kind.words}, got {shown(found)}')
