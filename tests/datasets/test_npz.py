from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.datasets import Dataset, load_dataset
from torchcaps.errors import InputError

X = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
X[:, 0, 0] = np.arange(40)  # tells the image
Y = np.arange(40) % 4


def load(path: Path, **arrays: object) -> Dataset:
    np.savez(path / "a.npz", **arrays)  # type: ignore[arg-type]
    return load_dataset(f"npz:{path / 'a.npz'}")


def test_images_and_labels_are_split_in_three(tmp_path: Path) -> None:
    data = load(tmp_path, x=X, y=Y)
    assert data.class_names == ("0", "1", "2", "3")
    assert data.in_shape == (1, 6, 5)
    assert [len(data.train), len(data.validation), len(data.test)] == [28, 4, 8]
    seen = []
    for part in (data.train, data.validation, data.test):
        assert part.labels.bincount().unique().numel() == 1
        for image, label in zip(part.images, part.labels, strict=True):
            number = int(image[0, 0, 0])
            seen.append(number)
            assert torch.equal(image[0], torch.from_numpy(X[number]))
            assert label == Y[number]
    assert sorted(seen) == list(range(40))
    # results rest on this choice: whatever moves it is a break
    assert data.test.images[:, 0, 0, 0].tolist() == [7, 8, 10, 13, 14, 21, 27, 32]


def test_parts_of_their_own_are_taken_as_they_are(tmp_path: Path) -> None:
    data = load(tmp_path, x=X, y=Y, x_test=X[:3], y_test=Y[:3], x_val=X[3:5], y_val=Y[3:5])
    assert torch.equal(data.train.images[:, 0], torch.from_numpy(X))
    assert torch.equal(data.test.images[:, 0], torch.from_numpy(X[:3]))
    assert torch.equal(data.validation.images[:, 0], torch.from_numpy(X[3:5]))


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 5, 1), (6, 5, 2)])
def test_channels_last_or_first(tmp_path: Path, shape: tuple[int, ...]) -> None:
    last = np.random.default_rng(0).integers(0, 256, (20, *shape), dtype=np.uint8)
    test = {"x_test": last[:4], "y_test": Y[:4]}
    one = load(tmp_path, x=last, y=Y[:20], **test)
    first = last.transpose(0, 3, 1, 2)
    two = load(tmp_path, x=first, y=Y[:20], **test)
    assert one.in_shape == two.in_shape == (shape[2], 6, 5)
    assert torch.equal(one.test.images, torch.from_numpy(first[:4].copy()))
    assert torch.equal(one.train.images, two.train.images)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_0_to_1_are_rounded_to_255_steps(tmp_path: Path, dtype: type) -> None:
    data = load(tmp_path, x=(X / 255).astype(dtype), y=Y, x_test=X, y_test=Y, x_val=X, y_val=Y)
    assert torch.equal(data.train.images[:, 0], torch.from_numpy(X))


def test_class_names(tmp_path: Path) -> None:
    data = load(tmp_path, x=X, y=Y.astype(np.uint8), class_names=np.array(["ant", "bee", "cat", "dog"]))
    assert data.class_names == ("ant", "bee", "cat", "dog")
    assert all(type(name) is str for name in data.class_names)


