"""One way to damage files, and every reader of files from elsewhere: data, or one sentence that names the file."""

import gzip
import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from support import assert_raises
from torchcaps.datasets import load_dataset, read_image
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.sources.affnist import read_originals
from torchcaps.errors import InputError

RANDOM = np.random.default_rng(7)
HEADER = struct.pack(">4BI", 0, 0, 8, 1, 600)
SIX = HEADER + bytes(range(200)) * 3


class Reader(NamedTuple):
    """A file as it should be, and what reads it."""

    whole: bytes
    read: Callable[[Path], object]
    sealed: bool = False
    """Whether a file that ends early, or is another one, is always an error."""


def image(suffix: str) -> Reader:
    buffer = io.BytesIO()
    options = {"compression": "tiff_deflate"} if suffix == "tiff" else {}
    Image.fromarray(RANDOM.integers(0, 256, (30, 40, 3), np.uint8)).save(
        buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix), **options
    )
    return Reader(buffer.getvalue(), lambda path: read_image(path, (3, 28, 28)))


def npz(save: Callable[..., None]) -> Reader:
    buffer = io.BytesIO()
    x, y = RANDOM.integers(0, 256, (40, 6, 5), np.uint8), np.arange(40) % 4
    save(buffer, x=x, y=y, class_names=np.array(list("abcd")))
    return Reader(buffer.getvalue(), lambda path: load_dataset(f"npz:{path}"), sealed=True)


def matlab() -> Reader:
    buffer = io.BytesIO()
    fields = {"image": RANDOM.integers(0, 256, (1600, 9), np.uint8), "label_int": np.arange(9, dtype=np.uint8)[None]}
    savemat(buffer, {"affNISTdata": fields}, do_compression=True)
    return Reader(buffer.getvalue(), lambda path: read_originals([path]), sealed=True)


def numbers(path: Path) -> np.ndarray:
    return read_binary(path, "a file of six hundred bytes", HEADER, (2, 300))


READERS = {
    **{f"a.{suffix}": image(suffix) for suffix in ("png", "jpg", "gif", "bmp", "tif", "tiff", "webp")},
    "a.npz": npz(np.savez),
    "b.npz": npz(np.savez_compressed),
    "a.mat": matlab(),
    "a-ubyte": Reader(SIX, numbers, sealed=True),
    "a-ubyte.gz": Reader(gzip.compress(SIX, mtime=0), numbers, sealed=True),
}


def others() -> Iterator[bytes]:
    """Files of another kind."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a.txt", "text")
    yield from (b"", b"text", b"<html>not here</html>", b"\x93NUMPY", pickle.dumps([1]), buffer.getvalue())
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EOF\n"  # Pillow would start another program
    yield gzip.compress(b"text", mtime=0)


def flipped(whole: bytes) -> Iterator[bytes]:
    """Damaged bytes, in the first ones and anywhere; some files end early, too."""
    for n in range(100):
        bad = np.frombuffer(whole, np.uint8).copy()
        places = RANDOM.integers(0, len(bad) if n % 2 else min(150, len(bad)), 1 + n % 4)
        bad[places] = RANDOM.choice(np.array([0, 1, 39, 57, 127, 128, 255], np.uint8), len(places))
        yield bad[: len(bad) if n % 5 else RANDOM.integers(10, len(bad))].tobytes()


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader, path = READERS[name], tmp_path / name

    def refuses(contents: bytes) -> bool:
        path.write_bytes(contents)
        try:
            reader.read(path)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            return True
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not refuses(reader.whole)
        assert all(map(refuses, others()))
        assert refuses(reader.whole[: len(reader.whole) // 2])
        if reader.sealed:
            assert all(refuses(reader.whole[:-n]) for n in (9, 20, 200))
        refused = list(map(refuses, flipped(reader.whole)))
    assert any(refused)
    assert capsys.readouterr() == ("", ""), "Pillow logs elsewhere"


def test_why_numbers_are_refused(tmp_path: Path) -> None:
    for contents, says in (
        (SIX[:-1], "it ends too early"),
        (gzip.compress(SIX + bytes(50_000_000), mtime=0), "it goes on after its last value"),
        (gzip.compress(SIX, mtime=0)[:-8] + bytes(8), "CRC check failed"),
        (b"<html>no", "it begins with the bytes 3c 68 74 6d 6c 3e 6e 6f instead of 00 00 08 01 00 00 02 58"),
    ):
        (tmp_path / "a").write_bytes(contents)
        assert_raises(InputError, numbers, tmp_path / "a", say=f"it is truncated or corrupt: {says}")
    (tmp_path / "b").write_bytes(b"head" + struct.pack("<3i", 1, -2, 3))
    assert read_binary(tmp_path / "b", "numbers", b"head", (3,), "<i4").tolist() == [1, -2, 3]
