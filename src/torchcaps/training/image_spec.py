"""Description of a network's images, stored beside the weights and in exported files. This file imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from torchcaps.analysis.calibration import Calibration
from torchcaps.analysis.certainty import Certainty
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError, shown
from torchcaps.ranges import COUNT, Components, Pages, is_scale, is_spacing, spatial_shape
from torchcaps.tasks import TASKS, TaskName

MAX_IMAGE_VALUES = 2**22
"""Largest C·H·W of an image."""


def _are_colours(values: object, count: int) -> bool:
    """Return True for ``count`` colours such as ``#00ff00``."""
    if not isinstance(values, tuple) or len(values) != count:
        return False
    return all(isinstance(each, str) and re.fullmatch("#[0-9a-f]{6}", each) for each in values)


def _are_components(values: object, count: int) -> bool:
    """Return True for a mean and ``count`` components, each a row with a finite number for each band."""
    rows = values if isinstance(values, tuple) and len(values) == count + 1 else ()
    numbers = [each for row in rows if isinstance(row, tuple) for each in row]
    finite = all(isinstance(each, float) and math.isfinite(each) for each in numbers)
    return finite and bool(rows) and len(numbers) == len(rows) * len(rows[0]) > 0 and len({*map(len, rows)}) == 1


def _are_texts(values: object, count: int) -> bool:
    """Return True for ``count`` different texts."""
    texts = values if isinstance(values, tuple) and all(isinstance(each, str) for each in values) else ()
    return len(set(texts)) == len(texts) == count


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """Shape and preparation of a network's input images, and the meaning of its outputs.

    Raises:
        InputError: A value has the wrong type or is out of range. Files may hold anything, so all values are checked.
    """

    in_shape: tuple[int, ...]
    """Images (C, H, W); for the task pixels patches (C, *S) of one to three axes."""
    class_names: tuple[str, ...]
    """Name of each class."""
    objects: int = 1
    """Number of objects in an image."""
    fit: Literal["pad", "stretch"] = "pad"
    """Way to resize image files, as for the training images: ``"pad"`` keeps their proportions."""
    preparation: Preparation | None = None
    """Preprocessing of photos of drawings; None if the images are not drawings."""
    calibration: Calibration | None = None
    """Thresholds of unsure answers; None if they were not measured."""
    certainty: Certainty | None = None
    """Probabilities and sets of classes, measured on validation images; None if they were not measured."""
    task: TaskName = "classes"
    """Task of the network; ``class_names`` are the names of its classes, labels or numbers."""
    scale: tuple[float, float] | None = None
    """Numbers that become 0 and 1, in all images that the network reads; None: by their data type, and in volumes the
    0.5th and the 99.5th percentile."""

    has_names: bool = True
    """False if ``class_names`` are only numbers, because the training data had no names."""

    pages: Pages | None = None
    """Meaning of the pages of image files; None: a file has one page."""

    window: int | None = None
    """Steps of the windows that sequences were cut into; None: whole sequences."""

    stride: int | None = None
    """Steps between the beginnings of two windows; None: the steps of a window."""

    pca: Components | None = None
    """Principal components of the training pixels of a scene in place of bands; None: the bands."""

    are_pixels: bool = True
    """False for numbers that no image file holds, such as sequences, spectra or components."""

    spacing: tuple[float, ...] | None = None
    """Distances of voxels to which volumes are resampled, mm; None: their own."""

    channels: tuple[str, ...] | None = None
    """Names of the channels of a subject, each in a file of its own; None: a file has all channels."""

    colours: tuple[str, ...] | None = None
    """Colour of each class in masks, such as ``#00ff00``; None: those of figures."""

    def __post_init__(self) -> None:
        names = self.class_names if isinstance(self.class_names, tuple) else ()
        known = isinstance(self.task, str) and self.task in TASKS
        axes = TASKS[self.task].spatial_axes if known else (2,)
        fits = {
            "in_shape": math.prod(spatial_shape(self.in_shape, axes)) <= MAX_IMAGE_VALUES,
            "class_names": bool(names) and all(isinstance(each, str) for each in names),
            "objects": self.objects in COUNT and self.objects <= len(names),
            "fit": self.fit in ("pad", "stretch"),
            "preparation": isinstance(self.preparation, Preparation | None),
            "calibration": isinstance(self.calibration, Calibration | None),
            "certainty": self.certainty is None
            or (isinstance(self.certainty, Certainty) and len(self.certainty.scores) == len(names)),
            "task": known,
            "has_names": isinstance(self.has_names, bool),
            "pages": self.pages in (None, "channels", "depth"),
            "window": self.window is None or self.window in COUNT,
            "stride": self.stride is None or self.stride in COUNT,
            "pca": self.pca is None or _are_components(self.pca, self.in_shape[0]),
            "are_pixels": isinstance(self.are_pixels, bool),
            "spacing": self.spacing is None or is_spacing(self.spacing),
            "channels": self.channels is None or _are_texts(self.channels, self.in_shape[0]),
            "colours": self.colours is None or _are_colours(self.colours, len(names)),
            "scale": self.scale is None or is_scale(self.scale),
        }
        for name, fitting in fits.items():
            if not fitting:
                raise InputError(f"{name} cannot be {shown(getattr(self, name))}")
        if len(names) < TASKS[self.task].output_range.least:
            raise InputError(f"class_names cannot be {shown(names)}")

    @property
    def takes_rows(self) -> bool:
        """True for a network of features or sequences, which gives one answer for each."""
        return len(self.in_shape) == 3 and self.in_shape[1] == 1 and not self.wants_masks

    @property
    def wants_masks(self) -> bool | None:
        """True for a task with a mask for each image, False without, and None for either."""
        return TASKS[self.task].has_masks

    def require_pixels(self, purpose: str) -> None:
        """Raise InputError if the network takes no pixels; ``purpose`` is the subject of the sentence."""
        if not self.are_pixels:
            raise InputError(
                f"{purpose} is for pixels of pictures, but this network takes other numbers, such as sequences or "
                "spectra; torchcaps predict reads those from .npz files with an array x, features or cube"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert :meth:`to_dict`. Missing entries take their defaults; unknown entries are ignored."""
        entries: dict[str, Any] = {"in_shape": None, "class_names": None}
        entries |= {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name, held in entries.items():
            kind: Any = {"preparation": Preparation, "calibration": Calibration, "certainty": Certainty}.get(name)
            if isinstance(held, list):
                entries[name] = tuple(tuple(each) if isinstance(each, list) else each for each in held)
            elif kind is not None and isinstance(held, Mapping):
                fields = kind.__dataclass_fields__
                if held.keys() >= {field for field in fields if fields[field].default is not None}:
                    entries[name] = kind(**{field: held[field] for field in fields if field in held})
        return cls(**entries)