def test_arrays_that_are_not_used_are_not_read(tmp_path: Path) -> None:
    assert len(load(tmp_path, x=X, y=Y, notes=np.array([{"a": 1}], dtype=object)).test) == 8


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": Y}, 'has no array "x"; it holds y'),
        ({"X": X, "y": Y}, r'has no array "x" \(rename "X"\?\); it holds X, y'),
        ({"x": X, "labels": Y}, 'has no array "y".*it holds labels, x'),
        ({"x": X, "y": Y, "x_test": X}, 'has no array "y_test"'),
        ({"x": X, "y": Y, "y_val": Y}, 'has no array "x_val"'),
        ({"x": X, "y": Y, "x_test": X, "ytest": Y}, r'no array "y_test" \(rename "ytest"\?\)'),
        ({}, 'no array "x"; it holds nothing'),
        ({"x": X.astype(np.int64), "y": Y}, "x must be uint8 of 0..255 or floats of 0..1, got int64"),
        ({"x": X.astype(np.float32), "y": Y}, r"x must be floats of 0..1.* got floats from 0 to 255"),
        ({"x": np.full((40, 6, 5), np.nan), "y": Y}, "x must be floats of 0..1.*nan"),
        ({"x": X / 255 - 0.1, "y": Y}, "floats from -0.1"),
        ({"x": X[0], "y": Y}, r"x must have the shape .*got \(6, 5\)"),
        ({"x": np.zeros((40, 6, 5, 9), np.uint8), "y": Y}, r"C from 1 to 4.*got \(40, 6, 5, 9\)"),
        ({"x": X[:0], "y": Y[:0]}, r"no axis empty, got \(0, 6, 5\)"),
        ({"x": X, "y": Y.astype(float)}, "y must hold whole numbers from 0, got float64"),
        ({"x": X, "y": np.array(["a"] * 40)}, "y must hold whole numbers from 0, got <U1"),
        ({"x": X, "y": Y[:39]}, r"y must have the shape \(40,\).*got \(39,\)"),
        ({"x": X, "y": np.eye(4, dtype=int)[Y]}, r"y must have the shape \(40,\).*got \(40, 4\)"),
        ({"x": X, "y": Y - 1}, "y has the label -1"),
        ({"x": X, "y": Y + 1}, "y has no image of class 0; every class from 0 to 4"),
        ({"x": X, "y": Y * 2}, "y has no image of class 1"),
        ({"x": X, "y": Y + 10**13}, "y has the label 10000000000003, but the 40 images of x .*0 to 39"),
        ({"x": X, "y": Y.astype(np.uint64) + 2**63}, "y has the label 9223372036854775811"),
        ({"x": X, "y": Y, "x_val": X, "y_val": Y.astype(np.uint64) + 2**63}, "y_val has the label 9223372036854775811"),
        ({"x": X, "y": Y * 0}, "only the class 0; at least two"),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": Y + 1},
            "y_test has the label 4, but the 4 classes of y go from 0 to 3",
        ),
        ({"x": X, "y": Y, "x_test": X[:, 1:], "y_test": Y}, r"test images are \(1, 5, 5\)"),
        ({"x": X, "y": Y, "class_names": np.array(["a", "b"])}, "class_names must be 4 texts"),
        ({"x": X, "y": Y, "class_names": np.arange(4)}, "class_names must be 4 texts.*int64"),
        ({"x": X, "y": Y, "class_names": np.array(list("abca"))}, r'a\.npz: two classes are called "a"'),
        ({"x": X, "y": Y, "class_names": np.array(list("abcde"))}, "y has no image of class 4"),
        ({"x": X[:4], "y": Y[:4]}, "4 images of 4 classes, too few"),
        ({"x": np.array([{}] * 40), "y": Y}, "no .npz file of plain arrays"),
    ],
)
def test_arrays_that_cannot_be(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        load(tmp_path, **arrays)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("contents", [b"", b"text", b"\x80\x04K\x01.", b"\x93NUMPY"])
def test_files_that_are_no_npz(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(contents)
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path / 'a.npz'))} is no .npz file of plain arrays"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_truncated_and_garbled_files(tmp_path: Path, save: type) -> None:
    path = tmp_path / "a.npz"
    save(path, x=X, y=Y)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:300] + bytes(40) + whole[340:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a truncated or corrupt one"):
            load_dataset(f"npz:{path}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.npz", tmp_path):
        with pytest.raises(InputError, match=f"there is no file {re.escape(str(path))}"):
            load_dataset(f"npz:{path}")


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, y=Y)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x", "pixels")
    with pytest.raises(InputError, match=r"a\.npz is no \.npz file of plain arrays.*its x is no array"):
        load_dataset(f"npz:{path}")


def test_encrypted_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=X, y=Y)
    contents = bytearray(path.read_bytes())
    contents[contents.index(b"PK\1\2") + 8] |= 1  # the flag in the list of members, which zipfile cannot write
    path.write_bytes(contents)
    with pytest.raises(InputError, match=r"a\.npz is no \.npz file of plain arrays.*encrypted"):
        load_dataset(f"npz:{path}")
