"""Small networks, and two tiny runs of the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import small
from tiny_runs import tiny_config, write_bars
from torchcaps import create_model
from torchcaps.export import Description
from torchcaps.models import BaselineCNN, CapsNet
from torchcaps.training import train

SHAPE, CLASSES = (1, 18, 20), ("zero", "one", "two", "three")

MakeNetwork = Callable[..., CapsNet | BaselineCNN]


@pytest.fixture(scope="session")
def make_network() -> MakeNetwork:
    """Networks for 18×20 images of four classes, whose capsules have lengths that differ, as those of trained ones."""

    def make(preset: str = "sabour2017", **overrides: Any) -> CapsNet | BaselineCNN:
        torch.manual_seed(0)
        made = create_model(preset, SHAPE, len(CLASSES), **small(preset) | overrides)
        if isinstance(made, CapsNet):
            with torch.no_grad():
                made.class_capsules.transform.weight.mul_(20)
        return made

    return make


@pytest.fixture(scope="session")
def describe() -> Callable[..., Description]:
    """What a file says of such a network."""
    return lambda **values: Description(**{"in_shape": SHAPE, "class_names": CLASSES, **values})


@pytest.fixture(scope="session")
def make_images() -> Callable[[int], torch.Tensor]:
    """So many of their images, uint8."""

    def make(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture(scope="session")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of tiny runs, as a file."""
    return write_bars(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="session")
def runs(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one training, of the seeds 0 and 1, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        config = tiny_config(bars, seed=seed, epochs=2, learning_rate=0.01)
        train(config, folder / str(seed), figures=False)
    return folder / "0", folder / "1"
