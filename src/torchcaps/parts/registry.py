"""The parts of each kind by their names, and the options that a part declares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.ranges import FROM_DATA

EntryT = TypeVar("EntryT")
Spec = str | Mapping[str, Any] | nn.Module | bool | None
"""Name, mapping or module of a part. `True`: the default part. `False`, `None`: no part, if it is optional."""
Tree = dict[str, Any]
"""Every option of a part, and of the parts inside it, by its name."""


class Registry(dict[str, EntryT]):
    """Entries of one kind, e.g. ``"preset"``, by their names, in the order in which they were added.

    Args:
        kind: Kind of the entries.
        home: Module that registers the entries of torchcaps itself, imported for a name that is still unknown.

    Raises:
        InputError: ``registry[name]``, if there is no such entry. The message suggests the nearest name.
    """

    def __init__(self, kind: str, home: str | None = None) -> None:
        super().__init__()
        self.kind, self.home = kind, home

    def __missing__(self, name: str) -> EntryT:
        if self.home is not None:
            importlib.import_module(self.home)
            if name in self:
                return self[name]
        raise InputError(f"{unknown_name(self.kind, name, self)} Load your own with --plugin FILE.")

    def add(self, name: str, entry: EntryT) -> None:
        """Add an entry; raise InputError if the name is taken."""
        if name in self:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise InputError(f'{article} {self.kind} "{name}" exists already; choose another name')
        self[name] = entry


KINDS = ("backbone", "primary", "transform", "routing", "layer", "decoder", "loss", "network", "optimizer")
HOMES = {
    "loss": "torchcaps.models.presets",
    "network": "torchcaps.models.presets",
    "optimizer": "torchcaps.training.recipe",
}
"""Modules that register the parts of a kind; ``torchcaps.nn`` registers all other kinds."""
PARTS: dict[str, Registry[type]] = {kind: Registry(kind, HOMES.get(kind, "torchcaps.nn")) for kind in KINDS}
"""The parts of each kind: ``PARTS["routing"]["dynamic"]``."""


@dataclass(frozen=True)
class Choice:
    """Mark an option that holds a part: ``Annotated[Spec, Choice("routing")]``; with ``many``, a sequence of parts."""

    kind: str
    many: bool = False
    optional: bool = False
    """The part may be left out."""


class Option(NamedTuple):
    """An argument of a constructor that has a default."""

    name: str
    default: Any
    hint: Any
    help: str
    choice: Choice | None
    """Kind of the parts that the option holds; None if it holds no parts."""


def part_of(cls: type) -> tuple[str, str]:
    """Return the kind and the name under which a class is registered; two empty texts if it is not."""
    kind, name = vars(cls).get("part", ("", ""))
    return kind, name


def find(kind: str, name: object) -> type:
    """Return the class of a part; raise InputError, with the nearest name, if there is none."""
    if not isinstance(name, str):
        importlib.import_module(HOMES.get(kind, "torchcaps.nn"))
        raise InputError(f'{kind} must have a "name", one of {", ".join(PARTS[kind])}, got {shown(name)}')
    return PARTS[kind][name]


def all_parts() -> Iterator[type]:
    """Iterate over the classes of all parts of all kinds."""
    for registry in PARTS.values():
        yield from registry.values()


def options(cls: type) -> Mapping[str, Option]:
    """Return the options of a part, or of settings, by their names."""
    return _options(cls)  # not cached itself, because mypy does not accept a dataclass as hashable


@functools.cache
def _options(cls: Any) -> Mapping[str, Option]:
    hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__, include_extras=True)
    help_texts = _help_texts(cls)
    described = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is not parameter.empty:
            hint = hints.get(name, Any)
            if FROM_DATA in typing.get_args(hint):
                continue
            choice = next((each for each in typing.get_args(hint) if isinstance(each, Choice)), None)
            described[name] = Option(name, parameter.default, hint, help_texts.get(name, ""), choice)
    return types.MappingProxyType(described)


def _help_texts(cls: type) -> dict[str, str]:
    """Return the ``Args:`` line of each argument, from the docstrings of a class and of its base classes.

    A part may describe an option in its own words, also if another part has an option of the same name.
    """
    described = {}
    for each in reversed(cls.__mro__):
        section = inspect.cleandoc(vars(each).get("__doc__") or "").partition("Args:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.split(r"\n(?=\S)", section)[0], re.M):
            described[name] = " ".join(re.sub(r":\w+:`~?([^`]*)`|`+", r"\1", text).split())
    return described
