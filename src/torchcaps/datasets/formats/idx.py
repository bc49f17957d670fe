"""Files in the idx format of MNIST, gzipped or not.

An idx file is two zero bytes, a byte for the type (8: unsigned byte), a byte for the number of axes, the length of each
axis as a big-endian 32-bit integer, and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchcaps.errors import InputError
from torchcaps.files import require_file

GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 8
_MOST_AXES = 8


def size_of(shape: Sequence[int]) -> int:
    """Bytes of an idx file, decompressed, with an array of that shape."""
    return 4 + 4 * len(shape) + math.prod(shape)


def read_contents(path: Path, most: int) -> bytes:
    """The file's bytes, decompressed where it is gzipped (its first bytes tell, not its name).

    Args:
        path: The file.
        most: How many bytes it may hold, decompressed; no more are read.

    Raises:
        InputError: The file is missing, holds more than ``most`` bytes, or is gzipped and truncated or corrupt.
    """
    require_file(path)
    with path.open("rb") as file:
        zipped = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        try:
            contents = gzip.GzipFile(fileobj=file).read(most + 1) if zipped else file.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} is a truncated or corrupt gzip file ({error}); fetch it again") from error
    if len(contents) > most:
        unpacked = ", unpacked" if zipped else ""
        raise InputError(f"{path} has more than the {most:,} bytes that it may have{unpacked}; fetch it again")
    return contents


def parse_idx(contents: bytes, path: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file.

    Args:
        contents: The file's bytes, decompressed.
        path: The file, for the error.

    Returns:
        A read-only uint8 array with as many axes as the file says.

    Raises:
        InputError: It is no idx file of unsigned bytes, or has too few bytes or too many.
    """
    if len(contents) < 4 or contents[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or not 1 <= contents[3] <= _MOST_AXES:
        raise InputError(
            f"{path} is no idx file of unsigned bytes: it begins with {contents[:4].hex(' ') or 'nothing'}, "
            f"not with 00 00 08 and the number of axes, 1 to {_MOST_AXES}"
        )
    axes = contents[3]
    start = 4 + 4 * axes
    if len(contents) < start:
        raise InputError(f"{path} is truncated: it ends within its header, after {len(contents)} bytes")
    shape = struct.unpack(f">{axes}I", contents[4:start])
    if len(contents) != start + math.prod(shape) or 0 in shape:
        raise InputError(
            f"{path} is truncated or corrupt: its header announces {' × '.join(map(str, shape))} values, "
            f"which makes {start + math.prod(shape):,} bytes, but it has {len(contents):,}"
        )
    return np.frombuffer(contents, dtype=np.uint8, offset=start).reshape(shape)
