"""Files in the idx format of MNIST, gzipped or not.

An idx file is two zero bytes, a byte for the type (8: unsigned byte), a byte for the number of axes, the length of each
axis as a big-endian 32-bit integer, and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from torchcaps.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 8


def read_contents(path: Path) -> bytes:
    """The file's bytes, decompressed where it is gzipped (its first bytes tell, not its name).

    Raises:
        InputError: When the file is missing, or is gzipped and truncated or corrupt.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    contents = path.read_bytes()
    if not contents.startswith(GZIP_MAGIC):
        return contents
    try:
        return gzip.decompress(contents)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a truncated or corrupt gzip file ({error}); fetch it again") from error


def parse_idx(contents: bytes, path: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file.

    Args:
        contents: The file's bytes, decompressed.
        path: Where they came from, for the error.

    Returns:
        A read-only uint8 array with as many axes as the file says.

    Raises:
        InputError: When it is no idx file of unsigned bytes, or has too few bytes or too many.
    """
    if len(contents) < 4 or contents[:2] != b"\0\0" or contents[2] != _UNSIGNED_BYTE or contents[3] == 0:
        raise InputError(
            f"{path} is no idx file of unsigned bytes: it begins with {contents[:4].hex(' ') or 'nothing'}, "
            "not with 00 00 08 and the number of axes"
        )
    axes = contents[3]
    start = 4 + 4 * axes
    if len(contents) < start:
        raise InputError(f"{path} is truncated: it ends within its header, after {len(contents)} bytes")
    shape = struct.unpack(f">{axes}I", contents[4:start])
    if len(contents) != start + math.prod(shape):
        raise InputError(
            f"{path} is truncated or corrupt: its header announces {' × '.join(map(str, shape))} values, "
            f"which makes {start + math.prod(shape):,} bytes, but it has {len(contents):,}"
        )
    return np.frombuffer(contents, dtype=np.uint8, offset=start).reshape(shape)
