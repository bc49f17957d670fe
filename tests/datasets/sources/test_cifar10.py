from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.datasets import load_dataset
from torchcaps.datasets.sources import cifar10
from torchcaps.errors import InputError

N = 20  # records in each of the small files
NAMES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def records(seed: int) -> np.ndarray:
    """A file's records: label, 1,024 red, 1,024 green and 1,024 blue bytes."""
    made = np.random.default_rng(seed).integers(0, 256, (N, 3073), dtype=np.uint8)
    made[:, 0] = (np.arange(N) + seed) % 10
    return made


FILES = {name: records(seed).tobytes() for seed, name in enumerate(NAMES)}


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, contents in {"batches.meta.txt": b"airplane\n", **files}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
    return gzip.compress(buffer.getvalue(), mtime=0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = {"cifar-10-binary.tar.gz": hashlib.sha256(packed(FILES)).hexdigest()}
    monkeypatch.setattr(cifar10, "_RECORDS", N)
    monkeypatch.setattr(cifar10, "SOURCE", dataclasses.replace(cifar10.SOURCE, sha256=sha256))


def put(root: Path, files: dict[str, bytes], *, as_archive: bool) -> Path:
    """The place of the archive or of the folder it unpacks to."""
    root.mkdir(parents=True, exist_ok=True)
    place = root / ("cifar-10-binary.tar.gz" if as_archive else "cifar-10-batches-bin")
    if as_archive:
        place.write_bytes(packed(files))
    else:
        place.mkdir()
        for name, contents in files.items():
            (place / name).write_bytes(contents)
    return place


@pytest.mark.parametrize("sub", [".", "cifar10"])
@pytest.mark.parametrize("as_archive", [True, False])
def test_files_are_read(tmp_path: Path, sub: str, as_archive: bool) -> None:
    put(tmp_path / sub, FILES, as_archive=as_archive)
    data = load_dataset("cifar10", data_dir=tmp_path, limit_train=60, validation_size=20)
    assert (len(data.train), len(data.validation), len(data.test)) == (60, 20, N)
    assert data.in_shape == (3, 32, 32)
    record = records(1)[4]  # the fifth of the second file
    assert data.train.labels[N + 4] == record[0]
    image = data.train.images[N + 4]  # type: ignore[union-attr]
    assert image[0].flatten().tolist() == record[1:1025].tolist()
    assert image[2, 3, 5] == record[1 + 2 * 1024 + 3 * 32 + 5]
    assert torch.equal(data.test.labels, torch.from_numpy(records(5)[:, 0]).long())
    assert cifar10.SOURCE.find(tmp_path) == tmp_path / sub


def test_it_is_downloaded_and_found_again(
    serve: Callable[[dict[str, bytes]], str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed(FILES)
    source = dataclasses.replace(
        cifar10.SOURCE,
        mirrors=(serve({"cifar-10-binary.tar.gz": archive}),),
        sha256={"cifar-10-binary.tar.gz": hashlib.sha256(archive).hexdigest()},
    )
    monkeypatch.setattr(cifar10, "SOURCE", source)
    assert source.find(None) is None
    with pytest.raises(InputError, match="cifar10 is not on this machine"):
        load_dataset("cifar10", download=False)
    assert len(load_dataset("cifar10").test) == N
    assert source.find(None) == cache / "cifar10"
    assert len(load_dataset("cifar10", download=False).test) == N


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named(tmp_path: Path, change: int) -> None:
    contents = (FILES["data_batch_3.bin"] + b"x")[: N * 3073 + change]
    place = put(tmp_path, FILES | {"data_batch_3.bin": contents}, as_archive=False)
    words = "it ends too early" if change < 0 else "it goes on after its last value"
    with pytest.raises(InputError, match=f"{re.escape(str(place))}/data_batch_3.bin is not CIFAR-10's .* {words}"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_a_label_beyond_the_classes_is_named(tmp_path: Path) -> None:
    put(tmp_path, FILES | {"test_batch.bin": b"\x0a" + FILES["test_batch.bin"][1:]}, as_archive=False)
    with pytest.raises(InputError, match="cifar10: a test label is 10, but the 10 classes go from 0 to 9"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files = {name: contents for name, contents in FILES.items() if name != "data_batch_2.bin"}
    place = put(tmp_path, files, as_archive=False)
    with pytest.raises(InputError, match=rf"there is no file {re.escape(str(place))}/data_batch_2\.bin"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_another_archive_is_not_opened(tmp_path: Path) -> None:
    """Damaged, other, or a bomb: its checksum tells."""
    place = put(tmp_path, FILES | {"data_batch_1.bin": FILES["data_batch_2.bin"]}, as_archive=True)
    for contents in (place.read_bytes(), b"", b"<html>"):
        place.write_bytes(contents)
        with pytest.raises(InputError, match=f"{re.escape(str(place))} is not cifar10's, or it is damaged"):
            load_dataset("cifar10", data_dir=tmp_path)


def test_a_folder_without_it_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin \(or cifar-10-binary\.tar\.gz\); put all files"):
        load_dataset("cifar10", data_dir=tmp_path)
