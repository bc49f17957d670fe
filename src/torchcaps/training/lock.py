"""One process at a time writes a run folder: a lock of the system's, which ends with the process that holds it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from torchcaps.errors import InputError
from torchcaps.files import read_json

#: What systems say of a file system without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
#: In the run folder while somebody works on it: what is locked, and who has locked it.
LOCK, HOLDER = ".lock", ".lock.json"


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a run folder; readers need not ask.

    A killed process keeps nobody out: what it leaves in the folder is taken over, and goes when the lock is given back.
    On a file system without locks nobody is kept out.

    Args:
        folder: It is made if it is not there.

    Raises:
        InputError: Another process has it; which one, on which machine and since when, is said.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f"{folder} is in use: {_holder(folder)}; wait for its end, or stop it") from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        yield
        return
    try:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        (folder / HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        if os.name == "posix":  # on Windows release removes it
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    """Who has locked a folder, in words."""
    try:
        holder = read_json(folder / HOLDER, "note of who trains there")
    except (InputError, OSError):  # it is just being written, or removed
        return "another process trains in it"
    return f"process {holder.get('process')} on {holder.get('host')} has trained in it since {holder.get('since')}"
