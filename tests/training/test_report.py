import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_raises
from tiny_runs import tiny_config, write_bars
from torchcaps.analysis import Evaluation
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.training import Interrupted, Progress, Recipe, load_run, make_config, resume, train
from torchcaps.training.config import read_config
from torchcaps.training.data import LEAST_STEPS, chance, warning_of_chance

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
    train(tiny_config(bars, preset, epochs=1, **overrides), tmp_path / "run", progress=Progress())
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
    train(config, tmp_path / "run", progress=Progress())
    pictures = {path.stem for path in (tmp_path / "run" / "figures").iterdir()}
    assert pictures == ALWAYS | {"reconstructions", "perturbation", "routing", "routing-statistics"}


# ---- nothing learned


class Told(Progress):
    """Keeps what a run says, and stops it after its first step if it should."""

    def __init__(self, *, stop: bool = False) -> None:
        self.said: list[str] = []
        self.stop_at = 1 if stop else None

    def message(self, text: str) -> None:
        self.said.append(text)

    def step(self, *, step: int, **_: object) -> None:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)


def judged(counts: list[list[int]]) -> Evaluation:
    confusion = np.array(counts)
    return Evaluation(confusion=confusion, total_loss=0.5 * confusion.sum(), class_names=tuple("abc"[: len(confusion)]))


def test_chance_is_the_share_of_the_most_frequent_class_and_an_error_of_counting() -> None:
    def of(*counts: int) -> float:
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return chance(ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels))

    assert of(12, 12, 12) == pytest.approx(1 / 3 + (2 / 9 / 36) ** 0.5)
    assert of(90, 10) == pytest.approx(0.9 + 0.03)
    assert of(5000, 5000) == pytest.approx(0.505)


def test_the_warning_says_what_the_network_does() -> None:
    recipe = Recipe(epochs=10, learning_rate=3e-3)
    one = warning_of_chance(judged([[0, 12, 0], [0, 12, 0], [0, 12, 0]]), recipe, "compact", 100)
    assert one.startswith(
        'the network has learned nothing: it takes every validation image for "b", 33.3% right, which'
    )
    assert "--epochs 40" in one
    assert "--learning-rate (0.001)" in one
    assert "Try the network compact-shared" in one
    other = warning_of_chance(judged([[1, 1], [1, 1]]), recipe, "compact-shared", 20)
    assert "it guesses, 50.0% right" in other
    assert "Try more steps (--epochs 100)" in other  # 2,000 steps


def test_a_run_that_learned_nothing_says_so(bars: Path, tmp_path: Path) -> None:
    stuck = train(tiny_config(bars, learning_rate=1e-9, epochs=1), tmp_path / "stuck", progress=Progress())
    assert stuck["validation"]["best"]["accuracy"] < 0.5
    assert stuck["warning"].startswith("the network has learned nothing: it ")
    learned = train(tiny_config(bars, learning_rate=1e-2, epochs=6), tmp_path / "learned", progress=Progress())
    assert learned["validation"]["best"]["accuracy"] > 0.6
    assert learned["warning"] is None


# ---- what a run says of its images


def test_a_recipe_that_is_fitted_to_few_images_is_said_and_written(bars: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "run", Told(stop=True)
    narrow = {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (16,)}
    with pytest.raises(Interrupted):
        train(make_config("sabour2017", data=f"npz:{bars}", **narrow), out, progress=told)
    (line,) = [line for line in told.said if line.startswith("Recipe: ")]
    assert line.startswith(
        "Recipe: for 108 training images 334 epochs in batches of 16, 2,004 steps, to a learning rate of 0.00035, in"
    )
    assert "With fewer than 50 training images of a class compact-shared learns better" in told.said
    written = read_config(out / "config.json")
    assert (written.recipe.epochs, written.recipe.batch_size, written.fitted) == (334, 16, ())
    assert LEAST_STEPS <= 6 * 334 < LEAST_STEPS + 6


def test_damaged_images_are_left_out_of_the_whole_run(tmp_path: Path) -> None:
    """Its evaluation and its resumption see the same images, also when the damaged files are gone."""
    with np.load(write_bars(tmp_path / "bars.npz")) as arrays:
        for n, (image, label) in enumerate(zip(arrays["x"], arrays["y"], strict=True)):
            (tmp_path / "photos" / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / "photos" / str(label) / f"{n:03}.png")
    bad = [tmp_path / "photos" / "0" / "000.png", tmp_path / "photos" / "2" / "new.png"]
    for file in bad:
        file.write_bytes(b"no image")
    config = tiny_config(tmp_path / "bars.npz", epochs=1)
    config = dataclasses.replace(config, data=f"folder:{tmp_path / 'photos'}")
    assert_raises(InputError, train, config, tmp_path / "run", say="2 of 151 images cannot be taken")
    assert not (tmp_path / "run").exists()
    told, config = Told(stop=True), dataclasses.replace(config, skip_damaged=True)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", progress=told)
    (line,) = [line for line in told.said if line.startswith("Left out 2 damaged images:")]
    assert [str(file) in line for file in bad] == [True, True]
    bad[1].unlink()
    summary = resume(tmp_path / "run", progress=Progress(), figures=False)
    assert len(summary["skipped"]) == 1
    data = load_run(tmp_path / "run").dataset()
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == 149 == sum(summary["images"].values())
