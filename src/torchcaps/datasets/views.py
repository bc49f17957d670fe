"""Data sets for new viewpoints: train on some sides of objects (familiar), test on other sides (novel)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from torchcaps.checks import checked
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.registry import DataRequest, register_dataset

FAMILIAR: Mapping[str, tuple[int, ...]] = {"azimuth": (0, 20, 40, 300, 320, 340), "elevation": (30, 35, 40)}
"""Familiar sides in degrees: a third of the azimuths 0 to 340, or of the elevations 30 to 70."""


@checked
def register_views(
    name: str, title: str, load: Callable[[DataRequest], Splits], *, num_train: int, num_test: int, **info: Any
) -> None:
    """Register four data sets: ``NAME-azimuth`` and ``NAME-elevation``, each also with ``-familiar`` appended.

    Training images show the training objects from familiar sides. ``NAME-azimuth`` tests on the test objects from novel
    sides, and ``NAME-azimuth-familiar`` on the same objects from familiar sides. Both have the same training and
    validation images, so one network can be tested on both. Validation images show training objects from familiar
    sides.

    Args:
        name: Name of the data set with all sides.
        title: Title in lists.
        load: Function that reads all sides; its images have the factors ``"azimuth"`` and ``"elevation"``.
        num_train: Number of training images of all sides.
        num_test: Number of test images of all sides.
        **info: Further fields, as for `register_dataset`.

    Source: Hinton, Sabour, Frosst: Matrix capsules with EM routing (2018), section 6, with these angles.
    """
    for factor, (kind, share) in itertools.product(FAMILIAR, (("novel", 2), ("familiar", 1))):
        register_dataset(
            f"{name}-{factor}{'-familiar' * (kind == 'familiar')}",
            title=f"{title}, {kind} {factor}s",
            num_train=num_train // 3,
            num_test=num_test // 3 * share,
            **info,
        )(partial(_load_sides, load, factor, kind == "familiar"))


def _load_sides(load: Callable[[DataRequest], Splits], factor: str, familiar: bool, request: DataRequest) -> Splits:
    splits = load(request)
    assert splits.train is not None
    assert splits.test is not None  # test objects differ from training objects
    return Splits(_seen(splits.train, factor, True), _seen(splits.test, factor, familiar), splits.class_names)


def _seen(images: ImageSet, factor: str, familiar: bool) -> ImageSet:
    """Return the images from familiar sides, or from novel sides."""
    sides = torch.isin(images.factors[factor].round().long(), torch.tensor(FAMILIAR[factor]))
    return images.select((sides == familiar).nonzero()[:, 0])
