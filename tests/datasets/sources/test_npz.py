from __future__ import annotations

import io
import os
import re
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support import assert_raises
from torchcaps import machine
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.errors import InputError

X = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
X[:, 0, 0] = np.arange(40)  # tells the image
Y = np.arange(40) % 4
#: Of these, "b" is followed by a number that is no character.
NO_CHARACTERS = np.array([[97, 0], [98, 0x110000], [99, 0], [100, 0]], np.uint32).view("=U2")[:, 0]


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
        ({"y": Y}, r'has no array "x"; it holds .y.$'),
        ({"X": X, "y": Y}, r'has no array "x"; it holds .X., .y.$'),
        ({"x": X, "labels": Y}, r'has no array "y".*it holds .labels., .x.$'),
        ({"x": X, "y": Y, "x_test": X}, 'has no array "y_test"'),
        ({"x": X, "y": Y, "y_val": Y}, 'has no array "x_val"'),
        ({"x": X, "y": Y, "x_test": X, "ytest": Y}, r'no array "y_test"; it holds .x., .x_test., .y., .ytest.$'),
        ({}, 'no array "x"; it holds nothing'),
        ({"x": X.astype(np.int64), "y": Y}, "x must be uint8 of 0..255 or floats of 0..1, got int64"),
        ({"x": X.astype(np.float32), "y": Y}, r"x must be floats of 0..1.* got floats from 0 to 255"),
        ({"x": np.full((40, 6, 5), np.nan), "y": Y}, "x must be floats of 0..1.*nan"),
        ({"x": X / 255 - 0.1, "y": Y}, "floats from -0.1"),
        ({"x": X[0], "y": Y}, r"x must have the shape .*got \(6, 5\)"),
        ({"x": np.zeros((40, 6, 5, 9), np.uint8), "y": Y}, r"C from 1 to 4.*got \(40, 6, 5, 9\)"),
        ({"x": X[:0], "y": Y[:0]}, r"no axis empty, got \(0, 6, 5, 1\)"),
        ({"x": X, "y": Y.astype(float)}, "y must hold whole numbers from 0, got float64"),
        ({"x": X, "y": np.array(["a"] * 40)}, "y must hold whole numbers from 0, got <U1"),
        ({"x": X, "y": Y[:39]}, r"y must have the shape \(40,\).*got \(39,\)"),
        ({"x": X, "y": np.eye(4, dtype=int)[Y]}, r"y must have the shape \(40,\).*got \(40, 4\)"),
        ({"x": X, "y": Y - 1}, "y has the label -1"),
        ({"x": X, "y": Y + 1}, "y has no image of class 0; every class from 0 to 4"),
        ({"x": X, "y": Y * 2}, "y has no image of class 1"),
        (
            {"x": X, "y": Y + 10**13},
            "y has the label 10000000000003, .*x can be of 40 classes at most",
        ),
        ({"x": X, "y": Y.astype(np.uint64) + 2**63}, "y has the label 9223372036854775811"),
        ({"x": X, "y": Y, "x_val": X, "y_val": Y.astype(np.uint64) + 2**63}, "y_val has the label 9223372036854775811"),
        ({"x": X, "y": Y * 0}, "only the class 0; at least two"),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": Y + 1},
            "a test label is 4, but the 4 classes go from 0 to 3",
        ),
        ({"x": X, "y": Y, "x_test": X[:, 1:], "y_test": Y}, r"test images are \(1, 5, 5\)"),
        ({"x": X, "y": Y, "class_names": np.array(["a", "b"])}, "class_names must be 4 texts"),
        ({"x": X, "y": Y, "class_names": np.arange(4)}, "class_names must be 4 texts.*int64"),
        ({"x": X, "y": Y, "class_names": np.array(list("abca"))}, r'a\.npz: two classes are called "a"'),
        ({"x": X, "y": Y, "class_names": np.array(list("abcde"))}, "y has no image of class 4"),
        ({"x": X[:4], "y": Y[:4]}, "4 images of 4 classes, too few"),
        ({"x": np.array([{}] * 40), "y": Y}, "not an .npz file of plain arrays.*Object arrays cannot be loaded"),
        ({"x": np.zeros(40, [("a", "f4")]), "y": Y}, r"x must have the shape .* got \(40,\)"),
        ({"x": np.zeros((40, 6, 5), [("a", "f4")]), "y": Y}, "x must be uint8 of 0..255 or floats of 0..1, got "),
        ({"x": np.zeros((1,) * 30), "y": Y}, r"x must have the shape .* got \(1, 1, .*1, 1\)$"),
        ({"x": X, "y": Y, "class_names": np.array([""] * 4)}, "two classes are called"),
        ({"x": X, "y": Y, "class_names": NO_CHARACTERS}, "corrupt: its class_names hold what is no character"),
        ({"x": X, "y": Y, "class_names": NO_CHARACTERS.byteswap().view(">U2")}, "hold what is no character"),
        (
            {"x": X, "y": Y, "class_names": np.array(["a", "b", "c\udce9", "d"])},
            r"the class 'c\\udce9' has a name.*UTF-8",
        ),
        ({f"{'z' * 99}{n}": X[:1] for n in range(30)}, r"it holds (.z{49} … z+\d+., ){20}…$"),
        ({"x\x1b[31m": X}, r"it holds 'x\\x1b\[31m'$"),
    ],
)
def test_arrays_that_cannot_be(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        load(tmp_path, **arrays)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("contents", [b"", b"text", b"\x80\x04K\x01.", b"\x93NUMPY"])
def test_files_that_are_no_npz(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(contents)
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path / 'a.npz'))} is not an .npz file of plain arrays"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_truncated_and_garbled_files(tmp_path: Path, save: type) -> None:
    path = tmp_path / "a.npz"
    save(path, x=X, y=Y)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:300] + bytes(40) + whole[340:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"or it is truncated or corrupt"):
            load_dataset(f"npz:{path}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.npz", tmp_path):
        with pytest.raises(InputError, match=f"there is no file {re.escape(str(path))}"):
            load_dataset(f"npz:{path}")


