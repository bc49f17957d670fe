"""The folder that a run writes to: which one it takes, and the lock by which it keeps other processes out."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from torchcaps.errors import InputError
from torchcaps.files import locked, read_json, real
from torchcaps.models.pretrained import CONFIG
from torchcaps.training.checkpoint import CHECKPOINT
from torchcaps.training.config import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: The errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
#: Files in a run folder while a process writes to it: the one that is locked, and the one that names the process.
LOCK, HOLDER = ".lock", ".lock.json"


@contextmanager
def sole_use(folder: Path) -> Iterator[Path]:
    """Keep other processes from writing to a run folder; readers need no lock.

    The lock of a killed process ends with it; the files that it left are removed when the next lock is released. A file
    system without locks keeps no process out.

    Args:
        folder: It is made if it is not there.

    Returns:
        A context, whose value is the folder.

    Raises:
        InputError: Another process has locked it; the error says which one, on which machine and since when.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)))
        except Timeout:
            raise InputError(f"{folder} is in use: {_holder(folder)}; wait for its end, or stop it") from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            yield folder
            return
        stack.callback((folder / HOLDER).unlink, missing_ok=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        (folder / HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield folder


def _holder(folder: Path) -> str:
    """The process that has locked a folder, in words."""
    try:
        holder = read_json(folder / HOLDER, "note of who trains there")
    except (InputError, OSError):  # it is just being written, or removed
        return "another process trains in it"
    return f"process {holder.get('process')} on {holder.get('host')} has trained in it since {holder.get('since')}"


@contextmanager
def new_folder(config: TrainConfig, out: str | Path | None) -> Iterator[Path]:
    """Lock a folder for a new run: the one that is named, or the next free one.

    Raises:
        InputError: There is a run in the folder that is named, or another process has locked it.
        OSError: The folder cannot be written.
    """
    if out is None:
        Path("runs").mkdir(exist_ok=True)
    while out is None:
        free = _next_folder(config)
        with suppress(FileExistsError):  # another run was faster
            free.mkdir()
            out = free
    with sole_use(Path(out)) as folder:
        check_new(folder)
        yield folder


@contextmanager
def taken_for_all(fabric: Fabric, folder: AbstractContextManager[Path]) -> Iterator[Path]:
    """Let the first process enter the context of a run folder for all processes; all of them raise its errors."""
    with ExitStack() as held:
        taken: Path | Exception | None = None
        if fabric.is_global_zero:
            try:
                taken = held.enter_context(folder)
            except (InputError, OSError) as error:
                taken = error
        taken = fabric.broadcast(taken)
        if isinstance(taken, Exception):
            raise taken
        assert taken is not None
        yield taken


def check_free(out: Path) -> None:
    """Raise InputError if another process has locked a folder, or there is a run in it."""
    if (out / LOCK).exists():
        with sole_use(out):  # what a killed process left is removed
            pass
    check_new(out)


def check_new(out: Path) -> None:
    """Raise InputError if there is a run in a folder."""
    if (out / CONFIG).exists() or (out / CHECKPOINT).exists():
        raise InputError(f"there is a run in {out} already; go on with it by --resume {out}, or choose another --out")


def _next_folder(config: TrainConfig) -> Path:
    """``runs/PRESET-DATA-N`` with the next free N."""
    # folder:PATH and npz:PATH become the name of what they point to
    kind, _, path = config.data.partition(":")
    data = real(path).stem if path else kind
    number = 1
    while os.path.lexists(folder := Path("runs") / f"{config.preset}-{data}-{number}"):  # a link to nothing, too
        number += 1
    return folder
