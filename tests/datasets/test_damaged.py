"""One way to damage files, and every reader of files from elsewhere: data, or one sentence that names the file."""

import gzip
import io
import pickle
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from dicom_files import write_dicom, write_series
from support import assert_raises
from torchcaps.datasets import Dataset, ImageSet, load_dataset, read_image
from torchcaps.datasets.images import read_pixels
from torchcaps.datasets.nifti import read_volume
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.sources.affnist import read_originals
from torchcaps.errors import InputError
from torchcaps.files import write_json
from torchcaps.models.files.weights import CURRENT_FORMAT, read_weights, weights_file
from torchcaps.training import make_config, read_config
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint

RANDOM = np.random.default_rng(7)
HEADER = struct.pack(">4BI", 0, 0, 8, 1, 600)
SIX = HEADER + bytes(range(200)) * 3


class Reader(NamedTuple):
    """A file as it should be, and what reads it."""

    whole: bytes
    read: Callable[[Path], object]
    """Returns arrays, and plain values, of the contents."""
    sealed: bool = False
    """Whether a file that ends early is always an error, and a file of another kind, too."""
    has_checksum: bool = False
    """Whether no damage may give other contents."""


def image(suffix: str) -> Reader:
    buffer = io.BytesIO()
    options = {"compression": "tiff_deflate"} if suffix == "tiff" else {}
    Image.fromarray(RANDOM.integers(0, 256, (30, 40, 3), np.uint8)).save(
        buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix), **options
    )
    return Reader(buffer.getvalue(), lambda path: read_image(path, (3, 28, 28)), has_checksum=suffix == "png")


def all_of(data: Dataset) -> list[object]:
    parts = (data.train, data.validation, data.test)
    return [data.class_names, *(each.numpy() for part in parts for each in part.tensors)]


def npz(save: Callable[..., None]) -> Reader:
    buffer = io.BytesIO()
    x, y = RANDOM.integers(0, 256, (40, 6, 5), np.uint8), np.arange(40) % 4
    save(buffer, x=x, y=y, class_names=np.array(list("abcd")))
    return Reader(buffer.getvalue(), lambda path: all_of(load_dataset(f"npz:{path}")), sealed=True, has_checksum=True)


def matlab() -> Reader:
    buffer = io.BytesIO()
    fields = {"image": RANDOM.integers(0, 256, (1600, 9), np.uint8), "label_int": np.arange(9, dtype=np.uint8)[None]}
    savemat(buffer, {"affNISTdata": fields}, do_compression=True)
    return Reader(buffer.getvalue(), lambda path: all_of_set(read_originals([path])), sealed=True)


def all_of_set(images: ImageSet) -> list[object]:
    return [each.numpy() for each in images.tensors]


def numbers(path: Path) -> np.ndarray:
    return read_binary(path, "a file of six hundred bytes", HEADER, (2, 300))


def volume(*, packed: bool) -> Reader:
    import nibabel as nib

    def read(path: Path) -> list[object]:
        found = read_volume(path)
        return [found.values, found.spacing]

    whole = nib.Nifti1Image(RANDOM.integers(-9, 9, (6, 5, 4)).astype(np.int16), np.diag([1, 2, 3, 1])).to_bytes()
    return Reader(gzip.compress(whole, mtime=0) if packed else whole, read, sealed=True, has_checksum=packed)


def dicom(path: Path) -> list[object]:
    return [read_pixels(path)]


def series(path: Path) -> list[object]:
    """Read a slice together with the slices below and above it."""
    if len(list(path.parent.iterdir())) < 3:
        for file in write_series(path.parent / "others", np.zeros((3, 9, 7)))[::2]:
            file.rename(path.parent / file.name)
        shutil.rmtree(path.parent / "others")
    found = read_volume(path.parent)
    return [found.values, found.spacing]


def table(path: Path) -> list[object]:
    if not (path.parent / "0.png").exists():
        for n in range(12):
            Image.fromarray(np.full((6, 6), 20 * n, np.uint8)).save(path.parent / f"{n}.png")
    return all_of(load_dataset(f"csv:{path}"))


def checkpoint(path: Path) -> object:
    return flat(read_checkpoint(path))


