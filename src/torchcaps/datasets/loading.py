"""List, find and load data sets by name, and split off their validation images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

import torchcaps.datasets.sources  # noqa: F401  registers the data sets of torchcaps
from torchcaps.checks import checked
from torchcaps.datasets.dataset import Dataset, Part, Splits
from torchcaps.datasets.image_set import Images, ImageSet
from torchcaps.datasets.patch_set import sized
from torchcaps.datasets.registry import _DATASETS, OPTIONS, DataRequest, DatasetInfo
from torchcaps.datasets.rng import FIXED_SEED
from torchcaps.datasets.scaling import check_scale
from torchcaps.datasets.splits import groups_of, stratified_folds, stratified_split
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import user_path
from torchcaps.ranges import Components, Count, Pages, Pixels, Seed, Spacing, ValidationSplit, read_fold
from torchcaps.tasks import TaskName, find_task
from torchcaps.words import counted

PartName = Literal["test", "validation", "train", "all"]
_TEST_SHARE, _VALIDATION_SHARE = 0.2, 0.1


def list_datasets() -> list[DatasetInfo]:
    """Return all data sets of ``load_dataset``: first the ones without a path, then the ones with a path."""
    return sorted(_DATASETS.values(), key=lambda info: info.takes_path)


@checked
def find_dataset(spec: str) -> tuple[DatasetInfo, Path | None]:
    """Return the entry of ``spec``, which is ``"name"`` or ``"kind:PATH"``, and the path after the colon.

    Raises:
        InputError: The name is unknown (the error suggests the nearest), the path is missing or superfluous, or it lies
            in the home folder of an unknown user.
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
    patch: Pixels | tuple[Pixels, ...] | None = None,
    pages: Pages | None = None,
    group: str | None = None,
    fold: str | None = None,
    window: Count | None = None,
    stride: Count | None = None,
    pca: Count | Components | None = None,
    spacing: Spacing | None = None,
) -> Dataset:
    """Load a data set on the CPU, and split off its validation images.

    The test images depend only on the data set, not on ``seed`` or ``validation_size``. With ``limit_train=n``,
    training uses the first n training images in their original order that are not validation images. If that leaves
    images out, random validation images come from the images after the first n.

    Args:
        spec: A name (see `list_datasets`), ``"folder:PATH"``, ``"npz:PATH"`` or ``"csv:PATH"``.
        data_dir: Folder of the files of a named data set; None: the folder in the environment variable TORCHCAPS_DATA,
            then the cache of downloads.
        image_size: Height and width in pixels to resize the images to, or one number for both; None: no resizing.
        validation_size: Number of validation images, at least 1. (Without them the test images would choose the best
            epoch, and the test result would be too good.) None: 5,000 for the MNIST family, else a tenth of the
            training images, at least one of each class.
        validation: Choice of the validation images among the training images: a stratified random choice, or the first
            or the last ones.
        seed: Random seed of the choice of validation images, 0 to 2³² - 1.
        limit_train: Largest number of training images, from 1; the first ones are taken.
        limit_test: Largest number of test images, from 1; the first ones are taken.
        skip_damaged: Leave out images of a ``folder:``, ``csv:`` or ``nifti:`` that cannot be used, instead of raising
            an error: unreadable files, and images without a mask or with a damaged one. The data set's ``skipped``
            lists them with the reasons.
        scale: Pixel values (low, high) that become 0 and 1, for your own files whose pixels are neither 8-bit nor
            floats of 0..1, such as (0, 4095) of a 12-bit camera; other values are clipped.
        task: Task of the labels: ``"classes"``, ``"labels"``, ``"regression"`` or ``"pixels"``; None: the form of the
            labels decides. For example, class numbers in floats are read as a regression unless the task is
            ``"classes"``.
        patch: Side of the patches, pixels, that training takes of images with masks, or a side for each axis. The
            images may then differ in size, and evaluation takes whole images. None: all images have one size.
        pages: Meaning of the pages of TIFF files and the frames of animations: ``"channels"`` of an image, or
            ``"depth"``, the slices of a volume with a mask. None: files of several pages are refused.
        group: Images of one group, such as a patient, are never in two parts. The name of a column of a table, of an
            array of an ``.npz`` file or of a factor; otherwise a regular expression: the part of an image's path that
            it, or its first parentheses, matches is the group, as in ``"(P[0-9]+)_"``. The sizes of the parts are then
            about those that were set. None: images are split one by one.
        fold: ``"K/N"``: split the images into N parts, test on part K, and train on the others, for data without test
            images. The N runs together test each image once. None: a fifth is tested.
        window: Cut sequences, such as long records of signals, into windows of this many steps. The windows are the
            images; those of one record are never in two parts. None: whole sequences.
        stride: Steps between the beginnings of two windows, 1 to ``window``; None: ``window``.
        pca: Replace the bands of a ``scene:`` by this many principal components of its training pixels, or by these
            components of another scene, the ``pca`` of its data set; None: the bands. ``patch`` is then the odd side of
            the square around each pixel, pixels.
        spacing: Resample volumes to these distances of neighbouring voxels along depth, height and width (upwards,
            forwards and to the right in the body), mm: images linearly, masks to the nearest voxel. None: their own.

    Raises:
        InputError: The name is unknown, files are missing or broken, or a number does not fit the images.
    """
    size = _both_sides(image_size)
    splits = _read(
        spec,
        size,
        data_dir=data_dir,
        task=task,
        fold=fold,
        limit_test=limit_test,
        skip_damaged=skip_damaged,
        scale=scale,
        pages=pages,
        group=group,
        patch=patch,
        window=window,
        stride=stride,
        pca=pca,
        spacing=spacing,
    )
    patch = patch if splits.finish is None else None  # a scene is in patches already
    parts, pca = _split(
        spec, splits, seed=seed, validation_size=validation_size, validation=validation, limit_train=limit_train
    )
    sets: Any = {part: sized(images, size, patch, spec) for part, images in parts.items()}
    sets["test"] = sets["test"].take(limit_test)
    dataset = Dataset(
        spec,
        **sets,
        class_names=splits.class_names,
        skipped=splits.skipped,
        task_name=splits.task,
        pca=pca,
        **splits.naming,
    )
    find_task(splits.task).check_training(dataset.train.labels, splits.class_names, spec)
    return dataset


