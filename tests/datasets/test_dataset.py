"""Sets of images, data sets by their names, and their splits."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import assert_raises, registered_for_now
from tiny_runs import image_set
from torchcaps.datasets import (
    DataRequest,
    Dataset,
    ImageSet,
    PairSet,
    Splits,
    center_crop,
    find_dataset,
    list_datasets,
    load_dataset,
    register_dataset,
    resize_images,
    rng,
)
from torchcaps.errors import InputError


def two_each(n: int = 4, classes: int = 3) -> ImageSet:
    """Images of two objects each, with their parts and a factor."""
    random = torch.Generator().manual_seed(n)
    parts = torch.randint(0, 256, (n, 2, 1, 6, 5), generator=random, dtype=torch.uint8)
    first = torch.arange(n) % classes
    labels = torch.stack([first, (first + 1) % classes], 1)
    return ImageSet(parts.amax(1), labels, parts, factors={"azimuth": torch.arange(n) * 20.0})


def test_all_that_a_set_holds_goes_where_its_images_go() -> None:
    images = two_each()
    assert images.parts is not None
    chosen = torch.tensor([3, 1])
    for made, index in (
        (images.take(2), torch.arange(2)),
        (images.preview(3), torch.arange(3)),
        (images.select(chosen), chosen),
    ):
        for got, wanted in zip(made.tensors, images.tensors, strict=True):
            assert torch.equal(got, wanted[index])
        assert made.factors["azimuth"].tolist() == (20 * index).tolist()
    assert images.take(4) is images.take(None) is images.preview(9) is images.to("cpu") is images
    resized = images.resize((12, 10))
    assert resized.parts is not None
    assert (resized.in_shape, resized.parts.shape) == ((1, 12, 10), (4, 2, 1, 12, 10))
    assert torch.equal(resized.parts[1, 1], resize_images(images.parts[1, 1:], (12, 10))[0])
    middle = center_crop(images, 4)
    assert torch.equal(middle.parts, images.parts[..., 1:5, 0:4])  # type: ignore[arg-type]
    for made in (resized, middle):
        assert torch.equal(made.labels, images.labels)
        assert made.factors.keys() == {"azimuth"}


PIXELS, BOTH = torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2, 2, 1, 3, 3).byte()
ONE, TWO = torch.zeros(2).long(), torch.tensor([[0, 1], [0, 1]])


def test_image_sets_that_cannot_be() -> None:
    for images, labels, parts, named in (
        (PIXELS.double(), ONE, None, "images"),
        (PIXELS, ONE.float(), None, "labels"),
        (PIXELS, TWO, BOTH.float(), "parts"),
        (PIXELS[0], ONE, None, "images"),
        (PIXELS[:0], ONE[:0], None, "images"),
        *(
            (PIXELS, torch.tensor(wrong), None, "labels")
            for wrong in ([0] * 3, [0, -1], [[0], [1]], [[[0, 1]], [[1, 2]]], [[0, 1], [2, 2]], [[0, 1], [2, -1]])
        ),
        (PIXELS, torch.tensor([[0.0], [torch.nan]]), None, "finite numbers"),
        (PIXELS, ONE, BOTH, "parts"),
        (PIXELS, torch.tensor([[0, 1, 2]] * 2), BOTH, "parts"),
        (PIXELS, TWO, BOTH[..., :2], "parts"),
    ):
        wrong_type = any(each is not None and each.is_floating_point() for each in (images, parts))
        with pytest.raises(TypeError if wrong_type else InputError, match=named):
            ImageSet(images, labels, parts)
    with pytest.raises(InputError, match=r"the factor light must have shape \(2,\), got \(6,\)"):
        ImageSet(PIXELS, ONE, factors={"light": torch.arange(6)})


def test_a_dataset_and_its_parts_that_do_not_fit() -> None:
    names, pairs = ("a", "b", "c"), PairSet(image_set(9), max_shift=0)
    data = Dataset("x", pairs, two_each(), two_each(5), names)
    assert (data.in_shape, data.num_classes, data.num_objects) == ((1, 6, 5), 3, 2)
    fine = image_set(9), image_set(3), image_set(6)
    for parts, given_names, says in (
        ((*fine[:2], image_set(6, (1, 5, 5))), names, r"test images are \(1, 5, 5\).*training .*\(1, 6, 5"),
        ((pairs, two_each(), image_set(9)), names, r"x: the test images are .* 1 object each, but .* with 2$"),
        ((fine[0], image_set(8, classes=4), fine[2]), names, r"x: a validation label must be in 0\.\.2, got 0\.\.3"),
        ((pairs, two_each(8, 5), two_each()), names, r"x: a validation label must be in 0\.\.2, got 0\.\.4"),
        (fine, ("a", "b", "b"), 'x: two classes are called "b"'),
        (fine, ("a", "b\udce9", "c"), r"the class 'b\\udce9' has a name .*UTF-8"),
    ):
        with pytest.raises(InputError, match=says):
            Dataset("x", *parts, given_names)


def test_resize_keeps_flat_images_flat_and_the_range() -> None:
    flat = torch.full((3, 2, 9, 7), 77, dtype=torch.uint8)
    assert torch.equal(resize_images(flat, (13, 5)), torch.full((3, 2, 13, 5), 77, dtype=torch.uint8))
    big = resize_images(torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(4).expand(1, 1, 8, 8), (8, 31))
    assert big[..., :12].max() < 50  # bicubic overshoots: without the clamp dark would turn bright
    assert big[..., 19:].min() > 205
    assert resize_images(flat, (9, 7)) is flat


@pytest.fixture
def toy() -> Iterator[Splits]:
    """A registered set of 100 training and 12 test images whose first label of 4 comes late."""
    train = image_set(100, classes=4)
    train = train.select(torch.cat([torch.arange(1, 100), torch.tensor([0])]))
    with registered_for_now():
        yield register("toy", Splits(train, image_set(12, classes=4), class_names=("a", "b", "c", "d")))


def register(name: str, splits: Splits) -> Splits:
    register_dataset(name, title="Toy", source="here", licence="none")(lambda _: splits)
    return splits


def identities(images: Any) -> set[bytes]:
    return {image.numpy().tobytes() for image in images.images}


def test_a_registered_set_is_listed_and_loaded(toy: Splits) -> None:
    info, path = find_dataset("toy")
    assert info in list_datasets()
    assert (path, info.find, info.is_downloaded(), info.locate()) == (None, None, True, None)
    data = load_dataset("toy")
    assert (data.name, data.class_names, data.test) == ("toy", ("a", "b", "c", "d"), toy.test)
    for size, width in (((9, 8), 8), ([9, 8], 8), (9, 9)):
        resized = load_dataset("toy", image_size=size)  # type: ignore[arg-type]
        assert resized.in_shape == resized.validation.in_shape == resized.test.in_shape == (1, 9, width)


def test_validation_is_a_tenth_of_training_of_each_class_its_share(toy: Splits) -> None:
    data = load_dataset("toy")
    assert [len(data.train), len(data.validation)] == [90, 10]
    assert sorted(data.validation.labels.bincount().tolist()) == [2, 2, 3, 3]
    assert identities(data.train) | identities(data.validation) == identities(toy.train)
    assert not identities(data.train) & identities(data.validation)
    first, again, other = (load_dataset("toy", seed=seed, validation_size=20) for seed in (1, 1, 2))
    assert torch.equal(first.validation.images, again.validation.images)
    assert identities(first.validation) != identities(other.validation)
    assert len(other.validation) == 20
    assert len(load_dataset("toy", validation_size=96).train) == 4


def test_limits_are_caps_and_validation_comes_after_them(toy: Splits) -> None:
    for size, left in ((None, 90), (20, 80)):
        whole = load_dataset("toy", validation_size=size)
        for limit in (left, left + 1, 10**9):  # none of these leaves out an image that would be trained on
            data = load_dataset("toy", validation_size=size, limit_train=limit, limit_test=limit)
            assert torch.equal(data.train.images, whole.train.images)  # type: ignore[union-attr]
            assert torch.equal(data.validation.images, whole.validation.images)
            assert data.test is toy.test
        for limit in (left - 1, 40):
            data = load_dataset("toy", validation_size=size, limit_train=limit, limit_test=5)
            for got, wanted in zip(data.train.tensors, toy.train.tensors, strict=True):
                assert torch.equal(got, wanted[:limit])
            assert torch.equal(data.test.images, toy.test.images[:5])
            assert len(data.validation) == len(whole.validation)
            assert identities(data.validation) <= identities(toy.train.select(torch.arange(limit, 100)))


def test_the_first_or_the_last_images_are_for_validation_in_their_order(toy: Splits) -> None:
    whole = toy.train.images
    for held, limit, train, validation in (
        ("first", None, whole[20:], whole[:20]),
        ("last", None, whole[:80], whole[80:]),
        ("first", 30, whole[20:50], whole[:20]),
        ("last", 30, whole[:30], whole[80:]),
    ):
        data = load_dataset("toy", validation=held, validation_size=20, limit_train=limit, seed=1)  # type: ignore[arg-type]
        assert torch.equal(data.train.images, train)  # type: ignore[union-attr]
        assert torch.equal(data.validation.images, validation)
    assert len(load_dataset("toy", validation="first").validation) == 10


def test_validation_images_of_their_own(toy: Splits) -> None:
    own = register("whole", dataclasses.replace(toy, validation=image_set(8, classes=4)))
    for limit in (None, 40, 100, 101):  # all images may be trained on: none of them is needed for validation
        data = load_dataset("whole", limit_train=limit)
        assert (len(data.train), data.validation) == (min(limit or 100, 100), own.validation)
    for name, value in (("validation_size", 8), ("validation", "first")):
        said = f"whole brings its own validation images; leave {name} out"
        assert_raises(InputError, load_dataset, "whole", **{name: value}, say=said)


@pytest.mark.usefixtures("toy")
def test_options_that_cannot_be() -> None:
    options: dict[str, Any]
    wrong = {"limit_train": 0, "image_size": (3, 4, 5), "seed": -1, "validation": "middle", "data_dir": "x"}
    for options, named in (
        *(({name: value}, name) for name, value in wrong.items()),
        ({"skip_damaged": True}, "skip_damaged"),
        (
            {"validation_size": 0},
            "1 to 96 images can be used; they choose the best epoch",
        ),
        ({"limit_train": 90, "validation_size": 97}, "validation_size is 97, but 1 to 96 images can be used"),
        ({"validation": "first", "validation_size": 97}, "validation_size"),
        ({"limit_train": 3}, 'the class "a" is in none of 3 training images'),
    ):
        assert_raises(InputError, load_dataset, "toy", say=named, **options)


def test_sets_that_cannot_be(toy: Splits) -> None:
    late = torch.argsort(toy.train.labels == 0, stable=True)
    register("sorted", dataclasses.replace(toy, train=toy.train.select(late)))
    said = 'sorted: the class "a" is in none of 60 training images'
    assert_raises(InputError, load_dataset, "sorted", validation="last", validation_size=40, say=said)
    register("few", dataclasses.replace(toy, train=image_set(4, classes=4)))
    assert_raises(
        InputError,
        load_dataset,
        "few",
        say="few has only 4 training images, which leaves none for validation; give more",
    )
    labels = toy.train.labels.clone()
    labels[0] = 10**13
    register("wrong", dataclasses.replace(toy, train=ImageSet(toy.train.images, labels)))
    assert_raises(
        InputError,
        load_dataset,
        "wrong",
        limit_train=99,
        say="wrong: a train label must be in 0..3, got 0..10000000000000",
    )
    assert_raises(InputError, register, "toy", toy, say='a data set "toy" exists already')
    assert_raises(InputError, register, "a:b", toy, say="because a path follows a colon")


def test_specs_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.npz").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec, words in {
        "mnits": 'there is no data set "mnits"; did you mean "mnist"',
        "zzz": "known: aeon:PATH, affnist, cifar10, csv:PATH, digits, fashion-mnist, folder:PATH, kmnist, ",
        "": "there is no data set",
        "folder": 'needs a path: write "folder:PATH"',
        "npz:": 'needs a path: write "npz:PATH"',
        "digits:": 'takes no path: write "digits"',
        str(tmp_path): f'write "folder:{tmp_path}"',
        str(tmp_path / "a.npz"): f'write "npz:{tmp_path / "a.npz"}"',
        "folder:~/photos": f"there is no folder {tmp_path / 'photos'}",
    }.items():
        assert_raises(InputError, load_dataset, spec, say=words)


@pytest.mark.parametrize("name", [info.name for info in list_datasets() if not info.takes_path])
def test_what_the_list_says_is_so(name: str, request: pytest.FixtureRequest) -> None:
    info = find_dataset(name)[0]
    assert all((info.title, info.source, info.licence))
    assert len(info.title) <= 45  # a line or two of the list
    if name not in ("mnist", "mnist-40", "affnist", "multimnist", "digits", "tetrominoes"):
        assert not info.is_downloaded()
        return
    where = None if name in ("digits", "tetrominoes") else request.getfixturevalue("mnist_dir")
    assert info.is_downloaded(where)
    splits = info.load(DataRequest(data_dir=where, limit_test=100))
    train = splits.as_train(splits.train)
    assert len(train) == info.num_train
    assert len(splits.test) in (info.num_test, 100)  # a set that makes its images may make no more than asked for
    assert train.in_shape == splits.test.in_shape == info.in_shape
    assert train.num_objects == splits.test.num_objects == info.num_objects
    assert splits.class_names == info.class_names


def test_every_key_has_a_stream_of_its_own_and_its_numbers_stay() -> None:
    """Runs rest on them: whatever moves one is a break."""

    def drawn(which: int, *key: int) -> tuple[int, ...]:
        seed, epoch, batch = key
        return tuple(torch.randint(2**30, (4,), generator=rng.stream_of(which, (seed, epoch, batch))).tolist())

    keys = list(itertools.product(range(10), *[range(3)] * 3))
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(rng.ORDER, 7, 8, 0) == (462895825, 578387387, 783513397, 701069107)
    assert drawn(rng.SHIFTS, 7, 8, 9) == (758158248, 35676093, 86031727, 472166912)
    names = "ORDER SHIFTS CROPS FLIPS BRIGHTNESS CONTRAST ROTATIONS SCALINGS PARTNERS PLACES"
    assert [getattr(rng, name) for name in names.split()] == list(range(10))
