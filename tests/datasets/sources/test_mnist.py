from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.datasets import list_datasets, load_dataset
from torchcaps.datasets.registry import DataRequest
from torchcaps.datasets.sources import mnist
from torchcaps.datasets.sources.mnist import FAMILIES, IdxFamily, load_family
from torchcaps.errors import InputError

STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def contents(seed: int) -> dict[str, bytes]:
    """The four files of a small family: 40 and 20 images of 6×5."""
    random = np.random.default_rng(seed)
    files = {}
    for part, n in (("train", 40), ("t10k", 20)):
        labels = np.arange(n, dtype=np.uint8) % 10
        files[f"{part}-images-idx3-ubyte"] = idx(random.integers(0, 256, (n, 6, 5), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx(random.permutation(labels))
    return files


def family(name: str, files: dict[str, bytes], mirrors: tuple[str, ...] = ("http://127.0.0.1:9/",)) -> IdxFamily:
    return dataclasses.replace(
        FAMILIES[0],
        name=name,
        folders=(f"{name.upper()}/raw",),
        mirrors=mirrors,
        sha256={f"{stem}.gz": hashlib.sha256(gzip.compress(data, mtime=0)).hexdigest() for stem, data in files.items()},
        labels_md5=hashlib.md5(files[STEMS[3]]).hexdigest(),
        shares_names=name != "small",  # as all but MNIST
        shapes={stem: (40 if "train" in stem else 20, 6, 5)[: 3 if "images" in stem else 1] for stem in files},
    )


ONE, TWO, FREE = contents(1), contents(2), contents(3)
SMALL, OTHER = family("small", ONE), family("other", TWO)
UNKNOWN = dataclasses.replace(family("unknown", FREE), labels_md5=None)  # as KMNIST's, which nobody published


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "FAMILIES", (SMALL, OTHER, UNKNOWN))


def write(folder: Path, files: dict[str, bytes], *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, data in files.items():
        if zipped:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(data, mtime=0))
        else:
            (folder / stem).write_bytes(data)
    return folder


def load(which: IdxFamily, folder: Path | None = None, *, download: bool = False) -> torch.Tensor:
    splits = load_family(which, DataRequest(data_dir=folder, download=download))
    return torch.cat([splits.train.images, splits.test.images])


@pytest.mark.parametrize("sub", [".", "small", "SMALL/raw"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_are_found_and_read(tmp_path: Path, sub: str, zipped: bool) -> None:
    write(tmp_path / "data" / sub, ONE, zipped=zipped)
    splits = load_family(SMALL, DataRequest(data_dir=tmp_path / "data"))
    pixels = np.frombuffer(ONE["train-images-idx3-ubyte"][16:], np.uint8).reshape(40, 1, 6, 5)
    assert torch.equal(splits.train.images, torch.from_numpy(pixels.copy()))
    assert splits.train.labels.tolist() == list(ONE["train-labels-idx1-ubyte"][8:])
    assert splits.test.labels.tolist() == list(ONE["t10k-labels-idx1-ubyte"][8:])
    assert SMALL.find(tmp_path / "data") == tmp_path / "data" / sub


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(write(tmp_path / "data", ONE)))
    assert len(load(SMALL)) == 60
    assert SMALL.find(None) == tmp_path / "data"


def test_the_argument_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "nowhere"))
    assert len(load(SMALL, write(tmp_path / "data", ONE))) == 60


def test_the_cache_is_the_last_place(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(cache / "small", ONE, zipped=True)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "data"))  # which holds other things
    assert SMALL.find(None) == cache / "small"
    assert len(load(SMALL)) == 60
    assert len(load(SMALL, download=True)) == 60  # needs no network either


def test_another_sets_files_of_the_same_names_are_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHCAPS_DATA", str(write(tmp_path / "data", ONE)))
    assert OTHER.find(None) is None
    assert UNKNOWN.find(None) is None
    with pytest.raises(InputError, match="other is not on this machine"):
        load(OTHER)
    write(tmp_path / "data" / "other", ONE)  # put where only the other's belong
    with pytest.raises(InputError, match=r"t10k-labels.* does not hold the test labels of other; they are small's"):
        load(OTHER)
    for which in (OTHER, UNKNOWN):
        assert which.find(tmp_path / "data") is not None
        with pytest.raises(InputError, match=f"does not hold the test labels of {which.name}; they are small's"):
            load(which, tmp_path / "data")  # named for it


