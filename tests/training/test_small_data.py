"""A recipe that is adapted to few or uneven images, and its messages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_runs import NARROW, Heard, StopAt, rows, run, tiny_config
from torchcaps.analysis import evaluate
from torchcaps.training import (
    Interrupted,
    TrainConfig,
    load_run,
    make_config,
    small_data,
)
from torchcaps.training.config import OWN_IMAGE_DEFAULTS, read_config
from torchcaps.training.small_data import chance_warning, fit_recipe


def test_a_recipe_is_fitted_to_few_images() -> None:
    given: dict[str, Any]
    for images, given, batch, epochs, rate in (
        (324, {}, 16, 100, 3e-3 / 8**0.5),  # 20 steps an epoch
        (5, {}, 16, 2000, 3e-3 / 8**0.5),  # which is refused later: fewer images than a batch
        (3_199, {}, 16, 20, 3e-3 / 8**0.5),
        (3_200, {}, 32, 20, 3e-3 / 4**0.5),
        (60_000, {}, 128, 20, 3e-3),
        (324, {"epochs": 10}, 16, 10, 3e-3 / 8**0.5),
        (324, {"batch_size": 500}, 500, 2000, 3e-3),
        (324, {"learning_rate": 1e-2}, 16, 100, 1e-2),
    ):
        config = fit_recipe(make_config("compact", data="folder:shapes", **given), torch.arange(images) % 2)
        assert (config.recipe.batch_size, config.recipe.epochs, config.fitted) == (batch, epochs, ())
        assert config.recipe.learning_rate == pytest.approx(rate)
        few = images < 60_000 and "epochs" not in given
        assert config.recipe.patience == (max(epochs // 4, 10) if few else None)
        rest = {"batch_size": 1, "epochs": 1, "learning_rate": 1.0, "patience": None, **OWN_IMAGE_DEFAULTS}
        assert config.recipe.replace(rest) == make_config("compact").recipe.replace(rest)
    for config in (make_config("compact", data="digits"), TrainConfig.from_dict({"data": "folder:shapes"})):
        assert fit_recipe(config, torch.arange(100) % 7 // 6) == config, "named data and files stay as they are"


def test_a_recipe_that_is_fitted_to_few_images_is_said_and_written(bars: Path, tmp_path: Path) -> None:
    said = StopAt(1)
    with pytest.raises(Interrupted):
        run(make_config("sabour2017", data=f"npz:{bars}", **NARROW), tmp_path / "run", said)
    (line,) = [line for line in said.said if line.startswith("Recipe: ")]
    assert line.startswith("Recipe: for 108 training images 334 epochs or 83 without a better one, in batches of 16")
    assert "With fewer than 50 training images of a class compact-shared learns better" in said.said
    written = read_config(tmp_path / "run" / "config.json")
    assert (written.recipe.epochs, written.recipe.batch_size, written.fitted) == (334, 16, ())
    assert small_data.MIN_STEPS <= 6 * 334 < small_data.MIN_STEPS + 6


def test_chance_is_the_share_of_the_most_frequent_class_and_an_error_of_counting() -> None:
    config = make_config("compact", epochs=10, learning_rate=3e-3)
    for counts, chance in (((12, 12, 12), 1 / 3 + (2 / 9 / 36) ** 0.5), ((90, 10), 0.93), ((5000, 5000), 0.505)):
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        assert chance_warning(chance + 1e-6, labels, config, 100) is None
        assert "the network has learned nothing: " in str(chance_warning(chance - 1e-6, labels, config, 100))
    for preset, steps, advice in (
        ("compact", 100, "Try the network compact-shared"),
        ("compact-shared", 20, "Try more steps (--epochs 100)"),  # 2,000 steps
    ):
        assert advice in str(chance_warning(0.0, labels, make_config(preset, epochs=10), steps))
    for in_shape, is_advised in (((3, 8, 8), True), ((3, 1, 8), False)):  # sequences have other networks
        assert ("compact-shared" in str(chance_warning(0.0, labels, config, 100, in_shape=in_shape))) == is_advised


def test_uneven_classes_are_said_and_balanced_accuracy_chooses(bars: Path, tmp_path: Path) -> None:
    with np.load(bars) as held:
        kept = (held["y"] == 0) | (np.arange(150) % 5 < 2)
        np.savez(tmp_path / "uneven.npz", x=held["x"][kept], y=held["y"][kept])
    file, heard = tmp_path / "uneven.npz", Heard()
    config = tiny_config(file, epochs=1, learning_rate=1e-9)
    assert run(config, tmp_path / "run", heard)["select"] == "balanced-accuracy"
    (line,) = [line for line in heard.said if line.startswith("Classes: ")]
    assert line.startswith("Classes: uneven, 33 training images of 0 and 13 of 1; ")
    assert "balanced accuracy chooses the epoch; --class-weights balanced makes" in line
    config = tiny_config(file, select="accuracy", class_weights="balanced", epochs=8, learning_rate=1e-2)
    found = run(config, tmp_path / "chosen")
    assert (found["select"], found["warning"]) == ("accuracy", None)
    row = rows(tmp_path / "chosen")[found["best_epoch"] - 1]
    chosen = load_run(tmp_path / "chosen")
    judged = evaluate(chosen.model, chosen.dataset().validation)
    assert float(row["validation_balanced_accuracy"]) == pytest.approx(judged.balanced_accuracy)
    assert found["test"]["best"]["balanced_accuracy"] > 0.6
