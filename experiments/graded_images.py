"""Images with a grade: how far a digit is turned, and from how high an object is seen.

torchcaps train compact --plugin experiments/graded_images.py --data turned-digits --task ordinal
"""

from __future__ import annotations

from pathlib import Path

import torch

from torchcaps.analysis.robustness import rotate
from torchcaps.datasets import DataRequest, ImageSet, Splits, find_dataset, register_dataset
from torchcaps.datasets.sources.mnist import MADE_OF_MNIST, read_mnist

ANGLES = (0, 15, 30, 45, 60)  # degrees, counter-clockwise
ELEVATIONS = tuple(range(30, 75, 5))  # degrees above the ground, of examples/viewpoints.py


def graded(
    images: ImageSet, grades: torch.Tensor, degrees: tuple[int, ...], request: DataRequest, **factors: torch.Tensor
) -> ImageSet:
    """Return the images with grades, or, for a regression, with degrees."""
    values = torch.tensor(degrees, dtype=torch.float32)[grades][:, None]
    return ImageSet(images.images, values if request.task == "regression" else grades, factors=factors)


def names_of(degrees: tuple[int, ...], request: DataRequest) -> tuple[str, ...]:
    return ("degrees",) if request.task == "regression" else tuple(f"{each}°" for each in degrees)


@register_dataset(
    "turned-digits",
    title="MNIST digits turned by 0 to 60 degrees in five steps",
    source="made here of MNIST",
    in_shape=(1, 28, 28),
    **MADE_OF_MNIST | {"class_names": names_of(ANGLES, DataRequest(Path()))},
)
def load_turned_digits(request: DataRequest) -> Splits:
    """Load MNIST with each digit turned counter-clockwise by one of five angles, drawn with a fixed seed."""
    sets = []
    for seed, digits in enumerate(read_mnist(request)):
        grades = torch.randint(len(ANGLES), (len(digits),), generator=torch.Generator().manual_seed(seed))
        images = digits.images.clone()
        for grade, angle in enumerate(ANGLES):
            mine = grades == grade
            images[mine] = (rotate(digits.images[mine] / 255, angle) * 255).round().to(torch.uint8)
        sets.append(graded(ImageSet(images, digits.labels), grades, ANGLES, request))
    return Splits(sets[0], sets[1], names_of(ANGLES, request), task=request.task)


def find_viewpoints(data_dir: Path | None) -> Path | None:
    """Return the folder of the images of examples/viewpoints.py, which is loaded as a plugin, too."""
    find = find_dataset("viewpoints")[0].find
    assert find is not None
    return find(data_dir)


@register_dataset(
    "elevations",
    title="Objects of ellipsoids, by the elevation of the camera",
    source="rendered by examples/viewpoints.py",
    licence="MIT, as torchcaps",
    in_shape=(1, 48, 48),
    class_names=names_of(ELEVATIONS, DataRequest(Path())),
    num_train=8100,
    num_test=8100,
    find=find_viewpoints,
)
def load_elevations(request: DataRequest) -> Splits:
    """Load ``viewpoints`` with one of nine elevations instead of a category; the test shows new objects.

    Each image has the factor ``"object"``, so ``--group object`` validates on new objects, too.
    """
    splits, sets = find_dataset("viewpoints")[0].load(request), []
    for images in (splits.train, splits.test):
        assert images is not None
        grades = ((images.factors["elevation"] - ELEVATIONS[0]) / 5).round().long()
        objects = images.labels * 10 + images.factors["instance"]
        sets.append(graded(images, grades, ELEVATIONS, request, object=objects))
    return Splits(sets[0], sets[1], names_of(ELEVATIONS, request), task=request.task)
