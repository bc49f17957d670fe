from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from torchcaps.datasets.formats.idx import parse_idx, read_contents
from torchcaps.errors import InputError

MOST = 100  # bytes
WHOLE = bytes([0, 0, 8, 2]) + struct.pack(">2I", 2, 3) + bytes(range(6))


def read(path: Path, contents: bytes) -> np.ndarray:
    path.write_bytes(contents)
    return parse_idx(read_contents(path, MOST), path)


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_plain_and_gzipped_files_whatever_their_name(tmp_path: Path, name: str, pack: type) -> None:
    assert read(tmp_path / name, pack(WHOLE)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00", "no idx file"),
        (b"<html>", "no idx file.*3c 68 74 6d"),
        (bytes([0, 0, 13]) + WHOLE[3:], "no idx file"),  # floats
        (bytes([0, 0, 8, 0]), "no idx file"),
        (WHOLE[:9], "ends within its header, after 9 bytes"),
        (WHOLE[:-1], "announces 2 × 3 values, which makes 18 bytes, but it has 17"),
        (WHOLE + b"x", "18 bytes, but it has 19"),
        (bytes([0, 0, 8, 2]) + struct.pack(">2I", 2**32 - 1, 2**32 - 1), "truncated or corrupt"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1), "truncated or corrupt"),
        (bytes([0, 0, 8, 9]) + struct.pack(">9I", *[1] * 9) + b"x", "number of axes, 1 to 8"),
        (WHOLE + bytes(83), "has more than the 100 bytes that it may have; fetch it again"),
        (
            gzip.compress(WHOLE + bytes(83), mtime=0),
            "has more than the 100 bytes that it may have, unpacked; fetch it again",
        ),
        (gzip.compress(WHOLE, mtime=0)[:-6], "truncated or corrupt gzip"),
        (gzip.compress(WHOLE, mtime=0)[:12], "truncated or corrupt gzip"),
        (gzip.compress(WHOLE, mtime=0)[:-8] + bytes(8), "truncated or corrupt gzip"),
        (b"\x1f\x8bnonsense", "truncated or corrupt gzip"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, contents: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        read(tmp_path / "broken", contents)
    assert str(tmp_path / "broken") in str(raised.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*gone"):
        read_contents(tmp_path / "gone", MOST)
    with pytest.raises(InputError, match="there is no file"):
        read_contents(tmp_path, MOST)


def test_no_more_is_unpacked_than_the_file_may_hold(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(WHOLE + bytes(50_000_000), mtime=0))
    tracemalloc.start()
    with pytest.raises(InputError, match="has more than the 100 bytes"):
        read_contents(tmp_path / "a.gz", MOST)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
