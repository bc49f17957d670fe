from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_runs import tiny_config
from torchcaps.datasets import Augmentation, Dataset
from torchcaps.errors import InputError
from torchcaps.training import Progress, Recipe, TrainConfig, data, load_run, make_config, train
from torchcaps.training.config import override
from torchcaps.training.data import (
    Batches,
    augmentation_of,
    check_objects,
    cropped,
    data_fingerprint,
    fit_recipe,
    load_run_data,
    run_data,
)
from torchcaps.training.devices import launch


def batches_of(config: TrainConfig, whole: Dataset) -> Batches:
    """The batches that a run trains on."""
    return run_data(whole, config.recipe, launch("cpu"), config.seed).train


def test_judged_images_are_cut_in_the_middle_and_batches_anywhere(bars: Path) -> None:
    config = tiny_config(bars, max_shift=0, crop=10)
    whole = load_run_data(config)
    seen = cropped(whole, config.recipe)
    assert seen.in_shape == (1, 10, 10)
    assert whole.in_shape == (1, 18, 18)
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(seen, part).images, getattr(whole, part).images[..., 4:14, 4:14])
    loader = batches_of(config, whole)
    known = {image.numpy().tobytes() for image in seen.train.images}
    batches = [(image * 255).round().byte().numpy().tobytes() for batch in loader.batches(0) for image in batch.images]
    assert sum(image in known for image in batches) / len(batches) < 0.2


def test_a_recipe_holds_every_field_of_an_augmentation_with_its_default() -> None:
    assert augmentation_of(Recipe()) == Augmentation()
    assert augmentation_of(Recipe(crop=9, max_scaling=0.5)) == Augmentation(crop=9, max_scaling=0.5)


def test_every_augmentation_of_the_recipe_reaches_the_loader(bars: Path) -> None:
    plain = tiny_config(bars, max_shift=0)
    whole = load_run_data(plain)
    first = next(iter(batches_of(plain, whole).batches(0))).images
    for change in (
        {"max_shift": 2},
        {"crop": 12},
        {"flip": True},
        {"brightness": 0.3},
        {"contrast": 0.5},
        {"max_rotation": 30.0},
        {"max_scaling": 0.3},
    ):
        images = next(iter(batches_of(override(plain, change), whole).batches(0))).images
        assert images.shape != first.shape or not torch.equal(images, first), change


def test_a_run_with_crops_is_judged_tested_and_read_back_in_its_own_size(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, max_shift=0, crop=17, flip=True, epochs=1)
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert summary["in_shape"] == [1, 17, 17]
    run = load_run(tmp_path / "run")
    assert run.model.in_shape == run.dataset().in_shape == (1, 17, 17)


def test_limits_are_caps(bars: Path) -> None:
    sizes = {
        limit: [len(part) for part in (d.train, d.validation, d.test)]
        for limit in (None, 20, 10_000)
        for d in [load_run_data(tiny_config(bars, limit_train=limit, limit_test=limit))]
    }
    assert sizes[None] == sizes[10_000] == [108, 12, 30]
    assert sizes[20] == [20, 12, 20]


def test_objects_that_the_network_does_not_look_for_are_refused() -> None:
    one, two = make_config("sabour2017"), make_config("sabour2017-multimnist")
    check_objects("digits", 1, one)
    check_objects("multimnist", 2, two)
    with pytest.raises(InputError) as caught:
        check_objects("multimnist", 2, one)
    assert str(caught.value).startswith("an image of multimnist holds 2 objects, but the network looks for 1; ")
    assert "set --objects 2, or take a preset made for that (" in str(caught.value)
    assert "sabour2017-multimnist" in str(caught.value)
    with pytest.raises(InputError) as caught:
        check_objects("digits", 1, two)
    assert "holds 1 object, but the network looks for 2; set --objects 1, or give --data multimnist" in str(
        caught.value
    )
    with pytest.raises(InputError, match="an image of digits holds 1 object"):
        load_run_data(override(two, {"data": "digits"}))


