"""A user's own images: the arrays of a NumPy .npz file."""

from __future__ import annotations

import difflib
import math
import sys
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.formats.reading import finish, opened, read_exactly
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.splits import with_test_set
from torchcaps.errors import InputError, shown
from torchcaps.machine import check_memory

_MAX_CHANNELS = 4
_MOST_HEADER = 10_000  # bytes; NumPy reads the header of an array whole before it looks at it
_MOST_IMAGES = 2**24  # in one array: bounds the labels that are read before the images
_MOST_CLASSES = 2**16
_MOST_OF_NAMES = 2**24  # bytes
_CHUNK = 2**20  # bytes that are unpacked at once
_MOST_LISTED = 20  # names of arrays in an error
_PAIRS = {"train": ("x", "y"), "test": ("x_test", "y_test"), "validation": ("x_val", "y_val")}
_NAMES = "class_names"
_KEYS = (*(key for pair in _PAIRS.values() for key in pair), _NAMES)


@register_dataset(
    "npz",
    title="your own images: arrays x and y in a NumPy .npz file",
    source="your file; x_test, y_test, x_val, y_val and class_names are used if they are there",
    licence="yours",
    takes_path=True,
)
def load_npz(request: DataRequest) -> Splits:
    """Read images and labels from the arrays of an .npz file.

    ``x`` holds the images: (N, H, W), (N, H, W, C) or (N, C, H, W) with C from 1 to 4, uint8 of 0..255 or floats of
    0..1 (which are rounded to 255 steps). ``y`` (N,) holds whole numbers from 0, every class up to the highest
    among them. ``x_test`` and ``y_test`` are the test set; without them, it is a fixed stratified fifth of the images.
    ``x_val`` and ``y_val`` are the validation images and ``class_names`` (J,) the names of the classes, if given.

    The forms of all arrays are checked before any values are read, the labels before the images are read, and the
    images are read once to their checksums before they are kept: a file that is refused takes little memory, whatever
    it would unpack to.

    Raises:
        InputError: The file is missing, truncated or corrupt, an array is missing or has another form, or the images do
            not fit into memory.
    """
    path = request.source
    with opened(path, "an .npz file of plain arrays"), zipfile.ZipFile(path) as archive:
        members = _members(archive)
        _check_keys(path, members)
        arrays = {key: _Array(archive, members[key], key) for key in _KEYS if key in members}
        parts = {part: keys for part, keys in _PAIRS.items() if keys[0] in arrays}
        for keys in parts.values():
            _check_forms(path, arrays, *keys)
        check_memory(sum(math.prod(arrays[x].shape) for x, _ in parts.values()), f"the images of {path}")
        labels = {part: _labels(path, arrays, y) for part, (_, y) in parts.items()}
        class_names = _class_names(path, arrays, labels["train"])
        for part, keys in parts.items():
            if labels[part].max() >= len(class_names):
                raise InputError(
                    f"{path}: {keys[1]} has the label {int(labels[part].max())}, but the "
                    f"{len(class_names)} classes of y go from 0 to {len(class_names) - 1}"
                )
        for x, _ in parts.values():
            for values in arrays[x].chunks():
                _to_uint8(values, f"{path}: {x}")
        sets = {part: ImageSet(_images(path, arrays, x), labels[part]) for part, (x, _) in parts.items()}
    return with_test_set(path, sets, class_names)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members of the file, by the names of the arrays."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        key = member.filename.removesuffix(".npy")
        if key in members and key in _KEYS:
            raise ValueError(f"it has two arrays {key}")
        members[key] = member
    return members


