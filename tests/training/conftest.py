"""A data set small enough to train on in a second."""

import shutil
from pathlib import Path

import pytest

from tiny_runs import run, tiny_config, write_bars
from torchcaps.datasets import Dataset, PairSet, fixed_pairs, load_dataset
from torchcaps.training import TrainConfig, data


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of tiny runs, as a file."""
    return write_bars(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture
def tiny(bars: Path) -> TrainConfig:
    """Three epochs of six steps."""
    return tiny_config(bars)


@pytest.fixture(scope="session")
def one_epoch(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, without figures."""
    out = tmp_path_factory.mktemp("runs") / "run"
    run(tiny_config(bars, epochs=1), out)
    return out


@pytest.fixture
def out(one_epoch: Path, tmp_path: Path) -> Path:
    """The same in a folder of the test's own."""
    return shutil.copytree(one_epoch, tmp_path / "run")


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