@pytest.mark.skipif(os.name == "nt", reason="there are no FIFOs")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    for name, words in (
        ("a.npz", "a.npz: what is there is a FIFO"),
        ("a\0.npz", "NUL"),
        ("x" * 300, "cannot be"),
    ):
        assert_raises(InputError, load_dataset, f"npz:{tmp_path / name}", say=words)
    assert_raises(InputError, load_dataset, f"folder:{tmp_path / 'a.npz'}", say="folder")
    assert_raises(InputError, load_dataset, "mnist", data_dir=tmp_path / "a.npz", say="data_dir")
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}/a\0", say="NUL")
    assert_raises(InputError, load_dataset, "mnist", data_dir=f"{tmp_path}/a\0", say="NUL")


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, y=Y)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x", "pixels")
    with pytest.raises(InputError, match=r"a\.npz is not an \.npz file of plain arrays.*its x is no array"):
        load_dataset(f"npz:{path}")


def test_encrypted_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=X, y=Y)
    contents = bytearray(path.read_bytes())
    contents[contents.index(b"PK\1\2") + 8] |= 1  # the flag in the list of members, which zipfile cannot write
    path.write_bytes(contents)
    with pytest.raises(InputError, match=r"a\.npz is not an \.npz file of plain arrays.*encrypted"):
        load_dataset(f"npz:{path}")


