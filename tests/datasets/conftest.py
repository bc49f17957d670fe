"""What the tests of data sets share: no test sees this machine's cache or the network by accident."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.datasets import ImageSet

_NAMED = os.environ.get("TORCHCAPS_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloads and no TORCHCAPS_DATA."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("pooch.os_cache", lambda project: folder / project)
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return folder / "torchcaps"


@pytest.fixture
def mnist_dir() -> Path:
    """The real MNIST files."""
    from torchcaps.datasets.mnist import FAMILIES, find_files

    if not _NAMED or find_files(FAMILIES[0], Path(_NAMED)) is None:
        pytest.skip("the environment variable TORCHCAPS_DATA names no folder with the four MNIST files")
    return Path(_NAMED)


@pytest.fixture
def make_set() -> Callable[..., ImageSet]:
    """Makes sets of random images, every pixel at least 1 so that zeros can only come from a shift."""

    def make(n: int = 12, shape: tuple[int, int, int] = (1, 6, 5), classes: int = 3) -> ImageSet:
        random = torch.Generator().manual_seed(n)
        images = torch.randint(1, 256, (n, *shape), generator=random, dtype=torch.uint8)
        return ImageSet(images, torch.arange(n) % classes)

    return make


@pytest.fixture
def save_image() -> Callable[..., Path]:
    """Writes an array as an image file, making its folder."""

    def save(path: Path, pixels: np.ndarray | None = None, mode: str | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.full((6, 5), 9, np.uint8) if pixels is None else pixels)
        (image.convert(mode) if mode else image).save(path)
        return path

    return save
