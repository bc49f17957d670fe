"""What an exported file says of its network. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torchcaps._version import __version__
from torchcaps.errors import InputError, shown
from torchcaps.image_spec import ImageSpec

ENTRY = "torchcaps"
"""The name of a file's entry."""


@dataclass(frozen=True, kw_only=True)
class Description(ImageSpec):
    """What must be known to use an exported network: it stands in the file as JSON."""

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
        """An entry for a file's metadata."""
        return {ENTRY: json.dumps(self.to_dict(), ensure_ascii=False)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """The inverse of :meth:`to_metadata`; entries of others are passed over.

        Raises:
            InputError: The entry is missing, or does not fit.
        """
        if ENTRY not in metadata:
            raise InputError(f"it has no entry {ENTRY}")
        try:
            values = json.loads(metadata[ENTRY])
        except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, or lists too deep in lists
            raise InputError(f"its entry {ENTRY} is not valid JSON") from None
        if not isinstance(values, dict):
            raise InputError(f"its entry {ENTRY} is no description of a network")
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"its entry {ENTRY} does not fit: {error}") from None
