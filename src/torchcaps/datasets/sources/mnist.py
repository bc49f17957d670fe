"""MNIST and the data sets of the same form: four idx files, from a folder or downloaded."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.formats.reading import finish, opened, read_exactly, read_header
from torchcaps.datasets.preparation import Preparation
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
        title: Its title in lists.
        source: Its paper or address.
        licence: Its terms.
        class_names: The name of each label.
        md5: The hash of each file's decompressed contents, as published, where it is known. It is the same however the
            file was packed.
        shapes: The shape of the array in each file, by the file's name without ``.gz``.
        preparation: How the images were made of drawings; None where they were made in another way.
    """

    title: str
    source: str
    licence: str
    class_names: tuple[str, ...]
    md5: dict[str, str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: _SHAPES)
    preparation: Preparation | None = None

    def is_foreign(self, found: Mapping[str, Path]) -> bool:
        """Whether the test labels, the smallest of the files, are known to be another family's: all share the names."""
        stem = f"t10k-{_LABELS}"
        if f"{stem}.gz" not in found:
            return False
        try:
            _, md5 = _contents(self, stem, found[f"{stem}.gz"])
        except InputError:  # reading it for good raises the error
            return False
        return _owner(md5) not in (None, self)


FAMILIES = (
    IdxFamily(
        name="mnist",
        title="MNIST handwritten digits",
        folders=("MNIST/raw",),
        source="LeCun, Cortes, Burges: The MNIST database of handwritten digits (1998)",
        licence="CC BY-SA 3.0",
        class_names=tuple("0123456789"),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256={
            f"train-{_IMAGES}.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            f"train-{_LABELS}.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            f"t10k-{_IMAGES}.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            f"t10k-{_LABELS}.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
        md5={
            f"train-{_IMAGES}": "6bbc9ace898e44ae57da46a324031adb",
            f"train-{_LABELS}": "a25bea736e30d166cdddb491f175f624",
            f"t10k-{_IMAGES}": "2646ac647ad5339dbf082846283269ea",
            f"t10k-{_LABELS}": "27ae3e4e09519cfbb04c329615203637",
        },
        preparation=Preparation(),
    ),
    IdxFamily(
        name="fashion-mnist",
        title="Fashion-MNIST articles of clothing",
        folders=("FashionMNIST/raw",),
        source="Xiao, Rasul, Vollgraf: Fashion-MNIST (2017), arXiv:1708.07747",
        licence="MIT",
        class_names=_CLOTHING,
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sha256={
            f"train-{_IMAGES}.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            f"train-{_LABELS}.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            f"t10k-{_IMAGES}.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            f"t10k-{_LABELS}.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        md5={
            f"train-{_IMAGES}": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            f"train-{_LABELS}": "9018921c3c673c538a1fc5bad174d6f9",
            f"t10k-{_IMAGES}": "8181f5470baa50b63fa0f6fddb340f0a",
            f"t10k-{_LABELS}": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
    IdxFamily(
        name="kmnist",
        title="Kuzushiji-MNIST cursive Japanese characters",
        folders=("KMNIST/raw",),
        source="Clanuwat and others: Deep Learning for Classical Japanese Literature (2018), arXiv:1812.01718",
        licence="CC BY-SA 4.0",
        class_names=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mirrors=(
            "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
            "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        ),
        sha256={
            f"train-{_IMAGES}.gz": "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            f"train-{_LABELS}.gz": "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            f"t10k-{_IMAGES}.gz": "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            f"t10k-{_LABELS}.gz": "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        },
        md5={},  # none are published; load_family describes the check that stands in for them
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
"""What data sets that are made of MNIST's digits have in common."""


def load_family(family: IdxFamily, request: DataRequest) -> Splits:
    """Read a family's four files from a folder, else download them, and check them.

    A download must have the SHA-256 of the mirrors' file before it is kept. Every file that is read, wherever it lies,
    must be whole (a gzipped one with its checksum), have the family's shapes and labels of its classes, and not be
    another family's. Its contents must be the published ones where their hash is known, as for MNIST and Fashion-MNIST.
    The hash is not known for KMNIST: there all classes must have the same size, as its paper says, but pixels that were
    changed before a user's file was packed are not noticed.

    Raises:
        InputError: Files are missing, truncated, corrupt, or another data set's; or they could not be downloaded.
    """
    files = family.paths(request)
    arrays = {stem: _read(family, stem, files[f"{stem}.gz"]) for stem in family.shapes}
    train, test = (
        ImageSet(
            torch.tensor(arrays[f"{part}-{_IMAGES}"])[:, None],
            torch.tensor(arrays[f"{part}-{_LABELS}"], dtype=torch.int64),
        )
        for part in ("train", "t10k")
    )
    return Splits(train, test, class_names=family.class_names)


def _owner(md5: str) -> IdxFamily | None:
    """The family one of whose files has these contents."""
    return next((family for family in FAMILIES if md5 in family.md5.values()), None)


def _contents(family: IdxFamily, stem: str, path: Path) -> tuple[np.ndarray, str]:
    """The array in an idx file, gzipped or not, and the MD5 of the file, unpacked.

    The file has two zero bytes, a byte for the type (8: unsigned byte), one for the number of axes, the length of each
    axis as a big-endian 32-bit integer, and the values.
    """
    shape = family.shapes[stem]
    with opened(path, f"{family.name}'s {stem}") as file:
        header = read_header(file, f">4B{len(shape)}I", (0, 0, 8, len(shape), *shape))
        values = read_exactly(file, math.prod(shape))
        finish(file)
    md5 = hashlib.md5(header, usedforsecurity=False)
    md5.update(values)
    return np.frombuffer(values, np.uint8).reshape(shape), md5.hexdigest()


def _read(family: IdxFamily, stem: str, path: Path) -> np.ndarray:
    """The array in one file, checked for form and contents."""
    array, got = _contents(family, stem, path)
    if stem.endswith(_LABELS):
        _check_labels(family, array, path)
    wanted = family.md5.get(stem)
    owner = _owner(got)
    if wanted not in (None, got) or owner not in (None, family):
        whose = f" but of {owner.name}" if owner else ""
        expected = f", expected {wanted}" if wanted else ""
        raise InputError(
            f"{path} does not have the contents of {family.name}'s {stem}{whose} (decompressed MD5 {got}{expected}); "
            "fetch it again"
        )
    return array


def _check_labels(family: IdxFamily, labels: np.ndarray, path: Path) -> None:
    if labels.max() >= len(family.class_names):
        raise InputError(f"{path} has a label {labels.max()}, but those of {family.name} are 0 to 9")
    if not family.md5 and len(set(np.bincount(labels, minlength=len(family.class_names)))) > 1:
        raise InputError(
            f"{path} is not {family.name}'s: its classes differ in size, but those of {family.name} have the same size"
        )


for _family in FAMILIES:
    register_dataset(
        _family.name,
        title=_family.title,
        source=_family.source,
        licence=_family.licence,
        num_train=60_000,
        num_test=10_000,
        in_shape=(1, 28, 28),
        class_names=_family.class_names,
        validation_size=5_000,
        preparation=_family.preparation,
        find=_family.find,
    )(functools.partial(load_family, _family))
