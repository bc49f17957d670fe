"""Every form of data × every door: the result of the plain form, or one sentence.

The plain form is uint8 tensors (N, C, H, W) and int64 labels. A cell never ends with a Python error or another result.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from support import assert_raises
from tiny_runs import NARROW, Heard, StopAt, rows, same_weights
from torchcaps import create_model, fit
from torchcaps.analysis import predict
from torchcaps.datasets import BatchLoader, ImageSet, load_dataset
from torchcaps.datasets.item_reader import find_keys
from torchcaps.datasets.scaling import UnknownRange
from torchcaps.datasets.user_data import Form, open_data
from torchcaps.errors import InputError, WrongType
from torchcaps.sklearn import CapsNetClassifier
from torchcaps.tasks import find_task
from torchcaps.training import Interrupted, Progress, Recipe
from torchcaps.training.checkpoint import read_checkpoint

N, J = 48, 3
PIXELS = torch.zeros(N, 1, 18, 18, dtype=torch.uint8)
LABELS = torch.arange(N) % J
for _n in range(N):
    PIXELS[_n, :, 5 * int(LABELS[_n]) : 5 * int(LABELS[_n]) + 6] = 200 + _n % 50
NAMES = np.array(["cat", "dog", "eel"])
EQUAL = "equal"  # the same result as the plain form
REFUSED = "refused"  # a sentence

IMAGES: dict[str, tuple[Any, str]] = {
    "uint8": (PIXELS, EQUAL),
    "numpy": (PIXELS.numpy(), EQUAL),
    "list of arrays": (list(PIXELS.numpy()), EQUAL),
    "float 0..1": (PIXELS.float() / 255, EQUAL),
    "float64 0..1": (PIXELS.numpy() / 255, EQUAL),
    "int64 0..255": (PIXELS.long(), EQUAL),
    "uint16": (PIXELS.numpy().astype(np.uint16) * 257, EQUAL),
    "float 0..255": (PIXELS.float(), REFUSED),
    "Hounsfield": (PIXELS.numpy().astype(np.int16) * 16 - 1000, REFUSED),
    "12 bit": (PIXELS.numpy().astype(np.uint16) * 16, REFUSED),
    "no channel": (PIXELS[:, 0], EQUAL),
    "channels last": (PIXELS.permute(0, 2, 3, 1), EQUAL),
    "not finite": (torch.full((N, 1, 18, 18), torch.nan), REFUSED),
    "texts": (np.array(["x"] * N), REFUSED),
    "complex": (PIXELS.numpy().astype(np.complex64), REFUSED),
    "another size": (PIXELS[..., :17], REFUSED),
}
TARGETS: dict[str, tuple[Any, str]] = {
    "int64": (LABELS, EQUAL),
    "int32": (LABELS.int(), EQUAL),
    "int8": (LABELS.to(torch.int8), EQUAL),
    "uint8": (LABELS.to(torch.uint8), EQUAL),
    "numpy": (LABELS.numpy(), EQUAL),
    "list": (LABELS.tolist(), EQUAL),
    "list of tensors": (list(LABELS), EQUAL),
    "(N, 1)": (LABELS[:, None], EQUAL),
    "whole floats": (LABELS.float(), EQUAL),
    "one-hot float": (torch.eye(J)[LABELS], EQUAL),
    "one-hot int": (torch.eye(J, dtype=torch.int64)[LABELS].numpy(), EQUAL),
    "one-hot bool": (torch.eye(J).bool()[LABELS].numpy(), EQUAL),
    "texts": (NAMES[LABELS.numpy()], EQUAL),
    "bytes": (np.array([b"cat", b"dog", b"eel"])[LABELS.numpy()], EQUAL),
    "objects that are numbers": (LABELS.numpy().astype(object), EQUAL),
    "objects that are texts": (NAMES[LABELS.numpy()].astype(object), EQUAL),
    "objects that are missing": (np.array([None, 1, 2] * (N // 3), dtype=object), REFUSED),
    "from 1": (LABELS + 1, REFUSED),
    "negative": (LABELS - 1, REFUSED),
    "fractions": (LABELS + 0.5, REFUSED),
    "too few": (LABELS[:-1], REFUSED),
    "None": (None, REFUSED),
}


def train_tiny(data: Any, **options: Any) -> list[float]:
    """Loss and accuracy of an epoch of a tiny network."""
    torch.manual_seed(0)
    network = create_model("sabour2017", (1, 18, 18), J, **NARROW)
    recipe = Recipe(epochs=1, batch_size=16, learning_rate=1e-2)
    rows = fit(network, data, recipe, accelerator="cpu", progress=options.pop("progress", Progress()), **options)
    return [rows[0]["train_loss"], rows[0]["train_accuracy"]]


class Made(Dataset[Any]):
    """A torch ``Dataset`` of what ``make`` returns for an index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def by_fit(images: Any, labels: Any, _: Path) -> list[float]:
    return train_tiny((images, labels))