def test_labels_that_are_nobodys(tmp_path: Path) -> None:
    write(tmp_path, FREE)
    assert len(load(UNKNOWN, tmp_path)) == 60
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte does not hold the test labels of small; fetch its"):
        load(SMALL, tmp_path)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_files_are_named(tmp_path: Path, stem: str, zipped: bool) -> None:
    write(tmp_path, ONE, zipped=zipped)
    path = tmp_path / (f"{stem}.gz" if zipped else stem)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        InputError, match=f"{re.escape(str(path))} is not small's {stem}, or it is truncated or corrupt"
    ):
        load(SMALL, tmp_path)


def test_wrong_shapes(tmp_path: Path) -> None:
    write(tmp_path, ONE | {"t10k-images-idx3-ubyte": idx(np.zeros((20, 5, 6), np.uint8))})
    with pytest.raises(InputError, match=r"t10k-images.* is not .* 05 00 00 00 06 instead of .* 06 00 00 00 05$"):
        load(SMALL, tmp_path)
    write(tmp_path, ONE | {"train-labels-idx1-ubyte": idx(np.zeros(39, np.uint8))})
    with pytest.raises(InputError, match=r"bytes 00 00 08 01 00 00 00 27 instead of 00 00 08 01 00 00 00 28"):
        load(SMALL, tmp_path)


@pytest.mark.parametrize("stem", STEMS)
def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str) -> None:
    write(tmp_path / "data", ONE)
    (tmp_path / "data" / stem).unlink()
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path / 'data'))} has no {stem}"):
        load(SMALL, tmp_path / "data")
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "data"))
    with pytest.raises(InputError, match=f"has no {stem}"):  # half a set there is a mistake, not a wish to download
        load(SMALL)
    assert SMALL.find(tmp_path / "data") is None


def test_a_folder_that_is_none_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"data_dir is {re.escape(str(tmp_path / 'no'))}, which is no folder"):
        load(SMALL, tmp_path / "no")
    with pytest.raises(InputError, match="has no train-images-idx3-ubyte and no train-labels"):
        load(SMALL, tmp_path, download=True)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "no"))
    with pytest.raises(InputError, match=r"TORCHCAPS_DATA is .*no folder"):
        load(SMALL)
    assert SMALL.find(None) is None


def test_no_network_and_no_wish_for_one() -> None:
    with pytest.raises(
        InputError, match=r"could not be downloaded \(http://127\.0\.0\.1:9/: ConnectionError\).*--data-dir"
    ):
        load(SMALL, download=True)
    with pytest.raises(InputError, match=r"small is not on this machine.*--data-dir FOLDER, or TORCHCAPS_DATA"):
        load(SMALL, download=False)


def test_the_published_families_are_complete() -> None:
    assert [family.name for family in FAMILIES] == ["mnist", "fashion-mnist", "kmnist"]
    for each in FAMILIES:
        assert tuple(each.shapes) == STEMS
        assert tuple(each.sha256) == tuple(f"{stem}.gz" for stem in STEMS)
        assert all(len(value) == 64 for value in each.sha256.values())
        assert len(each.labels_md5 or "0" * 32) == 32
        assert len(each.class_names) == 10
        assert all(mirror.endswith("/") for mirror in each.mirrors)


@pytest.mark.mnist
def test_the_real_thing(mnist_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "FAMILIES", FAMILIES)
    monkeypatch.setenv("TORCHCAPS_DATA", str(mnist_dir))
    data = load_dataset("mnist")
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, 10_000)
    assert data.in_shape == (1, 28, 28)
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = data.train.labels.bincount() + data.validation.labels.bincount()
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert ((data.validation.labels.bincount() - counts / 12).abs() < 1).all()

    limited = load_dataset("mnist", limit_train=1000, limit_test=1000, image_size=20)
    assert limited.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert (len(limited.train), len(limited.validation), len(limited.test)) == (1000, 5000, 1000)
    assert limited.in_shape == (1, 20, 20)

    here = {info.name for info in list_datasets() if info.locate()}
    assert "mnist" in here