# crafted files


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def with_header(header: str | bytes, values: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array of NumPy's with any header."""
    text = header.encode("latin1") if isinstance(header, str) else header
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + values


def described(descr: str, shape: str, order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def write(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, contents in members.items():
            file.writestr(f"{name}.npy", contents)
    return path


#: NumPy reads them, and says what is wrong in ways of its own; none may crash, warn, or take memory that is not there.
HEADERS = {
    "empty": "",
    "no literal": "__import__('os').getcwd()",
    "many open brackets": "(" * 9000,
    "additions": "+".join("1" * 4000),
    "not text": b"\xff\x00\xfe\x80" * 20,
    "an invalid escape": described("'\\d'", "(40, 6, 5)"),
    "negative shape": described("'|u1'", "(-40, 6, 5)"),
    "shape beyond 64 bits": described("'|u1'", f"({2**70}, 6, 5)"),
    "huge shape": described("'|u1'", "(4000000000, 28, 28)"),
    "empty but huge": described("'|u1'", "(0, 4294967295, 4294967295, 4294967295)"),
    "many axes": described("'|u1'", f"({'1, ' * 900})"),
    "dtype of objects": described("'|O'", "(40, 6, 5)"),
    "structure of structures": described("[('a', [('b', [('c', '|O')])])]", "(40,)"),
    "negative subarray": described("('|u1', (-1,))", "(40,)"),
    "text without letters": described("'<U0'", "(40, 6, 5)"),
    "deprecated": described("'a8'", "(40, 6, 5)"),
    "void": described("'|V0'", "(40, 6, 5)"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_cannot_be(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npz"
    for key in ("x", "y", "class_names"):
        others = {"x": npy(X), "y": npy(Y), "class_names": npy(np.array(list("abcd")))}
        write(path, others | {key: with_header(HEADERS[name], bytes(1200))})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(InputError, match=re.escape(str(path))) as raised:
                load_dataset(f"npz:{path}")
        assert "\n" not in str(raised.value)


def test_headers_of_other_versions(tmp_path: Path) -> None:
    header = with_header(described("'|u1'", "(40, 6, 5)"), X.tobytes(), (9, 9))
    path = write(tmp_path / "a.npz", {"x": header, "y": npy(Y)})
    assert_raises(InputError, load_dataset, f"npz:{path}", say="not an .npz file of plain arrays")


def test_orders_of_bytes_and_axes(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
    plain = load(tmp_path, x=images, y=Y)
    for x in (np.asfortranarray(images), (images / 255).astype(">f8"), np.asfortranarray((images / 255).astype(">f4"))):
        for y in (Y, Y.astype(">u2"), Y.astype(np.int8)):
            other = load(tmp_path, x=x, y=y)
            assert torch.equal(other.train.images, plain.train.images)  # type: ignore[union-attr]
            assert torch.equal(other.test.labels, plain.test.labels)


def test_a_file_of_python_2_is_read_without_a_word(tmp_path: Path) -> None:
    header = with_header(described("'|u1'", "(40L, 6L, 5L)"), X.tobytes())
    path = write(tmp_path / "a.npz", {"x": header, "y": npy(Y)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_dataset(f"npz:{path}").in_shape == (1, 6, 5)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_lengths_and_checksums_that_lie(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.npz"
    write(path, {"x": npy(X)[:-1], "y": npy(Y)}, method)
    assert_raises(InputError, load_dataset, f"npz:{path}", say="truncated or corrupt")
    write(path, {"x": npy(X), "y": npy(Y)}, method)
    contents = bytearray(path.read_bytes())
    contents[contents.index(b"PK\1\2") + 16] ^= 1  # the checksum of x in the list of members
    path.write_bytes(contents)
    assert_raises(InputError, load_dataset, f"npz:{path}", say="Bad CRC-32")


def test_images_that_do_not_fit_into_memory_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((100, 1024, 1024), np.uint8), y=np.arange(100) % 4)
    monkeypatch.setattr(machine, "free_memory_mib", lambda: 99.0)
    tracemalloc.start()
    assert_raises(
        InputError, load_dataset, f"npz:{path}", say=f"the images of {path} would take 100 MiB of memory, but must fit"
    )
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_many_classes_are_split_in_time(tmp_path: Path) -> None:
    labels = np.arange(60_000) % 5_000
    data = load(tmp_path, x=np.zeros((60_000, 1, 1), np.uint8), y=labels)
    assert data.num_classes == 5_000
    assert data.test.labels.bincount().unique().tolist() == [2, 3]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mutated_files(tmp_path: Path, save: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    """Damaged bytes anywhere, and most of all in headers and in the list of members: a data set or an InputError."""
    random, path = np.random.default_rng(5), tmp_path / "a.npz"
    save(path, x=X, y=Y, class_names=np.array(list("abcd")))
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    headers = [match.start() for match in re.finditer(b"PK[\\1\\3\\5]|NUMPY", whole.tobytes())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(300):
            bad = whole.copy()
            start = random.choice(headers) if n % 3 else random.integers(len(whole))
            places = np.minimum(start + random.integers(0, 90, 1 + n % 3), len(whole) - 1)
            bad[places] = random.choice(np.array([0, 1, 39, 40, 57, 127, 255], np.uint8), len(places))
            path.write_bytes(bad.tobytes())
            try:
                load_dataset(f"npz:{path}")
            except InputError as error:
                assert str(path) in str(error)  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017
    assert capfd.readouterr() == ("", "")


def test_a_header_is_not_read_beyond_its_length(tmp_path: Path) -> None:
    long = with_header(described("'|u1'", "(40, 6, 5)") + " " * 10**6, X.tobytes(), (2, 0))
    path = write(tmp_path / "a.npz", {"x": long, "y": npy(Y)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match=r"Header info length .* is large"):
        load_dataset(f"npz:{path}")