def by_items(images: Any, labels: Any, _: Path) -> list[float]:
    return train_tiny(Made(lambda n: (images[n], labels[n])))


def by_loader(images: Any, labels: Any, _: Path) -> list[float]:
    return train_tiny(DataLoader(Made(lambda n: {"image": images[n], "label": labels[n]}), batch_size=16))


def by_npz(images: Any, labels: Any, folder: Path) -> list[float]:
    given = {"x": images} if labels is None else {"x": images, "y": labels}
    parts = {f"{key}{part}": np.asarray(each) for part in ("", "_test", "_val") for key, each in given.items()}
    np.savez(folder / "a.npz", **parts)  # type: ignore[arg-type]
    return train_tiny(load_dataset(f"npz:{folder / 'a.npz'}", task="classes").train)


def by_sklearn(images: Any, labels: Any, _: Path) -> list[float]:
    network = CapsNetClassifier(options=NARROW, epochs=1, batch_size=16, learning_rate=1e-2, random_state=0)
    return [network.fit(images, labels).loss_curve_[0]]


def by_predict(images: Any, _labels: Any, _: Path) -> list[float]:
    torch.manual_seed(0)
    return predict(create_model("sabour2017", (1, 18, 18), J, **NARROW), images).scores[:4].ravel().tolist()


