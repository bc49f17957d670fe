from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchcaps.datasets import (
    DataRequest,
    DatasetInfo,
    ImageSet,
    Splits,
    find_dataset,
    list_datasets,
    load_dataset,
    register_dataset,
    registry,
)
from torchcaps.errors import InputError
from torchcaps.parts import Registry

MakeSet = Callable[..., ImageSet]


@pytest.fixture
def toy(make_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Splits]:
    """A registered set of 100 training and 12 test images whose first label of 4 comes late."""
    monkeypatch.setattr(registry, "_DATASETS", Registry("data set", registry._DATASETS))
    train = make_set(100, classes=4)
    train = train.select(torch.cat([torch.arange(1, 100), torch.tensor([0])]))
    splits = Splits(train, make_set(12, classes=4), class_names=("a", "b", "c", "d"))
    register_dataset("toy", title="Toy", source="here", licence="none")(lambda _: splits)
    return splits


def identities(images: ImageSet) -> set[bytes]:
    return {image.numpy().tobytes() for image in images.images}


def test_a_registered_set_is_listed_and_loaded(toy: Splits) -> None:
    assert "toy" in [info.spec for info in list_datasets()]
    data = load_dataset("toy")
    assert data.name == "toy"
    assert data.class_names == ("a", "b", "c", "d")
    assert data.test.images is toy.test.images


def test_validation_is_a_tenth_of_training_of_each_class_its_share(toy: Splits) -> None:
    data = load_dataset("toy")
    assert [len(data.train), len(data.validation)] == [90, 10]
    assert data.validation.labels.bincount().tolist() in ([3, 3, 2, 2],)
    assert identities(data.train) | identities(data.validation) == identities(toy.train)
    assert not identities(data.train) & identities(data.validation)


@pytest.mark.usefixtures("toy")
def test_validation_follows_seed_and_size() -> None:
    first, again, other = (load_dataset("toy", seed=seed, validation_size=20) for seed in (1, 1, 2))
    assert torch.equal(first.validation.images, again.validation.images)
    assert identities(first.validation) != identities(other.validation)
    assert len(other.validation) == 20
    assert len(load_dataset("toy", validation_size=96).train) == 4


@pytest.mark.parametrize("size", [0, -1, 97])
@pytest.mark.usefixtures("toy")
def test_validation_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(InputError, match=f"toy: validation_size is {size}, but 1 to 96 images") as raised:
        load_dataset("toy", validation_size=size)
    assert ("never by the test images" in str(raised.value)) == (size < 1)


def test_limits_take_the_first_images_and_validation_comes_after_them(toy: Splits) -> None:
    data = load_dataset("toy", limit_train=40, limit_test=5, validation_size=10)
    assert torch.equal(data.train.images, toy.train.images[:40])
    assert torch.equal(data.train.labels, toy.train.labels[:40])
    assert torch.equal(data.test.images, toy.test.images[:5])
    assert len(data.validation) == 10
    assert identities(data.validation) <= identities(toy.train.select(torch.arange(40, 100)))


