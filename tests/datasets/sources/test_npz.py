import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from support import assert_raises
from torchcaps import machine
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.datasets.pixels import to_bytes
from torchcaps.errors import InputError

X = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
X[:, 0, 0] = np.arange(40)  # tells the image
Y = np.arange(40) % 4
NAMES = np.array(list("abcd"))


def load(path: Path, **arrays: object) -> Dataset:
    np.savez(path / "a.npz", **arrays)  # type: ignore[arg-type]
    return load_dataset(f"npz:{path / 'a.npz'}")


def test_images_and_labels_are_split_in_three(tmp_path: Path) -> None:
    data = load(tmp_path, x=X, y=Y, notes=np.array([{"not": "read"}], dtype=object))
    assert data.class_names == ("0", "1", "2", "3")
    assert data.in_shape == (1, 6, 5)
    assert [len(data.train), len(data.validation), len(data.test)] == [28, 4, 8]
    seen: list[int] = []
    for part in (data.train, data.validation, data.test):
        assert part.labels.bincount().unique().numel() == 1
        numbers = part.images[:, 0, 0, 0].tolist()
        assert torch.equal(part.images[:, 0], torch.from_numpy(X[numbers]))
        assert torch.equal(part.labels, torch.from_numpy(Y[numbers]))
        seen += numbers
    assert sorted(seen) == list(range(40))
    # results rest on this choice: whatever moves it is a break
    assert data.test.images[:, 0, 0, 0].tolist() == [7, 8, 10, 13, 14, 21, 27, 32]


