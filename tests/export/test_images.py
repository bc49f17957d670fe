"""What a file is compared on: the run's own test images where they are at hand, else noise, and never a download."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from torchcaps.export import describe_run, random_images, sample_images
from torchcaps.models.pretrained import SHIPPED
from torchcaps.training import Run, load_run


@pytest.fixture
def run(runs: tuple[Path, Path]) -> Run:
    return load_run(runs[0])


def with_data(run: Run, data: str, data_dir: str | None = None) -> Run:
    assert run.config is not None
    return dataclasses.replace(run, config=dataclasses.replace(run.config, data=data, data_dir=data_dir))


def test_images_to_compare_on(run: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert run.config is not None
    images, words = sample_images(run, 5)
    assert torch.equal(images, run.dataset().test.images[:5])
    assert words == f"the first 5 test images of {run.config.data}"
    images, words = sample_images(run, 10_000)
    assert words.startswith(f"the first {len(images)} test images")
    for other, said in (
        (with_data(run, "mnist", str(tmp_path)), "32 random images (mnist is not on this machine)"),
        (with_data(run, f"npz:{tmp_path / 'gone.npz'}"), "32 random images (the data cannot be read: "),
        (load_run(runs[0] / "best"), f"32 random images ({runs[0] / 'best'} does not say what it was trained on)"),
    ):
        images, words = sample_images(other)
        assert torch.equal(images, random_images(run.model.in_shape))
        assert words.startswith(said)
    images, words = sample_images(load_run(SHIPPED["compact"]))
    assert (images.shape, words) == ((32, 1, 28, 28), "the first 32 test images of digits")
    assert random_images((3, 9, 8), 4).float().std() > 50


def test_what_a_run_says_of_itself(run: Run, runs: tuple[Path, Path]) -> None:
    described = describe_run(run)
    assert (described.in_shape, described.class_names) == ((1, 18, 18), ("0", "1", "2"))
    assert (described.preset, described.objects, described.fit) == ("sabour2017", 1, "pad")
    assert describe_run(load_run(runs[0] / "best")).preset is None
    stretched = dataclasses.replace(run, images=dataclasses.replace(run.images, fit="stretch"))
    assert describe_run(stretched).fit == "stretch"
    assert load_run(runs[0] / "best").images.fit == "pad"
