"""What is explored of a run: its network, and its test images as far as they are here."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from support import assert_raises
from tiny_runs import tiny_config, write_bars
from torchcaps.datasets import load_dataset
from torchcaps.errors import InputError
from torchcaps.explorer import open_explorer
from torchcaps.explorer.state import shipped_images
from torchcaps.models.files import SHIPPED
from torchcaps.training import Run, load_run, train


@pytest.fixture(scope="module")
def bars_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 18×18 images of a file that can be removed."""
    folder = tmp_path_factory.mktemp("sources")
    train(tiny_config(write_bars(folder / "bars.npz"), epochs=1), folder / "run", figures=False)
    return folder / "run"


def copy_with(run: Run, **fields: object) -> Run:
    """The run as if its configuration had other values."""
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **fields))


def test_a_run_brings_its_network_and_test_images(bars_run: Path) -> None:
    run = load_run(bars_run)
    explorer = open_explorer(run)
    assert explorer.model is run.model
    assert explorer.title == f"run: sabour2017, trained on {run.config.data}"
    assert explorer.class_names == ["0", "1", "2"]
    np.testing.assert_array_equal(explorer.pick(5)[0], run.dataset().test.images[5])
    assert explorer.fit == "pad"


def test_a_folder_without_data_says_so(bars_run: Path, tmp_path: Path) -> None:
    load_run(bars_run).model.save_pretrained(tmp_path / "pretrained")
    explorer = open_explorer(load_run(tmp_path / "pretrained"))
    assert explorer.title == "pretrained: trained on unknown data"
    assert explorer.images is None
    assert explorer.no_images.startswith("There are no test images to pick from: ")
    assert "--data" in explorer.no_images
    assert_raises(InputError, explorer.pick, 0, say=explorer.no_images)


def test_the_shipped_network_shows_test_images_of_mnist() -> None:
    run = load_run(SHIPPED["compact"])
    explorer = open_explorer(run)
    assert explorer.title.endswith("trained on MNIST handwritten digits")
    assert explorer.images_of == "test images of MNIST, five of each digit"
    images = shipped_images()
    assert images.labels.tolist() == [*range(10)] * 5
    right = sum(explorer.look(images.images[n].numpy()).present[0] == n % 10 for n in range(50))
    assert right >= 49
    named = open_explorer(run, "digits")
    assert (len(named.images), named.images_of[:19]) == (360, "test images of UCI ")


@pytest.mark.mnist
def test_they_are_the_first_five_of_each_digit() -> None:
    test, shipped = load_dataset("mnist").test, shipped_images()
    for n in range(50):
        wanted = test.images[test.labels == n % 10][n // 10]
        np.testing.assert_array_equal(shipped.images[n], wanted)


def test_data_that_have_gone_are_left_out_and_others_may_be_named(bars_run: Path, tmp_path: Path) -> None:
    run = copy_with(load_run(bars_run), data=f"npz:{tmp_path / 'gone.npz'}")
    explorer = open_explorer(run)
    assert explorer.images is None
    assert "gone.npz" in explorer.no_images
    assert_raises(InputError, open_explorer, run, f"npz:{tmp_path / 'gone.npz'}", say="gone.npz")
    other = open_explorer(run, f"npz:{bars_run.parent / 'bars.npz'}").images
    assert other.in_shape == (1, 18, 18)


def test_nothing_is_downloaded(bars_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pooch.retrieve")
    run = copy_with(load_run(bars_run), data="mnist", data_dir=str(tmp_path))
    explorer = open_explorer(run)
    assert "the files of mnist are not on this machine" in explorer.no_images
    assert_raises(InputError, open_explorer, run, "kmnist", str(tmp_path), say="downloads nothing")
