"""mnist-40 and affNIST: MNIST digits at random positions in 40×40 pixels, upright or under random affine maps."""

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
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator
from torchcaps.datasets.sources.mnist import DIGITS, MADE_OF_MNIST, read_mnist
from torchcaps.datasets.sources.source import data_folders
from torchcaps.files import one_sentence, require_file

MARGIN = 6  # pixels of zeros around a digit, and its largest shift in each direction
SIDE = 28 + 2 * MARGIN  # height and width of the images
VERSIONS = 32  # number of versions of each test digit
MAX_ROTATION = 20.0  # degrees, in both directions
MAX_SHEAR = 0.2  # pixels to the right or left for each pixel down
SCALES = (0.8, 1.2)  # smallest and largest factor of height and width
NUM_TEST = 10_000 * VERSIONS  # original or generated

_CHUNK = 64  # images generated at once, few enough to stay in the processor's cache
_INFO: dict[str, Any] = {"in_shape": (1, SIDE, SIDE), "preparation": Preparation(), **MADE_OF_MNIST}


@register_dataset(
    "mnist-40",
    title="MNIST digits at random positions in 40×40",
    source="made here of MNIST, as Sabour, Frosst, Hinton (2017) did to train for affNIST",
    num_test=10_000,
    **_INFO,
)
def load_mnist40(request: DataRequest) -> Splits:
    """Load MNIST with 6 pixels of zeros around each digit.

    Training digits are in the middle, and the loader moves them in each epoch (``max_shift=6``). Validation and test
    digits are at fixed random positions, up to 6 pixels from the middle in each direction.
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
    """Load mnist-40 for training and validation, and 32 affine versions of each MNIST test digit as test images.

    `affine_versions` generates the test images, always the same. If original files are found, they are read instead:
    ``affnist/test.mat``, or ``affnist/test_batches/1.mat`` to ``32.mat``, in the folder of MNIST's files. In both cases
    the images are in a fixed random order, so the first n are a random sample.
    """
    (train, test), originals, limit = read_mnist(request), find_originals(request.data_dir), request.limit_test
    test = affine_versions(test, limit=limit) if originals is None else read_originals(originals, limit=limit)
    return Splits(train, test, DIGITS, as_train=padded, as_validation=placed)


def padded(digits: ImageSet) -> ImageSet:
    """Put digits in the middle of a canvas with `MARGIN` more pixels on each side."""
    return ImageSet(F.pad(digits.images, (MARGIN,) * 4), digits.labels)


def placed(digits: ImageSet) -> ImageSet:
    """Put digits on the same canvas at fixed random positions, up to `MARGIN` pixels from the middle."""
    _, height, width = digits.in_shape
    corners = torch.from_numpy(generator(FIXED_SEED).randint(0, 2 * MARGIN + 1, (len(digits), 2)))
    canvas = (height + 2 * MARGIN, width + 2 * MARGIN)
    return ImageSet(cut_windows(digits.images, corners, canvas, 2 * MARGIN), digits.labels)


def affine_versions(digits: ImageSet, versions: int = VERSIONS, limit: int | None = None) -> ImageSet:
    """Transform digits by random affine maps with the ranges of affNIST. The same digits give the same images.

    Width and height of each digit are scaled by two factors uniform in 0.8..1.2. The digit is sheared by ±0.2 and
    rotated by ±20 degrees. Its position is uniform among all positions that keep its ink inside. Pixels are
    interpolated bilinearly; zeros are background.

    Returns:
        Images of 40×40 pixels: one version of each digit in random order, then the next versions in another order; the
        first ``limit`` of them.
    """
    random = generator(FIXED_SEED)
    order = np.concatenate([random.permutation(len(digits)) for _ in range(versions)])[:limit]
    index, numbers = torch.from_numpy(order), torch.from_numpy(random.random_sample((len(order), 6)))
    chunks = zip(index.split(_CHUNK), numbers.split(_CHUNK), strict=True)
    images = torch.cat([_transformed(digits.images[chosen], drawn) for chosen, drawn in chunks])
    return ImageSet(images, digits.labels[index])


def _transformed(digits: UInt8[Tensor, "B C H W"], numbers: Float64[Tensor, "B 6"]) -> UInt8[Tensor, "B C h w"]:
    """Transform digits by affine maps derived from random numbers of 0..1."""
    signs = 2 * numbers[:, :2] - 1
    scale = SCALES[0] + (SCALES[1] - SCALES[0]) * numbers[:, 2:4]
    linear = linear_maps(signs[:, 0] * MAX_ROTATION, scale, signs[:, 1] * MAX_SHEAR)
    lowest, highest = _shift_range(digits, linear)
    maps = inverse_maps(linear, lowest + (highest - lowest) * numbers[:, 4:])
    return warp(digits, maps, (SIDE, SIDE)).round_().to(torch.uint8)


def _shift_range(
    digits: UInt8[Tensor, "B C H W"], linear: Float64[Tensor, "B 2 2"]
) -> tuple[Float64[Tensor, "B 2"], Float64[Tensor, "B 2"]]:
    """Return the smallest and the largest shift (x, y) of transformed digits that keep all ink inside.

    If a digit is too large, both are the same shift. Interpolation spreads an ink pixel over positions less than one
    pixel away in each direction.
    """
    height, width = digits.shape[2:]
    y, x = torch.meshgrid(torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij")
    places = linear @ torch.stack([x, y]).double().flatten(1)  # (B, 2, H·W), new position of each pixel
    blank = (digits.amax(1) == 0).flatten(1)[:, None]
    blank = blank & ~blank.all(2, keepdim=True)  # an image without ink counts as full of ink
    reach = linear.abs().sum(2) * (1 + 2**-7)  # slightly more than a pixel
    edge = SIDE / 2 + 0.5  # the middle of the first pixel that is outside
    lowest = -edge - places.masked_fill(blank, torch.inf).amin(2) + reach
    highest = edge - places.masked_fill(blank, -torch.inf).amax(2) - reach
    middle = (lowest + highest) / 2
    return torch.minimum(lowest, middle), torch.maximum(highest, middle)


def find_originals(data_dir: Path | None) -> list[Path] | None:
    """Return the original Matlab files of the test images, or None; ``data_dir`` is the folder of MNIST's files."""
    for folder in (root / "affnist" for root in data_folders(data_dir)):
        if (folder / "test.mat").is_file():
            return [folder / "test.mat"]
        if (folder / "test_batches").is_dir():
            return [folder / "test_batches" / f"{number}.mat" for number in range(1, VERSIONS + 1)]
    return None


