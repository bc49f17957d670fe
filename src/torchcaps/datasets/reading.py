"""Read files that may be damaged, huge or malicious: never more bytes than expected, and one kind of error."""

from __future__ import annotations

import gzip
import math
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Shaped
from numpy.typing import DTypeLike

from torchcaps.errors import InputError
from torchcaps.files import one_sentence, require_file
from torchcaps.machine import check_memory

_NO_ARRAYS = "not an .npz file of plain arrays, or it is truncated or corrupt"


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


class Held(NamedTuple):
    """An array of an .npz file."""

    name: str
    """Name in the file."""
    size: int
    """Bytes after unpacking."""


def list_arrays(path: Path) -> dict[str, Held]:
    """Return the arrays of an .npz file by their names, also in small letters.

    Raises:
        InputError: The file is missing, a single array, or no archive.
    """
    require_file(path)
    with path.open("rb") as file:
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            raise InputError(
                f"{path} holds one array and no labels; save images and labels in one file, by "
                "np.savez('mine.npz', x=images, y=labels)"
            )
    with one_sentence(f"{path} is {_NO_ARRAYS}"), zipfile.ZipFile(path) as archive:
        held = {each.filename.removesuffix(".npy"): each.file_size for each in archive.infolist()}
        arrays = {name: Held(name, size) for name, size in held.items()}
        return {name.lower(): each for name, each in arrays.items()} | arrays


def read_arrays(path: Path, arrays: Mapping[str, Held]) -> dict[str, np.ndarray[Any, Any]]:
    """Read arrays of an .npz file, after a check that they fit into memory. Pickled objects are never read.

    Raises:
        InputError: The file is damaged, an array holds objects, or there is too little memory.
    """
    with one_sentence(f"{path} is {_NO_ARRAYS}"):
        check_memory(sum(each.size for each in arrays.values()), f"the images of {path}")
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, {name for each in arrays.values() for name in (each.name, f"{each.name}.npy")})
        with np.load(path, allow_pickle=False) as file:
            values = {key: np.asarray(file[each.name]) for key, each in arrays.items()}
        for array in values.values():  # NumPy accepts invalid characters, on which Python fails later
            if array.dtype.kind == "U":
                array.astype(array.dtype.newbyteorder("<")).tobytes().decode("utf-32-le")
    return values


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
