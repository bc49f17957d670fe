from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.datasets import load_dataset, resize_images
from torchcaps.datasets.sources import smallnorb
from torchcaps.errors import InputError

N = 30
TRAIN, TEST = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"


def matrix(values: np.ndarray) -> bytes:
    """NORB's binary matrix format: code, number of axes, at least three lengths, values, all little-endian."""
    code = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54, "float32": 0x1E3D4C51}[values.dtype.name]
    lengths = [*values.shape, *[1] * (3 - values.ndim)]
    return struct.pack(f"<Ii{len(lengths)}i", code, values.ndim, *lengths) + values.tobytes()


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (N, 2, 96, 96), dtype=np.uint8)


LABELS = (np.arange(N) % 5).astype(np.int32)
CODES = np.stack(
    [np.arange(N) % 5, np.arange(N) % 9, 2 * (np.arange(N) % 18), np.arange(N) % 6], 1
)  # instance, elevation, azimuth, light
FILES = {
    f"{TRAIN}-dat.mat": matrix(pixels(0)),
    f"{TRAIN}-cat.mat": matrix(LABELS),
    f"{TEST}-dat.mat": matrix(pixels(1)),
    f"{TEST}-cat.mat": matrix(LABELS[::-1].copy()),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallnorb, "_COUNT", N)
    monkeypatch.setattr(smallnorb, "_CHUNK", 8)


def write(folder: Path, files: dict[str, bytes] | None = None, *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in {**FILES, **(files or {})}.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(contents, compresslevel=1) if zipped else contents)
    return folder


