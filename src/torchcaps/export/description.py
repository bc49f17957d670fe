"""Description of a network inside an exported file. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torchcaps._version import __version__
from torchcaps.errors import InputError, shown
from torchcaps.files import one_sentence
from torchcaps.training.image_spec import ImageSpec

ENTRY = "torchcaps"
"""Name of the metadata entry in a file."""


@dataclass(frozen=True, kw_only=True)
class Description(ImageSpec):
    """Facts needed to use an exported network, stored in the file as JSON."""

    preset: str | None = None
    """Preset of the network, if known."""
    version: str = __version__
    """Version of torchcaps that wrote the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kinds in (("preset", str | None), ("version", str)):
            if not isinstance(getattr(self, name), kinds):
                raise InputError(f"{name} cannot be {shown(getattr(self, name))}")

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata entry for a file."""
        return {ENTRY: json.dumps(self.to_dict(), ensure_ascii=False)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Invert :meth:`to_metadata`; entries of other programs are ignored.

        Raises:
            InputError: The entry is missing or invalid.
        """
        if ENTRY not in metadata:
            raise InputError(f"it has no entry {ENTRY}")
        with one_sentence(f"its entry {ENTRY} is not valid JSON"):
            values = json.loads(metadata[ENTRY])
        if not isinstance(values, dict):
            raise InputError(f"its entry {ENTRY} is not the description of a network")
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"its entry {ENTRY} does not fit: {error}") from None