DOORS: dict[str, Callable[[Any, Any, Path], list[float]]] = {
    "fit": by_fit,
    "items": by_items,
    "loader": by_loader,
    "npz": by_npz,
    "sklearn": by_sklearn,
    "predict": by_predict,
}
OWN_RANGE = ("float 0..255", "Hounsfield", "12 bit", "another size")  # scikit-learn's class scales by what it sees
OTHER_LABELS = dict.fromkeys(("from 1", "negative"), EQUAL)  # in scikit-learn, any labels are classes
OTHER_LABELS |= dict.fromkeys(
    ("one-hot float", "one-hot int", "one-hot bool", "bytes", "objects that are numbers"), REFUSED
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What the plain form gives: the same through all doors of training."""
    folder = tmp_path_factory.mktemp("plain")
    made = {name: DOORS[name](PIXELS, LABELS, folder) for name in ("fit", "sklearn", "predict")}
    return made | dict.fromkeys(("items", "loader", "npz"), made["fit"])


def compare(door: Callable[[], list[float]], expected: str, plain: list[float], errors: Any = InputError) -> None:
    """Assert that a door gives the plain result, or one sentence."""
    if expected == EQUAL:
        assert door() == pytest.approx(plain, rel=2e-3, abs=2e-3)
        return
    with pytest.raises(errors) as refused:
        door()
    if errors is InputError:
        assert len(str(refused.value)) < 450
        assert "\n" not in str(refused.value)


def hold(door: str, expected: str, images: Any, labels: Any, plain: Any, folder: Path) -> None:
    """Assert that a door gives what is expected of a form."""
    errors = (ValueError, TypeError) if door == "sklearn" else InputError  # scikit-learn says much in its own words
    compare(lambda: DOORS[door](images, labels, folder), expected, plain[door], errors)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", IMAGES)
def test_images_of_any_form(form: str, door: str, plain: dict[str, list[float]], tmp_path: Path) -> None:
    images, expected = IMAGES[form]
    if (form, door) == ("another size", "npz") or (door == "sklearn" and form in OWN_RANGE):
        return  # there is no network yet that says the size
    hold(door, expected, images, LABELS, plain, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("door", [door for door in DOORS if door != "predict"])
@pytest.mark.parametrize("form", TARGETS)
def test_labels_of_any_form(form: str, door: str, plain: dict[str, list[float]], tmp_path: Path) -> None:
    labels, expected = TARGETS[form]
    if door in ("items", "loader") and form in ("None", "too few"):
        return  # an error of the test's own items
    if door in ("items", "loader") and form in ("texts", "bytes", "objects that are texts"):
        expected = REFUSED  # a batch does not have all names
    if door == "sklearn":
        expected = OTHER_LABELS.get(form, expected)
    if door == "npz" and "objects" in form:
        expected = REFUSED  # objects are pickled, and nothing in a file is executed
    hold(door, expected, PIXELS, labels, plain, tmp_path)


class Batched(Made):
    """Reads many items at once, as data sets of the Hugging Face hub do."""

    def __init__(self) -> None:
        super().__init__(lambda n: {"image": Image.fromarray(PIXELS[n, 0].numpy()), "label": int(LABELS[n])})

    def __getitems__(self, index: list[int]) -> list[Any]:
        return [self.make(n) for n in index]


ITEMS = [{"image": PIXELS[n].numpy(), "label": int(LABELS[n])} for n in range(N)]
CONTAINERS: dict[str, tuple[Any, str]] = {
    "tuple": ((PIXELS, LABELS), EQUAL),
    "list": ([PIXELS, LABELS], EQUAL),
    "ImageSet": (ImageSet(PIXELS, LABELS), EQUAL),
    "TensorDataset": (TensorDataset(PIXELS, LABELS), EQUAL),
    "pairs": (Made(lambda n: (PIXELS[n], LABELS[n])), EQUAL),
    "lists of two": (Made(lambda n: [PIXELS[n], LABELS[n]]), EQUAL),
    "pairs of numpy and int": (Made(lambda n: (PIXELS[n].numpy(), int(LABELS[n]))), EQUAL),
    "pairs, label first": (Made(lambda n: (LABELS[n], PIXELS[n])), REFUSED),
    "Pillow": (Made(lambda n: (Image.fromarray(PIXELS[n, 0].numpy()), int(LABELS[n]))), EQUAL),
    "dicts": (Made(lambda n: {"image": PIXELS[n], "label": int(LABELS[n])}), EQUAL),
    "dicts of other names": (Made(lambda n: {"pixel_values": PIXELS[n], "labels": int(LABELS[n])}), EQUAL),
    "dicts with more": (Made(lambda n: {"image": PIXELS[n], "label": int(LABELS[n]), "path": None}), EQUAL),
    "dicts of odd names": (Made(lambda n: {"a": PIXELS[n], "b": int(LABELS[n])}), REFUSED),
    "dicts of two images": (Made(lambda n: {"image": PIXELS[n], "x": PIXELS[n], "label": 0}), REFUSED),
    "triples": (Made(lambda n: (PIXELS[n], LABELS[n], n)), REFUSED),
    "images of several sizes": (Made(lambda n: (PIXELS[n, :, : 18 - n % 2], LABELS[n])), REFUSED),
    "items alone": (Made(lambda n: PIXELS[n]), REFUSED),
    "a list of pairs": ([(PIXELS[n], int(LABELS[n])) for n in range(N)], EQUAL),
    "a list of dicts": (ITEMS, EQUAL),
    "zipped": (list(zip(PIXELS, LABELS, strict=True)), EQUAL),
    "a Subset": (Subset(TensorDataset(PIXELS, LABELS), range(N)), EQUAL),
    "joined": (ConcatDataset([TensorDataset(PIXELS[:9], LABELS[:9]), TensorDataset(PIXELS[9:], LABELS[9:])]), EQUAL),
    "stacked": (StackDataset(image=PIXELS, label=LABELS), EQUAL),
    "batched reading": (Batched(), EQUAL),
    "height × width": (Made(lambda n: (PIXELS[n, 0].numpy(), np.array(int(LABELS[n])))), EQUAL),
    "None among the items": (Made(lambda n: None if n == 5 else (PIXELS[n], LABELS[n])), REFUSED),
    "paths": (Made(lambda n: (f"{n}.png", LABELS[n])), REFUSED),
    "a class": (TensorDataset, REFUSED),
    "a dict of arrays": ({"image": PIXELS, "label": LABELS}, EQUAL),
    "a dict with capital letters": ({"X": PIXELS, "y": LABELS}, EQUAL),
    "a dict with both letters": ({"X": PIXELS, "x": PIXELS, "y": LABELS}, REFUSED),
    "images only": (PIXELS, REFUSED),
    "three tensors": ((PIXELS, LABELS, LABELS), REFUSED),
    "a text": ("mnist", REFUSED),
    "None": (None, REFUSED),
    "an iterator": (iter([(PIXELS, LABELS)]), REFUSED),
    "an empty data set": (TensorDataset(PIXELS[:0], LABELS[:0]), REFUSED),
    "an empty list": ([], REFUSED),
    "loader": (DataLoader(TensorDataset(PIXELS, LABELS), batch_size=16), EQUAL),
    "loader, shuffle": (DataLoader(TensorDataset(PIXELS, LABELS), batch_size=16, shuffle=True), EQUAL),
    "loader of single images": (DataLoader(TensorDataset(PIXELS, LABELS), batch_size=None), REFUSED),
}


@pytest.mark.parametrize("form", CONTAINERS)
def test_data_in_any_container(form: str, plain: dict[str, list[float]]) -> None:
    data, expected = CONTAINERS[form]
    compare(lambda: train_tiny(data), expected, plain["fit"])


def test_keys_say_which_parts_are_image_and_label(plain: dict[str, list[float]]) -> None:
    for keys, data in (
        ((0, 1), Made(lambda n: (PIXELS[n], LABELS[n], n))),
        ((1, 0), Made(lambda n: (LABELS[n], PIXELS[n]))),
        ((-2, -1), Made(lambda n: (n, PIXELS[n], LABELS[n]))),
        (("a", "b"), Made(lambda n: {"a": PIXELS[n], "b": LABELS[n], "image": 0})),
        (("b", "a"), {"a": LABELS, "b": PIXELS}),
        ((2, 0), (LABELS, None, PIXELS)),
    ):
        assert train_tiny(data, keys=keys) == pytest.approx(plain["fit"], rel=2e-3)
    pairs = Made(lambda n: (PIXELS[n], LABELS[n]))
    for wrong, said in (((0, 2), "there are 2 parts"), (("a", "b"), "there are 2 parts")):
        assert_raises(InputError, train_tiny, pairs, keys=wrong, say=said)
    assert_raises(WrongType, train_tiny, pairs, keys="image", say="keys must be a sequence")
    dicts = Made(lambda n: {"image": PIXELS[n], "label": LABELS[n]})
    assert_raises(InputError, train_tiny, dicts, keys=("image", "b"), say="have the entries 'image, label'")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("image", "mask"), ("image", "mask")),
        (("Image", "MASKS", "id"), ("Image", "MASKS")),
        (("mask", "x", "label"), ("x", "label")),
        (("image", "mask", "masks"), None),
        (("image", "label", "y"), None),
        (("image", "img", "label"), None),
    ],
)
def test_usual_names_are_found(names: tuple[str, ...], keys: tuple[str, str] | None) -> None:
    item = dict.fromkeys(names, 0)
    if keys is None:
        assert_raises(InputError, find_keys, item, None, "items", say="name them with keys")
    else:
        assert find_keys(item, None, "items") == keys


def test_names_that_were_guessed_are_said() -> None:
    heard = Heard()
    train_tiny(Made(lambda n: {"img": PIXELS[n], "fine_label": LABELS[n]}), progress=heard)
    assert "Data: images are 'img' and labels 'fine_label'" in heard.said


def test_a_scale_says_the_range_of_pixels(plain: dict[str, list[float]], tmp_path: Path) -> None:
    wide = PIXELS.numpy().astype(np.int16) * 16 - 1000
    scale = (-1000, 255 * 16 - 1000)
    for data in (
        (wide, LABELS),
        Made(lambda n: (wide[n], LABELS[n])),
        DataLoader(Made(lambda n: (wide[n], LABELS[n])), 16),
    ):
        assert train_tiny(data, scale=scale) == pytest.approx(plain["fit"], rel=2e-3)
    parts = {
        f"{key}{part}": each for part in ("", "_test", "_val") for key, each in (("x", wide), ("y", LABELS.numpy()))
    }
    np.savez(tmp_path / "a.npz", **parts)  # type: ignore[arg-type]
    data = load_dataset(f"npz:{tmp_path / 'a.npz'}", scale=scale)
    assert train_tiny(data.train) == pytest.approx(plain["fit"], rel=2e-3)
    normalised = (PIXELS.float() / 255 - 0.3) / 0.4
    assert_raises(UnknownRange, train_tiny, (normalised, LABELS), say="images must be uint8")
    assert train_tiny((normalised, LABELS), scale="none") != train_tiny((PIXELS, LABELS))


def test_validation_labels_that_are_texts_have_the_numbers_of_the_training(tmp_path: Path) -> None:
    """Of the validation images only the second and third class are there."""
    texts, chosen = NAMES[LABELS.numpy()], (LABELS > 0).nonzero().flatten()
    found = []
    for given in (LABELS, texts):
        torch.manual_seed(0)
        network = create_model("sabour2017", (1, 18, 18), J, **NARROW)
        recipe, out = Recipe(epochs=1, batch_size=16, learning_rate=1e-2), tmp_path / str(len(found))
        check = (PIXELS[chosen], given[chosen.numpy()])
        rows = fit(network, (PIXELS, given), recipe, out, validation=check, accelerator="cpu", progress=Progress())
        found.append((rows[0]["validation_loss"], rows[0]["validation_accuracy"]))
    assert found[0] == found[1]


# ---- loaders


def seen_by(loader: Any, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The images of each batch that a loader of (image, label) gives to ``fit``, by their first pixel."""
    seen: list[list[int]] = []

    class Look(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(324, J)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append((images[:, 0, 0, 0] * 255).round().int().tolist())
            return self.last(images.flatten(1))

    fit(Look(), loader, Recipe(epochs=epochs), accelerator="cpu", progress=Progress(), **options)
    return seen


NUMBERED = PIXELS.clone()
NUMBERED[:, 0, 0, 0] = torch.arange(N, dtype=torch.uint8)
DATA = TensorDataset(NUMBERED, LABELS)
FIRST = WeightedRandomSampler(torch.arange(N).lt(4).double().tolist(), 64)


def test_a_sampler_is_honoured_and_its_epochs_differ() -> None:
    for seeded in (FIRST, WeightedRandomSampler(FIRST.weights, 64, generator=torch.Generator())):
        batches = seen_by(DataLoader(DATA, batch_size=16, sampler=seeded), epochs=2)
        assert [len(each) for each in batches] == [16] * 8
        assert set(chain.from_iterable(batches)) == {0, 1, 2, 3}
        assert batches[:4] != batches[4:]
        assert batches == seen_by(DataLoader(DATA, batch_size=16, sampler=seeded), epochs=2)
        assert batches != seen_by(DataLoader(DATA, batch_size=16, sampler=seeded), epochs=2, seed=1)
    part = DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(10)))
    assert sorted(chain.from_iterable(seen_by(part))) == list(range(10))
    assert seen_by(DataLoader(DATA, batch_size=2, sampler=[5, 3, 4])) == [[5, 3], [4]]
    assert seen_by(DataLoader(DATA, batch_size=2, sampler=[5, 3, 4], drop_last=True)) == [[5, 3]]