@pytest.mark.parametrize("task", ["labels", "regression"])
def test_fewer_images_than_outputs_are_split(tmp_path: Path, task: str) -> None:
    """Only classes need an image of each output in every part."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=X[:10], y=random.integers(0, 2, (10, 12)) + (task == "regression") * 0.5)
    data = load_dataset(f"npz:{tmp_path / 'a.npz'}", task=task)
    assert [len(data.train), len(data.validation), len(data.test)] == [7, 1, 2]
    np.savez(tmp_path / "b.npz", x=X[:10], y=np.arange(10) % 5)
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'b.npz'}", say="leaves none for validation")


def test_parts_of_their_own_are_taken_as_they_are_in_files_of_medmnist_too(tmp_path: Path) -> None:
    ours = {"x": X, "y": Y, "x_test": X[:3], "y_test": Y[:3], "x_val": X[3:5], "y_val": Y[3:5], "class_names": NAMES}
    labels, parts = Y[:, None].astype(np.uint8), {"train": slice(40), "val": slice(3, 5), "test": slice(3)}
    medmnist = {f"{part}_images": X[rows] for part, rows in parts.items()}
    medmnist |= {f"{part}_labels": labels[rows] for part, rows in parts.items()}
    for arrays, names in ((ours, "abcd"), (medmnist, "0123")):
        data = load(tmp_path, **arrays)
        assert data.class_names == tuple(names)
        assert all(type(name) is str for name in data.class_names)
        for part, rows in zip((data.train, data.validation, data.test), parts.values(), strict=True):
            assert torch.equal(part.images[:, 0], torch.from_numpy(X[rows]))
            assert torch.equal(part.labels, torch.from_numpy(Y[rows]))


def test_channels_first_or_last_orders_of_bytes_and_floats(tmp_path: Path) -> None:
    for channels in (1, 2, 3, 4):
        last = np.random.default_rng(0).integers(0, 256, (40, 6, 5, channels), dtype=np.uint8)
        plain = load(tmp_path, x=last, y=Y)
        assert plain.in_shape == (channels, 6, 5)
        floats = [(last / 255).astype(dtype) for dtype in (np.float16, np.float32, ">f8")]
        for x in (np.asfortranarray(last), last.transpose(0, 3, 1, 2), *floats):
            for y in (Y, Y.astype(">u2"), Y.astype(np.int8)):
                other = load(tmp_path, x=x, y=y)
                assert torch.equal(to_bytes(other.train.images), plain.train.images)
                assert torch.equal(other.test.labels, plain.test.labels)


def test_channels_that_the_shape_does_not_tell_are_told_by_an_array(tmp_path: Path) -> None:
    for shape, order, in_shape in (
        ((40, 1, 20, 3), "first", (1, 20, 3)),
        ((40, 1, 20, 3), "last", (3, 1, 20)),
        ((40, 8, 8, 30), "last", (30, 8, 8)),
        ((40, 30, 8, 8), "first", (30, 8, 8)),
    ):
        assert load(tmp_path, x=np.zeros(shape, np.uint8), y=Y, channels=np.array(order)).in_shape == in_shape


def test_names_as_keras_and_scikit_learn_have_them(tmp_path: Path) -> None:
    plain = load(tmp_path, x=X, y=Y, x_test=X[:8], y_test=Y[:8])
    for arrays in (
        {"x_train": X, "y_train": Y, "x_test": X[:8], "y_test": Y[:8]},
        {"X_train": X, "y_train": Y, "X_test": X[:8], "y_test": Y[:8]},
        {"X": X, "y": Y, "X_test": X[:8], "Y_test": Y[:8]},
    ):
        data = load(tmp_path, **arrays)
        assert torch.equal(data.train.images, plain.train.images)
        assert torch.equal(data.test.labels, plain.test.labels)


def test_rows_of_numbers_are_sequences_of_one_channel(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 30))
    data = load(tmp_path, x=rows, y=Y, x_test=rows, y_test=Y)
    assert data.in_shape == (1, 1, 30)
    assert torch.equal(data.test.images[:, 0, 0], torch.from_numpy(rows).float())


@pytest.mark.parametrize("form", ["one-hot", "one-hot floats", "texts", "floats", "column of floats", "True and False"])
def test_classes_in_other_forms(form: str, tmp_path: Path) -> None:
    """Also of a file whose test images lack the last class; floats are classes if the task says so."""
    labels, rows = (Y % 2 if form == "True and False" else Y), np.eye(4, dtype=int)[Y]
    y: dict[str, np.ndarray] = {
        "one-hot": rows,
        "one-hot floats": rows.astype(np.float32),
        "texts": NAMES[Y],
        "floats": Y.astype(float),
        "column of floats": Y[:, None].astype(float),
        "True and False": labels == 1,
    }
    held = Y < 3
    options = {"x": X, "x_test": X[held]}
    plain = load(tmp_path, **options, y=labels, y_test=labels[held])
    np.savez(tmp_path / "b.npz", **options, y=y[form], y_test=y[form][held])
    other = load_dataset(f"npz:{tmp_path / 'b.npz'}", task="classes")
    assert other.task.name == "classes"
    assert other.class_names == (tuple("abcd") if form == "texts" else plain.class_names)
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(other, part).labels, getattr(plain, part).labels)
    guessed = load_dataset(f"npz:{tmp_path / 'b.npz'}").task.name
    of_a_file = {"floats": "regression", "column of floats": "regression", "True and False": "labels"}
    assert guessed == of_a_file.get(form, "classes")


def characters(last: int) -> np.ndarray:
    """Four names, of which the last one has another character."""
    return np.array([[97, 0], [98, 0], [99, 0], [100, last]], np.uint32).view("=U2")[:, 0]


XY = {"x": X, "y": Y}
WRONG: list[tuple[dict[str, np.ndarray], str]] = [
    ({}, 'no array "x"; it holds nothing'),
    ({"x": X, "labels": Y}, "no array \"y\"; it holds 'labels', 'x'"),
    (XY | {"x_test": X}, 'no array "y_test"'),
    (XY | {"y_val": Y}, 'no array "x_val"'),
    ({f"{'z' * 99}{n}": X[:1] for n in range(30)}, ", …"),
    (XY | {"x": X.astype(np.int64) * 8}, "x must be uint8, other integers of 0..255"),
    (XY | {"x": X.astype(np.int64) * 8}, "got int64 from 0 to 2040; say which numbers become 0 and 1"),
    (XY | {"x": X.astype(np.uint16)}, "such as scale=(0, 255) (--scale 0,255 of train and datasets)"),
    (
        XY | {"x": X.astype(np.int16) * 8 - 1000},
        "such as scale=(-1024, 3071) (--scale -1024,3071 of train",
    ),
    (XY | {"x": X.astype(np.float32)}, "got float32 from 0 to 255"),
    (XY | {"x": np.full((40, 6, 5), np.nan)}, "x must be finite"),
    (XY | {"x": np.zeros((40, 6, 5), [("a", "f4")])}, "x must be numbers"),
    (XY | {"x": np.zeros((40, 6, 5, 9), np.uint8)}, "neither axis 1 nor axis 3 could be 1 to 4 channels"),
    (XY | {"x": np.zeros((40, 1, 20, 3), np.uint8)}, "both axis 1 and axis 3 could be 1 to 4 channels"),
    (
        XY | {"x": np.zeros((40, 1, 20, 3), np.uint8), "channels": np.array("both")},
        'channels must be "first" or "last"',
    ),
    (XY | {"x": np.zeros(40, np.uint8)}, "x must have the shape"),
    (XY | {"x": np.full((40, 6), 1e300)}, "x has a number that is NaN, infinite or beyond float32"),
    ({"x": X[:0], "y": Y[:0]}, "x must have the shape"),
    (XY | {"y": np.full(40, np.nan)}, "y must be finite numbers"),
    (XY | {"y": Y[:39]}, "y must be given for each of 40 images of x, got 39"),
    (XY | {"y": 2 * np.eye(4, dtype=int)[Y]}, "y must be whole numbers from 0"),
    (XY | {"y": Y + 1}, "labels from 1 to 4, but classes are counted from 0; subtract 1"),
    (XY | {"y": Y + 1, "class_names": NAMES}, "labels from 1 to 4, but classes are counted from 0; subtract 1"),
    (XY | {"class_names": NAMES[:3]}, "y (class_names has 3 texts) must be in 0..2, got 0..3"),
    (XY | {"y": NAMES[Y], "x_test": X, "y_test": np.full(40, "e")}, 'y_test has the text "e"'),
    ({"train_images": X}, 'no array "train_labels"'),
    (XY | {"y": Y - 1}, "y must be 0 or greater, got -1"),
    (XY | {"y": Y.astype(np.uint64) + 2**63}, "y has the label 9223372036854775811"),
    (XY | {"y": Y * 2}, "or number the classes without gaps"),
    (XY | {"class_names": np.array(list("abcde"))}, "class_names must be 4 texts"),
    (XY | {"class_names": np.arange(4)}, "class_names must be 4 texts"),
    (XY | {"class_names": np.array("abcd")}, "class_names must be 4 texts"),
    (XY | {"class_names": characters(0x110000).byteswap().view(">U2")}, "corrupt"),
    (XY | {"class_names": characters(0xDCE9)}, "corrupt"),
    ({"x": X[:4], "y": Y[:4]}, "4 images of 4 classes, too few"),
    (XY | {"x": np.array([{}] * 40)}, "Object arrays cannot be loaded"),
]


def test_arrays_that_cannot_be(tmp_path: Path) -> None:
    for arrays, named in WRONG:
        with pytest.raises(InputError) as raised:
            load(tmp_path, **arrays)
        assert named in str(raised.value)
        assert str(tmp_path / "a.npz") in str(raised.value)
        assert "\n" not in str(raised.value)


def test_images_that_do_not_fit_into_memory_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((100, 1024, 1024), np.uint8), y=np.arange(100) % 4)
    monkeypatch.setattr(machine, "free_memory_mib", lambda: 99.0)
    tracemalloc.start()
    said = f"the images of {path} would take 100 MiB of memory, but must fit"
    assert_raises(InputError, load_dataset, f"npz:{path}", say=said)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


@pytest.mark.skipif(os.name == "nt", reason="there are no FIFOs")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    for spec, words in (
        (f"npz:{tmp_path / 'a.npz'}", "a.npz: this path is a FIFO"),
        (f"npz:{tmp_path / ('x' * 300)}", "cannot be"),
        (f"folder:{tmp_path / 'a.npz'}", "folder"),
        (f"folder:{tmp_path}/a\0", "NUL"),
    ):
        assert_raises(InputError, load_dataset, spec, say=words)
    for folder, words in ((tmp_path / "a.npz", "data_dir"), (f"{tmp_path}/a\0", "NUL")):
        assert_raises(InputError, load_dataset, "mnist", data_dir=folder, say=words)
