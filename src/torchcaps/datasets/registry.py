"""Registry of data sets. A decorated function is listed, loadable by name and tested.

@register_dataset("blobs", title="Blobs", source="drawn here", licence="MIT")
def load_blobs(request: DataRequest) -> Splits:
    ...
    return Splits(train, test, class_names=("round", "square"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchcaps.checks import checked
from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError
from torchcaps.files import user_path
from torchcaps.parts import Registry
from torchcaps.ranges import Components, Pages
from torchcaps.tasks import TaskName, find_task

OPTIONS_OF_PIXELS = ("scale", "image_size", "pages")
FEATURES_STAY = "holds features, which are no images and keep their values"
"""Options that features refuse, and why."""
READING = ("scale", "pages", "spacing", "window", "stride", "pca")
"""Options that a run keeps, to read other files as its own."""
OPTIONS = ("skip_damaged", *READING)
"""Options that not every data set takes."""


@dataclass(frozen=True)
class DataRequest:
    """Options of :func:`load_dataset` for the loading function of a data set."""

    path: Path = Path()
    """Text after the colon of ``kind:PATH``."""
    data_dir: Path | None = None
    """Folder that the user named; None: the usual folders."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize to. Only a function whose files differ in size must resize them itself."""
    limit_test: int | None = None
    """Largest number of test images; a function that generates them may stop there."""
    skip_damaged: bool = False
    scale: tuple[float, float] | None = None
    """Pixel values that become 0 and 1, if pixels are neither uint8 nor 0..1; None: by the dtype."""
    task: TaskName | None = None
    """Task of the targets; None: the form of the targets decides."""
    part: str | None = None
    """The only part to use, ``"test"``, or ``"all"``: nothing is trained on the images. None: all parts."""
    pages: Pages | None = None
    """Meaning of the pages of image files; None: files of several pages are refused."""
    group: str | None = None
    """Column, array or factor with the group of each image, or a regular expression for the paths of their files."""
    patch: int | tuple[int, ...] | None = None
    """Side of the patches around the pixels of a scene. Patches of images with masks are taken later."""
    window: int | None = None
    """Steps of the windows that sequences are cut into; None: whole sequences."""
    stride: int | None = None
    """Steps between the beginnings of two windows; None: the steps of a window."""
    spacing: tuple[float, ...] | None = None
    """Distances of voxels to which volumes are resampled, mm; None: their own."""
    pca: int | Components | None = None
    """Number of principal components that replace the bands of a scene, or components of another scene; None: the
    bands."""

    @property
    def wants_masks(self) -> bool | None:
        """True if the task needs a mask for each image, False for tasks without masks; None if the data decide."""
        return None if self.task is None else find_task(self.task).has_masks

    def refuse(self, options: Sequence[str], why: str) -> None:
        """Raise InputError if one of these options is set; ``why`` follows the path."""
        for option in options:
            if getattr(self, option) is not None:
                typed = f"{option} (--{option.replace('_', '-')})"
                raise InputError(f"{self.path} {why}; leave {typed} out")


Load = Callable[[DataRequest], Splits]


@dataclass(frozen=True)
class DatasetInfo:
    """Entry of the registry of data sets. Sizes, shape and class names are None if the files decide.

    Args:
        name: Name for ``load_dataset``.
        title: Title in lists.
        source: Address or paper.
        licence: Licence of the images.
        load: Function that reads the data set.
        num_train: Number of training images, including the validation images.
        num_test: Number of test images.
        in_shape: Shape of an image (C, H, W).
        class_names: Names of the classes.
        num_objects: Number of objects in an image.
        takes_path: True if it is loaded as ``name:PATH``.
        options: Options of ``load_dataset`` that it takes, among :data:`OPTIONS`.
        validation_size: Default number of validation images; None: a tenth of the training images.
        preparation: Preprocessing that turned drawings into its images, applied to photos as well; None for other
            images.
        find: Function that finds the folder of the files, in ``data_dir`` or, for None, in the usual folders; None for
            a data set without files.
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
    options: Sequence[str] = ()
    validation_size: int | None = None
    preparation: Preparation | None = None
    find: Callable[[Path | None], Path | None] | None = field(default=None, repr=False)

    @property
    def spec(self) -> str:
        """Text that loads the data set: ``"mnist"``, ``"folder:PATH"``."""
        return f"{self.name}:PATH" if self.takes_path else self.name

    def is_downloaded(self, data_dir: str | Path | None = None) -> bool:
        """Return True if it loads without a download: its files are on this machine, or it has no files."""
        return self.find is None or self.locate(data_dir) is not None

    def locate(self, data_dir: str | Path | None = None) -> Path | None:
        """Return the folder on this machine with all files, or None. ``data_dir`` as for ``load_dataset``."""
        folder = None if data_dir is None else user_path(data_dir)
        return None if self.find is None else self.find(folder)


_DATASETS: Registry[DatasetInfo] = Registry("data set")


@checked
def register_dataset(name: str, **info: Any) -> Callable[[Load], Load]:
    """Register the decorated function as a data set.

    Args:
        name: Unique name to load it by, without a colon.
        info: Fields of `DatasetInfo`: ``title``, ``source`` and ``licence`` at least.

    Returns:
        A decorator that returns its function unchanged.

    Raises:
        InputError: The name is taken or contains a colon.
    """
    if ":" in name:
        raise InputError(f'a data set cannot be called "{name}", because a path follows a colon')

    def register(load: Load) -> Load:
        _DATASETS.add(name, DatasetInfo(name=name, load=load, **info))
        return load

    return register
