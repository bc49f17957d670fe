"""CIFAR-10 in its binary version."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.formats.reading import opened
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.errors import InputError
from torchcaps.files import require_file

_ARCHIVE, _FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_RECORDS = 10_000  # in each file
_SHAPE = (3, 32, 32)
_RECORD = 1 + math.prod(_SHAPE)  # bytes
_MOST_OF_OTHERS = 2**20  # bytes of the archive for headers and small files

SOURCE = Source(
    name="cifar10",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    sha256={_ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    unpacked={_ARCHIVE: _FOLDER},
)

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@register_dataset(
    "cifar10",
    title="CIFAR-10 small photographs",
    source="Krizhevsky: Learning Multiple Layers of Features from Tiny Images (2009)",
    licence="none stated",
    num_train=50_000,
    num_test=10_000,
    in_shape=_SHAPE,
    class_names=CLASS_NAMES,
    validation_size=5_000,
    find=SOURCE.find,
)
def load_cifar10(request: DataRequest) -> Splits:
    """Read the six files of the binary version, from their archive or from the folder it unpacks to.

    A file has 10,000 records of 3,073 bytes: the label, then 32×32 pixels of red, of green and of blue, row by row.
    """
    place = SOURCE.paths(request)[_ARCHIVE]
    sets = {name: _image_set(contents, f"{name} in {place}") for name, contents in _contents(place)}
    train = ImageSet(*(torch.cat(tensors) for tensors in zip(*(sets[name].tensors for name in _TRAIN), strict=True)))
    return Splits(train, sets[_TEST], CLASS_NAMES)


def _contents(place: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of each of the six files."""
    if place.is_dir():
        for name in (*_TRAIN, _TEST):
            require_file(place / name, f"file of {_ARCHIVE}")
            _check_size((place / name).stat().st_size, f"{name} in {place}")
            yield name, (place / name).read_bytes()
        return
    with opened(place, "the archive of CIFAR-10's binary version") as packed:
        most = 6 * _RECORDS * _RECORD + _MOST_OF_OTHERS
        contents = packed.read(most + 1)  # as a whole, because the checksum is at the end
        if len(contents) > most:
            raise ValueError(f"it has more than the {most:,} bytes that it may have, unpacked")
        with tarfile.open(fileobj=io.BytesIO(contents), mode="r:") as archive:  # nothing is unpacked to the disk
            for name in (*_TRAIN, _TEST):
                member = archive.getmember(f"{_FOLDER}/{name}")
                _check_size(member.size, f"{name} in {place}")
                file = archive.extractfile(member)
                if file is None:
                    raise KeyError(f"{_FOLDER}/{name} is no file")
                yield name, file.read()


def _check_size(size: int, where: str) -> None:
    """Refuse a file of another size than its records have, before it is read."""
    if size != _RECORDS * _RECORD:
        raise InputError(
            f"{where} has {size:,} bytes, but {_RECORDS:,} records of {_RECORD:,} bytes make "
            f"{_RECORDS * _RECORD:,}; fetch it again"
        )


def _image_set(contents: bytes, where: str) -> ImageSet:
    records = torch.from_numpy(np.frombuffer(contents, np.uint8).reshape(_RECORDS, _RECORD).copy())
    labels = records[:, 0].long()
    if labels.max() >= len(CLASS_NAMES):
        raise InputError(f"{where} has a label {int(labels.max())}, but those of CIFAR-10 are 0 to 9; fetch it again")
    return ImageSet(records[:, 1:].reshape(_RECORDS, *_SHAPE), labels)
