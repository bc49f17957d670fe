"""smallNORB: toys seen by two cameras."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.formats.reading import Readable, finish, opened, read_exactly, read_header
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.errors import InputError

_TRAIN = "smallnorb-5x46789x9x18x6x2x96x96-training"
_TEST = "smallnorb-5x01235x9x18x6x2x96x96-testing"
_IMAGES, _LABELS = "dat.mat", "cat.mat"
_COUNT = 24_300  # pairs of images, in training and in test
_RAW_SIZE = (96, 96)
_SIZE = (48, 48)
_CHUNK = 256  # pairs that are unpacked at once: all of them, at their own size, would take 450 MB

_UINT8, _INT32 = 0x1E3D4C55, 0x1E3D4C54

SOURCE = Source(
    name="smallnorb",
    mirrors=("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",),
    sha256={
        f"{_TRAIN}-{_IMAGES}.gz": "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
        f"{_TRAIN}-{_LABELS}.gz": "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
        f"{_TEST}-{_IMAGES}.gz": "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
        f"{_TEST}-{_LABELS}.gz": "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
    },
)

CLASS_NAMES = ("animal", "human", "airplane", "truck", "car")


@register_dataset(
    "smallnorb",
    title="smallNORB toys seen by two cameras",
    source="LeCun, Huang, Bottou: Learning Methods for Generic Object Recognition (2004)",
    licence="for research; not to be sold",
    num_train=_COUNT,
    num_test=_COUNT,
    in_shape=(2, *_SIZE),
    class_names=CLASS_NAMES,
    takes_data_dir=True,
    find=SOURCE.find,
)
def load_smallnorb(request: DataRequest) -> Splits:
    """Read the pairs of images, one channel for each camera, and bring them to 48×48, as the paper does.

    Each pixel of 48×48 is the mean of 2×2 pixels, which is also what bilinear interpolation gives. Another
    ``image_size`` is made of the 96×96 pixels as for all data sets.

    Training and test images show different toys. Validation images show the toys of the training images, from other
    sides or in other light, so that results on them are better than on the test images.
    """
    paths = SOURCE.paths(request)
    resize = _halved if request.image_size in (None, _SIZE) else partial(resize_images, size=request.image_size)
    train, test = (
        ImageSet(_read_images(paths[f"{part}-{_IMAGES}.gz"], resize), _read_labels(paths[f"{part}-{_LABELS}.gz"]))
        for part in (_TRAIN, _TEST)
    )
    return Splits(train, test, CLASS_NAMES)


def _halved(images: UInt8[Tensor, "N C H W"]) -> UInt8[Tensor, "N C h w"]:
    return F.avg_pool2d(images.float(), 2).round_().to(torch.uint8)


def _read_images(path: Path, resize: Callable[[Tensor], Tensor]) -> UInt8[Tensor, "N 2 H W"]:
    """The pairs of images in a file, resized a few at a time."""
    with _matrix(path, _UINT8, (_COUNT, 2, *_RAW_SIZE)) as file:
        chunks = []
        for start in range(0, _COUNT, _CHUNK):
            shape = (min(_CHUNK, _COUNT - start), 2, *_RAW_SIZE)
            pixels = np.frombuffer(read_exactly(file, math.prod(shape)), np.uint8).reshape(shape)
            chunks.append(resize(torch.from_numpy(pixels.copy())))
    return torch.cat(chunks)


def _read_labels(path: Path) -> Int64[Tensor, "N"]:
    with _matrix(path, _INT32, (_COUNT,)) as file:
        labels = np.frombuffer(read_exactly(file, 4 * _COUNT), "<i4").astype(np.int64)
    if not np.isin(labels, np.arange(len(CLASS_NAMES))).all():
        raise InputError(f"{path} has labels from {labels.min()} to {labels.max()}, but smallNORB's are 0 to 4")
    return torch.from_numpy(labels)


@contextmanager
def _matrix(path: Path, kind: int, shape: tuple[int, ...]) -> Iterator[Readable]:
    """The values of a file in NORB's binary matrix format, gzipped or not, to be read to their end.

    The format: a code for the type of the values, the number of axes, the length of each axis (of three at least, the
    last ones 1), all as little-endian 32-bit integers; then the values.
    """
    lengths = shape + (1,) * (3 - len(shape))
    with opened(path, "smallNORB's") as file:
        read_header(file, f"<{2 + len(lengths)}i", (kind, len(shape), *lengths))
        yield file
        finish(file)