class _Array:
    """An array of the file: its form, checked against its number of bytes, and its values, read on demand."""

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, key: str) -> None:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others cannot unpack in parts
            raise ValueError(f"its {key} is compressed in another way than NumPy's")
        self._archive, self._member = archive, member
        with archive.open(member) as file:
            self.shape, self._order, self.dtype = _read_header(file, key)
            self._begin = file.tell()
        if self.dtype.hasobject or self.dtype.kind == "V" or not self.dtype.itemsize:
            raise ValueError(f"its {key} is no plain array")
        if self._begin + self.nbytes != member.file_size:
            raise ValueError(
                f"its {key} should have {self.nbytes:,} bytes by its shape {shown(self.shape)}, but has "
                f"{member.file_size - self._begin:,}"
            )

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[np.ndarray]:
        """All values in the order of the file, some at a time; the checksum is compared at the end."""
        at_once = max(_CHUNK // self.dtype.itemsize, 1) * self.dtype.itemsize
        with self._archive.open(self._member) as file:
            file.read(self._begin)
            for start in range(0, self.nbytes, at_once):
                yield np.frombuffer(read_exactly(file, min(at_once, self.nbytes - start)), self.dtype)
            finish(file)

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """Bring values in the order of the file into the shape of the array."""
        return values.reshape(self.shape, order=self._order)

    def read(self) -> np.ndarray:
        """The array."""
        return self.shaped(np.concatenate(list(self.chunks()) or [np.empty(0, self.dtype)]))


def _read_header(file: IO[bytes], key: str) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype]:
    """Read shape, order and dtype of an array."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise ValueError(f"its {key} is no array of NumPy's") from None
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:  # later versions are for structures with named fields
        raise ValueError(f"its {key} is no plain array")
    begin = file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if length > _MOST_HEADER:
        raise ValueError(f"its {key} has a header of {length:,} bytes")
    file.seek(begin)
    shape, fortran_order, dtype = readers[version](file)
    if any(length < 0 for length in shape):
        raise ValueError(f"its {key} has the shape {shown(shape)}")
    return tuple(map(int, shape)), "F" if fortran_order else "C", dtype


def _check_keys(path: Path, names: Collection[str]) -> None:
    """Raise InputError unless all needed arrays are there, each with its partner."""
    for x, y in _PAIRS.values():
        for key, partner in ((x, y), (y, x)):
            if key in names or (key not in _PAIRS["train"] and partner not in names):
                continue
            held = [name if name.isprintable() else ascii(name) for name in sorted(names)]
            others = [name for name in held if name not in _KEYS and len(name) <= 40][:_MOST_LISTED]
            near = difflib.get_close_matches(key, [other.lower() for other in others], n=1, cutoff=0.3)
            hint = f' (rename "{next(o for o in others if o.lower() == near[0])}"?)' if near else ""
            listed = [f"{name[:40]}…" if len(name) > 40 else name for name in held[:_MOST_LISTED]]
            more = ["…"] if len(held) > _MOST_LISTED else []
            raise InputError(f'{path} has no array "{key}"{hint}; it holds {", ".join(listed + more) or "nothing"}')


def _check_forms(path: Path, arrays: dict[str, _Array], x: str, y: str) -> None:
    """Raise InputError unless images and labels have dtypes and shapes that can be read and fit each other."""
    images, labels = arrays[x], arrays[y]
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise InputError(f"{path}: {x} must be uint8 of 0..255 or floats of 0..1, got {images.dtype}")
    _channel_axis(images.shape, f"{path}: {x}")
    if len(images) > _MOST_IMAGES:
        raise InputError(f"{path}: {x} has {len(images):,} images, but at most {_MOST_IMAGES:,} are read")
    if labels.dtype.kind not in "iu":
        raise InputError(f"{path}: {y} must hold whole numbers from 0, got {labels.dtype}")
    if labels.shape != (len(images),):
        raise InputError(
            f"{path}: {y} must have the shape ({len(images)},), one label for each image of {x}, "
            f"got {shown(labels.shape)}"
        )


def _labels(path: Path, arrays: dict[str, _Array], y: str) -> Int64[Tensor, "N"]:
    labels = arrays[y].read()
    if labels.min() < 0:
        raise InputError(f"{path}: {y} has the label {labels.min()}, but labels are whole numbers from 0")
    # every class needs a training image; this bounds the memory of bincount
    images = len(arrays[_PAIRS["train"][0]])
    most = min(images, _MOST_CLASSES)
    if labels.max() >= most:
        raise InputError(
            f"{path}: {y} has the label {labels.max()}, but the {images} images of x can be of {most} classes at most, "
            f"0 to {most - 1}"
        )
    return torch.from_numpy(labels.astype(np.int64))


def _images(path: Path, arrays: dict[str, _Array], x: str) -> UInt8[Tensor, "N C H W"]:
    pixels, start = np.empty(math.prod(arrays[x].shape), np.uint8), 0
    for values in arrays[x].chunks():
        pixels[start : start + len(values)] = _to_uint8(values, f"{path}: {x}")
        start += len(values)
    images = arrays[x].shaped(pixels)
    images = images[..., None] if images.ndim == 3 else images
    axis = _channel_axis(images.shape, f"{path}: {x}")
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, axis, 1)))


def _to_uint8(values: np.ndarray, where: str) -> np.ndarray:
    if values.dtype == np.uint8:
        return values
    if not (values.min() >= 0 and values.max() <= 1):  # false for NaN too
        raise InputError(
            f"{where} must be floats of 0..1 or uint8 of 0..255, got floats from {values.min():g} to {values.max():g}"
        )
    return np.round(values * 255).astype(np.uint8)


def _channel_axis(shape: tuple[int, ...], where: str) -> int:
    """The axis of the channels in (N, H, W, C) or (N, C, H, W): the last one whose length is at most 4."""
    if 0 not in shape and len(shape) == 3:
        return 3  # to be added
    if 0 not in shape and len(shape) == 4:
        for axis in (3, 1):
            if shape[axis] <= _MAX_CHANNELS:
                return axis
    raise InputError(
        f"{where} must have the shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C from 1 to {_MAX_CHANNELS} and "
        f"no axis empty, got {shown(shape)}"
    )


def _class_names(path: Path, arrays: dict[str, _Array], labels: Int64[Tensor, "N"]) -> tuple[str, ...]:
    """The given names, or the labels as text; every class must occur among the training images."""
    counts = torch.bincount(labels)
    if _NAMES in arrays:
        names = arrays[_NAMES]
        if names.dtype.kind != "U" or len(names.shape) != 1 or len(names) < len(counts):
            raise InputError(
                f"{path}: {_NAMES} must be {len(counts)} texts, one for each class of y, "
                f"got {names.dtype} of the shape {shown(names.shape)}"
            )
        if len(names) > _MOST_CLASSES or names.nbytes > _MOST_OF_NAMES:
            raise InputError(
                f"{path}: {_NAMES} must be at most {_MOST_CLASSES:,} texts of at most {_MOST_OF_NAMES:,} bytes in all, "
                f"got {names.dtype} of the shape {shown(names.shape)}"
            )
        counts = torch.bincount(labels, minlength=len(names))
    if not counts.all():
        raise InputError(
            f"{path}: y has no image of class {int((counts == 0).nonzero()[0])}; "
            f"every class from 0 to {len(counts) - 1} needs one"
        )
    if len(counts) < 2:
        raise InputError(f"{path}: y has only the class 0; at least two are needed")
    return _texts(arrays[_NAMES].read()) if _NAMES in arrays else tuple(map(str, range(len(counts))))


def _texts(names: Shaped[np.ndarray, "J"]) -> tuple[str, ...]:
    """Texts of NumPy as Python's; an error where one holds a number that is no character, which Python cannot make."""
    codes = np.frombuffer(names.tobytes(), np.dtype(np.uint32).newbyteorder(names.dtype.byteorder))
    if (codes > sys.maxunicode).any():
        raise ValueError(f"its {_NAMES} hold what is no character")
    return tuple(map(str, names))
