"""Street View House Numbers: the cropped digits."""

from __future__ import annotations

import torch

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.files import one_sentence

SOURCE = Source(
    name="svhn",
    mirrors=("http://ufldl.stanford.edu/housenumbers/",),
    sha256={
        "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    },
    folders=("SVHN",),
)


@register_dataset(
    "svhn",
    title="SVHN: digits of house numbers",
    source="Netzer and others: Reading Digits in Natural Images (2011)",
    licence="non-commercial use only",
    num_train=73_257,
    num_test=26_032,
    in_shape=(3, 32, 32),
    class_names=tuple("0123456789"),
    validation_size=5_000,
    find=SOURCE.find,
)
def load_svhn(request: DataRequest) -> Splits:
    """Read the training and the test digits, without the extra digits, as in the paper.

    A file has the variables X, uint8 pixels (32, 32, 3, N), and y, labels (N, 1), where 10 means the digit 0. It is
    opened only if its checksum is right.
    """
    from scipy.io import loadmat

    sets = []
    for path in SOURCE.paths(request).values():
        SOURCE.verify(path)
        with one_sentence(f"{path} is not SVHN's"):
            variables = loadmat(path, variable_names=["X", "y"])
        images = torch.from_numpy(variables["X"]).permute(3, 2, 0, 1).contiguous()
        sets.append(ImageSet(images, torch.from_numpy(variables["y"][:, 0]).long() % 10))
    train, test = sets
    return Splits(train, test, class_names=tuple("0123456789"))
