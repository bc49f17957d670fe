"""mnist-40 and affNIST: MNIST digits somewhere in 40×40 pixels, upright or under random affine maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float64, Shaped, UInt8
from torch import Tensor

from torchcaps.datasets.affine import cut_windows, inverse_maps, linear_maps, warp
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.reading import one_sentence
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.sources.mnist import DIGITS, MADE_OF_MNIST, read_mnist
from torchcaps.datasets.sources.source import data_folders
from torchcaps.files import require_file

MARGIN = 6  # pixels of zeros around a digit; as far, at most, it is moved each way
SIDE = 28 + 2 * MARGIN  # height and width of the images
VERSIONS = 32  # of each test digit
MAX_ROTATION = 20.0  # degrees, either way
MAX_SHEAR = 0.2  # pixels to the right or left for each pixel down
SCALES = (0.8, 1.2)  # the least and the largest factor of the height, and of the width
NUM_TEST = 10_000 * VERSIONS  # test images, original or made here

_CHUNK = 64  # images made at once: few enough for all their numbers to stay in the processor's cache
_INFO: dict[str, Any] = {"in_shape": (1, SIDE, SIDE), "preparation": Preparation(), **MADE_OF_MNIST}


@register_dataset(
    "mnist-40",
    title="MNIST digits at random places in 40×40",
    source="made here of MNIST, as Sabour, Frosst, Hinton (2017) did to train for affNIST",
    num_test=10_000,
    **_INFO,
)
def load_mnist40(request: DataRequest) -> Splits:
    """MNIST with 6 pixels of zeros around each digit.

    Training digits are in the middle: the loader moves them in each epoch (``max_shift=6``). Validation and test digits
    are at random places, up to 6 pixels from the middle each way, which are always the same.
    """
    train, test = read_mnist(request)
    return Splits(train, placed(test), DIGITS, as_train=padded, as_validation=placed)


@register_dataset(
    "affnist",
    title="affNIST: mnist-40, tested on deformed digits",
    source="Tieleman, www.cs.toronto.edu/~tijmen/affNIST; made here of MNIST by its ranges",
    num_test=NUM_TEST,
    **_INFO,
)
def load_affnist(request: DataRequest) -> Splits:
    """mnist-40 for training and validation, and 32 affine versions of each MNIST test digit as test images.

    `affine_versions` makes the test images, always the same ones. Original files are read instead where they are found:
    ``affnist/test.mat``, or ``affnist/test_batches/1.mat`` to ``32.mat``, in the folder of MNIST's files. Either way
    the images are in a fixed random order, so that the first n are a sample of all.
    """
    (train, test), originals, limit = read_mnist(request), find_originals(request.data_dir), request.limit_test
    test = affine_versions(test, limit=limit) if originals is None else read_originals(originals, limit=limit)
    return Splits(train, test, DIGITS, as_train=padded, as_validation=placed)


def padded(digits: ImageSet) -> ImageSet:
    """Put digits in the middle of a canvas with `MARGIN` pixels more on each side."""
    return ImageSet(F.pad(digits.images, (MARGIN,) * 4), digits.labels)


def placed(digits: ImageSet) -> ImageSet:
    """Put digits on that canvas, each moved by up to `MARGIN` pixels each way, always to the same places."""
    _, height, width = digits.in_shape
    corners = torch.from_numpy(generator(FIXED_SEED).randint(0, 2 * MARGIN + 1, (len(digits), 2)))
    canvas = (height + 2 * MARGIN, width + 2 * MARGIN)
    return ImageSet(cut_windows(digits.images, corners, canvas, 2 * MARGIN), digits.labels)


def affine_versions(digits: ImageSet, versions: int = VERSIONS, limit: int | None = None) -> ImageSet:
    """Change digits by random affine maps with the ranges of affNIST; the same digits give the same images.

    Each digit is scaled in width and height by two factors, uniform in 0.8..1.2, sheared by ±0.2, turned by ±20
    degrees, and moved to a place that is uniform among those at which no ink is lost. Values between pixels are
    interpolated bilinearly.

    Args:
        digits: Images of one object each, zeros where there is no ink.
        versions: How many versions to make of each digit.
        limit: How many images to make, the first ones; None for all.

    Returns:
        The images, 40×40: one version of each digit in random order, then another of each in another order, and so on.
    """
    random = generator(FIXED_SEED)
    order = np.concatenate([random.permutation(len(digits)) for _ in range(versions)])[:limit]
    index, numbers = torch.from_numpy(order), torch.from_numpy(random.random_sample((len(order), 6)))
    chunks = zip(index.split(_CHUNK), numbers.split(_CHUNK), strict=True)
    images = torch.cat([_transformed(digits.images[chosen], drawn) for chosen, drawn in chunks])
    return ImageSet(images, digits.labels[index])


def _transformed(digits: UInt8[Tensor, "B C H W"], numbers: Float64[Tensor, "B 6"]) -> UInt8[Tensor, "B C h w"]:
    """Change digits by the maps that numbers of 0..1 choose."""
    signs = 2 * numbers[:, :2] - 1
    scale = SCALES[0] + (SCALES[1] - SCALES[0]) * numbers[:, 2:4]
    linear = linear_maps(signs[:, 0] * MAX_ROTATION, scale, signs[:, 1] * MAX_SHEAR)
    least, most = _room(digits, linear)
    maps = inverse_maps(linear, least + (most - least) * numbers[:, 4:])
    return warp(digits, maps, (SIDE, SIDE)).round_().to(torch.uint8)


def _room(
    digits: UInt8[Tensor, "B C H W"], linear: Float64[Tensor, "B 2 2"]
) -> tuple[Float64[Tensor, "B 2"], Float64[Tensor, "B 2"]]:
    """The least and the largest shift (x, y) of transformed digits that keep all ink inside.

    A digit that is too large for that has one shift, which is both. An ink pixel changes the interpolated values at
    places that are less than a pixel away from it in each direction.
    """
    height, width = digits.shape[2:]
    y, x = torch.meshgrid(torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij")
    places = linear @ torch.stack([x, y]).double().flatten(1)  # (B, 2, H·W), where each pixel goes
    blank = (digits.amax(1) == 0).flatten(1)[:, None]
    blank = blank & ~blank.all(2, keepdim=True)  # an image without ink counts as ink everywhere
    reach = linear.abs().sum(2) * (1 + 2**-7)  # a little more than a pixel
    edge = SIDE / 2 + 0.5  # the middle of the first pixel that is outside
    least = -edge - places.masked_fill(blank, torch.inf).amin(2) + reach
    most = edge - places.masked_fill(blank, -torch.inf).amax(2) - reach
    middle = (least + most) / 2
    return torch.minimum(least, middle), torch.maximum(most, middle)


def find_originals(data_dir: Path | None) -> list[Path] | None:
    """The original Matlab files of the test images, or None; ``data_dir`` is the folder of MNIST's files."""
    for folder in (root / "affnist" for root in data_folders(data_dir)):
        if (folder / "test.mat").is_file():
            return [folder / "test.mat"]
        if (folder / "test_batches").is_dir():
            return [folder / "test_batches" / f"{number}.mat" for number in range(1, VERSIONS + 1)]
    return None