@pytest.mark.parametrize("size", [None, 20])
def test_limits_are_caps(toy: Splits, size: int | None) -> None:
    whole = load_dataset("toy", validation_size=size)
    left = 100 - (size or 10)
    assert len(whole.train) == left
    for limit in (left, left + 1, 100, 10**9):  # none of these leaves out an image that would be trained on
        data = load_dataset("toy", validation_size=size, limit_train=limit, limit_test=limit)
        assert torch.equal(data.train.images, whole.train.images)
        assert torch.equal(data.validation.images, whole.validation.images)
        assert data.test is toy.test
    data = load_dataset("toy", validation_size=size, limit_train=left - 1)
    assert torch.equal(data.train.images, toy.train.images[: left - 1])
    assert len(data.validation) == len(whole.validation)
    assert identities(data.validation) <= identities(toy.train.select(torch.arange(left - 1, 100)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_train": 0}, "load_dataset: limit_train must be 1 to 1000000000, got 0"),
        ({"limit_test": -1}, "load_dataset: limit_test must be 1 to 1000000000, got -1"),
        ({"limit_train": 90, "validation_size": 97}, "validation_size is 97, but 1 to 96"),
        ({"limit_train": 3}, 'first 3 training images have none of the class "a"'),
        ({"image_size": 0}, "image_size must be 1 to 4096, got 0"),
        ({"image_size": 10**30}, "image_size must be 1 to 4096, got 1000000000000000000000000000000"),
        ({"image_size": (3, 4, 5)}, "image_size must have 2 entries"),
        ({"seed": -1}, "seed must be 0 to 4294967295"),
        ({"validation": "middle"}, "validation must be one of random, first, last, got 'middle'"),
        ({"validation": "first", "validation_size": 97}, "validation_size is 97, but 1 to 96"),
        ({"data_dir": "x"}, 'the data set "toy" has no files in a data folder'),
    ],
)
@pytest.mark.usefixtures("toy")
def test_options_that_cannot_be(options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_dataset("toy", **options)  # type: ignore[arg-type]


def test_the_first_or_the_last_images_are_for_validation_in_their_order(toy: Splits) -> None:
    whole = toy.train.images
    first, last = (load_dataset("toy", validation=held, validation_size=20) for held in ("first", "last"))
    assert torch.equal(first.validation.images, whole[:20])
    assert torch.equal(first.train.images, whole[20:])
    assert torch.equal(last.validation.images, whole[80:])
    assert len(load_dataset("toy", validation="first").validation) == 10
    few = load_dataset("toy", validation="first", validation_size=20, limit_train=30)
    assert torch.equal(few.train.images, whole[20:50])
    assert torch.equal(few.validation.images, whole[:20])
    other = load_dataset("toy", validation="first", validation_size=20, seed=1)
    assert torch.equal(other.validation.images, first.validation.images)


def test_the_last_images_that_hold_all_of_a_class_are_not_for_validation(toy: Splits) -> None:
    alone = toy.train.select(
        torch.cat([(toy.train.labels != 0).nonzero()[:, 0], (toy.train.labels == 0).nonzero()[:, 0]])
    )
    splits = dataclasses.replace(toy, train=alone)
    register_dataset("sorted", title="Sorted", source="here", licence="none")(lambda _: splits)
    with pytest.raises(InputError, match='sorted: the first 60 training images have none of the class "a"'):
        load_dataset("sorted", validation="last", validation_size=40)
    load_dataset("sorted", validation="first", validation_size=10)


@pytest.mark.mnist
def test_mnists_images_after_the_first_5000_are_those_that_the_tensorflow_notebook_prints(mnist_dir: Path) -> None:
    data = load_dataset("mnist", data_dir=mnist_dir, validation="first", validation_size=5000)
    assert isinstance(data.train, ImageSet)
    assert data.train.labels[:5].tolist() == [7, 3, 4, 6, 1]
    assert data.validation.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_validation_images_of_their_own_stand_in_the_way_of_a_size_only(toy: Splits, make_set: MakeSet) -> None:
    own = dataclasses.replace(toy, validation=make_set(8, classes=4))
    register_dataset("whole", title="Whole", source="here", licence="none")(lambda _: own)
    for limit in (None, 40, 100, 101):  # all images may be trained on: none of them is needed for validation
        data = load_dataset("whole", limit_train=limit)
        assert (len(data.train), data.validation) == (min(limit or 100, 100), own.validation)
    with pytest.raises(InputError, match="whole has validation images of its own; leave validation_size out"):
        load_dataset("whole", validation_size=8)
    with pytest.raises(InputError, match="whole has validation images of its own; leave validation out"):
        load_dataset("whole", validation="first")


def test_a_set_that_leaves_no_validation_image(toy: Splits, make_set: MakeSet) -> None:
    few = dataclasses.replace(toy, train=make_set(4, classes=4))
    register_dataset("few", title="Few", source="here", licence="none")(lambda _: few)
    with pytest.raises(InputError, match="few: 4 training images leave none for validation; give more"):
        load_dataset("few")


def test_labels_beyond_all_bounds(toy: Splits) -> None:
    labels = toy.train.labels.clone()
    labels[0] = 10**13
    wrong = dataclasses.replace(toy, train=ImageSet(toy.train.images, labels))
    register_dataset("wrong", title="Wrong", source="here", licence="none")(lambda _: wrong)
    with pytest.raises(InputError, match="wrong: a train label is 10000000000000, but the 4 classes"):
        load_dataset("wrong", limit_train=99)


@pytest.mark.usefixtures("toy")
def test_every_part_is_resized() -> None:
    data = load_dataset("toy", image_size=(9, 8))
    assert data.in_shape == data.validation.in_shape == data.test.in_shape == (1, 9, 8)
    assert load_dataset("toy", image_size=7).in_shape == (1, 7, 7)
    assert load_dataset("toy", image_size=[7, 8]).in_shape == (1, 7, 8)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mnits", 'there is no data set "mnits"; did you mean "mnist"'),
        (
            "zzz",
            r"known: affnist, cifar10, digits, fashion-mnist, folder:PATH, kmnist, mnist, mnist-40, multimnist, npz",
        ),
        ("", "there is no data set"),
        ("folder", 'needs a path: write "folder:PATH"'),
        ("npz:", 'needs a path: write "npz:PATH"'),
        ("mnist:x", 'takes no path: write "mnist"'),
        ("digits:", 'takes no path: write "digits"'),
    ],
)
def test_specs_that_cannot_be(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_dataset(spec)


def test_a_bare_path_is_told_how_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f'write "folder:{re.escape(str(tmp_path))}"'):
        load_dataset(str(tmp_path))
    (tmp_path / "a.npz").touch()
    with pytest.raises(InputError, match=f'write "npz:{re.escape(str(tmp_path / "a.npz"))}"'):
        load_dataset(str(tmp_path / "a.npz"))


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=f"there is no folder {re.escape(str(tmp_path / 'photos'))}"):
        load_dataset("folder:~/photos")


