"""Familiar and novel sides of objects: what a network that learned from some sides says of the others."""

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
"""The sides that are learned from, degrees: a third of the azimuths 0 to 340, or of the elevations 30 to 70."""


@checked
def register_views(
    name: str, title: str, load: Callable[[DataRequest], Splits], *, num_train: int, num_test: int, **info: Any
) -> None:
    """Put four data sets on the list: ``NAME-azimuth``, ``NAME-elevation``, each also with ``-familiar`` after it.

    A network learns from the training objects, seen from familiar sides. ``NAME-azimuth`` tests it on the test objects
    from novel sides, ``NAME-azimuth-familiar`` on the same objects from familiar ones; training and validation images
    of the two are the same, so that one network is judged on both. The validation images are of training objects from
    familiar sides.

    Args:
        name: Of the data set with all sides.
        title: What it shows, for the list.
        load: Reads all sides; its images have the factors ``"azimuth"`` and ``"elevation"``.
        num_train: How many training images of all sides there are.
        num_test: How many test images of all sides there are.
        **info: As for `register_dataset`.

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
    assert splits.test is not None  # of other objects
    return Splits(_seen(splits.train, factor, True), _seen(splits.test, factor, familiar), splits.class_names)


def _seen(images: ImageSet, factor: str, familiar: bool) -> ImageSet:
    """The images from familiar sides, or the others."""
    sides = torch.isin(images.factors[factor].round().long(), torch.tensor(FAMILIAR[factor]))
    return images.select((sides == familiar).nonzero()[:, 0])
