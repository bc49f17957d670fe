"""MNIST and the data sets of the same form: four idx files, from a folder or downloaded."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.errors import InputError

_IMAGES = "images-idx3-ubyte"
_LABELS = "labels-idx1-ubyte"
_SHAPES = {
    f"train-{_IMAGES}": (60_000, 28, 28),
    f"train-{_LABELS}": (60_000,),
    f"t10k-{_IMAGES}": (10_000, 28, 28),
    f"t10k-{_LABELS}": (10_000,),
}
_CLOTHING = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True, kw_only=True)
class IdxFamily(Source):
    """One data set of four idx files, each gzipped or not.

    Args:
        class_names: The name of each label.
        labels_md5: The hash of the unpacked test labels, as published, where it is known: all families have files of
            the same names and shapes, and this tells which one it is.
        shapes: The shape of the array in each file, by the file's name without ``.gz``.
        info: What else the list says of it.
    """

    class_names: tuple[str, ...]
    labels_md5: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: _SHAPES)
    info: Mapping[str, Any] = field(default_factory=dict)


def _of_each(*sha256: str) -> dict[str, str]:
    """The hashes of the four files, by their names."""
    return dict(zip((f"{stem}.gz" for stem in _SHAPES), sha256, strict=True))


FAMILIES = (
    IdxFamily(
        name="mnist",
        folders=("MNIST/raw",),
        class_names=tuple("0123456789"),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256=_of_each(
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        labels_md5="27ae3e4e09519cfbb04c329615203637",
        info={
            "title": "MNIST handwritten digits",
            "source": "LeCun, Cortes, Burges: The MNIST database of handwritten digits (1998)",
            "licence": "CC BY-SA 3.0",
            "preparation": Preparation(),
        },
    ),
    IdxFamily(
        name="fashion-mnist",
        shares_names=True,
        folders=("FashionMNIST/raw",),
        class_names=_CLOTHING,
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sha256=_of_each(
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        labels_md5="15d484375f8d13e6eb1aabb0c3f46965",
        info={
            "title": "Fashion-MNIST articles of clothing",
            "source": "Xiao, Rasul, Vollgraf: Fashion-MNIST (2017), arXiv:1708.07747",
            "licence": "MIT",
        },
    ),
    IdxFamily(
        name="kmnist",
        shares_names=True,
        folders=("KMNIST/raw",),
        class_names=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mirrors=(
            "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
            "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        ),
        sha256=_of_each(
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        ),
        info={
            "title": "Kuzushiji-MNIST cursive Japanese characters",
            "source": "Clanuwat and others: Deep Learning for Classical Japanese Literature (2018), arXiv:1812.01718",
            "licence": "CC BY-SA 4.0",
        },
    ),
)


def load_mnist(request: DataRequest) -> Splits:
    """Load MNIST, for the data sets that are made of its digits; see `load_family`."""
    return load_family(FAMILIES[0], request)


def find_mnist(data_dir: Path | None) -> Path | None:
    """The folder that holds MNIST's files, or None; see `Source.find`."""
    return FAMILIES[0].find(data_dir)


MADE_OF_MNIST: dict[str, Any] = {
    "licence": "CC BY-SA 3.0, as MNIST's",
    "num_train": 60_000,
    "class_names": tuple("0123456789"),
    "validation_size": 5_000,
    "find": find_mnist,
}
"""The entries that data sets made of MNIST's digits have in common."""


def load_family(family: IdxFamily, request: DataRequest) -> Splits:
    """Read a family's four files from a folder, else download them.

    A download must have the SHA-256 of the mirrors' file before it is kept. Every file that is read, wherever it lies,
    must be whole (a gzipped one with its checksum) and have the family's shape, and the test labels must not be those
    of another family.

    Raises:
        InputError: Files are missing, truncated, corrupt, or another data set's; or they could not be downloaded.
    """
    files = family.paths(request)
    arrays = {
        stem: read_binary(files[f"{stem}.gz"], f"{family.name}'s {stem}", _header(shape), shape)
        for stem, shape in family.shapes.items()
    }
    _check_family(family, arrays[f"t10k-{_LABELS}"], files[f"t10k-{_LABELS}.gz"])
    train, test = (
        ImageSet(
            torch.tensor(arrays[f"{part}-{_IMAGES}"])[:, None],
            torch.tensor(arrays[f"{part}-{_LABELS}"], dtype=torch.int64),
        )
        for part in ("train", "t10k")
    )
    return Splits(train, test, class_names=family.class_names)


def _header(shape: tuple[int, ...]) -> bytes:
    """Two zero bytes, the type (8: unsigned byte), the number of axes, and their lengths as big-endian integers."""
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)


def _check_family(family: IdxFamily, labels: UInt8[np.ndarray, "N"], path: Path) -> None:
    """Raise InputError if test labels are known to be another family's."""
    found = hashlib.md5(_header(labels.shape) + labels.tobytes(), usedforsecurity=False).hexdigest()
    owner = next((each for each in FAMILIES if each.labels_md5 == found), None)
    if owner is not family and (owner is not None or family.labels_md5 is not None):
        whose = f"; they are {owner.name}'s" if owner else ""
        raise InputError(f"{path} does not hold the test labels of {family.name}{whose}; fetch its files again")


for _family in FAMILIES:
    register_dataset(
        _family.name,
        num_train=60_000,
        num_test=10_000,
        in_shape=(1, 28, 28),
        class_names=_family.class_names,
        validation_size=5_000,
        find=_family.find,
        **_family.info,
    )(functools.partial(load_family, _family))
