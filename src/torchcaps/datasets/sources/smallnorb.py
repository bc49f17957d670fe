"""smallNORB: toys seen by two cameras."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.reading import read_binary
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.sources.source import Source
from torchcaps.datasets.views import register_views

_TRAIN = "smallnorb-5x46789x9x18x6x2x96x96-training"
_TEST = "smallnorb-5x01235x9x18x6x2x96x96-testing"
_COUNT = 24_300  # pairs of images, in training and in test
_RAW_SIZE = (96, 96)
_SIZE = (48, 48)
_CHUNK = 256  # pairs resized at once
_CODES = {"u1": 0x1E3D4C55, "<i4": 0x1E3D4C54}  # magic numbers of types

SOURCE = Source(
    name="smallnorb",
    mirrors=("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",),
    sha256={
        f"{_TRAIN}-dat.mat.gz": "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
        f"{_TRAIN}-cat.mat.gz": "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
        f"{_TEST}-dat.mat.gz": "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
        f"{_TEST}-cat.mat.gz": "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
    },
)
VIEWS = {
    f"{_TRAIN}-info.mat.gz": "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
    f"{_TEST}-info.mat.gz": "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
}
"""Files with the viewpoint of each image."""
VIEWS_SOURCE = replace(SOURCE, sha256={**SOURCE.sha256, **VIEWS})

_INFO: dict[str, Any] = {
    "source": "LeCun, Huang, Bottou: Learning Methods for Generic Object Recognition (2004)",
    "licence": "for research; not to be sold",
    "num_train": _COUNT,
    "num_test": _COUNT,
    "in_shape": (2, *_SIZE),
    "class_names": ("animal", "human", "airplane", "truck", "car"),
}


@register_dataset("smallnorb", title="smallNORB toys seen by two cameras", find=SOURCE.find, **_INFO)
def load_smallnorb(request: DataRequest) -> Splits:
    """Read the pairs of images, one channel for each camera, and resize them to 48×48, as in the paper.

    Each pixel of 48×48 is the mean of 2×2 pixels, the same as bilinear interpolation. Another ``image_size`` is
    computed from the 96×96 pixels, as for all data sets.

    Training and test images show different toys. Validation images show toys of the training images from other sides or
    in other light, so validation results are better than test results.
    """
    return _load(SOURCE, request)


def load_views(request: DataRequest) -> Splits:
    """Read the same images with factors: ``"azimuth"``, ``"elevation"`` (degrees), ``"light"`` (0..5), ``"instance"``.

    Azimuths are 0 to 340 in steps of 20, elevations 30 to 70 in steps of 5.
    """
    return _load(VIEWS_SOURCE, request)


register_views("smallnorb", "smallNORB", load_views, find=VIEWS_SOURCE.find, **_INFO)


def _load(source: Source, request: DataRequest) -> Splits:
    paths, size = source.paths(request), request.image_size or _SIZE
    sets = []
    for part in (_TRAIN, _TEST):
        pixels = _read(paths[f"{part}-dat.mat.gz"], (_COUNT, 2, *_RAW_SIZE), "u1")
        images = torch.cat([_resized(torch.tensor(pixels[i : i + _CHUNK]), size) for i in range(0, _COUNT, _CHUNK)])
        labels = torch.tensor(_read(paths[f"{part}-cat.mat.gz"], (_COUNT,), "<i4")).long()
        views = paths.get(f"{part}-info.mat.gz")
        sets.append(ImageSet(images, labels, factors={} if views is None else _read_factors(views)))
    train, test = sets
    return Splits(train, test, class_names=_INFO["class_names"])


def _resized(images: UInt8[Tensor, "N 2 H W"], size: tuple[int, int]) -> UInt8[Tensor, "N 2 h w"]:
    if size != _SIZE:
        return resize_images(images, size)
    return F.avg_pool2d(images.float(), 2).round_().to(torch.uint8)


def _read_factors(path: Path) -> dict[str, Tensor]:
    """Read the columns of a file: instance 0..9, elevation 0..8, azimuth 0, 2, .. 34, light 0..5."""
    instance, elevation, azimuth, light = torch.tensor(_read(path, (_COUNT, 4), "<i4")).long().unbind(1)
    return {"azimuth": 10.0 * azimuth, "elevation": 30 + 5.0 * elevation, "light": light, "instance": instance}


def _read(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Read the values of a file in NORB's binary matrix format, gzipped or not.

    The header consists of little-endian 32-bit integers: a code of the type, the number of axes, and the length of each
    axis (at least three lengths, filled up with 1). The values follow.
    """
    lengths = shape + (1,) * (3 - len(shape))
    header = struct.pack(f"<{2 + len(lengths)}i", _CODES[dtype], len(shape), *lengths)
    return read_binary(path, "smallNORB's", header, shape, dtype)
