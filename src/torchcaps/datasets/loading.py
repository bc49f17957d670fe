"""``load_dataset`` turns a name into a data set in its three parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchcaps.checks import check
from torchcaps.datasets.dataset import Dataset, ImageSet, Splits
from torchcaps.datasets.registry import DataRequest, find_dataset
from torchcaps.datasets.splits import stratified_split
from torchcaps.errors import InputError, shown
from torchcaps.files import user_path
from torchcaps.ranges import COUNT, PIXELS, SEED, ValidationSplit

_VALIDATION_SHARE = 0.1


def load_dataset(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    image_size: int | Sequence[int] | None = None,
    validation_size: int | None = None,
    validation: ValidationSplit = "random",
    seed: int = 0,
    download: bool = True,
    limit_train: int | None = None,
    limit_test: int | None = None,
    skip_damaged: bool = False,
) -> Dataset:
    """Load a data set and set its validation images apart.

    The test images depend on the data set alone, not on ``seed`` or ``validation_size``. The validation images are a
    stratified random choice from the training images, or the first or the last of them in their original order. Limits
    are caps: with ``limit_train=n`` the training part is the first n training images in their original order, without
    the first or last ones that are for validation; validation images that are chosen at random come from those after
    them. The limit changes nothing if no more than n training images are left anyway.

    Args:
        spec: A name (see `list_datasets`), ``"folder:PATH"`` or ``"npz:PATH"``.
        data_dir: The folder of the files, for a data set with files of its own; None for the one that the environment
            variable TORCHCAPS_DATA names, then the cache of downloads.
        image_size: Height and width in pixels to resize the images to, one number for both; None leaves them.
        validation_size: How many validation images to set apart, at least 1: without them the test images would have to
            choose the best epoch, and their result would be too good. None for 5,000 (MNIST family) or a tenth of the
            training images, at least one of each class.
        validation: Which images are for validation: ``"random"``, ``"first"`` or ``"last"``.
        seed: Chooses the random validation images, 0 to 2³² - 1.
        download: Whether missing files may be downloaded.
        limit_train: How many training images to take at most, the first ones, from 1.
        limit_test: How many test images to take at most, the first ones, from 1.
        skip_damaged: Leave out the image files of a ``folder:`` that cannot be read, instead of raising an error; the
            data set's ``skipped`` says which, and why.

    Returns:
        The data set, on the CPU.

    Raises:
        InputError: The name is not known, files are missing or broken, or a number does not fit the images.
    """
    info, path = find_dataset(spec)
    if data_dir is not None and not info.takes_data_dir:
        raise InputError(f'the data set "{info.name}" has no files in a data folder; leave data_dir (--data-dir) out')
    if skip_damaged and not info.can_skip_damaged:
        raise InputError(f"{spec} has no image files to leave out; skip_damaged (--skip-damaged) is for folder:PATH")
    SEED.check("seed", seed)
    request = DataRequest(
        path=path,
        data_dir=None if data_dir is None else user_path(data_dir),
        image_size=_size(image_size),
        download=download,
        limit_test=limit_test,
        skip_damaged=skip_damaged,
    )
    for name, limit in (("limit_train", limit_train), ("limit_test", limit_test)):
        if limit is not None:
            COUNT.check(f"{spec}: {name}", limit)
    splits = info.load(request)
    check("validation", validation, ValidationSplit)
    if splits.validation is None:
        count = _validation_size(spec, splits, validation_size, info.validation_size)
        learned, chosen = _divide(splits.train, count, validation, seed, limit_train)
    else:
        for name, own in (("validation_size", validation_size is not None), ("validation", validation != "random")):
            if own:
                raise InputError(f"{spec} has validation images of its own; leave {name} out")
        learned, chosen = _at_most(splits.train, limit_train), splits.validation
    _check_classes(spec, learned, splits)
    train, held, test = splits.as_train(learned), splits.as_validation(chosen), _at_most(splits.test, limit_test)
    if (size := request.image_size) is not None:
        train, held, test = train.resize(size), held.resize(size), test.resize(size)
    return Dataset(spec, train, held, test, splits.class_names, splits.skipped)


def _size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    sizes = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sizes) != 2 or not all(type(size) is int and size in PIXELS for size in sizes):
        raise InputError(f"image_size must be {PIXELS} pixels, once or as height and width, got {shown(image_size)}")
    return sizes[0], sizes[1]


def _at_most(images: ImageSet, limit: int | None) -> ImageSet:
    return images if limit is None or limit >= len(images) else images.take(limit)


def _divide(
    images: ImageSet, size: int, validation: ValidationSplit, seed: int, limit: int | None
) -> tuple[ImageSet, ImageSet]:
    """Divide the training images into those to train on, at most ``limit``, and ``size`` for validation."""
    if validation != "random":
        left = torch.arange(len(images) - size) + (size if validation == "first" else 0)
        apart = torch.arange(size) + (0 if validation == "first" else len(images) - size)
        return _at_most(images.select(left), limit), images.select(apart)

    limited = _at_most(images, limit)
    strata = images.labels.view(len(images), -1)[:, 0]  # of several objects the first one's class
    if len(limited) >= len(images) - size:  # the limit leaves out no image that would be trained on
        rest, apart = stratified_split(strata, size, seed=seed)
        return images.select(rest), images.select(apart)
    begin = len(limited)  # the images before it are trained on in any case
    _, apart = stratified_split(strata[begin:], size, seed=seed, leave_one=False)
    return limited, images.select(apart + begin)


def _validation_size(spec: str, splits: Splits, asked: int | None, default: int | None) -> int:
    """How many images to set apart for validation."""
    images, num_classes = len(splits.train), len(splits.class_names)
    most = images - num_classes
    if most < 1:
        raise InputError(f"{spec}: {images} training images leave none for validation; give more")
    if asked is None:
        return min(default or max(round(_VALIDATION_SHARE * images), num_classes), most)
    if not 1 <= asked <= most:
        why = "; the best epoch is chosen by them, never by the test images" if asked < 1 else ""
        raise InputError(f"{spec}: validation_size is {asked}, but 1 to {most} images can be set apart{why}")
    return asked


def _check_classes(spec: str, images: ImageSet, splits: Splits) -> None:
    """Raise InputError if a class is missing among the images to train on."""
    missing = (~torch.isin(torch.arange(len(splits.class_names)), images.labels)).nonzero()
    if len(missing):
        raise InputError(
            f"{spec}: the first {len(images)} training images have none of the class "
            f'"{splits.class_names[missing[0]]}"; take more of them'
        )
