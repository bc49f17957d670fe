"""Matlab's .mat files of version 5: arrays of numbers, and those that are fields of a structure.

A file is a header of 128 bytes and elements. An element is its type and its length in bytes, each a 32-bit integer, and
its data, filled up to a multiple of 8 bytes; one of at most 4 bytes may be packed into 8 in all. A matrix is an element
made of elements: its class, its shape, its name and its values. An element of type 15 is another one, deflated.

SciPy reads more kinds of files, but trusts them: it unpacks everything, and nested structures can crash it.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchcaps.datasets.formats.reading import Readable, finish, opened, read_exactly
from torchcaps.errors import InputError

_HEADER = 128
_MATRIX, _DEFLATED = 14, 15  # types of elements
_STRUCTURE, _NUMBERS = 2, range(6, 16)  # classes of matrices
_COMPLEX = 0x800
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MOST_OF_A_HEAD = 4096  # bytes of a shape, a name or the names of fields
_CHUNK = 2**20  # bytes that are unpacked at once
_PACKED = 2**16  # bytes that are unpacked from, at once


def read_mat(path: Path, *names: str, most: int) -> dict[str, np.ndarray]:
    """Read the variables ``names`` of a Matlab file.

    Only the values of these variables are unpacked, and their length is checked first.

    Args:
        path: The file.
        names: Arrays of numbers: ``"variable"``, or ``"variable.field"`` of a structure (1×1).
        most: How many bytes one of them may take.

    Returns:
        The arrays by name, each with the dtype that the file stores it in.

    Raises:
        InputError: The file is missing, no Matlab file of version 5, truncated or corrupt, or lacks one of the
            variables; or one of them holds no numbers, or more than ``most`` bytes.
    """
    found: dict[str, np.ndarray] = {}
    there = []
    with opened(path, "a Matlab file of version 5") as file:
        order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(file.read(_HEADER)[124:])
        if order is None:
            raise ValueError("it does not begin as one")
        while tag := file.read(8):
            kind, size = struct.unpack(f"{order}II", tag)
            end = file.tell() + size
            if kind in (_MATRIX, _DEFLATED):
                element = _Element(file if kind == _MATRIX else io.BufferedReader(_Inflated(file, size)), order)
                if kind == _DEFLATED:
                    element.matrix()
                name, arrays = _variable(element, names, most)
                if kind == _DEFLATED and arrays:
                    finish(element.file)
                if file.tell() > end:
                    raise ValueError("its data do not end where they should")
                there.append(name)
                found.update(arrays)
            file.seek(end)
    for name in names:
        if name not in found:
            raise InputError(f"{path} has no variable {name}; it holds {', '.join(sorted(there)[:20]) or 'nothing'}")
    return found


class _Inflated(io.RawIOBase):
    """The bytes of a deflated element of ``size`` bytes, unpacked only as far as they are read."""

    def __init__(self, file: Readable, size: int) -> None:
        self._file, self._left, self._unpack = file, size, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._unpack.eof:
            packed = self._unpack.unconsumed_tail
            if not packed:
                packed = self._file.read(min(_PACKED, self._left))
                self._left -= len(packed)
            data = self._unpack.decompress(packed, min(_CHUNK, len(buffer)))
            buffer[: len(data)] = data
            if data:
                return len(data)
            if not packed:
                raise EOFError("it ends too early")
        return 0


class _Element:
    """The elements in the data of an element, at whose beginning ``file`` is; ``order`` is that of `struct`."""

    def __init__(self, file: Readable, order: str) -> None:
        self.file, self._order = file, order

    def numbers(self, count: int) -> tuple[int, ...]:
        """The next ``count`` 32-bit integers."""
        return struct.unpack(f"{self._order}{count}I", read_exactly(self.file, 4 * count))

    def matrix(self) -> int:
        """Enter the next matrix, and return its number of bytes."""
        kind, size = self.numbers(2)
        if kind != _MATRIX:
            raise ValueError(f"it has an element of type {kind} where a matrix should be")
        return size

    def data(self, most: int = _MOST_OF_A_HEAD) -> tuple[int, memoryview]:
        """The type of the next element, and its data of at most ``most`` bytes."""
        (first,) = self.numbers(1)
        packed = first >> 16 != 0
        kind, size = (first & 0xFFFF, first >> 16) if packed else (first, self.numbers(1)[0])
        if size > (4 if packed else most):
            raise ValueError(f"it announces {size:,} bytes where at most {4 if packed else most:,} can be")
        return kind, memoryview(read_exactly(self.file, 4 if packed else -(-size // 8) * 8))[:size]

    def array(self, most: int) -> np.ndarray:
        """The numbers of the next element, as one axis."""
        kind, data = self.data(most)
        if kind not in _DTYPES:
            raise ValueError(f"it has an element of type {kind} where numbers should be")
        return np.frombuffer(data, np.dtype(f"{self._order}{_DTYPES[kind]}"))

    def integers(self) -> list[int]:
        """The whole numbers of the next element."""
        array = self.array(_MOST_OF_A_HEAD)
        if array.dtype.kind not in "iu":
            raise ValueError(f"it has {array.dtype} numbers where whole ones should be")
        return [int(number) for number in array]


class _Head(NamedTuple):
    """The beginning of a matrix: its class, shape and name."""

    kind: int
    is_complex: bool
    shape: tuple[int, ...]
    name: str


def _head(matrix: _Element) -> _Head:
    flags, *_ = matrix.integers()
    shape = tuple(matrix.integers())
    if len(shape) < 2 or min(shape) < 0:
        raise ValueError(f"it has a variable of the shape {shape}")
    _, name = matrix.data()
    return _Head(flags & 0xFF, bool(flags & _COMPLEX), shape, bytes(name).decode("ascii"))


def _variable(element: _Element, names: tuple[str, ...], most: int) -> tuple[str, dict[str, np.ndarray]]:
    """Read the name of a variable, and those of the arrays ``names`` that it is or holds as fields."""
    head = _head(element)
    found = {}
    if head.name in names:
        found[head.name] = _values(element, head, most)
    elif head.kind == _STRUCTURE and any(name.startswith(f"{head.name}.") for name in names):
        if math.prod(head.shape) != 1:
            raise ValueError(f"its {head.name} are {math.prod(head.shape)} structures instead of one")
        width, *_ = element.integers()
        _, fields = element.data()
        if width < 1 or len(fields) % width:
            raise ValueError(f"the names of the fields of {head.name} are cut")
        for start in range(0, len(fields), width):
            field, _, _ = bytes(fields[start : start + width]).partition(b"\0")
            name = f"{head.name}.{field.decode('ascii')}"
            size = element.matrix()
            if name in names:
                found[name] = _values(element, _head(element), most, name)
            else:
                for start in range(0, size, _CHUNK):  # pass over it
                    read_exactly(element.file, min(_CHUNK, size - start))
    return head.name, found


def _values(matrix: _Element, head: _Head, most: int, name: str | None = None) -> np.ndarray:
    """Read the numbers of a matrix."""
    name = name or head.name
    if head.kind not in _NUMBERS or head.is_complex:
        raise ValueError(f"its {name} holds other than real numbers")
    values = matrix.array(most)
    if len(values) != math.prod(head.shape):
        raise ValueError(f"its {name} has {len(values):,} numbers instead of {math.prod(head.shape):,}")
    return values.reshape(head.shape, order="F")
