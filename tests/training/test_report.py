from pathlib import Path

import pytest
from PIL import Image

from tiny_runs import tiny_config
from torchcaps.training import train
from torchcaps.training.progress import Silence

ALWAYS = {"samples", "curves", "confusion"}


@pytest.mark.parametrize(
    ("preset", "overrides", "more"),
    [
        ("sabour2017", {}, {"reconstructions", "perturbation", "routing", "routing-statistics"}),
        ("sabour2017", {"decoder": False}, {"routing", "routing-statistics"}),
        ("sabour2017", {"num_iterations": 0, "decoder": False}, set()),
        ("baseline-cnn", {"channels": (4,), "hidden": (8,)}, set()),
    ],
)
def test_a_run_draws_what_its_network_has(
    bars: Path, tmp_path: Path, preset: str, overrides: dict[str, object], more: set[str]
) -> None:
    train(tiny_config(bars, preset, epochs=1, **overrides), tmp_path / "run", progress=Silence())
    pictures = {path.stem: path for path in (tmp_path / "run" / "figures").iterdir()}
    assert set(pictures) == ALWAYS | more
    for path in pictures.values():
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 200
            assert len(picture.convert("L").getcolors(1 << 20) or []) > 10, "the picture is empty"


@pytest.mark.usefixtures("two_bars")
def test_a_run_with_two_objects_in_an_image_draws_the_same(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, max_shift=0, objects=2, epochs=1)
    train(config, tmp_path / "run", progress=Silence())
    pictures = {path.stem for path in (tmp_path / "run" / "figures").iterdir()}
    assert pictures == ALWAYS | {"reconstructions", "perturbation", "routing", "routing-statistics"}
