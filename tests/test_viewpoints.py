"""The data set of ``examples/viewpoints.py``, which the tables of results use."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support import registered_for_now
from torchcaps.datasets import list_datasets, load_dataset
from torchcaps.datasets.registry import _DATASETS
from torchcaps.datasets.views import FAMILIAR
from torchcaps.plugins import load_plugin

with registered_for_now():
    load_plugin(Path(__file__).parents[1] / "examples" / "viewpoints.py")
    INFOS = {info.name: info for info in list_datasets() if info.name.startswith("viewpoints")}
    viewpoints = next(
        each for name, each in sys.modules.items() if name in ("viewpoints", "torchcaps_plugin_viewpoints")
    )
_camera, _draw, _Ellipsoids, _render, _shade = (
    getattr(viewpoints, name) for name in ("_camera", "_draw", "_Ellipsoids", "_render", "_shade")
)

FILE = "viewpoints/viewpoints-1.bin"
NAMES = list(INFOS)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered_for_now():
        _DATASETS.update(INFOS)
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloads and no TORCHCAPS_DATA."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("pooch.os_cache", lambda project: folder / project)
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    return folder / "torchcaps"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two objects of each category from six sides."""
    for name, value in (("INSTANCES", 2), ("AZIMUTHS", (0, 20, 180)), ("ELEVATIONS", (30, 60)), ("_VIEWS", 12)):
        monkeypatch.setattr(viewpoints, name, value)


@pytest.mark.usefixtures("few")
def test_they_are_rendered_once_and_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset("viewpoints")
    path = cache / FILE
    assert path.stat().st_size == 32 + 120 * 48 * 48
    monkeypatch.setattr(viewpoints, "_render", lambda _: pytest.fail("rendered again"))
    again = load_dataset("viewpoints")
    assert torch.equal(again.train.images, data.train.images)
    (tmp_path / "mine/viewpoints").mkdir(parents=True)
    path.rename(tmp_path / "mine" / FILE)
    for options in ({"data_dir": tmp_path / "mine"}, {}):
        monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "mine"))
        assert torch.equal(load_dataset("viewpoints", **options).test.images, data.test.images)


@pytest.mark.usefixtures("few")
def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    whole = load_dataset("viewpoints", data_dir=tmp_path).test.images
    path = tmp_path / FILE
    good = path.read_bytes()
    wrong_pixel, wrong_checksum = bytearray(good), bytearray(good)
    wrong_pixel[5000] ^= 1
    wrong_checksum[5] ^= 1
    for damaged in (good[:-1], good + b"x", wrong_pixel, wrong_checksum):
        path.write_bytes(damaged)
        assert torch.equal(load_dataset("viewpoints", data_dir=tmp_path).test.images, whole)
        assert path.read_bytes() == good
        assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("few")
def test_factors_are_those_of_the_image(tmp_path: Path) -> None:
    data = load_dataset("viewpoints", data_dir=tmp_path, limit_test=40)
    random = np.random.RandomState(0)
    objects = [[_draw(parts, random) for _ in range(2)] for parts in viewpoints._CATEGORIES.values()]
    for images, instance in ((data.train, 0), (data.validation, 0), (data.test, 1)):
        assert set(images.factors["instance"].tolist()) == {instance}
        for n in range(len(images)):
            azimuth, elevation, light = (float(images.factors[name][n]) for name in ("azimuth", "elevation", "light"))
            fine = _shade(objects[int(images.labels[n])][instance], _camera(azimuth, elevation))[int(light)]
            coarse = fine.reshape(48, 2, 48, 2).mean((1, 3)) * 255
            assert np.abs(images.images[n, 0].numpy() - coarse).max() <= 0.5 + 1e-9
    assert len({tuple(image.flatten().tolist()) for image in data.test.images}) == 40


def test_the_pixels_are_the_same_everywhere() -> None:
    """One object from all sides: what was measured on x86-64 with AVX2."""
    pixels = _render(_draw(viewpoints._CATEGORIES["animal"], np.random.RandomState(0)))
    assert pixels.shape == (324, 48, 48)
    assert hashlib.sha256(pixels).hexdigest() == "cb95ce2e4d1e477e8bc77b37423ced832d996e780e6ca645458faecf87d972a6"


def test_the_sets_have_the_sizes_that_the_list_says(tmp_path: Path) -> None:
    (tmp_path / "viewpoints").mkdir()
    pixels = bytes(16_200 * 48 * 48)
    (tmp_path / FILE).write_bytes(hashlib.sha256(pixels).digest() + pixels)
    assert [INFOS[name].num_test for name in NAMES] == [8100, 5400, 2700, 5400, 2700]
    for name in NAMES:
        data, info = load_dataset(name, data_dir=tmp_path), INFOS[name]
        assert (len(data.train) + len(data.validation), len(data.test)) == (info.num_train, info.num_test)
        assert (data.in_shape, data.class_names) == (info.in_shape, info.class_names)
        assert info.locate(tmp_path) == tmp_path / "viewpoints"
        assert data.test.labels.bincount().tolist() == [info.num_test // 5] * 5
        for factor, familiar in FAMILIAR.items():
            if factor in name:
                parts = ((data.train, True), (data.validation, True), (data.test, name.endswith("-familiar")))
                for images, is_familiar in parts:
                    assert {int(angle) in familiar for angle in images.factors[factor]} == {is_familiar}