@checked
def load_part(spec: str, part: PartName = "test", *, seed: Seed = 0, **options: Any) -> Part:
    """Load images of a data set to evaluate a network on. Unlike training images, they may lack classes.

    Args:
        spec: As for `load_dataset`.
        part: ``"test"``, ``"validation"`` or ``"train"`` as of `load_dataset`; or ``"all"`` images, such as those of a
            folder without test/, if the network was trained on none of them. If a data set has only test images, these
            are all.
        seed: Random seed of the choice of validation images.
        **options: ``data_dir``, ``image_size``, ``scale``, ``task``, ``patch``, ``pages``, ``group``, ``fold``,
            ``window``, ``stride``, ``pca`` and ``spacing`` as for `load_dataset`.

    Raises:
        InputError: As for `load_dataset`, or the data set has no such part.
    """
    size, patch = _both_sides(options.pop("image_size", None)), options.get("patch")
    splits, note = _read(spec, size, part=part if part in ("test", "all") else None, **options), None
    patch = patch if splits.finish is None else None
    if part == "all" or (part == "test" and splits.train is None and splits.test is None):
        if splits.as_train is not Splits.as_train:
            raise InputError(f"{spec} makes new training images in each epoch; choose --split test")
        images = joined(list(splits.parts.values()), spec)
        images = images if splits.finish is None else splits.finish({"all": images})[0]["all"]
    elif part != "train" and part in splits.parts and splits.finish is None:
        images = splits.parts[part]
    elif part == "test" and splits.finish is None:
        rest, test = _set_test_aside(spec, splits)
        images = splits.as_validation(test)
        note = (
            f"{spec} has no test images of its own, so these are {len(test)} of its {len(rest) + len(test)} images; if "
            "the network was trained on none of them, choose --split all"
        )
    elif splits.train is None:
        raise InputError(
            f"{spec} has no {part} images, but {' and '.join(splits.parts)} images; choose another --split"
        )
    else:
        chosen = _split(spec, splits, seed=seed)[0][part]
        images = chosen.preview(len(chosen))
    words = f"images of {spec}" if part == "all" else f"{part} images of {spec}"
    images = cast(ImageSet, sized(images, size, patch, spec))
    return Part(spec, words, images, splits.class_names, task_name=splits.task, note=note, **splits.naming)


