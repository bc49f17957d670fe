"""A data set: as its function returns it (`Splits`), and in its parts (`Dataset`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchcaps.checks import check
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.pairs import PairSet
from torchcaps.errors import InputError
from torchcaps.tasks import Task, TaskName, find_task, widest_task


@dataclass(frozen=True, eq=False)
class Splits:
    """The images that a data set's function returns.

    Args:
        train: All training images in their own fixed order; ``load_dataset`` takes the validation images from them.
        test: The test images, the same whatever the user's seed; None sets a fixed stratified fifth of the training
            images aside.
        class_names: The name of each label.
        validation: Validation images, only where the source keeps them apart from the others.
        as_train: Makes the training part of the images that are left when the validation images are taken out.
        as_validation: Makes the validation part of the images that were taken out, and the test part of those set
            aside.
        skipped: What is wrong with each image that was left out, a sentence each.
        task: The task that the labels are for; None if their form decides.
    """

    train: ImageSet
    test: ImageSet | None
    class_names: tuple[str, ...]
    validation: ImageSet | None = None
    as_train: Callable[[ImageSet], ImageSet | PairSet] = lambda images: images
    as_validation: Callable[[ImageSet], ImageSet] = lambda images: images
    skipped: tuple[str, ...] = ()
    task: TaskName | None = None

    def for_task(self, task: TaskName | None, where: str) -> Splits:
        """Return the same images with labels in the form of a task.

        Args:
            task: The name of the task; None for the splits' own.
            where: The data set's name, with which errors begin.

        Raises:
            InputError: The labels do not fit the task.
        """
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sets = {part: images for part, images in parts.items() if images is not None}
        own = widest_task(images.task for images in sets.values())
        wanted = find_task(task or self.task or own.name)
        if own.name == wanted.name:
            return replace(self, task=wanted.name)

        def brought(part: str, images: ImageSet) -> ImageSet:
            labels = wanted.bring(images.labels, len(self.class_names), f"{where}: {part} labels")
            return replace(images, labels=labels)

        changed: dict[str, Any] = {part: brought(part, images) for part, images in sets.items()}
        return replace(self, task=wanted.name, **changed)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in its three parts, no image in two of them.

    Args:
        name: The name that it was loaded by, e.g. ``"mnist"`` or ``"folder:photos"``.
        train: Images to learn from; a `PairSet` makes them when they are needed.
        validation: Images that choose the best epoch and the settings.
        test: Images for the one figure at the end; nothing is ever chosen by them.
        class_names: The name of each label, in the order of the labels, no two alike.
        skipped: What is wrong with each image that was left out, a sentence each.
        task_name: The task that the labels are for; None if their form decides.

    Raises:
        InputError: The parts differ in image shape or in the number of objects, a label has no class name, two classes
            have the same name, or a name is not UTF-8.
    """

    name: str
    train: ImageSet | PairSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    task_name: TaskName | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"name": str, "train": ImageSet | PairSet, "validation": ImageSet, "test": ImageSet}
        for field, kind in (kinds | {"class_names": tuple, "skipped": tuple}).items():
            check(f"Dataset: {field}", getattr(self, field), kind)
        for n, name in enumerate(self.class_names):
            if name in self.class_names[:n]:
                raise InputError(f'{self.name}: two classes are called "{name}"; each needs a name of its own')
            if any("\ud800" <= letter <= "\udfff" for letter in name):  # no result could be written by it
                raise InputError(f"{self.name}: the class {name!a} has a name that is not UTF-8; rename it")
        form = (self.train.in_shape, self.train.num_objects)
        for part in ("train", "validation", "test"):
            images = getattr(self, part)
            if (images.in_shape, images.num_objects) != form:
                raise InputError(
                    f"{self.name}: the {part} images are {images.in_shape} (channels, height, width) with "
                    f"{images.num_objects} objects each, but the training images {form[0]} with {form[1]}"
                )
            self.task.check_targets(images.labels, self.num_classes, f"{self.name}: a {part} label")

    @property
    def task(self) -> Task:
        """The task that the labels are for."""
        if self.task_name is not None:
            return find_task(self.task_name, self.num_objects)
        return widest_task((self.train.task, self.validation.task, self.test.task))

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image: (C, H, W)."""
        return self.train.in_shape

    @property
    def num_classes(self) -> int:
        """How many classes there are: J."""
        return len(self.class_names)

    @property
    def num_objects(self) -> int:
        """How many objects are in every image: P."""
        return self.train.num_objects
