"""Data sets by their names: listed, found, and loaded with their validation images set apart."""

from __future__ import annotations

from pathlib import Path

import torch

import torchcaps.datasets.sources  # noqa: F401  puts on the list what comes with torchcaps
from torchcaps.checks import checked
from torchcaps.datasets.dataset import Dataset
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.pixels import check_scale
from torchcaps.datasets.registry import _DATASETS, DataRequest, DatasetInfo
from torchcaps.datasets.rng import FIXED_SEED
from torchcaps.datasets.splits import stratified_split
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import user_path
from torchcaps.ranges import Count, Pixels, Seed, ValidationSplit
from torchcaps.tasks import TaskName, find_task

_TEST_SHARE, _VALIDATION_SHARE = 0.2, 0.1


def list_datasets() -> list[DatasetInfo]:
    """All data sets that ``load_dataset`` knows: first those with a name only, then those with a path."""
    return sorted(_DATASETS.values(), key=lambda info: info.takes_path)


@checked
def find_dataset(spec: str) -> tuple[DatasetInfo, Path | None]:
    """The entry that ``spec``, ``"name"`` or ``"kind:PATH"``, names and the path that follows its colon.

    Raises:
        InputError: The name is not known (the error names the nearest), the path is missing, there is one too many, or
            it is in the home folder of a user who is not known.
    """
    name, colon, path = spec.partition(":")
    known = _DATASETS
    if name not in known:
        if spec and user_path(spec).exists():
            is_table = user_path(spec).suffix.lower() in (".csv", ".tsv")
            kind = "folder" if user_path(spec).is_dir() else "csv" if is_table else "npz"
            raise InputError(f'there is no data set "{spec}"; for the files at that path write "{kind}:{spec}"')
        raise unknown_name("data set", name, [info.spec for info in known.values()])
    info = known[name]
    if info.takes_path and not path:
        raise InputError(f'the data set "{name}" needs a path: write "{name}:PATH"')
    if colon and not info.takes_path:
        raise InputError(f'the data set "{name}" takes no path: write "{name}" instead of "{spec}"')
    return info, user_path(path) if path else None