def joined(sets: Sequence[Images], where: str) -> ImageSet:
    """Return all images of several sets as one.

    Raises:
        InputError: The sets differ in the shape of images, or images are made anew in each epoch.
    """
    images: Any = None
    for each in sets:
        if each.targets is None or (images is not None and each.in_shape != images.in_shape):
            raise InputError(f"{where} has parts that cannot be joined; choose another --split")
        images = each if images is None else images.followed_by(each)
    return cast(ImageSet, images)


def _both_sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _read(
    spec: str,
    size: tuple[int, int] | None,
    *,
    data_dir: str | Path | None = None,
    task: TaskName | None = None,
    fold: str | None = None,
    **options: Any,
) -> Splits:
    """Return the parts that the source of a data set has, and that of a fold, with labels in the form of the task.

    ``options`` are further fields of a `DataRequest`.
    """
    number = None if fold is None else read_fold(fold)
    info, path = find_dataset(spec)
    folder = None if data_dir is None else user_path(data_dir)
    request = DataRequest(path or Path(), folder, size, task=task, **options)
    if folder is not None and info.find is None:
        raise InputError(f'the data set "{info.name}" has no files in a data folder; leave data_dir (--data-dir) out')
    for option in OPTIONS:
        if getattr(request, option) not in (None, False) and option not in info.options:
            fitting = ", ".join(each.spec for each in _DATASETS.values() if option in each.options)
            typed = f"{option} (--{option.replace('_', '-')})"
            raise InputError(f"{spec} takes no {typed}, which is for {fitting}; leave it out")
    check_scale("auto" if request.scale is None else request.scale)
    if request.stride is not None and request.window is None:
        raise InputError("stride (--stride) is for windows; set window (--window), or leave it out")
    if request.stride is not None and request.window is not None and request.stride > request.window:
        raise InputError(f"stride (--stride) must be at most window (--window), {request.window}, got {request.stride}")
    splits = info.load(request).for_task(task, spec)
    if request.group is not None:
        splits = splits.in_groups(request.group, spec)
    return splits if number is None else _with_fold(spec, splits, *number)


def _with_fold(spec: str, splits: Splits, number: int, folds: int) -> Splits:
    """Return the images with one of several parts as the test images."""
    images, option = splits.train, f"leave fold (--fold {number}/{folds}) out"
    if images is None or splits.test is not None:
        raise InputError(f"{spec} has its own test images; {option}, or the test images")
    try:
        numbers = stratified_folds(images.task.strata(images.labels), folds, groups_of(images.names))
    except InputError as error:
        raise InputError(f"{spec}: {error}; {option}") from None
    test, rest = ((numbers == number - 1).nonzero()[:, 0], (numbers != number - 1).nonzero()[:, 0])
    return replace(splits, train=images.select(rest), test=splits.as_validation(images.select(test)))


