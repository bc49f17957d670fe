"""Files and their names: written so that a reader never meets a half-written one, even after a kill or a power cut."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError


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
        InputError: There is no user of that name.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path} begins with the home folder of a user who is not known here") from None


def could_be_repository(path: Path) -> bool:
    """Whether a path may name a repository of the Hugging Face hub: an owner, of which no folder is here, and a name.

    So ``runs/sabour2017-mnst-1``, mistyped where there is a folder ``runs``, is asked of nobody.
    """
    return len(path.parts) == 2 and not path.anchor and ".." not in path.parts and not path.parent.is_dir()


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        what: What it is, for the error, e.g. ``"configuration"``.

    Raises:
        InputError: There is no such file, or it holds no JSON object.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {what} {path}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{what} {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{what} {path} must hold a JSON object, got a {type(value).__name__}")
    return value