def read_originals(paths: list[Path], limit: int | None = None) -> ImageSet:
    """The images of original files, in a fixed random order, of which ``limit`` are read at most."""
    images, labels = map(np.concatenate, zip(*map(_read_original, paths), strict=True))
    order = generator(FIXED_SEED).permutation(len(labels))[:limit]
    pixels = images[order].reshape(-1, 1, SIDE, SIDE)
    return ImageSet(torch.from_numpy(pixels), torch.from_numpy(labels[order].astype(np.int64)))


def _read_original(path: Path) -> tuple[UInt8[np.ndarray, "n pixels"], Shaped[np.ndarray, "n"]]:
    """The images and labels of one file.

    It has the structure ``affNISTdata``: ``image`` (1600, n), whose columns are the rows of an image one after the
    other, and ``label_int`` (1, n).
    """
    from scipy.io import loadmat

    require_file(path)
    with one_sentence(f"{path} is not affNIST's"):
        fields = loadmat(path, variable_names=["affNISTdata"])["affNISTdata"][0, 0]
        images, labels = fields["image"], fields["label_int"].ravel()
        if (images.dtype, images.shape, labels.dtype.kind) != (np.uint8, (SIDE * SIDE, labels.size), "u"):
            raise ValueError(f"its images are {images.dtype} of the shape {images.shape}, its labels {labels.dtype}")
    return images.T, labels
