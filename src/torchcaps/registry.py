"""What users may add to by name: presets, data sets and tables each lie in a registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from torchcaps.errors import InputError, unknown_name

EntryT = TypeVar("EntryT")


class Registry(dict[str, EntryT]):
    """Entries of one kind by their names, in the order in which they were added.

    Args:
        kind: What an entry is, in messages, e.g. ``"preset"``.
        entries: Those it begins with.

    Raises:
        InputError: ``registry[name]`` without such an entry; the nearest name is given.
    """

    def __init__(self, kind: str, entries: Mapping[str, EntryT] | None = None) -> None:
        super().__init__(entries or {})
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        raise unknown_name(self.kind, name, self)

    def add(self, name: str, entry: EntryT) -> None:
        """Add an entry; raise InputError if the name is taken."""
        if name in self:
            raise InputError(f'there is a {self.kind} "{name}" already; choose another name')
        self[name] = entry
