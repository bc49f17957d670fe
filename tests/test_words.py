"""Numbers of things in messages: one image, two images."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import torchcaps
from pixel_support import disc_set, register_tiny_pixels, write_folder
from support import WRONG_PLURAL, registered_for_now
from torchcaps import create_model, fit
from torchcaps.analysis import evaluate
from torchcaps.datasets import BatchLoader, ImageSet, PatchSet, load_dataset
from torchcaps.datasets.image_set import ImageSet as Images
from torchcaps.errors import InputError
from torchcaps.ops.sliding import sliding_windows
from torchcaps.sklearn import CapsNetClassifier
from torchcaps.words import counted, each_of, first_of, plural

SOURCES = sorted(Path(torchcaps.__file__).parent.rglob("*.py"))


def test_a_number_has_its_noun() -> None:
    assert [counted(n, "image") for n in (0, 1, 2, 3_000)] == ["0 images", "1 image", "2 images", "3,000 images"]
    assert [counted(n, "class") for n in (1, 2)] == ["1 class", "2 classes"]
    nouns = ("label", "test batch", "epoch", "softmax", "spatial axis", "entry")
    assert [*map(plural, nouns)] == ["labels", "test batches", "epochs", "softmaxes", "spatial axes", "entries"]
    assert [each_of(n, "image") for n in (1, 4)] == ["1 image", "each of 4 images"]
    assert [first_of(n, "test images of digits") for n in (1, 2)] == [
        "first test image of digits",
        "first 2 test images of digits",
    ]


def test_the_pattern_finds_a_wrong_plural() -> None:
    for wrong in ("got 1 images", "1 test images wrong", "there are 1 batches, so"):
        assert WRONG_PLURAL.search(wrong), wrong
    for right in ("got 1 image", "1 is", "image 1 has 3", "0.1 pixels", "batch 1 of 3", "1 class", "1..1 images"):
        assert not WRONG_PLURAL.search(right), right


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_message_makes_its_own_plural(path: Path) -> None:
    """An s that is added by a condition belongs into ``counted``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FormattedValue) and path.stem != "words":
            letters = {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
            assert not letters & {"s", "es"}, ast.unparse(node)


FILLERS = {"given", "found", "wanted"}
PUBLIC_FILLERS = {("detection", "found"), ("photos", "given")}
"""Names that users type, so they stay."""


def fillers(source: str) -> set[str]:
    """Names of variables, parameters, fields and functions in a source that say nothing of what they hold."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names & FILLERS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_name_says_what_it_holds(path: Path) -> None:
    assert {(path.stem, name) for name in fillers(path.read_text())} <= PUBLIC_FILLERS


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for found in []: pass",
        "[1 for wanted in []]",
        "lambda given: 1",
        "def given(): pass",
        "(found := 1)",
    ],
)
def test_a_filler_is_seen_wherever_a_name_is_made(source: str) -> None:
    assert fillers(source)
    assert not fillers("print(found, 'given')")


def one_class(tmp_path: Path, names: tuple[str, ...] = ("a", "b"), count: int = 1) -> str:
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8), 50 + number, np.uint8)).save(tmp_path / name / f"{number}.png")
    return f"folder:{tmp_path}"


def npz(tmp_path: Path, **arrays: Any) -> str:
    np.savez(tmp_path / "own.npz", **arrays)
    return f"npz:{tmp_path / 'own.npz'}"


X = np.zeros((1, 8, 8), np.uint8)
MODEL = {"in_shape": (1, 8, 8), "num_classes": 2}
MESSAGES: dict[str, Callable[[Path], Any]] = {
    "one image of masks": lambda path: load_dataset(f"folder:{write_folder(path, 1)}"),
    "one training image": lambda path: load_dataset(npz(path, x=X, y=[0], x_test=X, y_test=[0])),
    "one label": lambda path: load_dataset(npz(path, x=X, y=[0, 0])),
    "one name": lambda path: load_dataset(
        npz(path, x=np.repeat(X, 9, 0), y=np.linspace(0, 1, 9), class_names=["a", "b"])
    ),
    "one class name": lambda path: load_dataset(npz(path, x=np.repeat(X, 9, 0), y=[0, 1] * 4 + [0], class_names=["a"])),
    "one file": lambda path: load_dataset(one_class(path)),
    "one class": lambda path: load_dataset(one_class(path, ("a",), 9)),
    "one column": lambda path: (
        (path / "a.csv").write_text("image,label\na\n") and load_dataset(f"csv:{path / 'a.csv'}")
    ),
    "one training image with none of a class": lambda path: load_dataset(one_class(path, count=5), limit_train=1),
    "one mask": lambda path: PatchSet((torch.zeros(1, 8, 8).byte(),) * 2, (torch.zeros(8, 8).byte(),), patch=(8, 8)),
    "one channel": lambda path: PatchSet(
        tuple(torch.zeros(n, 8, 8).byte() for n in (1, 2)), (torch.zeros(8, 8).byte(),) * 2, patch=(8, 8)
    ),
    "one image to train on": lambda path: BatchLoader(
        Images(torch.zeros(1, 1, 8, 8).byte(), torch.zeros(1).long()), 4, shuffle=True
    ),
    "one batch": lambda path: next(
        iter(
            BatchLoader(ImageSet(torch.zeros(4, 1, 8, 8).byte(), torch.zeros(4).long()), 4, shuffle=True).batches(
                0, start=9
            )
        )
    ),
    "one image and labels": lambda path: fit(
        nn.Linear(2, 2), (torch.rand(1, 2), torch.zeros(2).long()), out=path / "r"
    ),
    "one part": lambda path: fit(nn.Linear(2, 2), (torch.rand(1, 2),), out=path / "r"),
    "one side": lambda path: sliding_windows(lambda images: images, torch.rand(1, 1, 8), (4, 4)),
    "one convolution": lambda path: create_model("sabour2017", **MODEL, stem_channels=(8,), stem_strides=(1, 1)),
    "one pixel convolution": lambda path: create_model("segcaps", **MODEL, pixel_channels=(8,), pixel_kernels=(1, 1)),
    "one object": lambda path: create_model("sabour2017", in_shape=(1, 28, 28), num_classes=2, objects=2),
    "one output": lambda path: create_model("sabour2017", (1, 28, 28), 1, task="regression").save_pretrained(
        path / "m", class_names=["a", "b"]
    ),
    "one feature": lambda path: CapsNetClassifier(image_shape=(8, 8)).fit(np.zeros((9, 1)), [0, 1] * 4 + [0]),
}


def messages(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


@pytest.mark.parametrize("name", MESSAGES)
def test_an_error_about_one_thing_is_in_the_singular(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        MESSAGES[name](tmp_path)
    for message in messages(caught.value):
        assert not WRONG_PLURAL.search(message.replace(str(tmp_path), "")), message


def test_tables_of_one_test_image_are_in_the_singular() -> None:
    with registered_for_now():
        register_tiny_pixels()
        found = evaluate(create_model("tiny-pixels", (1, 24, 20), 3), disc_set(1))
    words = [str(found), found.warning or "", *map(str, found.tables())]
    assert "1 image" in " ".join(words)
    for each in words:
        assert not WRONG_PLURAL.search(each), each
