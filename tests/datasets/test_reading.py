from __future__ import annotations

import gzip
import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest

from support import assert_raises
from torchcaps.datasets.reading import one_sentence, read_binary
from torchcaps.errors import InputError

HEADER = struct.pack(">4BI", 0, 0, 8, 1, 6)
WHOLE = HEADER + bytes(range(6))


def read(path: Path, contents: bytes) -> list[list[int]]:
    path.write_bytes(contents)
    return read_binary(path, "a file of six bytes", HEADER, (2, 3)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_plain_and_gzipped_files_whatever_their_name(tmp_path: Path, name: str, pack: type) -> None:
    assert read(tmp_path / name, pack(WHOLE)) == [[0, 1, 2], [3, 4, 5]]


def test_numbers_of_several_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"head" + struct.pack("<3i", 1, -2, 3))
    assert read_binary(tmp_path / "a", "numbers", b"head", (3,), "<i4").tolist() == [1, -2, 3]


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "it ends too early"),
        (b"\x00\x00", "it ends too early"),
        (b"<html>not here", "it begins with the bytes 3c 68 74 6d 6c 3e 6e 6f instead of 00 00 08 01 00 00 00 06"),
        (WHOLE[:7] + b"\7" + WHOLE[8:], "the bytes 00 00 08 01 00 00 00 07 instead of"),
        (WHOLE[:7], "it ends too early"),
        (WHOLE[:-1], "it ends too early"),
        (WHOLE + b"x", "it goes on after its last value"),
        (gzip.compress(WHOLE + b"x", mtime=0), "it goes on after its last value"),
        (gzip.compress(WHOLE, mtime=0)[:-6], "truncated or corrupt"),
        (gzip.compress(WHOLE, mtime=0)[:12], "truncated or corrupt"),
        (gzip.compress(WHOLE, mtime=0)[:-8] + bytes(8), "CRC check failed"),
        (b"\x1f\x8bnonsense", "truncated or corrupt"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, contents: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        read(tmp_path / "broken", contents)
    assert str(raised.value).startswith(f"{tmp_path / 'broken'} is not a file of six bytes, or it is truncated or ")
    assert "\n" not in str(raised.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(InputError, match=f"there is no file {path}"):
            read_binary(path, "a file", b"", (1,))


def test_no_more_is_unpacked_than_is_read(tmp_path: Path) -> None:
    packed = gzip.compress(WHOLE + bytes(50_000_000), mtime=0)
    tracemalloc.start()
    assert_raises(InputError, read, tmp_path / "a.gz", packed, say="it goes on after its last value")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_errors_become_one_sentence_and_warnings_nothing() -> None:
    def fail(error: Exception) -> None:
        with one_sentence("a file is broken"):
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
            raise error

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=r"^a file is broken: two lines$"):
            fail(RuntimeError("two\nlines"))
        with pytest.raises(InputError, match=r"^a file is broken: it has no 'x'$"):
            fail(KeyError("x"))
        with pytest.raises(InputError, match=r"^as it is$"):
            fail(InputError("as it is"))