@pytest.mark.parametrize("sub", [".", "smallnorb"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_are_read_as_two_channels_of_half_the_size(tmp_path: Path, sub: str, zipped: bool) -> None:
    write(tmp_path / sub, zipped=zipped)
    data = load_dataset("smallnorb", data_dir=tmp_path, limit_train=20, validation_size=5)
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 5, N)
    assert data.in_shape == (2, 48, 48)
    assert data.test.labels.tolist() == LABELS[::-1].tolist()
    raw = pixels(1)[17, 1].astype(float)
    assert data.test.images[17, 1, 10, 20] == np.round(raw[20:22, 40:42].mean())
    blocks = raw.reshape(48, 2, 48, 2).mean((1, 3))
    assert torch.equal(data.test.images[17, 1], torch.from_numpy(np.round(blocks).astype(np.uint8)))
    assert smallnorb.SOURCE.find(tmp_path) == tmp_path / sub


def test_another_size_is_made_of_the_original_pixels(tmp_path: Path) -> None:
    write(tmp_path)
    raw = torch.from_numpy(pixels(1))
    for size in (96, 32):
        test = load_dataset("smallnorb", data_dir=tmp_path, image_size=size).test
        assert torch.equal(test.images, resize_images(raw, (size, size)))
    same = load_dataset("smallnorb", data_dir=tmp_path, image_size=48).test
    assert torch.equal(same.images, load_dataset("smallnorb", data_dir=tmp_path).test.images)


VIEWS = {f"{part}-info.mat": matrix(CODES.astype(np.int32)) for part in (TRAIN, TEST)}


@pytest.mark.parametrize("zipped", [True, False])
def test_familiar_and_novel_sides(tmp_path: Path, zipped: bool) -> None:
    write(tmp_path, VIEWS, zipped=zipped)
    whole = load_dataset("smallnorb", data_dir=tmp_path).test
    assert not whole.factors
    familiar = {"azimuth": CODES[:, 2] * 10 % 360, "elevation": 30 + 5 * CODES[:, 1]}
    learned = {"azimuth": [0, 20, 40, 300, 320, 340], "elevation": [30, 35, 40]}
    for factor, angles in familiar.items():
        for name, is_familiar in ((f"smallnorb-{factor}", False), (f"smallnorb-{factor}-familiar", True)):
            data = load_dataset(name, data_dir=tmp_path, validation_size=2)
            chosen = np.flatnonzero(np.isin(angles, learned[factor]) == is_familiar)
            assert torch.equal(data.test.images, whole.images[torch.from_numpy(chosen)])
            assert data.test.factors[factor].tolist() == angles[chosen].tolist()
            assert data.test.factors["instance"].tolist() == CODES[chosen, 0].tolist()
            assert data.test.factors["light"].tolist() == CODES[chosen, 3].tolist()
            for images in (data.train, data.validation):
                assert set(images.factors[factor].tolist()) <= set(learned[factor])
            assert len(data.train) + 2 == np.isin(angles, learned[factor]).sum()


@pytest.mark.parametrize("column", range(4))
def test_sides_that_cannot_be(tmp_path: Path, column: int) -> None:
    codes = CODES.astype(np.int32)
    codes[3, column] = 37
    write(tmp_path, VIEWS | {f"{TRAIN}-info.mat": matrix(codes)})
    with pytest.raises(InputError, match=r"training-info.mat has codes from \[0, .*37.*, but smallNORB's are "):
        load_dataset("smallnorb-azimuth", data_dir=tmp_path)


def test_without_the_files_that_say_the_sides(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=rf"has no {TRAIN}-info\.mat and no {TEST}-info\.mat \("):
        load_dataset("smallnorb-elevation", data_dir=tmp_path)
    assert smallnorb.VIEWS_SOURCE.find(tmp_path) is None


def test_they_are_downloaded(
    serve: Callable[[dict[str, bytes]], str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{name}.gz": gzip.compress(contents, compresslevel=1) for name, contents in FILES.items()}
    sha256 = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    assert set(sha256) == set(smallnorb.SOURCE.sha256)
    source = dataclasses.replace(smallnorb.SOURCE, mirrors=(serve(files),), sha256=sha256)
    monkeypatch.setattr(smallnorb, "SOURCE", source)
    assert len(load_dataset("smallnorb").test) == N
    assert source.find(None) == cache / "smallnorb"


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        (
            "dat.mat",
            matrix(LABELS),
            "it begins with the bytes 54 4c 3d 1e .* instead of 55 4c 3d 1e",
        ),
        ("dat.mat", b"<html>not here</html>", "is not smallNORB's, "),
        ("dat.mat", matrix(pixels(0)[:29]), "04 00 00 00 1d 00 00 00 .* instead of .* 04 00 00 00 1e 00 00 00 "),
        ("cat.mat", matrix(LABELS.astype(np.float32)), "it begins with the bytes 51 4c 3d 1e"),
        ("cat.mat", b"", "truncated or corrupt: it ends too early"),
        ("cat.mat", matrix(LABELS)[:-1], "truncated or corrupt: it ends too early"),
        ("dat.mat", matrix(pixels(0)) + b"x", "truncated or corrupt: it goes on after its last value"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_files_and_those_of_another_form(
    tmp_path: Path, name: str, contents: bytes, words: str, zipped: bool
) -> None:
    write(tmp_path, {f"{TRAIN}-{name}": contents}, zipped=zipped)
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path / TRAIN))}-{name}(.gz)? .*{words}"):
        load_dataset("smallnorb", data_dir=tmp_path)


def test_damaged_gzip_files(tmp_path: Path) -> None:
    write(tmp_path, zipped=True)
    for name in (f"{TRAIN}-dat.mat.gz", f"{TRAIN}-cat.mat.gz"):
        path = tmp_path / name
        whole = path.read_bytes()
        wrong_checksum = whole[:-8] + bytes(4) + whole[-4:]
        for contents in (whole[:-4], whole[:12], whole[:40] + bytes(30) + whole[70:], wrong_checksum):
            path.write_bytes(contents)
            with pytest.raises(InputError, match=f"{re.escape(str(path))} "):
                load_dataset("smallnorb", data_dir=tmp_path)
        path.write_bytes(whole)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / f"{TEST}-cat.mat").unlink()
    with pytest.raises(
        InputError, match=rf"{re.escape(str(tmp_path))} has no {TEST}-cat\.mat \(or {TEST}-cat\.mat\.gz\); put all"
    ):
        load_dataset("smallnorb", data_dir=tmp_path)
