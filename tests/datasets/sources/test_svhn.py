from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from torchcaps.datasets import load_dataset
from torchcaps.datasets.sources import svhn
from torchcaps.errors import InputError

NAMES = ("train_32x32.mat", "test_32x32.mat")


def arrays(n: int) -> dict[str, np.ndarray]:
    """The variables of a file of the true form: pixels (32, 32, 3, N), labels 1..10 (N, 1)."""
    pixels = np.random.default_rng(n).integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
    return {"X": pixels, "y": (np.arange(n, dtype=np.uint8)[:, None] % 10) + 1}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svhn, "_COUNTS", dict(zip(NAMES, (40, 20), strict=True)))


def write(folder: Path, train: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    savemat(folder / NAMES[0], train or arrays(40), do_compression=True)
    savemat(folder / NAMES[1], arrays(20), do_compression=True)
    return folder


@pytest.mark.parametrize("sub", [".", "svhn", "SVHN"])
def test_files_are_read(tmp_path: Path, sub: str) -> None:
    write(tmp_path / sub)
    data = load_dataset("svhn", data_dir=tmp_path, limit_train=20, validation_size=10)
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 10, 20)
    assert data.in_shape == (3, 32, 32)
    raw = arrays(20)
    assert torch.equal(data.test.images[7], torch.from_numpy(raw["X"][:, :, :, 7]).permute(2, 0, 1))
    assert data.test.labels[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]  # 10 stands for the digit 0
    assert svhn.SOURCE.find(tmp_path) == tmp_path / sub


def test_they_are_downloaded(
    serve: Callable[[dict[str, bytes]], str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "there")
    files = {name: (folder / name).read_bytes() for name in NAMES}
    sha256 = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    monkeypatch.setattr(svhn, "SOURCE", dataclasses.replace(svhn.SOURCE, mirrors=(serve(files),), sha256=sha256))
    assert len(load_dataset("svhn").test) == 20
    assert svhn.SOURCE.find(None) == cache / "svhn"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"X": np.zeros((32, 32, 3, 39), np.uint8)},
            r"shape \(32, 32, 3, 39\).*uint8 of \(32, 32, 3, 40\) and \(40, 1\)",
        ),
        ({"X": np.zeros((32, 32, 3, 40), np.int8)}, "holds int8 pixels"),
        ({"X": np.zeros((32, 32, 3, 40))}, "it announces 983,040 bytes where at most 122,880 can be"),
        ({"y": np.ones((39, 1))}, r"labels of the shape \(39, 1\)"),
        ({"y": np.zeros((40, 1))}, r"has labels from 0\.0 to 0\.0, but SVHN's are 1 to 10"),
        ({"y": np.full((40, 1), 1.5)}, "has labels from 1.5 to 1.5"),
    ],
)
def test_files_of_another_form(tmp_path: Path, changed: dict[str, np.ndarray], words: str) -> None:
    write(tmp_path, {**arrays(40), **changed})
    with pytest.raises(InputError, match=rf"{re.escape(str(tmp_path / NAMES[0]))} .*{words}"):
        load_dataset("svhn", data_dir=tmp_path)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = write(tmp_path) / NAMES[1]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(
        InputError, match=f"{re.escape(str(path))} is not a Matlab file of version 5, or it is truncated or corrupt"
    ):
        load_dataset("svhn", data_dir=tmp_path)
    savemat(path, {"X": arrays(20)["X"]})
    with pytest.raises(InputError, match=f"{re.escape(str(path))} has no variable y; it holds X"):
        load_dataset("svhn", data_dir=tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path))} has no {NAMES[1]}; put all files of svhn there"):
        load_dataset("svhn", data_dir=tmp_path)
