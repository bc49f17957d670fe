"""The list of data sets, and ``load_dataset``: a decorated function makes one listed, loadable by name and tested.

@register_dataset("blobs", title="Blobs", source="drawn here", licence="MIT")
def load_blobs(request: DataRequest) -> Splits:
    ...
    return Splits(train, test, class_names=("round", "square"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchcaps.checks import checked
from torchcaps.datasets.dataset import Dataset, ImageSet, Splits
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.splits import stratified_split
from torchcaps.errors import InputError, unknown_name
from torchcaps.files import user_path
from torchcaps.parts import Registry
from torchcaps.ranges import Count, Pixels, Seed, ValidationSplit

_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class DataRequest:
    """The request that a data set's function answers.

    Args:
        path: The text after the colon of ``kind:PATH``; None for a data set that has a name only.
        data_dir: The folder that the user named; None for the usual places.
        image_size: Height and width to bring images to, in pixels; None to leave them. A function whose files may
            differ in size must resize them; ``load_dataset`` resizes the others.
        download: Whether missing files may be downloaded.
        limit_test: How many test images are wanted at most; None for all. A function that makes its test images may
            make only the first so many.
        skip_damaged: Whether image files that cannot be read are left out, instead of being an error.
    """

    path: Path | None = None
    data_dir: Path | None = None
    image_size: tuple[int, int] | None = None
    download: bool = True
    limit_test: int | None = None
    skip_damaged: bool = False

    @property
    def source(self) -> Path:
        """``path``, which is never None for a data set that was registered with ``takes_path``."""
        assert self.path is not None
        return self.path


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of the list of data sets.

    Args:
        name: Its name for ``load_dataset``.
        title: Its title in lists.
        source: Its address or paper.
        licence: The terms of its images.
        load: The function that reads it.
        num_train: How many training images it has, with those of the validation split; None if its files decide.
        num_test: How many test images it has; None if its files decide.
        in_shape: (C, H, W) of the images; None if its files decide.
        class_names: The names of the classes; None if its files decide.
        num_objects: How many objects are in an image.
        takes_path: Whether it is loaded as ``name:PATH``.
        can_skip_damaged: Whether its image files may be damaged and left out.
        validation_size: How many validation images to take by default; None for a tenth of the training images.
        preparation: How its images were made of drawings, so that photos of drawings can be made so too; None for
            images of something else.
        find: The function that finds the folder of its files in ``data_dir``, or in the usual places for None; None
            for a data set without files of its own.
    """

    name: str
    title: str
    source: str
    licence: str
    load: Callable[[DataRequest], Splits] = field(repr=False)
    num_train: int | None = None
    num_test: int | None = None
    in_shape: tuple[int, int, int] | None = None
    class_names: tuple[str, ...] | None = None
    num_objects: int = 1
    takes_path: bool = False
    can_skip_damaged: bool = False
    validation_size: int | None = None
    preparation: Preparation | None = None
    find: Callable[[Path | None], Path | None] | None = field(default=None, repr=False)

    @property
    def spec(self) -> str:
        """The text that loads it: ``"mnist"``, ``"folder:PATH"``."""
        return f"{self.name}:PATH" if self.takes_path else self.name

    @property
    def num_classes(self) -> int | None:
        """How many classes it has; None if its files decide."""
        return None if self.class_names is None else len(self.class_names)

    @property
    def takes_data_dir(self) -> bool:
        """Whether its files are looked for in ``data_dir``."""
        return self.find is not None

    def is_downloaded(self, data_dir: str | Path | None = None) -> bool:
        """Whether it loads without a download: its files are on this machine, or it has none of its own."""
        return self.find is None or self.locate(data_dir) is not None

    def locate(self, data_dir: str | Path | None = None) -> Path | None:
        """The folder on this machine that holds all its files, or None. ``data_dir`` as for ``load_dataset``."""
        folder = None if data_dir is None else user_path(data_dir)
        return None if self.find is None else self.find(folder)


