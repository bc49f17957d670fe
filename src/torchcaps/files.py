"""Files, paths and locks. A file is written in full or not at all, even after a kill or a power cut."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import tempfile
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError, WrongType, reason_of, shown

if TYPE_CHECKING:
    from filelock import BaseFileLock

MAX_TEXT_BYTES = 16 * 2**20
"""Largest text file to read, bytes: far more than any run writes, and its parsed JSON fits into 1 GiB."""


def composed(text: str) -> str:
    """Return a text with each letter as one character: é may also be two, as in names of files from a Mac."""
    return unicodedata.normalize("NFC", text)


def paths_from(root: Path, files: Iterable[Path]) -> tuple[str, ...]:
    """Return the path of each file from a folder, with slashes; of files elsewhere, the whole path."""
    return tuple((file.relative_to(root) if file.is_relative_to(root) else file).as_posix() for file in files)


def groups_in_paths(paths: Iterable[str], pattern: str) -> list[str]:
    """Return the group of each path: the part that a regular expression, or its first parentheses, matches.

    Raises:
        InputError: The pattern is not a regular expression, or does not match a path.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"--group must be a regular expression, got {shown(pattern)}: {error}") from None
    groups = []
    for path in paths:
        match = compiled.search(composed(path))
        if match is None:
            raise InputError(f"--group {shown(pattern)} does not match {path}; it must match the path of every image")
        groups.append((compiled.groups and match[1]) or match[0])
        if not groups[-1].strip():
            raise InputError(f"--group {shown(pattern)} matches no text of {path}; it must match one in every path")
    return groups