class ByClass(Sampler[list[int]]):
    """Batches of one class each, in an order of NumPy's global generator, or of one of its own."""

    def __init__(self, random: Any = np.random) -> None:
        self.random = random

    def __len__(self) -> int:
        return 2 * J

    def __iter__(self) -> Iterator[list[int]]:
        for j in self.random.permutation(J).tolist():
            members = self.random.permutation(N // J).tolist()
            yield [j + J * each for each in members[:10]]
            yield [j + J * each for each in members[10:]]


def test_a_batch_sampler_is_honoured() -> None:
    batches = seen_by(DataLoader(DATA, batch_sampler=ByClass()), epochs=2)
    assert [len(each) for each in batches] == [10, 6] * 6
    assert all(len({each % J for each in batch}) == 1 for batch in batches)
    assert sorted(chain.from_iterable(batches[:6])) == sorted(chain.from_iterable(batches[6:])) == list(range(N))
    assert batches[:6] != batches[6:]
    inner = BatchSampler(SequentialSampler(DATA), 20, drop_last=True)
    assert seen_by(DataLoader(DATA, batch_sampler=inner)) == [list(range(20)), list(range(20, 40))]


@pytest.mark.parametrize(
    "sampler", [lambda: ByClass(np.random.default_rng(0)), lambda: BatchSampler(Counting(), 2, False)]
)
def test_randomness_of_another_kind_is_used_and_said(sampler: Callable[[], Any]) -> None:
    opened = open_data(DataLoader(DATA, batch_sampler=sampler()), Form(find_task("classes"), J))
    assert opened.sampler is not None
    assert not opened.sampler.is_repeatable
    (message,) = opened.messages
    assert "draws other images each time, so a resumed run differs" in message
    loader = BatchLoader(opened.data, 4, shuffle=True, sampler=opened.sampler)
    assert len(list(loader.batches(0))) == len(list(loader.batches(1, start=1))) + 1 == len(loader)
    with pytest.raises(InputError, match="several processes need that"):
        BatchLoader(opened.data, 4, shuffle=True, sampler=opened.sampler, world_size=2)
    repeatable = open_data(DataLoader(DATA, batch_sampler=ByClass()), Form(find_task("classes"), J))
    assert repeatable.messages == []


def test_a_collate_function_is_honoured() -> None:
    def collate(items: list[Any]) -> Any:
        images, labels = torch.utils.data.default_collate(items)
        images = images.clone()
        images[:, 0, 0, 0] = 77
        return {"image": images, "label": labels}

    batches = seen_by(DataLoader(DATA, batch_size=16, collate_fn=collate))
    assert set(chain.from_iterable(batches)) == {77}
    fewer = DataLoader(DATA, batch_size=16, collate_fn=lambda items: torch.utils.data.default_collate(items[:3]))
    assert_raises(InputError, seen_by, fewer, say="a batch of 16 items has 3 images and 3 labels")
    dropped = DataLoader(DATA, batch_size=16, collate_fn=lambda items: torch.utils.data.default_collate(items[:3])[0])
    assert_raises(WrongType, seen_by, dropped, say="must be pairs (image, label) or dicts")


def test_samplers_that_take_all_images_change_nothing() -> None:
    orders = [seen_by(DataLoader(DATA, 16, sampler=kind(DATA))) for kind in (SequentialSampler, RandomSampler)]
    assert orders[0] == orders[1] == seen_by(DataLoader(DATA, 16, shuffle=True))


class Counting(Sampler[int]):
    """Other images each time, whatever the generators are."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(range(self.times, self.times + 4))


class Growing(Sampler[int]):
    """One image more in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 + self.epoch))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            lambda: DataLoader(DATA, batch_size=2, sampler=iter([1, 2, 3])),
            "gives 0 batches in epoch 1 but 2 in the first",
        ),
        (lambda: DataLoader(DATA, batch_size=1, sampler=Growing()), "gives 5 batches in epoch 2 but 4 in the first"),
        (lambda: DataLoader(DATA, batch_size=2, sampler=[0, N]), f"gives indices from 0 to {N}, but the {N} images"),
        (lambda: DataLoader(DATA, batch_size=2, sampler=["a", "b"]), "must give indices of images, or lists of them"),
        (lambda: DataLoader(DATA, batch_sampler=[0, 1]), "must give indices of images, or lists of them"),
        (lambda: DataLoader(DATA, batch_size=2, sampler=[]), "gives 0 batches in epoch 1"),
        (
            lambda: DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 2, 0)),
            "leave the DistributedSampler",
        ),
        (lambda: DataLoader(Stream(), batch_size=2), "got an IterableDataset"),
        (lambda: DataLoader(DATA, batch_size=None), "must have a batch_size or a batch_sampler"),
    ],
)
def test_loaders_that_have_no_epochs_are_refused(loader: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        seen_by(loader(), epochs=2)
    assert said in str(caught.value)


@pytest.mark.parametrize("classes", [2, 3])
def test_one_hot_rows_have_the_accuracy_of_their_classes(classes: int) -> None:
    labels = torch.arange(N) % classes
    made = []
    for targets in (labels, torch.eye(classes)[labels]):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(324, classes))
        recipe = Recipe(epochs=2, batch_size=16)
        rows = fit(
            module, (PIXELS, targets), recipe, validation=(PIXELS, targets), accelerator="cpu", progress=Progress()
        )
        made.append(rows[-1]["validation_accuracy"])
    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", ["float64", "float32", "uint8"])
