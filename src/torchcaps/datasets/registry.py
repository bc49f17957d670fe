"""The list of data sets: a decorated function makes one listed, loadable by name and tested.

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

from torchcaps.checks import checked
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError
from torchcaps.files import user_path
from torchcaps.parts import Registry
from torchcaps.tasks import TaskName


@dataclass(frozen=True)
class DataRequest:
    """The request that a data set's function answers: options of :func:`load_dataset`, as far as it needs them."""

    path: Path = Path()
    """The text after the colon of ``kind:PATH``."""
    data_dir: Path | None = None
    """The folder that the user named; None for the usual places."""
    image_size: tuple[int, int] | None = None
    """Height and width to bring images to, pixels. A function resizes files of several sizes; others are resized."""
    limit_test: int | None = None
    """A function that makes its test images may make only the first so many."""
    skip_damaged: bool = False
    scale: tuple[float, float] | None = None
    """The numbers that become 0 and 1, of pixels that are neither uint8 nor 0..1; None for the rules of the dtype."""
    task: TaskName | None = None
    """The task that the targets are for; None if the form of the targets decides."""


Load = Callable[[DataRequest], Splits]


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of the list of data sets; sizes, shape and names are None where its files decide.

    Args:
        name: Its name for ``load_dataset``.
        title: Its title in lists.
        source: Its address or paper.
        licence: The terms of its images.
        load: The function that reads it.
        num_train: Training images, with those of the validation split.
        num_test: Test images.
        in_shape: (C, H, W) of the images.
        class_names: The names of the classes.
        num_objects: How many objects are in an image.
        takes_path: Whether it is loaded as ``name:PATH``.
        can_skip_damaged: Whether its image files may be damaged and left out.
        takes_scale: Whether its pixels may have another range than that of their dtype.
        validation_size: How many validation images to take by default; None for a tenth of the training images.
        preparation: How its images were made of drawings, as photos of drawings can be made; None for other images.
        find: Finds the folder of its files in ``data_dir``, or in the usual places for None; None for a data set
            without files of its own.
    """

    name: str
    title: str
    source: str
    licence: str
    load: Load = field(repr=False)
    num_train: int | None = None
    num_test: int | None = None
    in_shape: tuple[int, int, int] | None = None
    class_names: tuple[str, ...] | None = None
    num_objects: int = 1
    takes_path: bool = False
    can_skip_damaged: bool = False
    takes_scale: bool = False
    validation_size: int | None = None
    preparation: Preparation | None = None
    find: Callable[[Path | None], Path | None] | None = field(default=None, repr=False)

    @property
    def spec(self) -> str:
        """The text that loads it: ``"mnist"``, ``"folder:PATH"``."""
        return f"{self.name}:PATH" if self.takes_path else self.name

    def is_downloaded(self, data_dir: str | Path | None = None) -> bool:
        """Whether it loads without a download: its files are on this machine, or it has none of its own."""
        return self.find is None or self.locate(data_dir) is not None

    def locate(self, data_dir: str | Path | None = None) -> Path | None:
        """The folder on this machine that holds all its files, or None. ``data_dir`` as for ``load_dataset``."""
        folder = None if data_dir is None else user_path(data_dir)
        return None if self.find is None else self.find(folder)


_DATASETS: Registry[DatasetInfo] = Registry("data set")


@checked
def register_dataset(name: str, **info: Any) -> Callable[[Load], Load]:
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

    def register(load: Load) -> Load:
        _DATASETS.add(name, DatasetInfo(name=name, load=load, **info))
        return load

    return register
