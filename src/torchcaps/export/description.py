"""What an exported file says of its network. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torchcaps._version import __version__
from torchcaps.errors import InputError, shown
from torchcaps.image_spec import ImageSpec

PREFIX = "torchcaps."
"""What the names of all entries begin with."""
LATER = ("preparation", "calibration", "task")
"""Entries that files of earlier versions have not."""


@dataclass(frozen=True, kw_only=True)
class Description(ImageSpec):
    """What must be known to use an exported network: it stands in the file, each field as JSON under its own name."""

    preset: str | None = None
    """The preset that the network started from, if known."""
    version: str = __version__
    """Of the torchcaps that wrote the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kinds in (("preset", str | None), ("version", str)):
            if not isinstance(getattr(self, name), kinds):
                raise InputError(f"{name} cannot be {shown(getattr(self, name))}")

    def to_metadata(self) -> dict[str, str]:
        """Entries for a file's metadata."""
        return {PREFIX + name: json.dumps(value, ensure_ascii=False) for name, value in self.to_dict().items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """The inverse of :meth:`to_metadata`; entries of others are passed over.

        Raises:
            InputError: An entry is missing, or does not fit.
        """
        values: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            if PREFIX + name not in metadata:
                if name in LATER:
                    continue
                raise InputError(f"it has no entry {PREFIX}{name}")
            try:
                values[name] = json.loads(metadata[PREFIX + name])
            except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, or lists too deep in lists
                raise InputError(f"its entry {PREFIX}{name} is not valid JSON") from None
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"its entry {PREFIX}{error}") from None