def test_a_module_of_ones_own_gets_its_own_dtype(form: str, dtype: torch.dtype) -> None:
    """Numbers of NumPy are float64 as a rule, and weights float32."""
    images = PIXELS.numpy() if form == "uint8" else (PIXELS.numpy() / 255).astype(form)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(324, J)).to(dtype)
    rows = fit(module, (images, LABELS), Recipe(epochs=1, batch_size=16), accelerator="cpu", progress=Progress())
    assert rows[0]["train_loss"] < 3
    assert {each.dtype for each in module.parameters()} == {dtype}


def test_errors_of_validation_data_name_it() -> None:
    for data in ((PIXELS[..., :17], LABELS), (PIXELS, LABELS + 5), DataLoader(TensorDataset(PIXELS[..., :17], LABELS))):
        with pytest.raises(InputError, match=r"^validation: (images|labels) must "):
            train_tiny((PIXELS, LABELS), validation=data)


# ---- what a run does with any form


UNEVEN = torch.cat([torch.zeros(30), torch.ones(12), torch.full((6,), 2.0)]).long()


def learn(data: Any, labels: str = "classes", **options: Any) -> dict[str, Any]:
    """The row of an epoch of a tiny network that is validated on its training data."""
    torch.manual_seed(0)
    network = create_model("sabour2017", (1, 18, 18), 1 if labels == "regression" else J, task=labels, **NARROW)
    recipe = Recipe(epochs=1, batch_size=16, learning_rate=1e-2, **options)
    (row,) = fit(network, data, recipe, validation=data, accelerator="cpu", progress=Progress())
    return {name: each for name, each in row.items() if name.startswith(("train", "validation"))}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["items", "loader", "dicts", "one-hot", "one-hot items"])