@contextmanager
def atomic_path(path: str | Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, or else remove it.

    The bytes are flushed to the disk before the rename, and the rename itself afterwards. An OSError (the folder cannot
    be written, or the disk is full) leaves ``path`` unchanged. With ``new``, so does a file that came there meanwhile.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{path.suffix}")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        if new and os.path.lexists(path):
            raise InputError(f"{path} was written by another program during this command, and stays as it is")
        commit(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # for example after a write to a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; move its files to ``path``, a new or an empty folder, if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
            folder = Path(temporary) / "contents"
            folder.mkdir()
            yield folder
            path.mkdir(exist_ok=True)
            for each in folder.iterdir():
                each.rename(path / each.name)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            error.filename = str(path)  # the copied file, or a temporary one
        raise


def remove_temporaries(path: Path) -> None:
    """Remove temporary files of :func:`atomic_path` after a kill; no process may be writing ``path``."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.????????{glob.escape(path.suffix)}"):
        temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Flush ``temporary`` to the disk and rename it to ``path``."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    if os.name == "posix":  # a folder cannot be opened on Windows
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | Path, text: str, *, new: bool = False) -> None:
    """Write a text file in full or not at all, with the same bytes on every system; ``new`` as of `atomic_path`."""
    with atomic_path(path, new=new) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file in full or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def locked(lock: BaseFileLock) -> Iterator[None]:
    """Hold a lock and remove its file at the end; a waiting process then creates a new file.

    The file of a killed process stays, unlocked, until the next process has held the lock.
    """
    with lock:
        try:
            yield
        finally:
            if os.name == "posix":  # on other systems, filelock removes the file on release
                Path(lock.lock_file).unlink(missing_ok=True)


def check_targets(
    targets: Iterable[Path], inputs: Iterable[Path] = (), *, option: str = "--out", overwrite: bool = False
) -> None:
    """Raise InputError if files cannot be written, or would replace something. Called before the work.

    A link counts as a file, even if it leads nowhere. Folders, devices and inputs are never replaced, whatever link
    leads to them.

    Args:
        targets: The files to write.
        inputs: Files that are read.
        option: Option that names the targets, for errors.
        overwrite: Replace other files.
    """
    read = {file_id(path): path for path in inputs}
    read.pop(None, None)
    existing = []
    for target in targets:
        check_folder_of(target, option)
        if (source := read.get(file_id(target))) is not None:
            link = "" if source == target else f", a link to {source}"
            raise InputError(f"{target} is an input of this command{link}; choose another {option}")
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "a device"
            raise InputError(f"{target} is {kind}, and no file can replace it; choose another {option}")
        if os.path.lexists(target):
            existing.append(target)
    if existing and not overwrite:
        more = f", and {len(existing) - 1} more of the files to write" if len(existing) > 1 else ""
        raise InputError(f"{existing[0]} exists already{more}; choose another {option}, or replace with --overwrite")


def check_folder_of(path: Path, option: str) -> None:
    """Raise InputError if the folder of a new file is a file or cannot be written; ``option`` names the file."""
    folder = next((each for each in path.parents if os.path.lexists(each)), path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        fault = "cannot be written" if folder.is_dir() else "is no folder"
        raise InputError(f"{path} cannot be created, because {folder} {fault}; choose another {option}")


def require_new_folder(path: Path) -> None:
    """Raise InputError unless a path is a folder that can be created, or an empty one."""
    check_folder_of(path, "folder")
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; choose a new or an empty folder")


def require_suffix(path: Path, suffix: str, name: str = "the file") -> None:
    """Raise InputError unless a path ends in a suffix; ``name`` begins the error, such as the option of the path."""
    if path.suffix.lower() != suffix:
        raise InputError(f"{name} must end in {suffix}, got {path}")


def file_id(path: Path) -> tuple[int, int] | None:
    """Return a number that is equal for all links to a file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def printable(path: Path) -> str:
    r"""Return a path as text for a file in UTF-8; bytes that are not UTF-8 are written out, as ``\xe9``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def user_path(path: str | Path) -> Path:
    """Return a path that the user typed, with ``~`` or ``~name`` at its beginning replaced by the home folder."""
    check_path(str(path))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path} begins with the home folder of an unknown user; write the whole path") from None


def as_path(name: str, value: object) -> Path:
    """Return an argument as a path; errors call it ``name``.

    Raises:
        WrongType: The value is neither a text nor a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise WrongType(f"{name} must be a path, got {type(value).__name__}")
    return Path(value)


def check_path(text: str) -> None:
    """Raise InputError if a text is empty or holds a character that file names cannot hold."""
    if not text:
        raise InputError("a path must not be empty; write . for the current folder")
    try:
        fits = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InputError(f"a path must not hold a NUL or half of a character, got {shown(text)}")


def real(path: str | Path) -> Path:
    """Return the absolute path without links. Links in a circle give a path that does not exist."""
    return Path(os.path.realpath(path))  # before Python 3.13, Path.resolve raises RuntimeError for a circle


def could_be_repository(path: Path) -> bool:
    """Return True if a path may name a repository of the Hugging Face hub: OWNER/NAME, without a folder OWNER here.

    A mistyped ``runs/sabour2017-mnst-1`` is therefore not requested from the hub if the folder ``runs`` exists.
    """
    return len(path.parts) == 2 and not path.anchor and ".." not in path.parts and not path.parent.is_dir()


def require_file(path: Path, what: str = "file", name: str | None = None) -> None:
    """Raise InputError unless a path is a file, before anything opens it: reading a FIFO or a device may never end.

    Args:
        path: The path; a link to a file is a file.
        what: Words for the file in error messages.
        name: Name of the file in error messages; the path if None.
    """
    name = str(path) if name is None else name
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"there is no {what} {name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"the {what} {name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise InputError(f"there is no {what} {name}: this path is {kinds.get(stat.S_IFMT(mode), 'a device')}")


@contextmanager
def one_sentence(complaint: str, *, says_all: bool = False) -> Iterator[None]:
    """Turn any error of a third-party reader into an InputError that begins with ``complaint``; hide its warnings.

    Every call of a third-party reader is made inside it. No list of types says what a reader may raise: damaged files
    cause any of them, and a panic of a reader in Rust is not even an ``Exception``.

    Args:
        complaint: Beginning of the error: the file, and what it should be.
        says_all: Put ``complaint`` before an InputError too. False: such errors name the file and stay unchanged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BaseException as error:
        is_whole = isinstance(error, InputError) and not says_all
        if is_whole or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        reason = f"it has no {error}" if isinstance(error, KeyError) else reason_of(error)
        raise InputError(f"{complaint}: {reason}") from error


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Turn any error of reading or parsing a file into an InputError; see `one_sentence`.

    Args:
        path: The file.
        what: Words for the file in error messages, such as "weights file".
    """
    require_file(Path(path), what)
    with one_sentence(f"{what} {path} is damaged or no {what}", says_all=True):
        yield


def read_bytes(path: str | Path, what: str) -> bytes:
    """Read a file of at most ``MAX_TEXT_BYTES``; see :func:`reading` for errors."""
    with reading(path, what), Path(path).open("rb") as file:
        contents = file.read(MAX_TEXT_BYTES + 1)
        if len(contents) > MAX_TEXT_BYTES:
            raise InputError(f"it must have at most {MAX_TEXT_BYTES // 2**20} MiB, but is larger")
        return contents


def read_text(path: str | Path, what: str) -> str:
    """Read a text file in UTF-8; see :func:`read_bytes` for limit and errors."""
    contents = read_bytes(path, what)
    with reading(path, what):
        return contents.decode("utf-8")


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON object; see :func:`read_text` for limits and errors."""
    text = read_text(path, what)
    with reading(path, what):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise InputError(f"it must hold a JSON object, got a {type(value).__name__}")
    return value
