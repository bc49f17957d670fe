from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from torchcaps.datasets.matlab import read_mat
from torchcaps.errors import InputError

VALUES = np.arange(600, dtype=np.uint8).reshape(20, 30)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("version", ["4", "5"])
def test_variables_by_their_names(tmp_path: Path, compressed: bool, version: str) -> None:
    savemat(tmp_path / "a.mat", {"X": VALUES, "y": VALUES[:1], "z": VALUES}, format=version, do_compression=compressed)
    found = read_mat(tmp_path / "a.mat", "X", "y")
    assert sorted(found) == ["X", "y"]
    assert np.array_equal(found["X"], VALUES)


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    savemat(tmp_path / "a.mat", {"X": VALUES})
    with pytest.raises(InputError, match=r"a\.mat has no variable y; it holds X"):
        read_mat(tmp_path / "a.mat", "X", "y")
    with pytest.raises(InputError, match=r"a\.mat has no variable y; it holds none of those looked for"):
        read_mat(tmp_path / "a.mat", "y")


@pytest.mark.parametrize(
    "contents", [b"", b"<html>not here</html>" * 20, bytes(500), b"MATLAB 7.3 MAT-file" + bytes(600)]
)
def test_other_files(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a.mat").write_bytes(contents)
    with pytest.raises(InputError, match=r"a\.mat (is no Matlab file of version 5, or|has no variable X)") as raised:
        read_mat(tmp_path / "a.mat", "X")
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="there is no file"):
        read_mat(tmp_path / "gone.mat", "X")


@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_and_garbled_files(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "a.mat"
    savemat(path, {"X": VALUES}, do_compression=compressed)
    whole = path.read_bytes()
    for length in (100, 130, 140, 180, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_mat(path, "X")
    for begin in range(124, 240, 4):  # whatever the reader makes of it, nothing but an InputError may come out
        path.write_bytes(whole[:begin] + b"\xff\x00\x7f\x03" + whole[begin + 4 :])
        try:
            read_mat(path, "X")
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017
