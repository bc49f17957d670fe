"""CIFAR-10 in its binary version."""

from __future__ import annotations

import math
import tarfile

import numpy as np
import torch
from jaxtyping import UInt8

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source

_ARCHIVE, _FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_RECORDS = 10_000  # in each file
_SHAPE = (3, 32, 32)

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
    form = (_RECORDS, 1 + math.prod(_SHAPE))
    if place.is_dir():
        files = {name: read_binary(place / name, f"CIFAR-10's {name}", b"", form) for name in (*_TRAIN, _TEST)}
    else:
        SOURCE.verify(place)
        with tarfile.open(place) as archive:  # nothing is unpacked to the disk
            members = {name: archive.extractfile(f"{_FOLDER}/{name}") for name in (*_TRAIN, _TEST)}
            files = {name: np.frombuffer(file.read(), np.uint8).reshape(form) for name, file in members.items() if file}
    train = np.concatenate([files[name] for name in _TRAIN])
    return Splits(_image_set(train), _image_set(files[_TEST]), CLASS_NAMES)


def _image_set(records: UInt8[np.ndarray, "N bytes"]) -> ImageSet:
    images = torch.tensor(records[:, 1:]).reshape(-1, *_SHAPE)
    return ImageSet(images, torch.tensor(records[:, 0], dtype=torch.int64))