def read_originals(paths: list[Path], limit: int | None = None) -> ImageSet:
    """Read the images of original files in a fixed random order; return the first ``limit``."""
    images, labels = map(np.concatenate, zip(*map(_read_original, paths), strict=True))
    order = generator(FIXED_SEED).permutation(len(labels))[:limit]
    pixels = images[order].reshape(-1, 1, SIDE, SIDE)
    return ImageSet(torch.from_numpy(pixels), torch.from_numpy(labels[order].astype(np.int64)))


def _read_original(path: Path) -> tuple[UInt8[np.ndarray, "n pixels"], Shaped[np.ndarray, "n"]]:
    """Read the images and labels of one file.

    Its structure ``affNISTdata`` has ``image`` (1600, n), one image in each column, row by row, and ``label_int`` (1,
    n).
    """
    from scipy.io import loadmat

    require_file(path)
    with one_sentence(f"{path} is not affNIST's"):
        fields = loadmat(path, variable_names=["affNISTdata"])["affNISTdata"][0, 0]
        images, labels = fields["image"], fields["label_int"].ravel()
        if (images.dtype, images.shape, labels.dtype.kind) != (np.uint8, (SIDE * SIDE, labels.size), "u"):
            raise ValueError(f"its images are {images.dtype} of the shape {images.shape}, its labels {labels.dtype}")
    return images.T, labels
