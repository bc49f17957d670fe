"""Files that others may have written: read whole and within bounds, or refused in a sentence."""

import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcaps import files
from torchcaps.errors import InputError, reason_of, shown, unknown_name
from torchcaps.files import read_json, user_path


def said(path: Path) -> str:
    """What reading a file as JSON is refused with."""
    with pytest.raises(InputError) as caught:
        read_json(path, "configuration")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250
    return str(caught.value)


def test_damaged_json_is_one_sentence(tmp_path: Path) -> None:
    for contents, words in (
        (b"[" * 100_000, "is damaged or no configuration: maximum recursion depth exceeded"),
        (b'{"a":' * 100_000, "is damaged or no configuration: maximum recursion depth exceeded"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "is damaged or no configuration: Exceeds the limit (4300 digits)"),
        (b"\xff\xfe", "can't decode byte"),
        (b"", "is damaged or no configuration: Expecting value"),
        (b"{", "is damaged or no configuration: Expecting property name"),
        (b"[" + b"0," * 100_000 + b"0]", "must hold a JSON object, got a list"),
    ):
        (tmp_path / "c.json").write_bytes(contents)
        assert words in said(tmp_path / "c.json")
    (tmp_path / "c.json").write_text(r'{"a": "\ud83d\ude00"}')  # a character in two halves is one
    assert read_json(tmp_path / "c.json", "configuration") == {"a": "😀"}


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "c.json").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no place
    tracemalloc.start()
    try:
        assert "must have at most 16 MiB, but is larger" in said(tmp_path / "c.json")
        assert tracemalloc.get_traced_memory()[1] < 3 * files.MAX_TEXT_BYTES
    finally:
        tracemalloc.stop()
    (tmp_path / "c.json").write_text('{"a": 1}')
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 8)
    assert read_json(tmp_path / "c.json", "configuration") == {"a": 1}
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 7)
    assert "but is larger" in said(tmp_path / "c.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "this path is a FIFO" in said(tmp_path / "pipe")
    assert "this path is a device" in said(Path("/dev/zero"))
    assert "this path is a folder" in said(tmp_path)
    assert "there is no configuration" in said(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "there is no configuration" in said(tmp_path / "file" / "c.json")


def test_what_is_no_path_is_refused() -> None:
    for path, words in (("", "must not be empty"), ("a\0b", "must not hold a NUL"), ("\ud800", "half of a character")):
        with pytest.raises(InputError, match=words):
            user_path(path)


def test_errors_show_long_values_in_short() -> None:
    assert shown("abc") == "'abc'"
    assert len(shown("x" * 10**6)) < 110
    assert shown("x" * 10**6).startswith("'xxx")
    assert shown(10**5000) == "a value of type int that is too long to show"
    assert shown(np.eye(3)) == "array([[1., 0., 0.], [0., 1., 0.], [0., 0., 1.]])", "on one line"
    assert shown("two  spaces\nand a line") == repr("two  spaces\nand a line"), "a text stays as it is"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a value of type list that is too long to show"
    message = str(unknown_name("preset", "y" * 10**5, ["sabour2017"]))
    assert re.fullmatch("there is no preset 'y+ … y+'; known: sabour2017.", message)
    assert len(message) < 200
    assert "begin" in reason_of(OSError("begin " + "x" * 100_000 + " end"))
    assert len(reason_of(OSError("begin " + "x" * 100_000 + " end"))) <= 800
