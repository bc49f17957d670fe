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
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose checksums are known."""
    folder = write(tmp_path / "checked")
    sha256 = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(svhn, "SOURCE", dataclasses.replace(svhn.SOURCE, sha256=sha256))


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in zip(NAMES, (40, 20), strict=True):
        savemat(folder / name, arrays(n), do_compression=True)
        contents = bytearray((folder / name).read_bytes())
        contents[:116] = b"MATLAB 5.0 MAT-file".ljust(116)  # without the time
        (folder / name).write_bytes(contents)
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
    monkeypatch.setattr(svhn, "SOURCE", dataclasses.replace(svhn.SOURCE, mirrors=(serve(files),)))
    assert len(load_dataset("svhn").test) == 20
    assert svhn.SOURCE.find(None) == cache / "svhn"


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = write(tmp_path) / NAMES[1]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match=f"{re.escape(str(path))} is not svhn's, or it is damaged"):
        load_dataset("svhn", data_dir=tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path))} has no {NAMES[1]}; put all files of svhn there"):
        load_dataset("svhn", data_dir=tmp_path)