@pytest.mark.usefixtures("toy")
def test_names_that_cannot_be_registered() -> None:
    with pytest.raises(InputError, match='there is a data set "toy" already'):
        register_dataset("toy", title="x", source="x", licence="x")(lambda _: pytest.fail("registered"))
    with pytest.raises(InputError, match="what follows a colon is a path"):
        register_dataset("a:b", title="x", source="x", licence="x")


@pytest.mark.parametrize("info", list_datasets(), ids=lambda info: info.name)
def test_what_the_list_says_is_so(info: DatasetInfo, request: pytest.FixtureRequest) -> None:
    assert info.title
    assert info.source
    assert info.licence
    if info.takes_path:
        assert info.locate() is None
        assert info.is_downloaded()
        assert info.spec == f"{info.name}:PATH"
        return
    assert info.num_classes == len(info.class_names or ())
    assert len(info.title) <= 45  # a line or two of the list
    if info.name in ("mnist", "mnist-40", "affnist", "multimnist"):
        where = request.getfixturevalue("mnist_dir")
    elif info.name == "digits":
        where = None
    else:
        assert not info.is_downloaded()
        return
    assert info.is_downloaded(where)
    splits = info.load(DataRequest(data_dir=where, limit_test=100))
    train, validation = splits.as_train(splits.train), splits.as_validation(splits.train.take(100))
    assert len(train) == info.num_train
    assert len(splits.test) in (info.num_test, 100)  # a set that makes its images may make no more than asked for
    assert train.in_shape == splits.test.in_shape == validation.in_shape == info.in_shape
    assert train.num_objects == splits.test.num_objects == validation.num_objects == info.num_objects
    assert splits.class_names == info.class_names


def test_a_data_set_without_files_is_here(toy: Splits) -> None:
    info, _ = find_dataset("toy")
    assert info.is_downloaded()
    assert info.locate() is None
    assert not info.takes_data_dir


def test_importing_loads_nothing_heavy_and_the_list_has_its_order() -> None:
    # in a process of its own, where nothing was imported before
    code = """import sys, torchcaps.datasets
print([m for m in ("torch", "numpy", "PIL", "sklearn", "scipy") if m in sys.modules])
print([info.spec for info in torchcaps.datasets.list_datasets()])
print([m for m in ("sklearn", "scipy", "pooch") if m in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    at_once, specs, later = map(ast.literal_eval, done.stdout.splitlines())
    assert at_once == later == []
    made_of_mnist = ["mnist-40", "affnist", "multimnist"]
    seen = [f"smallnorb{each}" for each in ("", "-azimuth", "-azimuth-familiar", "-elevation", "-elevation-familiar")]
    others = ["svhn", "cifar10", "folder:PATH", "npz:PATH"]
    assert specs == ["digits", "mnist", "fashion-mnist", "kmnist", *made_of_mnist, *seen, *others]
