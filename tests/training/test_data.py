"""What a run is trained and judged on: crops, changes, limits, fingerprints, and recipes for few images."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_raises
from tiny_runs import NARROW, Heard, StopAt, go_on, run, save_image, tiny_config, write_bars
from torchcaps.analysis import Evaluation
from torchcaps.datasets import Augmentation, Dataset, ImageSet, PairSet, fixed_pairs, load_dataset
from torchcaps.errors import InputError
from torchcaps.models import CapsNet
from torchcaps.parts import describe, flat
from torchcaps.training import (
    Interrupted,
    Recipe,
    data,
    learning_rates,
    load_run,
    make_config,
)
from torchcaps.training.config import override, read_config
from torchcaps.training.data import augmentation_of, cropped, load_run_data, run_data
from torchcaps.training.devices import launch


def test_judged_images_are_cut_in_the_middle_and_batches_anywhere(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, max_shift=0, crop=10, flip=True, epochs=1)
    whole = load_run_data(config)
    seen = cropped(whole, config.recipe)
    assert (seen.in_shape, whole.in_shape) == ((1, 10, 10), (1, 18, 18))
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(seen, part).images, getattr(whole, part).images[..., 4:14, 4:14])
    known = {image.numpy().tobytes() for image in seen.train.images}
    first = next(iter(run_data(whole, config.recipe, launch("cpu"), config.seed).train.batches(0)))
    images = (first.images * 255).round().byte()
    assert sum(image.numpy().tobytes() in known for image in images) / len(images) < 0.2
    config = override(config, {"crop": 17})
    assert run(config, tmp_path / "run")["in_shape"] == [1, 17, 17]
    found = load_run(tmp_path / "run")
    assert found.model.in_shape == found.dataset().in_shape == (1, 17, 17)


def test_every_change_of_a_recipe_is_made() -> None:
    changes: dict[str, Any] = {"max_shift": 2, "crop": 12, "flip": True, "brightness": 0.3, "contrast": 0.5}
    changes |= {"max_rotation": 30.0, "max_scaling": 0.3, "fill": "edge"}
    assert augmentation_of(Recipe(**changes)) == Augmentation(**changes)
    assert augmentation_of(Recipe()) == Augmentation()


@pytest.mark.usefixtures("two_bars")
def test_images_must_fit_what_the_network_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    two = make_config("sabour2017-multimnist")
    with pytest.raises(InputError, match="holds 2 objects, but the network looks for 1; set --objects 2"):
        load_run_data(make_config("sabour2017"))
    pairs = load_run_data(two)
    with pytest.raises(
        InputError, match="new training images are made in each epoch, and these cannot be cropped; omit crop"
    ):
        cropped(pairs, Recipe(crop=20))
    nowhere = dataclasses.replace(pairs, test=ImageSet(pairs.test.images, pairs.test.labels))
    monkeypatch.setattr(data, "load_dataset", lambda *_, **__: nowhere)
    with pytest.raises(InputError, match=r"needs images of single objects, .* set --no-decoder"):
        load_run_data(two)
    assert load_run_data(override(two, {"decoder": False})).num_objects == 2


def test_a_fingerprint_changes_with_any_pixel_or_label(bars: Path) -> None:
    """That of pairs is of what they are made of."""
    single = load_dataset(f"npz:{bars}", validation_size=12)
    pairs = Dataset("", PairSet(single.train), *map(fixed_pairs, (single.validation, single.test)), ("0", "1", "2"))
    for whole in (single, pairs):
        tensors = [tensor for part in (whole.train, whole.validation, whole.test) for tensor in part.tensors]
        found = []
        for changed in (None, *tensors):
            if changed is not None:
                changed.view(-1)[-1] ^= 1
            found.append(run_data(whole, Recipe(batch_size=16), launch("cpu"), 0, drop_last=False).fingerprint)
        assert [each[:3] for each in found] == [[108, 12, 30]] * len(found)
        assert len({each[3] for each in found}) == len(found)


def test_damaged_images_are_left_out_of_the_whole_run(tmp_path: Path) -> None:
    """Its evaluation and its resumption see the same images, also when the damaged files are gone."""
    photos = tmp_path / "photos"
    with np.load(write_bars(tmp_path / "bars.npz")) as arrays:
        for n, (image, label) in enumerate(zip(arrays["x"], arrays["y"], strict=True)):
            save_image(photos / str(label) / f"{n:03}.png", image)
    bad = [photos / "0" / "000.png", photos / "2" / "new.png"]
    for file in bad:
        file.write_bytes(b"no image")
    config = dataclasses.replace(tiny_config(tmp_path / "bars.npz", epochs=1), data=f"folder:{photos}")
    assert_raises(InputError, run, config, tmp_path / "run", say="2 of 151 images cannot be used")
    assert not (tmp_path / "run").exists()
    said = StopAt(1)
    with pytest.raises(Interrupted):
        run(dataclasses.replace(config, skip_damaged=True), tmp_path / "run", said)
    (line,) = [line for line in said.said if line.startswith("Left out 2 images:")]
    assert all(str(file) in line for file in bad)
    bad[1].unlink()
    summary = go_on(tmp_path / "run")
    assert len(summary["skipped"]) == 1
    found = load_run(tmp_path / "run").dataset()
    assert sum(len(part) for part in (found.train, found.validation, found.test)) == sum(summary["images"].values())


@pytest.mark.slow
def test_strides_that_grow_with_the_images_are_said_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 72, 70), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(40) % 2)
    given = {"batch_size": 8, "epochs": 1, "schedule": "constant", "stem_channels": (4, 4, 4)}
    config = make_config("compact", data=f"npz:{tmp_path / 'a.npz'}", **given | NARROW)
    for given, said in (
        ({}, ["--stem-strides 2,1,2 --decoder-channels 64,64,32,16"]),
        ({"fitted": ("decoder_channels",)}, ["--decoder-channels 64,64,32,16"]),
        ({"fitted": ()}, []),
    ):
        heard, out = Heard(), tmp_path / f"run{len(said)}-{len(given)}"
        run(config.replace(given), out, heard)
        found = [line for line in heard.said if line.startswith("Chosen for 72×70 images: ")]
        assert found == [f"Chosen for 72×70 images: {each} (override on the command line)" for each in said]
        model = flat(read_config(out / "config.json").model)
        assert model["stem_strides"] == ((2, 1, 2) if given == {} else (1, 1, 2))
        assert model["decoder_channels"] == ((64, 64, 32, 16) if said else ())
    assert go_on(tmp_path / "run1-0", epochs=2)["epochs"] == 2
    tried: list[torch.nn.Module] = []
    monkeypatch.setattr(
        "torchcaps.training.run.find_learning_rate", lambda _, network, *__, **___: tried.append(network)
    )
    learning_rates(config)
    assert isinstance(tried[0], CapsNet)
    assert flat(describe(tried[0]))["stem_strides"] == (2, 1, 2), (
        "a rate is found for the network that would be trained"
    )


def test_classes_that_are_never_predicted_are_named() -> None:
    labels, names = np.array([0] * 9 + [1] * 2), ("good", "hole", "none")
    said = Evaluation(labels, np.eye(3)[labels * 0], 1.0, names).warning
    assert said == (
        "never predicted for 11 test images: hole; try --class-weights balanced, more steps, or more images of these "
        "classes"
    )
    assert Evaluation(labels, np.eye(3)[labels], 1.0, names).warning is None
