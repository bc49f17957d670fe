"""A data set small enough to train on in a second."""

from pathlib import Path

import numpy as np
import pytest

from tiny_runs import tiny_config
from torchcaps.datasets import Dataset, PairSet, fixed_pairs, load_dataset
from torchcaps.training import TrainConfig, data


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18×18 images of three classes: a bar on top, in the middle, or at the bottom, in noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(150) % 3
    images = rng.integers(0, 80, (150, 18, 18))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    path = tmp_path_factory.mktemp("data") / "bars.npz"
    np.savez(path, x=images.astype(np.uint8), y=labels)
    return path


@pytest.fixture
def tiny(bars: Path) -> TrainConfig:
    """Three epochs of six steps."""
    return tiny_config(bars)


@pytest.fixture
def two_bars(bars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever data set is asked for, a run gets images of two bars each: 22×22 pixels, pairs made anew to train on."""
    single = load_dataset(f"npz:{bars}", validation_size=12)
    pairs = Dataset(
        "pairs",
        PairSet(single.train, max_shift=2),
        fixed_pairs(single.validation, max_shift=2),
        fixed_pairs(single.test, max_shift=2),
        single.class_names,
    )
    monkeypatch.setattr(data, "load_dataset", lambda *_, **__: pairs)
