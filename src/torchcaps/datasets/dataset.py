"""A data set as its loading function returns it (`Splits`), and split in three parts (`Dataset`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torchcaps.checks import check
from torchcaps.datasets.image_set import Images, ImageSet, for_task
from torchcaps.datasets.splits import FILE, GROUP, check_apart, groups_of, read_groups
from torchcaps.errors import InputError, shown
from torchcaps.files import groups_in_paths
from torchcaps.ranges import IGNORED, Components
from torchcaps.tasks import Task, TaskName, find_task, widest_task
from torchcaps.words import counted

SLOTS = 7
"""Outputs of a network for pictures without labels, as for CLEVR6 in slot attention."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Naming:
    """Names of what is in the images and the targets of a data set.

    Args:
        has_names: False if the source names no classes, so that ``class_names`` are their numbers.
        colours: Colour of each class in masks, such as ``#00ff00``; None: the masks hold numbers.
        channels: Names of the channels of each image; None: they have no names.
    """

    has_names: bool = True
    colours: tuple[str, ...] | None = None
    channels: tuple[str, ...] | None = None

    @property
    def naming(self) -> dict[str, Any]:
        """These fields by name, for another data set with the same images."""
        return {each.name: getattr(self, each.name) for each in fields(Naming)}


@dataclass(frozen=True, eq=False)
class Splits(Naming):
    """Images that the loading function of a data set returns.

    Args:
        train: All training images in a fixed order; ``load_dataset`` takes the validation images from them. None: the
            source has only images to test on, on which networks can be evaluated.
        test: Test images, which do not depend on the user's seed. None: a fixed stratified fifth of the training images
            becomes the test set.
        class_names: Name of each label.
        validation: Validation images, if the source provides them separately.
        as_train: Turns the images left for training into the training part.
        as_validation: Turns the images held out into the validation part or the test part.
        finish: Turns all parts, by their names, into those that a network sees, and returns the components in place of
            their bands, if there are any; None: they stay as they are.
        skipped: A sentence for each image that was left out, with the reason.
        task: Name of the task of the labels; None: the form of the labels decides.
    """

    train: ImageSet | None
    test: ImageSet | None
    class_names: tuple[str, ...]
    validation: ImageSet | None = None
    as_train: Callable[[ImageSet], Images] = lambda images: images
    as_validation: Callable[[ImageSet], ImageSet] = lambda images: images
    finish: Callable[[Mapping[str, ImageSet]], tuple[dict[str, ImageSet], Components | None]] | None = None
    skipped: tuple[str, ...] = ()
    task: TaskName | None = None

    @classmethod
    def of(cls, sets: Mapping[str, ImageSet], class_names: tuple[str, ...], **options: Any) -> Splits:
        """Return the sets by the names of their parts, ``"train"``, ``"test"`` and ``"validation"``."""
        return cls(sets.get("train"), sets.get("test"), class_names, sets.get("validation"), **options)

    @classmethod
    def of_pictures(cls, pictures: Mapping[str, ImageSet], task: TaskName | None, **options: Any) -> Splits:
        """Return pictures by part with unknown masks in place of labels, for a network of :data:`SLOTS` slots."""
        sets = {
            part: replace(each, labels=each.images.new_full(each.images[:, 0].shape, IGNORED, dtype=torch.uint8))
            for part, each in pictures.items()
        }
        return cls.of(sets, tuple(map(str, range(SLOTS))), task=task, has_names=False, **options)

    @property
    def parts(self) -> dict[str, ImageSet]:
        """The parts that the source has, by name."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {part: images for part, images in parts.items() if images is not None}

    def for_task(self, task: TaskName | None, where: str) -> Splits:
        """Return the same images with labels converted to the form of a task.

        Args:
            task: Name of the task; None: the task of the splits.
            where: Name of the data set, which begins errors.

        Raises:
            InputError: The labels do not fit the task.
        """
        own = widest_task(images.task for images in self.parts.values())
        target = find_task(task or self.task or own.name)
        if own.name == target.name:
            return replace(self, task=target.name)
        changed: Any = {
            part: for_task(images, target, len(self.class_names), f"{where}: {part} labels")
            for part, images in self.parts.items()
        }
        return replace(self, task=target.name, **changed)

    def with_names(self, kind: str, names: Mapping[str, Sequence[str]]) -> Splits:
        """Return the same images with a text of this kind for each, by part."""
        changed: dict[str, Any] = {}
        for part, texts in names.items():
            images = self.parts[part]
            changed[part] = replace(images, names={**images.names, kind: tuple(texts)})
        return replace(self, **changed)

    def in_groups(self, group: str, where: str) -> Splits:
        """Return the same images with the name of the group of each, which no split divides.

        Args:
            group: Name of a factor of the images, or a regular expression for the paths of their files, unless the
                loading function has set the groups.
            where: Name of the data set, which begins errors.

        Raises:
            InputError: The images have neither, a path does not match, or a group has images in two parts.
        """
        groups = dict[str, Sequence[str]]()
        for part, images in self.parts.items():
            if GROUP in images.names:
                groups[part] = images.names[GROUP]
            elif group in images.factors:
                groups[part] = read_groups(images.factors[group], len(images), f"{where}: {group}")
            elif FILE in images.names:
                groups[part] = groups_in_paths(images.names[FILE], group)
            else:
                factors = f"; its factors are {', '.join(images.factors)}" if images.factors else ""
                raise InputError(f"{where} has nothing called {shown(group)} to group images by (--group){factors}")
        check_apart(groups, where)
        return self.with_names(GROUP, groups)


@dataclass(frozen=True, eq=False)
class Part(Naming):
    """Images of a data set on which a network is evaluated.

    Args:
        name: Name by which the data set was loaded.
        words: Description of the images, such as ``"test images of mnist"``.
        images: The images.
        class_names: Name of each label.
        task_name: Name of the task of the labels; None: the form of the labels decides.
        note: Sentence about the choice of the images; None if there is nothing to say.
    """

    name: str
    words: str
    images: ImageSet
    class_names: tuple[str, ...]
    task_name: TaskName | None = None
    note: str | None = None

    @property
    def parts(self) -> dict[str, ImageSet]:
        """The images, by the name of their field."""
        return {"images": self.images}

    @property
    def task(self) -> Task:
        """Task of the labels."""
        return self.images.task if self.task_name is None else find_task(self.task_name, self.images.num_objects)


@dataclass(frozen=True, eq=False)
class Dataset(Naming):
    """Data set in three parts without common images.

    Args:
        name: Name by which it was loaded, e.g. ``"mnist"`` or ``"folder:photos"``.
        train: Training images; a `PairSet` makes them when they are needed.
        validation: Images that choose the best epoch and the settings.
        test: Images for the final result; nothing is ever chosen by them.
        class_names: Name of each label, in the order of the labels, all different.
        skipped: A sentence for each image that was left out, with the reason.
        task_name: Name of the task of the labels; None: the form of the labels decides.
        pca: Components in place of the bands of a scene; None: the bands.

    Raises:
        InputError: The parts differ in image shape or in the number of objects, a label has no class name, two classes
            have the same name, or a name is not UTF-8.
    """

    name: str
    train: Images
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    task_name: TaskName | None = None
    pca: Components | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"name": str, "train": Images, "validation": ImageSet, "test": ImageSet}
        for field, kind in (kinds | {"class_names": tuple, "skipped": tuple}).items():
            check(f"Dataset: {field}", getattr(self, field), kind)
        for n, name in enumerate(self.class_names):
            if name in self.class_names[:n]:
                raise InputError(f'{self.name}: two classes are called "{name}"; give them different names')
            if any("\ud800" <= letter <= "\udfff" for letter in name):  # results are written as UTF-8
                raise InputError(f"{self.name}: the class {name!a} has a name that is not UTF-8; rename it")
        form = (self.train.in_shape, self.train.num_objects)
        for part in ("train", "validation", "test"):
            images = getattr(self, part)
            if (images.in_shape, images.num_objects) != form:
                raise InputError(
                    f"{self.name}: the {part} images are {images.in_shape} (channels, height, width) with "
                    f"{counted(images.num_objects, 'object')} each, but the training images {form[0]} with {form[1]}"
                )
            self.task.check_targets(images.labels, self.num_classes, f"{self.name}: a {part} label")

    @property
    def parts(self) -> dict[str, Images]:
        """The three parts by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def task(self) -> Task:
        """Task of the labels."""
        if self.task_name is not None:
            return find_task(self.task_name, self.num_objects)
        return widest_task((self.train.task, self.validation.task, self.test.task))

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        return self.train.in_shape

    @property
    def num_classes(self) -> int:
        """Number of classes: J."""
        return len(self.class_names)

    @property
    def num_objects(self) -> int:
        """Number of objects in every image: P."""
        return self.train.num_objects

    @property
    def num_groups(self) -> dict[str, int] | None:
        """Number of groups in each part, by its name; None if the images have no groups."""
        numbers = {part: groups_of(images.names) for part, images in self.parts.items()}
        return {part: len(each.unique()) for part, each in numbers.items() if each is not None} or None