_DATASETS: Registry[DatasetInfo] = Registry("data set")


def register_dataset(
    name: str, **info: Any
) -> Callable[[Callable[[DataRequest], Splits]], Callable[[DataRequest], Splits]]:
    """Put the decorated function on the list of data sets.

    Args:
        name: The name to load it by, without a colon, which no other data set has.
        info: The fields of `DatasetInfo`: ``title``, ``source`` and ``licence`` at least.

    Returns:
        A decorator that returns its function unchanged.

    Raises:
        InputError: The name is taken or has a colon in it.
    """
    if ":" in name:
        raise InputError(f'a data set cannot be called "{name}": what follows a colon is a path')

    def register(load: Callable[[DataRequest], Splits]) -> Callable[[DataRequest], Splits]:
        _DATASETS.add(name, DatasetInfo(name=name, load=load, **info))
        return load

    return register


def list_datasets() -> list[DatasetInfo]:
    """All data sets that ``load_dataset`` knows: first those with a name only, then those with a path."""
    return sorted(_registered().values(), key=lambda info: info.takes_path)


def find_dataset(spec: str) -> tuple[DatasetInfo, Path | None]:
    """The entry that ``spec``, ``"name"`` or ``"kind:PATH"``, names and the path that follows its colon.

    Raises:
        InputError: The name is not known (the error names the nearest), the path is missing, there is one too many, or
            it is in the home folder of a user who is not known.
    """
    name, colon, path = spec.partition(":")
    known = _registered()
    if name not in known:
        if spec and user_path(spec).exists():
            kind = "folder" if user_path(spec).is_dir() else "npz"
            raise InputError(f'there is no data set "{spec}"; for the files at that path write "{kind}:{spec}"')
        raise unknown_name("data set", name, [info.spec for info in known.values()])
    info = known[name]
    if info.takes_path and not path:
        raise InputError(f'the data set "{name}" needs a path: write "{name}:PATH"')
    if colon and not info.takes_path:
        raise InputError(f'the data set "{name}" takes no path: write "{name}" instead of "{spec}"')
    return info, user_path(path) if path else None


def _registered() -> Registry[DatasetInfo]:
    """The list, with the data sets that come with torchcaps on it."""
    import torchcaps.datasets.sources  # noqa: F401  imported for what it registers

    return _DATASETS


@checked
def load_dataset(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    image_size: Pixels | tuple[Pixels, Pixels] | None = None,
    validation_size: int | None = None,
    validation: ValidationSplit = "random",
    seed: Seed = 0,
    download: bool = True,
    limit_train: Count | None = None,
    limit_test: Count | None = None,
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
    request = DataRequest(
        path=path,
        data_dir=None if data_dir is None else user_path(data_dir),
        image_size=(image_size, image_size) if isinstance(image_size, int) else image_size,
        download=download,
        limit_test=limit_test,
        skip_damaged=skip_damaged,
    )
    splits = info.load(request)
    if splits.validation is None:
        count = _validation_size(spec, splits, validation_size, info.validation_size)
        learned, chosen = _divide(splits.train, count, validation, seed, limit_train)
    else:
        if validation_size is not None or validation != "random":
            name = "validation_size" if validation_size is not None else "validation"
            raise InputError(f"{spec} has validation images of its own; leave {name} out")
        learned, chosen = _at_most(splits.train, limit_train), splits.validation
    missing = (~torch.isin(torch.arange(len(splits.class_names)), learned.labels)).nonzero()
    if len(missing):
        raise InputError(
            f"{spec}: the first {len(learned)} training images have none of the class "
            f'"{splits.class_names[missing[0]]}"; take more of them'
        )
    train, held, test = splits.as_train(learned), splits.as_validation(chosen), _at_most(splits.test, limit_test)
    if (size := request.image_size) is not None:
        train, held, test = train.resize(size), held.resize(size), test.resize(size)
    return Dataset(spec, train, held, test, splits.class_names, splits.skipped)


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