@checked
def load_dataset(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    image_size: Pixels | tuple[Pixels, Pixels] | None = None,
    validation_size: int | None = None,
    validation: ValidationSplit = "random",
    seed: Seed = 0,
    limit_train: Count | None = None,
    limit_test: Count | None = None,
    skip_damaged: bool = False,
    scale: tuple[float, float] | None = None,
    task: TaskName | None = None,
) -> Dataset:
    """Load a data set, on the CPU, and set its validation images apart.

    The test images depend on the data set alone, not on ``seed`` or ``validation_size``. With ``limit_train=n`` the
    training part is the first n training images in their original order that are not for validation; validation images
    that are chosen at random come from those after them, if any need be left out at all.

    Args:
        spec: A name (see `list_datasets`), ``"folder:PATH"``, ``"npz:PATH"`` or ``"csv:PATH"``.
        data_dir: The folder of the files, for a data set with files of its own; None for the one that the environment
            variable TORCHCAPS_DATA names, then the cache of downloads.
        image_size: Height and width in pixels to resize the images to, one number for both; None leaves them.
        validation_size: How many validation images to set apart, at least 1: without them the test images would have to
            choose the best epoch, and their result would be too good. None for 5,000 (MNIST family) or a tenth of the
            training images, at least one of each class.
        validation: Which of the training images these are: a stratified random choice, or the first or the last ones.
        seed: Chooses the random validation images, 0 to 2³² - 1.
        limit_train: How many training images to take at most, the first ones, from 1.
        limit_test: How many test images to take at most, the first ones, from 1.
        skip_damaged: Leave out the image files of a ``folder:`` that cannot be read, instead of raising an error; the
            data set's ``skipped`` says which, and why.
        scale: The numbers (low, high) that become 0 and 1, for pixels of your own files that are neither 8-bit nor
            floats of 0..1, such as (0, 4095) of a 12-bit camera; numbers beyond are clipped.
        task: The task that the labels are converted for: ``"classes"``, ``"labels"`` or ``"regression"``; None if their
            form decides. Class numbers in floats, for example, are numbers of a regression unless the task is
            ``"classes"``.

    Raises:
        InputError: The name is not known, files are missing or broken, or a number does not fit the images.
    """
    info, path = find_dataset(spec)
    if data_dir is not None and info.find is None:
        raise InputError(f'the data set "{info.name}" has no files in a data folder; leave data_dir (--data-dir) out')
    if skip_damaged and not info.can_skip_damaged:
        raise InputError(f"{spec} has no image files to leave out; skip_damaged (--skip-damaged) is for folder:PATH")
    if scale is not None:
        check_scale(scale)
        if not info.takes_scale:
            raise InputError(f"the pixels of {spec} have a range of their own; leave scale (--scale) out")
    folder = None if data_dir is None else user_path(data_dir)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    request = DataRequest(path or Path(), folder, size, limit_test, skip_damaged, scale, task)
    splits = info.load(request).for_task(task, spec)
    names, known, test = splits.class_names, splits.train, splits.test
    if test is None:
        known, test = _set_test_aside(spec, known, len(names))
        test = splits.as_validation(test)
    if splits.validation is None:
        count = _validation_size(spec, len(known), len(names), validation_size, info.validation_size)
        learned, chosen = _set_validation_apart(known, count, validation, seed, limit_train)
    elif validation_size is None and validation == "random":
        learned, chosen = known.take(limit_train), splits.validation
    else:
        option = "validation" if validation_size is None else "validation_size"
        raise InputError(f"{spec} has validation images of its own; leave {option} out")
    find_task(splits.task).check_training(learned.labels, names, spec)
    train, held, test = splits.as_train(learned), splits.as_validation(chosen), test.take(limit_test)
    if size is not None:
        train, held, test = train.resize(size), held.resize(size), test.resize(size)
    return Dataset(spec, train, held, test, names, splits.skipped, splits.task)


def _set_test_aside(spec: str, images: ImageSet, classes: int) -> tuple[ImageSet, ImageSet]:
    """Divide images into those to learn from, and a fifth that is always the same."""
    size = max(round(_TEST_SHARE * len(images)), classes)
    if len(images) - size < classes:
        raise InputError(
            f"{spec} has {len(images)} images of {classes} classes, too few to set a test set aside; give more, or a "
            "test set of their own"
        )
    left, held = stratified_split(images.task.strata(images.labels), size, seed=FIXED_SEED)
    return images.select(left), images.select(held)


def _validation_size(spec: str, images: int, classes: int, asked: int | None, usual: int | None) -> int:
    """How many images to set apart for validation."""
    most = images - classes
    if most < 1:
        raise InputError(f"{spec}: {images} training images leave none for validation; give more")
    if asked is None:
        return min(usual or max(round(_VALIDATION_SHARE * images), classes), most)
    if not 1 <= asked <= most:
        why = "; the best epoch is chosen by them, never by the test images" if asked < 1 else ""
        raise InputError(f"{spec}: validation_size is {asked}, but 1 to {most} images can be set apart{why}")
    return asked


def _set_validation_apart(
    images: ImageSet, size: int, which: ValidationSplit, seed: int, limit: int | None
) -> tuple[ImageSet, ImageSet]:
    """Divide the training images into those to train on, at most ``limit``, and ``size`` for validation."""
    total = len(images)
    if which != "random":
        held = torch.arange(size) if which == "first" else torch.arange(total - size, total)
        left = torch.arange(size, total) if which == "first" else torch.arange(total - size)
        return images.select(left).take(limit), images.select(held)
    strata = images.task.strata(images.labels)
    if limit is None or limit >= total - size:  # the limit leaves out no image that would be trained on
        left, held = stratified_split(strata, size, seed=seed)
        return images.select(left), images.select(held)
    _, held = stratified_split(strata[limit:], size, seed=seed, leave_one=False)  # the images before are trained on
    return images.take(limit), images.select(held + limit)