@pytest.mark.usefixtures("two_bars")
def test_objects_that_nobody_shows_alone_cannot_be_reconstructed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("sabour2017-multimnist")
    own = load_run_data(config)
    nowhere = type(own.test)(own.test.images, own.test.labels)
    monkeypatch.setattr(
        data, "load_dataset", lambda *_, **__: Dataset("pairs", own.train, own.validation, nowhere, own.class_names)
    )
    with pytest.raises(InputError, match="none of them alone, which the network is to reconstruct; set --no-decoder"):
        load_run_data(config)
    assert load_run_data(override(config, {"decoder": False})).num_objects == 2


@pytest.mark.usefixtures("two_bars")
def test_pairs_that_are_made_anew_are_not_cropped() -> None:
    config = override(make_config("sabour2017-multimnist"), {"crop": 20})
    with pytest.raises(InputError, match="makes new training images in each epoch, which are not cropped; omit --crop"):
        load_run_data(config)


def test_a_fingerprint_changes_with_any_pixel_or_label(bars: Path, tmp_path: Path) -> None:
    with np.load(bars) as arrays:
        x, y = arrays["x"], arrays["y"]

    def marks(x: np.ndarray, y: np.ndarray) -> list[int]:
        np.savez(tmp_path / "bars.npz", x=x, y=y)
        run = config(tmp_path / "bars.npz")
        return data_fingerprint(load_run_data(run), run.recipe)

    other = x.copy()
    other[70, 3, 4] ^= 1
    found = [marks(x, y), marks(other, y), marks(x, np.roll(y, 1))]
    assert [each[:3] for each in found] == [[108, 12, 30]] * 3
    assert len({each[3] for each in found}) == 3
    assert marks(x, y) == found[0]


@pytest.mark.usefixtures("two_bars")
def test_a_fingerprint_of_pairs_is_that_of_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("sabour2017-multimnist")
    pairs = load_run_data(config)
    first = data_fingerprint(pairs, config.recipe)
    pairs.validation.parts[0, 1, 0, 5, 5] ^= 1  # type: ignore[index]
    second = data_fingerprint(pairs, config.recipe)
    pairs.train.tensors[0][3, 0, 2, 2] ^= 1
    assert len({first[3], second[3], data_fingerprint(pairs, config.recipe)[3]}) == 3


def config(path: Path) -> TrainConfig:
    return tiny_config(path)


@pytest.mark.parametrize(
    ("images", "given", "batch", "epochs", "rate"),
    [
        (324, {}, 16, 100, 3e-3 / 8**0.5),  # 20 steps an epoch
        (216, {}, 16, 154, 3e-3 / 8**0.5),
        (16, {}, 16, 2000, 3e-3 / 8**0.5),
        (5, {}, 16, 2000, 3e-3 / 8**0.5),  # which is refused later: fewer images than a batch
        (2_047, {}, 64, 65, 3e-3 / 2**0.5),
        (2_048, {}, 128, 125, 3e-3),
        (60_000, {}, 128, 20, 3e-3),
        (324, {"epochs": 10}, 16, 10, 3e-3 / 8**0.5),
        (324, {"batch_size": 32}, 32, 200, 3e-3),
        (324, {"batch_size": 8}, 8, 50, 3e-3),
        (324, {"batch_size": 500}, 500, 2000, 3e-3),
        (324, {"learning_rate": 1e-2}, 16, 100, 1e-2),
        (324, {"epochs": 10, "batch_size": 32, "learning_rate": 3e-3}, 32, 10, 3e-3),
    ],
)
def test_a_recipe_is_fitted_to_few_images(
    images: int, given: dict[str, Any], batch: int, epochs: int, rate: float
) -> None:
    config = fit_recipe(make_config("compact", data="folder:shapes", **given), images)
    assert (config.recipe.batch_size, config.recipe.epochs) == (batch, epochs)
    assert config.recipe.learning_rate == pytest.approx(rate)
    assert config.fitted == ()
    rest = {"batch_size": 1, "epochs": 1, "learning_rate": 1.0, "fill": "edge"}
    assert config.recipe.replace(rest) == make_config("compact").recipe.replace(rest)


def test_recipes_of_named_data_and_of_files_stay_as_they_are() -> None:
    for config in (make_config("compact", data="digits"), TrainConfig.from_dict({"data": "folder:shapes"})):
        assert fit_recipe(config, 100) == config
