"""Locks that leave no file behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, UnixFileLock


@contextmanager
def held(lock: BaseFileLock) -> Iterator[None]:
    """Hold a lock, whose file is removed at the end; who waits for it then makes a new one.

    The file of a killed process stays, unlocked, until the next one has held it.
    """
    with lock:
        try:
            yield
        finally:
            if isinstance(lock, UnixFileLock):  # the other kinds remove it when they are released
                Path(lock.lock_file).unlink(missing_ok=True)
