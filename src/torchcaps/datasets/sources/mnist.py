"""MNIST and data sets of the same form: four idx files, from a folder or downloaded."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import torch

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source

SHAPES: dict[str, tuple[int, ...]] = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
"""Shape of the array in each file, by file name without ``.gz``."""
DIGITS = tuple("0123456789")


def read_idx(source: Source, request: DataRequest) -> tuple[ImageSet, ImageSet]:
    """Read the four files of a data set of MNIST's form, gzipped or not, from a folder, else download them.

    A download is kept only if it has the SHA-256 of the mirrors' file. Every file must be complete (gzipped ones with
    their checksum) and have the expected shape.

    Raises:
        InputError: Files are missing, truncated, corrupt or of another shape, or could not be downloaded.
    """
    files = source.paths(request)
    train, train_labels, test, test_labels = (
        torch.tensor(read_binary(files[f"{stem}.gz"], f"{source.name}'s {stem}", _header(shape), shape))
        for stem, shape in SHAPES.items()
    )
    return ImageSet(train[:, None], train_labels.long()), ImageSet(test[:, None], test_labels.long())


def _header(shape: tuple[int, ...]) -> bytes:
    """Return the header: two zero bytes, type (8: unsigned byte), number of axes, their lengths (big-endian)."""
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)


def _register(
    name: str,
    class_names: tuple[str, ...],
    mirrors: tuple[str, ...],
    sha256: tuple[str, ...],
    folder: str,
    **info: Any,
) -> Source:
    """Register a data set of MNIST's form; ``sha256`` is in the order of ``SHAPES``."""
    hashes = {f"{stem}.gz": each for stem, each in zip(SHAPES, sha256, strict=True)}
    source = Source(name=name, mirrors=mirrors, sha256=hashes, folders=(folder,), shares_names=name != "mnist")
    known = {"num_train": 60_000, "num_test": 10_000, "in_shape": (1, 28, 28), "validation_size": 5_000}

    @register_dataset(name, class_names=class_names, find=source.find, **known, **info)
    def load(request: DataRequest) -> Splits:
        return Splits(*read_idx(source, request), class_names)

    return source


MNIST = _register(
    "mnist",
    DIGITS,
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "MNIST/raw",
    title="MNIST handwritten digits",
    source="LeCun, Cortes, Burges: The MNIST database of handwritten digits (1998)",
    licence="CC BY-SA 3.0",
    preparation=Preparation(),
)

_register(
    "fashion-mnist",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "FashionMNIST/raw",
    title="Fashion-MNIST articles of clothing",
    source="Xiao, Rasul, Vollgraf: Fashion-MNIST (2017), arXiv:1708.07747",
    licence="MIT",
)

_register(
    "kmnist",
    ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    ("https://codh.rois.ac.jp/kmnist/dataset/kmnist/", "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"),
    (
        "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    ),
    "KMNIST/raw",
    title="Kuzushiji-MNIST cursive Japanese characters",
    source="Clanuwat and others: Deep Learning for Classical Japanese Literature (2018), arXiv:1812.01718",
    licence="CC BY-SA 4.0",
)


read_mnist = partial(read_idx, MNIST)
"""Read the training and the test digits of MNIST, for data sets derived from them."""
MADE_OF_MNIST: dict[str, Any] = {
    "licence": "CC BY-SA 3.0, as MNIST's",
    "num_train": 60_000,
    "class_names": DIGITS,
    "validation_size": 5_000,
    "find": MNIST.find,
}
"""Fields shared by data sets derived from MNIST."""
