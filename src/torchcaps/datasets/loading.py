"""``load_dataset``: from a name to a data set in its three parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

# imported for what they register
# isort: off
# in the order of the list
from torchcaps.datasets import digits, mnist, affnist, multimnist, smallnorb, svhn, cifar10, folder, npz  # noqa: F401

# isort: on
from torchcaps.datasets.registry import DataRequest, DatasetInfo, Splits, look_up, registered
from torchcaps.datasets.splits import check_seed, stratified_split
from torchcaps.datasets.types import Dataset, ImageSet
from torchcaps.errors import InputError, shown
from torchcaps.files import user_path
from torchcaps.ranges import COUNT

_VALIDATION_SHARE = 0.1


def list_datasets() -> list[DatasetInfo]:
    """All data sets that ``load_dataset`` knows, those a user registered among them."""
    return registered()


def load_dataset(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    image_size: int | Sequence[int] | None = None,
    validation_size: int | None = None,
    seed: int = 0,
    download: bool = True,
    limit_train: int | None = None,
    limit_test: int | None = None,
) -> Dataset:
    """Load a data set and set its validation images apart.

    The test images depend on nothing but the data set: neither on ``seed`` nor on ``validation_size``. The validation
    images are a stratified random choice from the training images. Limits are caps: with ``limit_train=n`` the
    training part is exactly the first n training images in their original order, and the validation images come from
    those after them; where no more than n images are left to train on anyway, the limit changes nothing.

    Args:
        spec: A name (see `list_datasets`), ``"folder:PATH"`` or ``"npz:PATH"``.
        data_dir: The folder that holds the files of a data set with files of its own; None for the one that the
            environment variable TORCHCAPS_DATA names, then the cache of downloads.
        image_size: Height and width in pixels to resize the images to, one number for both; None leaves them.
        validation_size: How many validation images; None for 5,000 (MNIST family) or a tenth of the training
            images, at least one of each class. At least 1: without them the best epoch would have to be chosen by the
            test images, whose result would then be too good.
        seed: Which images are chosen for validation, 0 to 2³² - 1.
        download: Whether files that are missing may be downloaded.
        limit_train: Train on the first so many training images at most, from 1.
        limit_test: Test on the first so many test images at most, from 1.

    Returns:
        The data set, on the CPU.

    Raises:
        InputError: When the name is not known, files are missing or broken, or a number does not fit the images.
    """
    info, path = look_up(spec)
    if data_dir is not None and not info.takes_data_dir:
        raise InputError(f'the data set "{info.name}" has no files in a data folder; leave data_dir (--data-dir) out')
    check_seed(seed)
    request = DataRequest(
        path=path,
        data_dir=None if data_dir is None else user_path(data_dir),
        image_size=_size(image_size),
        download=download,
        limit_test=limit_test,
    )
    _check_limits(spec, train=limit_train, test=limit_test)
    splits = info.load(request)
    to_train_on, to_choose_by = _divide(spec, splits, validation_size, info.validation_size, seed, limit_train)
    train, validation = splits.as_train(to_train_on), splits.as_validation(to_choose_by)
    test = _at_most(splits.test, limit_test)
    if (size := request.image_size) is not None:
        train, validation, test = train.resize(size), validation.resize(size), test.resize(size)
    return Dataset(spec, train, validation, test, splits.class_names)


def _size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    sizes = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    for size in sizes:
        COUNT.check("image_size", size)
    if len(sizes) != 2:
        raise InputError(f"image_size must be one number of pixels or two (height, width), got {shown(image_size)}")
    return sizes[0], sizes[1]


def _check_limits(spec: str, **limits: int | None) -> None:
    for part, limit in limits.items():
        if limit is not None and limit < 1:
            raise InputError(f"{spec}: limit_{part} is {limit}, but at least 1 {part} image is needed")


def _at_most(images: ImageSet, limit: int | None) -> ImageSet:
    return images if limit is None or limit >= len(images) else images.take(limit)


def _divide(
    spec: str, splits: Splits, size: int | None, default: int | None, seed: int, limit: int | None
) -> tuple[ImageSet, ImageSet]:
    """The training and the validation images."""
    images, num_classes = splits.train, len(splits.class_names)
    limited = _at_most(images, limit)
    missing = (~torch.isin(torch.arange(num_classes), limited.labels)).nonzero()
    if len(missing):
        raise InputError(
            f"{spec}: the first {len(limited)} training images have none of the class "
            f'"{splits.class_names[missing[0]]}"; take more of them'
        )
    if splits.validation is not None:
        if size is not None:
            raise InputError(f"{spec} has validation images of its own; leave validation_size out")
        return limited, splits.validation

    most = len(images) - num_classes
    if most < 1:
        raise InputError(f"{spec}: {len(images)} training images leave none for validation; give more")
    if size is None:
        size = min(default or max(round(_VALIDATION_SHARE * len(images)), num_classes), most)
    if not 1 <= size <= most:
        why = "; the best epoch is chosen by them, never by the test images" if size < 1 else ""
        raise InputError(f"{spec}: validation_size is {size}, but 1 to {most} images can be set apart{why}")
    strata = images.labels.view(len(images), -1)[:, 0]  # of several objects the first one's class
    if len(limited) >= len(images) - size:  # the limit leaves out no image that would be trained on
        rest, held = stratified_split(strata, size, seed=seed)
        return images.select(rest), images.select(held)
    begin = len(limited)  # the images before it are trained on in any case
    _, held = stratified_split(strata[begin:], size, seed=seed, leave_one=False)
    return limited, images.select(held + begin)


class DataShape(NamedTuple):
    """How large a data set is."""

    in_shape: tuple[int, int, int]
    """Channels, height and width of the images."""
    num_classes: int
    """How many classes there are: J."""
    num_images: int
    """All images together."""
    num_objects: int = 1
    """How many objects are in an image: P."""


def data_shape(
    spec: str, *, data_dir: str | Path | None = None, image_size: int | Sequence[int] | None = None
) -> DataShape:
    """How large a data set is; one with a name of its own need not be here for that, files of a path are read.

    Args:
        spec: A name (see `list_datasets`), ``"folder:PATH"`` or ``"npz:PATH"``.
        data_dir: As for `load_dataset`.
        image_size: As for `load_dataset`.

    Raises:
        InputError: As for `load_dataset`.
    """
    info, _ = look_up(spec)
    if info.in_shape is not None and info.num_train is not None and info.num_test is not None:
        size = _size(image_size) or info.in_shape[1:]
        num_images, num_classes = info.num_train + info.num_test, len(info.class_names or ())
        return DataShape((info.in_shape[0], *size), num_classes, num_images, info.num_objects)
    loaded = load_dataset(spec, data_dir=data_dir, image_size=image_size)
    parts = (loaded.train, loaded.validation, loaded.test)
    return DataShape(loaded.in_shape, loaded.num_classes, sum(map(len, parts)), loaded.num_objects)
