"""Read files that may be damaged, huge or malicious: never more bytes than expected, and one kind of error."""

from __future__ import annotations

import gzip
import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Shaped
from numpy.typing import DTypeLike

from torchcaps.files import one_sentence, require_file


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file to read its bytes, gzipped or not; its first bytes decide, not its name.

    The checksum of a gzipped file is compared when a byte after its last one is read.
    """
    require_file(path)
    with path.open("rb") as file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            yield file
            return
        with gzip.GzipFile(fileobj=file) as contents:
            yield contents


def check_archive(archive: zipfile.ZipFile, members: Collection[str]) -> None:
    """Raise an error if a member of an archive, or the list of all members, does not fit its checksum and sizes.

    Readers of archives trust the list at its end, which has no checksum; each member repeats what it says. Only of
    ``members``, which will be unpacked, more than the beginning is compared with the list.
    """
    entries = archive.infolist()
    if any(info.comment for info in entries):  # a damaged length of a comment hides the next member
        raise ValueError("its list of parts has comments")
    for info in entries:
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise ValueError(f"its part {info.filename} has two sizes")
        with archive.open(info) as member:  # compares the names
            if info.filename in members:
                size = 0
                while block := member.read(2**20):
                    size += len(block)
                if size != info.file_size:
                    raise ValueError(f"its part {info.filename} has {size} bytes instead of {info.file_size}")


def read_binary(
    path: Path, what: str, header: bytes, shape: tuple[int, ...], dtype: DTypeLike = np.uint8
) -> Shaped[np.ndarray[Any, Any], "..."]:
    """Read a file of a known header and numbers of a known shape, gzipped or not. No further byte is unpacked.

    ``what`` describes the expected file in the error. The numbers are read-only.

    Raises:
        InputError: The file is missing, truncated, corrupt or not the expected one.
    """
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    with one_sentence(f"{path} is not {what}, or it is truncated or corrupt"), unpacked(path) as file:
        contents = file.read(size + 1)  # +1, so that gzip checks its checksum
        begin = contents[: len(header)]
        if begin != header[: len(begin)]:
            raise ValueError(f"it begins with the bytes {begin.hex(' ')} instead of {header.hex(' ')}")
        if len(contents) != size:
            raise ValueError("it ends too early" if len(contents) < size else "it goes on after its last value")
    return np.frombuffer(contents, dtype, offset=len(header)).reshape(shape)