def _split(
    spec: str,
    splits: Splits,
    *,
    seed: int,
    validation_size: int | None = None,
    validation: ValidationSplit = "random",
    limit_train: int | None = None,
) -> tuple[Mapping[str, Images], Components | None]:
    """Return the three parts of a data set by name, and its components; the arguments are those of `load_dataset`."""
    if splits.train is None:
        raise InputError(
            f"{spec} has only {' and '.join(splits.parts)} images, and none to train on; add them in train"
        )
    known, test = splits.train, splits.test
    if test is None:
        known, test = _set_test_aside(spec, splits)
        test = splits.as_validation(test)
    if splits.validation is None:
        fewest = _num_strata(known)
        default = find_dataset(spec)[0].validation_size
        count = _validation_size(spec, len(known), fewest, validation_size, default)
        learned, chosen = _set_validation_apart(known, count, validation, seed, limit_train, spec)
    elif validation_size is None and validation == "random":
        learned, chosen = known.take(limit_train), splits.validation
    else:
        option = "validation" if validation_size is None else "validation_size"
        raise InputError(f"{spec} brings its own validation images; leave {option} out")
    if splits.finish is not None:
        return splits.finish({"train": learned, "validation": chosen, "test": test})
    return {"train": splits.as_train(learned), "validation": splits.as_validation(chosen), "test": test}, None


def _set_test_aside(spec: str, splits: Splits) -> tuple[ImageSet, ImageSet]:
    """Split images into training images and a fixed fifth for the test, each with an image for each class."""
    images = splits.train
    assert images is not None
    fewest, outputs = _num_strata(images), counted(len(splits.class_names), images.task.output)
    size = max(round(_TEST_SHARE * len(images)), fewest)
    if len(images) - size < fewest:
        raise InputError(
            f"{spec} has {counted(len(images), 'image')} of {outputs}, too few to split off a "
            "test set; give more, or a separate test set; to evaluate a run on all of them, choose --split all"
        )
    left, held = _held_out(images, size, FIXED_SEED, spec)
    return images.select(left), images.select(held)


def _num_strata(images: ImageSet) -> int:
    """Return the number of strata, each of which gives an image to both parts of a split."""
    return len(images.task.strata(images.labels).unique())


def _validation_size(spec: str, images: int, fewest: int, requested: int | None, default: int | None) -> int:
    """Return the number of validation images."""
    limit = images - fewest
    if limit < 1:
        raise InputError(
            f"{spec} has only {counted(images, 'training image')}, which leaves none for validation; give more"
        )
    if requested is None:
        return min(default or max(round(_VALIDATION_SHARE * images), fewest), limit)
    if not 1 <= requested <= limit:
        why = "; they choose the best epoch, because the test images must not" if requested < 1 else ""
        raise InputError(f"{spec}: validation_size is {requested}, but 1 to {limit} images can be used{why}")
    return requested


def _set_validation_apart(
    images: ImageSet, size: int, which: ValidationSplit, seed: int, limit: int | None, where: str
) -> tuple[ImageSet, ImageSet]:
    """Split the training images into at most ``limit`` for training and ``size`` for validation."""
    total, groups = len(images), groups_of(images.names)
    if which != "random":
        if groups is not None:
            raise InputError(
                f"{where}: the {which} images may divide a group; leave validation (--validation {which}) out"
            )
        held = torch.arange(size) if which == "first" else torch.arange(total - size, total)
        left = torch.arange(size, total) if which == "first" else torch.arange(total - size)
        return images.select(left).take(limit), images.select(held)
    if groups is not None or limit is None or limit >= total - size:  # the limit leaves out no training image
        left, held = _held_out(images, size, seed, where)
        return images.select(left).take(limit), images.select(held)
    strata = images.task.strata(images.labels)
    _, held = stratified_split(strata[limit:], size, seed=seed, leave_one=False)  # the first images are for training
    return images.take(limit), images.select(held + limit)


def _held_out(images: ImageSet, size: int, seed: int, where: str) -> tuple[Tensor, Tensor]:
    """Return the indices of the rest and of about ``size`` images that are held out, in whole groups."""
    try:
        strata, groups = images.task.strata(images.labels), groups_of(images.names)
        return stratified_split(strata, size, seed=seed, groups=groups)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
