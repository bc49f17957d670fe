from __future__ import annotations

import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from support import assert_raises
from torchcaps.datasets.formats.matlab import read_mat
from torchcaps.errors import InputError

VALUES = np.arange(600, dtype=np.uint8).reshape(20, 30)


def read(path: Path, *names: str) -> dict[str, np.ndarray]:
    return read_mat(path, *names, most=10_000)


@pytest.mark.parametrize("compressed", [True, False])
def test_variables_by_their_names(tmp_path: Path, compressed: bool) -> None:
    others = {"text": "abc", "cells": np.array([1, "a"], dtype=object), "z": VALUES, "odd": VALUES[:3, :1]}
    savemat(tmp_path / "a.mat", {**others, "X": VALUES, "y": VALUES[:1]}, do_compression=compressed)
    found = read(tmp_path / "a.mat", "X", "y", "odd")
    assert sorted(found) == ["X", "odd", "y"]
    assert np.array_equal(found["X"], VALUES)
    assert np.array_equal(found["odd"], VALUES[:3, :1])


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_it_reads_what_scipy_reads(tmp_path: Path, compressed: bool, dtype: str) -> None:
    fields = {name: VALUES[:4, :n].reshape(2, 2, n).astype(dtype) for n, name in enumerate(("a", "wide", "c" * 31), 1)}
    savemat(
        tmp_path / "a.mat", {"s": {**fields, "more": {"deep": 1}}}, do_compression=compressed, long_field_names=True
    )
    theirs = loadmat(tmp_path / "a.mat")["s"]
    for name, array in read(tmp_path / "a.mat", *(f"s.{name}" for name in fields)).items():
        other = theirs[name.removeprefix("s.")].item()
        assert array.dtype == other.dtype
        assert np.array_equal(array, other)


def test_the_high_byte_first(tmp_path: Path) -> None:
    def element(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    values = element(9, struct.pack(">3d", 1, 2.5, -3))
    head = element(6, struct.pack(">II", 6, 0)) + element(5, struct.pack(">2i", 1, 3)) + element(1, b"X")
    start = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x01\x00MI"
    (tmp_path / "a.mat").write_bytes(start + element(14, head + values))
    assert loadmat(tmp_path / "a.mat")["X"].tolist() == [[1, 2.5, -3]]
    assert read(tmp_path / "a.mat", "X")["X"].tolist() == [[1, 2.5, -3]]


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    savemat(tmp_path / "a.mat", {"X": VALUES})
    with pytest.raises(InputError, match=r"a\.mat has no variable y; it holds X"):
        read(tmp_path / "a.mat", "X", "y")
    with pytest.raises(InputError, match=r"a\.mat has no variable y; it holds X"):
        read(tmp_path / "a.mat", "y")


@pytest.mark.parametrize(
    "contents", [b"", b"<html>not here</html>" * 20, bytes(500), b"MATLAB 7.3 MAT-file" + bytes(600)]
)
def test_other_files(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a.mat").write_bytes(contents)
    with pytest.raises(InputError, match=r"a\.mat (is not a Matlab file of version 5, or|has no variable X)") as raised:
        read(tmp_path / "a.mat", "X")
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "gone.mat", "X")


@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_and_garbled_files(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "a.mat"
    savemat(path, {"X": VALUES}, do_compression=compressed)
    whole = path.read_bytes()
    for length in (100, 130, 140, 180, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=re.escape(str(path))):
            read(path, "X")
    for begin in range(124, 240, 4):  # whatever the reader makes of it, nothing but an InputError may come out
        path.write_bytes(whole[:begin] + b"\xff\x00\x7f\x03" + whole[begin + 4 :])
        try:
            read(path, "X")
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_other_than_numbers(tmp_path: Path) -> None:
    for values in ("text", np.array([1 + 2j]), np.array([1, "a"], dtype=object), {"a": 1}):
        savemat(tmp_path / "a.mat", {"X": values})
        assert_raises(InputError, read, tmp_path / "a.mat", "X", say="its X holds other than real numbers")
    savemat(tmp_path / "a.mat", {"X": np.zeros((2, 2), dtype=[("a", "f8")])})
    assert_raises(InputError, read, tmp_path / "a.mat", "X.a", say="its X are 4 structures instead of one")


def test_bombs_are_not_unpacked(tmp_path: Path) -> None:
    """A hundred megabytes of zeros in a hundred kilobytes: wanted, of another name, or beside what is wanted."""
    bomb, path = np.zeros((100, 2**20), np.uint8), tmp_path / "a.mat"
    cases = {
        "X": ({"X": bomb}, r"it announces 104,857,600 bytes where at most 10,000 can be"),
        "y": ({"X": bomb}, r"has no variable y; it holds X"),
        "s.a": ({"s": {"a": bomb}}, r"it announces 104,857,600 bytes where at most 10,000 can be"),
        "s.b": ({"s": {"a": bomb, "b": VALUES}}, None),
    }
    for name, (variables, words) in cases.items():
        savemat(path, variables, do_compression=True)
        tracemalloc.start()
        if words is None:
            assert np.array_equal(read(path, name)[name], VALUES)
        else:
            assert_raises(InputError, read, path, name, say=words)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5 * 2**20


def test_a_wrong_checksum_and_data_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    savemat(path, {"X": VALUES}, do_compression=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + bytes(4))
    assert_raises(InputError, read, path, "X", say="truncated or corrupt")
    packed = zlib.compress(zlib.decompress(whole[136:]) + bytes(8))
    path.write_bytes(whole[:132] + struct.pack("<I", len(packed)) + packed)
    assert_raises(InputError, read, path, "X", say="goes on after its last value")


def test_structures_nested_deeply_crash_nothing(tmp_path: Path) -> None:
    """SciPy's reader ends the process at 20,000."""
    head = struct.pack("<IIIIIIiiHHI", 6, 8, 1, 0, 5, 8, 1, 1, 1, 0, 0)  # a cell array without a name, 1×1
    name = struct.pack("<IIIIIIiiHHI", 6, 8, 1, 0, 5, 8, 1, 1, 1, 1, ord("X"))
    depth = 200_000
    inner = b"".join(struct.pack("<II", 14, n * (8 + len(head)) - 8) + head for n in range(depth, 0, -1))
    start = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    (tmp_path / "a.mat").write_bytes(start + struct.pack("<II", 14, len(name) + len(inner)) + name + inner)
    assert_raises(InputError, read, tmp_path / "a.mat", "X", say="its X holds other than real numbers")
    assert_raises(InputError, read, tmp_path / "a.mat", "y", say="has no variable y; it holds X")
