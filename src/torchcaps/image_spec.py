"""What must be known of a network's images: it lies beside the weights, and in an exported file. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from torchcaps.analysis.calibration import Calibration
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError, shown
from torchcaps.ranges import COUNT, image_shape
from torchcaps.tasks import TASKS, TaskName

LARGEST_IMAGE = 2**22
"""Values C·H·W of an image at most."""


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """What a network takes, and what its answers mean.

    Raises:
        InputError: A value does not fit; files from elsewhere may hold anything.
    """

    in_shape: tuple[int, int, int]
    """Images (C, H, W)."""
    class_names: tuple[str, ...]
    """The name of each class."""
    objects: int = 1
    """Objects in an image."""
    fit: Literal["pad", "stretch"] = "pad"
    """How image files are brought to size, as those of the training were."""
    preparation: Preparation | None = None
    """How photos of drawings are prepared; None where images are of something else."""
    calibration: Calibration | None = None
    """What is usual for the network; None where it was not measured."""
    task: TaskName = "classes"
    """What is predicted: the class of an image, its labels, or numbers; ``class_names`` are the names of these."""

    def __post_init__(self) -> None:
        names = self.class_names if isinstance(self.class_names, tuple) else ()
        fits = {
            "in_shape": math.prod(image_shape(self.in_shape)) <= LARGEST_IMAGE,
            "class_names": bool(names) and all(isinstance(each, str) for each in names),
            "objects": self.objects in COUNT and self.objects <= len(names),
            "fit": self.fit in ("pad", "stretch"),
            "preparation": isinstance(self.preparation, Preparation | None),
            "calibration": isinstance(self.calibration, Calibration | None),
            "task": isinstance(self.task, str) and self.task in TASKS,
        }
        for name, fitting in fits.items():
            if not fitting:
                raise InputError(f"{name} cannot be {shown(getattr(self, name))}")
        if len(names) < TASKS[self.task].min_outputs:
            raise InputError(f"class_names cannot be {shown(names)}")

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; what has a default may be missing, and other entries are passed over."""
        given: dict[str, Any] = {"in_shape": None, "class_names": None}
        given |= {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name, held in given.items():
            kind: Any = {"preparation": Preparation, "calibration": Calibration}.get(name)
            if isinstance(held, list):
                given[name] = tuple(held)
            elif kind is not None and isinstance(held, Mapping):
                fields = kind.__dataclass_fields__
                if held.keys() >= {field for field in fields if fields[field].default is not None}:
                    given[name] = kind(**{field: held[field] for field in fields if field in held})
        return cls(**given)
