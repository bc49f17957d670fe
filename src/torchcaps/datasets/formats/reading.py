"""Files that may be damaged, huge or malicious: opened, read and refused in one way."""

from __future__ import annotations

import gzip
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchcaps.errors import InputError, reason_of
from torchcaps.files import require_file

Readable = IO[bytes] | io.BufferedIOBase
_GZIP = b"\x1f\x8b"


@contextmanager
def one_sentence(complaint: str) -> Iterator[None]:
    """Turn any error of a reader, which trusts the bytes, into an InputError that begins so; hide its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{complaint}: {reason_of(error)}") from error


@contextmanager
def opened(path: Path, what: str) -> Iterator[Readable]:
    """Open a file for reading; a gzipped one is unpacked (its first bytes tell, not its name).

    What goes wrong while it is read becomes an InputError: that the file is not ``what`` it should be.
    """
    require_file(path)
    with one_sentence(f"{path} is not {what}, or it is truncated or corrupt"), path.open("rb") as file:
        zipped = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if zipped else file


def read_exactly(file: Readable, n: int) -> bytes:
    """The next ``n`` bytes; an error where there are fewer."""
    found = file.read(n)
    if len(found) < n:
        raise EOFError("it ends too early")
    return found


def read_header(file: Readable, layout: str, wanted: tuple[int, ...]) -> bytes:
    """The next bytes, which must be those numbers in that layout of `struct`."""
    header = read_exactly(file, struct.calcsize(layout))
    found = struct.unpack(layout, header)
    if found != wanted:
        raise ValueError(f"it begins with the numbers {found} instead of {wanted}")
    return header


def finish(file: Readable) -> None:
    """Read on to the end, where packed files have their checksum; an error where there is more."""
    if file.read(1):
        raise ValueError("it goes on after its last value")
