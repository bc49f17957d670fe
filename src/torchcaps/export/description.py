"""What an exported file says of its network. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from torchcaps._version import __version__
from torchcaps.analysis.calibration import Calibration
from torchcaps.datasets.preparation import Preparation
from torchcaps.errors import InputError

PREFIX = "torchcaps."
"""What the names of all entries begin with."""
LARGEST_IMAGE = 2**22
"""Values C·H·W of an image at most."""


READERS: dict[str, Callable[[Any], Any]] = {
    "preparation": Preparation.from_json,
    "calibration": Calibration.from_json,
}
"""Entries that files of earlier versions have not, and what reads each from JSON."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What must be known to use an exported network: it stands in the file, each field as JSON under its own name."""

    in_shape: tuple[int, int, int]
    """Images (C, H, W)."""
    class_names: tuple[str, ...]
    """The name of each class."""
    preset: str | None = None
    """The preset that the network started from, if known."""
    objects: int = 1
    """Objects in an image."""
    fit: Literal["pad", "stretch"] = "pad"
    """How image files are brought to size, as those of the training were."""
    preparation: Preparation | None = None
    """How photos of drawings are prepared; None where images are of something else."""
    calibration: Calibration | None = None
    """What is usual for the network; None where it was not measured."""
    version: str = __version__
    """Of the torchcaps that wrote the file."""

    def to_metadata(self) -> dict[str, str]:
        """Entries for a file's metadata."""
        return {PREFIX + name: json.dumps(value, ensure_ascii=False) for name, value in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """The inverse of :meth:`to_metadata`; entries of others are passed over.

        Raises:
            InputError: An entry is missing, or does not fit.
        """
        values: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            try:
                values[name] = json.loads(metadata[PREFIX + name])
            except KeyError:
                if name in READERS:  # a file of an earlier version
                    values[name] = None
                    continue
                raise InputError(f"it has no entry {PREFIX}{name}") from None
            except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, or lists too deep in lists
                raise InputError(f"its entry {PREFIX}{name} is not valid JSON") from None
        shape, names = values["in_shape"], values["class_names"]
        fits = {
            "in_shape": isinstance(shape, list)
            and len(shape) == 3
            and all(type(size) is int and size > 0 for size in shape)  # True is an int too
            and math.prod(shape) <= LARGEST_IMAGE,
            "class_names": isinstance(names, list) and len(names) > 1 and all(isinstance(name, str) for name in names),
            "preset": values["preset"] is None or isinstance(values["preset"], str),
            "objects": type(values["objects"]) is int and values["objects"] > 0,
            "fit": values["fit"] in ("pad", "stretch"),
            "version": isinstance(values["version"], str),
        }
        for name, fitting in fits.items():
            if not fitting:
                raise InputError(f"its entry {PREFIX}{name} must not be {reprlib.repr(values[name])}")
        for name, read in READERS.items():
            values[name] = read(values[name])
        if values["objects"] > len(names):
            raise InputError(f"its entry {PREFIX}objects must be at most the number of classes, {len(names)}")
        return cls(**values | {"in_shape": tuple(shape), "class_names": tuple(names)})
