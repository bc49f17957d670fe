"""Street View House Numbers: the cropped digits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.formats.matlab import read_mat
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.errors import InputError

_TRAIN, _TEST = "train_32x32.mat", "test_32x32.mat"
_COUNTS = {_TRAIN: 73_257, _TEST: 26_032}
_SHAPE = (3, 32, 32)

SOURCE = Source(
    name="svhn",
    mirrors=("http://ufldl.stanford.edu/housenumbers/",),
    sha256={
        _TRAIN: "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        _TEST: "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    },
    folders=("SVHN",),
)


@register_dataset(
    "svhn",
    title="SVHN: digits of house numbers",
    source="Netzer and others: Reading Digits in Natural Images (2011)",
    licence="non-commercial use only",
    num_train=_COUNTS[_TRAIN],
    num_test=_COUNTS[_TEST],
    in_shape=_SHAPE,
    class_names=tuple("0123456789"),
    validation_size=5_000,
    find=SOURCE.find,
)
def load_svhn(request: DataRequest) -> Splits:
    """Read the training and the test digits; the extra ones of the data set are left out, as in the paper.

    A file has the variables X, uint8 pixels (32, 32, 3, N), and y, the labels (N, 1), in which 10 stands for the
    digit 0.
    """
    paths = SOURCE.paths(request)
    return Splits(_read(paths[_TRAIN], _COUNTS[_TRAIN]), _read(paths[_TEST], _COUNTS[_TEST]), tuple("0123456789"))


def _read(path: Path, count: int) -> ImageSet:
    channels, height, width = _SHAPE
    variables = read_mat(path, "X", "y", most=math.prod(_SHAPE) * count)
    pixels, labels = variables["X"], variables["y"]
    wanted = (height, width, channels, count)
    if pixels.dtype != np.uint8 or pixels.shape != wanted or labels.shape != (count, 1):
        raise InputError(
            f"{path} holds {pixels.dtype} pixels of the shape {pixels.shape} and labels of the shape {labels.shape}, "
            f"but SVHN's are uint8 of {wanted} and {(count, 1)}; fetch it again"
        )
    if not np.isin(labels, np.arange(1, 11)).all():
        raise InputError(f"{path} has labels from {labels.min()} to {labels.max()}, but SVHN's are 1 to 10")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return ImageSet(images, torch.from_numpy(labels[:, 0].astype(np.int64)) % 10)