def flat(contents: object) -> list[object]:
    """Return the leaves of nested contents."""
    if isinstance(contents, dict):
        return [leaf for key, each in contents.items() for leaf in (key, *flat(each))]
    if isinstance(contents, list | tuple):
        return [leaf for each in contents for leaf in flat(each)]
    return [contents.numpy() if isinstance(contents, torch.Tensor) else contents]


def written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


MODEL = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
STATE = {
    "model": MODEL.state_dict(),
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(5, 7)}}},
    "progress": {"epoch": 2, "best": 0.5, "names": ["a", "b"]},
    "data": [1, 2, 3],
    "settings": {"seed": 0},
    "format": CURRENT_FORMAT,
}
ROWS = "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(12))

READERS = {
    **{f"a.{suffix}": image(suffix) for suffix in ("png", "jpg", "gif", "bmp", "tif", "tiff", "webp", "ppm")},
    "a.npz": npz(np.savez),
    "b.npz": npz(np.savez_compressed),
    "a.mat": matlab(),
    "a-ubyte": Reader(SIX, numbers, sealed=True),
    "a-ubyte.gz": Reader(gzip.compress(SIX, mtime=0), numbers, sealed=True, has_checksum=True),
    "a.dcm": Reader(written(lambda path: write_dicom(path, RANDOM.integers(0, 4096, (9, 7)))), dicom, sealed=True),
    "slice.dcm": Reader(
        written(lambda path: write_series(path.parent, RANDOM.integers(0, 4096, (3, 9, 7)))[1].rename(path)),
        series,
        sealed=True,
    ),
    "a.nii": volume(packed=False),
    "a.nii.gz": volume(packed=True),
    "a.csv": Reader(f"image,label\n{ROWS}".encode(), table),
    "last.ckpt": Reader(written(lambda path: write_checkpoint(path, STATE)), checkpoint, has_checksum=True),
    "model.safetensors": Reader(
        weights_file(MODEL.state_dict()), lambda path: flat(dict(sorted(read_weights(path).items()))), has_checksum=True
    ),
    "config.json": Reader(
        written(lambda path: write_json(path, make_config("compact").to_dict())),
        lambda path: [str(read_config(path))],
    ),
}
SEED, COPIES = 0, 1000
"""Damaged copies of each file."""


def others() -> Iterator[bytes]:
    """Files of another kind."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a.txt", "text")
    yield from (b"", b"text", b"<html>not here</html>", b"\x93NUMPY", pickle.dumps([1]), buffer.getvalue())
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EOF\n"  # Pillow would start another program
    yield gzip.compress(b"text", mtime=0)


def flipped(whole: bytes, seed: int) -> Iterator[bytes]:
    """Damaged bytes, in the first ones and anywhere, single bits, and files that end early."""
    random = np.random.default_rng(seed)
    for n in range(COPIES):
        bad = np.frombuffer(whole, np.uint8).copy()
        if n % 3 == 0:
            bad[random.integers(len(bad))] ^= np.uint8(1 << random.integers(8))
        else:
            places = random.integers(0, len(bad) if n % 2 else min(150, len(bad)), 1 + n % 4)
            bad[places] = random.choice(np.array([0, 1, 39, 57, 127, 128, 255], np.uint8), len(places))
        yield bad[: len(bad) if n % 5 else random.integers(10, len(bad))].tobytes()


def is_equal(one: Any, other: Any) -> bool:
    """Return True if contents are equal, NaN too."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader, path = READERS[name], tmp_path / name
    path.write_bytes(reader.whole)
    contents = reader.read(path)

    def refuses(damaged: bytes) -> bool:
        path.write_bytes(damaged)
        try:
            read = reader.read(path)
        except InputError as error:
            assert str(tmp_path if name in ("a.csv", "slice.dcm") else path) in str(error)  # noqa: PT017
            assert "\n" not in str(error).partition(":\n  ")[0]  # noqa: PT017
            return True
        assert is_equal(read, contents) or not reader.has_checksum
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not refuses(reader.whole)
        assert all(map(refuses, others()))
        assert refuses(reader.whole[: len(reader.whole) // 2])
        if reader.sealed:
            assert all(refuses(reader.whole[:-n]) for n in (9, 20, 200))
        refused = list(map(refuses, flipped(reader.whole, SEED)))
    assert any(refused)
    assert capsys.readouterr() == ("", ""), "Pillow and nibabel log elsewhere"


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