def test_class_weights_and_balanced_accuracy_are_of_any_form(form: str) -> None:
    """Labels that are not known beforehand are read once."""
    rows = torch.eye(J)[UNEVEN]
    data = {
        "items": Made(lambda n: (PIXELS[n], UNEVEN[n])),
        "loader": DataLoader(TensorDataset(PIXELS, UNEVEN), batch_size=16),
        "dicts": Made(lambda n: {"image": PIXELS[n], "label": int(UNEVEN[n])}),
        "one-hot": (PIXELS, rows),
        "one-hot items": Made(lambda n: (PIXELS[n], rows[n])),
    }[form]
    for weights in (None, "balanced", (1.0, 2.0, 3.0)):
        plain = learn((PIXELS, UNEVEN), class_weights=weights)
        assert plain["validation_balanced_accuracy"] != plain["validation_accuracy"]
        assert learn(data, class_weights=weights) == pytest.approx(plain, rel=1e-4)
    assert learn(data, class_weights="balanced") != pytest.approx(learn(data), rel=1e-4)


def test_the_targets_of_a_regression_are_read_from_any_form() -> None:
    numbers = 1000 + 50 * LABELS
    plain = learn((PIXELS, numbers.float()), "regression")
    for data in (Made(lambda n: (PIXELS[n], float(numbers[n]))), Made(lambda n: (PIXELS[n], numbers[n : n + 1]))):
        assert learn(data, "regression") == pytest.approx(plain, rel=1e-4)


