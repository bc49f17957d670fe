"""The data set of ``examples/viewpoints.py``, which the tables of results use."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import registered_for_now
from torchcaps.datasets import list_datasets, load_dataset
from torchcaps.plugins import load_plugin

EXAMPLE = Path(__file__).parents[2] / "examples" / "viewpoints.py"
FILE = "viewpoints/viewpoints-1.bin"


@pytest.fixture(autouse=True)
def viewpoints() -> Iterator[Any]:
    """The example, loaded as a plugin."""
    with registered_for_now():
        load_plugin(EXAMPLE)
        yield next(each for each in sys.modules.values() if getattr(each, "__file__", None) == str(EXAMPLE))


@pytest.fixture
def few(viewpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two objects of each category from six sides."""
    for name, value in (("INSTANCES", 2), ("AZIMUTHS", (0, 20, 180)), ("ELEVATIONS", (30, 60)), ("_VIEWS", 12)):
        monkeypatch.setattr(viewpoints, name, value)


@pytest.mark.usefixtures("few")
def test_they_are_rendered_once_kept_and_made_again_where_the_file_is_damaged(
    viewpoints: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_dataset("viewpoints").test.images
    path = cache / FILE
    assert path.stat().st_size == 32 + 120 * 48 * 48
    good = path.read_bytes()
    wrong_pixel, wrong_checksum = bytearray(good), bytearray(good)
    wrong_pixel[5000] ^= 1
    wrong_checksum[5] ^= 1
    for damaged in (good[:-1], good + b"x", wrong_pixel, wrong_checksum):
        path.write_bytes(damaged)
        assert torch.equal(load_dataset("viewpoints").test.images, whole)
        assert path.read_bytes() == good
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(viewpoints, "_render", lambda _: pytest.fail("rendered again"))
    assert torch.equal(load_dataset("viewpoints").test.images, whole)
    (tmp_path / "mine/viewpoints").mkdir(parents=True)
    path.rename(tmp_path / "mine" / FILE)
    for options in ({"data_dir": tmp_path / "mine"}, {}):
        monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "mine"))
        assert torch.equal(load_dataset("viewpoints", **options).test.images, whole)


@pytest.mark.usefixtures("few")
def test_silhouettes_are_the_pixels_of_the_category(viewpoints: Any) -> None:
    images, masks = (load_dataset(f"{name}-azimuth", seed=3).test for name in ("viewpoints", "silhouettes"))
    assert torch.equal(images.images, masks.images)
    assert masks.task.name == "pixels"
    for image, label, mask in zip(images.images[:20], images.labels, masks.labels, strict=False):
        assert torch.equal(mask, ((image[0] > 0) * (1 + label)).to(torch.uint8))
        assert 0.05 < (mask > 0).float().mean() < 0.8


@pytest.mark.usefixtures("few")
def test_factors_are_those_of_the_image(viewpoints: Any, tmp_path: Path) -> None:
    data = load_dataset("viewpoints", data_dir=tmp_path, limit_test=40)
    random = np.random.RandomState(0)
    objects = [[viewpoints._draw(parts, random) for _ in range(2)] for parts in viewpoints._CATEGORIES.values()]
    for images, instance in ((data.train, 0), (data.validation, 0), (data.test, 1)):
        assert set(images.factors["instance"].tolist()) == {instance}
        for n in range(len(images)):
            azimuth, elevation, light = (float(images.factors[name][n]) for name in ("azimuth", "elevation", "light"))
            camera = viewpoints._camera(azimuth, elevation)
            fine = viewpoints._shade(objects[int(images.labels[n])][instance], camera)[int(light)]
            coarse = fine.reshape(48, 2, 48, 2).mean((1, 3)) * 255
            assert np.abs(images.images[n, 0].numpy() - coarse).max() <= 0.5 + 1e-9
    assert len({tuple(image.flatten().tolist()) for image in data.test.images}) == 40


def test_the_pixels_are_the_same_everywhere(viewpoints: Any) -> None:
    """One object from all sides: what was measured on x86-64 with AVX2."""
    pixels = viewpoints._render(viewpoints._draw(viewpoints._CATEGORIES["animal"], np.random.RandomState(0)))
    assert pixels.shape == (324, 48, 48)
    assert hashlib.sha256(pixels).hexdigest() == "cb95ce2e4d1e477e8bc77b37423ced832d996e780e6ca645458faecf87d972a6"


def test_the_sets_have_the_sizes_that_the_list_says(tmp_path: Path) -> None:
    (tmp_path / "viewpoints").mkdir()
    pixels = bytes(16_200 * 48 * 48)
    (tmp_path / FILE).write_bytes(hashlib.sha256(pixels).digest() + pixels)
    infos = [info for info in list_datasets() if info.name.startswith("viewpoints")]
    assert [info.num_test for info in infos] == [8100, 5400, 2700, 5400, 2700]
    for info in infos:
        data = load_dataset(info.name, data_dir=tmp_path)
        assert (len(data.train) + len(data.validation), len(data.test)) == (info.num_train, info.num_test)
        assert (data.in_shape, data.class_names) == (info.in_shape, info.class_names)
        assert info.locate(tmp_path) == tmp_path / "viewpoints"
        assert data.test.labels.bincount().tolist() == [info.num_test // 5] * 5
