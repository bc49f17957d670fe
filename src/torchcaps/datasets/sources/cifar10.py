"""CIFAR-10 in its binary version."""

from __future__ import annotations

import math
import tarfile

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.files import one_sentence

_ARCHIVE, _FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_RECORDS = 10_000  # images in each file
_SHAPE = (3, 32, 32)
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

SOURCE = Source(
    name="cifar10",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    sha256={_ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    unpacked={_ARCHIVE: _FOLDER},
)


@register_dataset(
    "cifar10",
    title="CIFAR-10 small photographs",
    source="Krizhevsky: Learning Multiple Layers of Features from Tiny Images (2009)",
    licence="none stated",
    num_train=50_000,
    num_test=10_000,
    in_shape=_SHAPE,
    class_names=_CLASSES,
    validation_size=5_000,
    find=SOURCE.find,
)
def load_cifar10(request: DataRequest) -> Splits:
    """Read the six files of the binary version, from their archive or from its unpacked folder.

    A file has 10,000 records of 3,073 bytes: the label, then 32×32 pixels of red, of green and of blue, row by row.
    The archive is opened only if its checksum is right. Nothing is unpacked to the disk.
    """
    place = SOURCE.paths(request)[_ARCHIVE]
    form = (_RECORDS, 1 + math.prod(_SHAPE))
    if place.is_dir():
        files = [read_binary(place / name, f"CIFAR-10's {name}", b"", form) for name in _FILES]
    else:
        SOURCE.verify(place)
        with one_sentence(f"{place} is not CIFAR-10's"), tarfile.open(place) as archive:
            members = [archive.extractfile(f"{_FOLDER}/{name}") for name in _FILES]
            files = [np.frombuffer(file.read(), np.uint8).reshape(form) for file in members if file]
    train, test = (torch.tensor(each) for each in (np.concatenate(files[:-1]), files[-1]))
    return Splits(_image_set(train), _image_set(test), class_names=_CLASSES)


def _image_set(records: UInt8[Tensor, "N bytes"]) -> ImageSet:
    return ImageSet(records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].long())