def test_class_weights_that_cannot_be() -> None:
    labels = torch.eye(J)[LABELS]
    for task in ("labels", "regression"):
        targets = labels if task == "labels" else LABELS.float()
        for weights in ("balanced", (1.0, 2.0, 3.0)):
            said = f"images of one class each, but this network was made for the task {task}"
            assert_raises(InputError, learn, (PIXELS, targets), task, class_weights=weights, say=said)
    shares = torch.full((N, J), 1 / J)
    said = 'class_weights="balanced" needs one class for each image'
    assert_raises(InputError, learn, (PIXELS, shares), class_weights="balanced", say=said)
    assert learn((PIXELS, shares), class_weights=(2.0, 2.0, 2.0))["train_loss"] > 0
    assert_raises(InputError, learn, (PIXELS, LABELS), class_weights=(1.0, 2.0), say="class_weights must be 3 numbers")


class Noisy(Dataset[Any]):
    """Images with noise that is drawn by NumPy, Python and torch when an item is taken."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        shift = int(np.random.randint(3)) + random.randrange(3) + int(torch.randint(3, ()))
        return {"image": PIXELS[index].roll(shift, -1), "label": int(LABELS[index])}


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "workers"])
def test_a_run_that_was_stopped_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        if kind == "batch sampler":
            return DataLoader(Noisy(), batch_sampler=ByClass())
        if kind == "sampler":
            return DataLoader(Noisy(), batch_size=16, sampler=WeightedRandomSampler(torch.ones(N).tolist(), N))
        return DataLoader(Noisy(), batch_size=16, num_workers=2)

    found = []
    for stops in ((), (2, 5)):
        out = tmp_path / str(len(stops))
        for at in (*stops, None):
            torch.manual_seed(0)
            network = create_model("sabour2017", (1, 18, 18), J, **NARROW)
            recipe = Recipe(epochs=2, batch_size=16, learning_rate=1e-2)
            progress = Progress() if at is None else StopAt(at)
            with nullcontext() if at is None else pytest.raises(Interrupted):
                fit(network, loader(), recipe, out, accelerator="cpu", progress=progress)
            np.random.seed()  # a new process would have other generators
            random.seed()
        found.append((rows(out), read_checkpoint(out / "last.ckpt")["model"]))
    assert found[0][0] == found[1][0]
    assert same_weights(found[0][1], found[1][1])


def dark_folder(path: Path, images: np.ndarray, scale: Any) -> Any:
    for n, image in enumerate(images):
        (path / str(n % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path / f"{n % 2}/{n}.png")
    return load_dataset(f"folder:{path}", scale=scale).test.images


def dark_npz(path: Path, images: np.ndarray, scale: Any) -> Any:
    path.mkdir()
    np.savez(path / "a.npz", x=images.astype(np.int64), y=np.arange(len(images)) % 2)
    return load_dataset(f"npz:{path / 'a.npz'}", scale=scale).test.images


def dark_fit(_: Path, images: np.ndarray, scale: Any) -> Any:
    form = Form(find_task("classes"), 2, (1, *images.shape[1:]), scale=scale or "auto")
    return open_data((images, np.arange(len(images)) % 2), form).data.tensors[0]


def dark_estimator(_: Path, images: np.ndarray, scale: Any) -> Any:
    network = CapsNetClassifier("first", epochs=1)
    network.fit(images if scale is None else images.astype(float), np.arange(len(images)) % 2)
    return np.array(network.pixel_range_[1] == images.max(), float)


@pytest.mark.parametrize("door", [dark_folder, dark_npz, dark_fit, dark_estimator])
@pytest.mark.parametrize("highest", [1, 16])
def test_small_numbers_in_8_bits_are_said_and_the_advice_works(tmp_path: Path, door: Any, highest: int) -> None:
    images = np.random.default_rng(0).integers(0, highest, (20, 28, 28), np.uint8, endpoint=True)
    with pytest.warns(UserWarning, match=f"is above {highest}, but 255 is white, so they are dark"):
        door(tmp_path / "dark", images, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = door(tmp_path / "right", images, (0, highest))
    assert pixels.max() == (255 if pixels.dtype == torch.uint8 else 1)
