"""Typed fields: the dataclasses that describe networks, recipes and runs, checked, written as JSON, changed by name.

Nothing here imports torch, so that the command line can list every field at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.ranges import MOST_LAYERS
from torchcaps.registry import Registry


def hints_of(kind: type) -> Mapping[str, Any]:
    """The annotations of a dataclass, with the ranges of numbers."""
    return _evaluated(kind)


@functools.cache  # Python would evaluate their text anew each time; mypy takes no class of a dataclass for hashable
def _evaluated(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@dataclass(frozen=True)
class Described:
    """A frozen dataclass whose fields are checked against their annotations when one is made.

    A :class:`~torchcaps.ranges.Range` in an annotation says which numbers a field takes; the options of the command
    line show it, too. A field may hold another ``Described``: the whole is a tree, in which a name stands for the same
    thing wherever it stands, so that ``replace(config, {"num_iterations": 2})`` needs no path.
    """

    kind: ClassVar[str] = "field"
    alone: ClassVar[tuple[str, ...]] = ()
    """Fields that are given within their part only, as they mean nothing to all parts of their kind together."""
    heading: ClassVar[str] = ""
    """Over its fields in the help; a part without one stands under its choice and its name."""

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Fields and values, as JSON takes them."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
        """
        return replace(cls(), values)


@dataclass(frozen=True)
class Part(Described):
    """A ``Described`` of which there are several kinds to choose from, each registered under its name.

    A class without a ``name`` is a choice, such as that of the routing; :func:`register_part` adds kinds to it.
    """

    choice: ClassVar[str]
    """What is chosen: ``"routing"``."""
    name: ClassVar[str]
    """Which one this is: ``"dynamic"``."""

    def to_dict(self) -> dict[str, Any]:
        """The name, and fields and values, as JSON takes them."""
        return {"name": self.name} | super().to_dict()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """The inverse of :meth:`to_dict`; of a class that stands for a choice, of whichever kind ``"name"`` says."""
        part = _chosen(cls.choice, cls() if hasattr(cls, "name") else None, values, cls)
        assert isinstance(part, cls)
        return part


class UnknownField(InputError):  # noqa: N818  one kind of wrong input
    """A name that is no field.

    Args:
        what: What was looked up, in words.
        name: The name.
        known: All fields.
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(known)
        #: Parts that could be chosen and have such a field, by their choice and name.
        self.owners = [
            (part.choice, part.name) for part in all_parts() if part.choice in self.known and name in _names(part)
        ]
        if self.owners:
            owners = " and ".join(f'{choice} "{part}"' for choice, part in self.owners)
            super().__init__(f'there is no {what} "{name}" with the parts that are chosen; it belongs to {owners}')
        else:
            super().__init__(str(unknown_name(what, name, self.known)))


OF_ONES_OWN = "One of your own is loaded by --plugin FILE."
"""Said where a part is not known."""
PARTS: dict[str, Registry[type[Part]]] = {}
"""The kinds of each choice, by their names."""

PartT = TypeVar("PartT", bound=type[Part])


def register_part(part: PartT) -> PartT:
    """Add a kind of routing, transform, backbone, layer or network to those that can be chosen by name.

    Args:
        part: A dataclass that derives from the choice's class, with a class attribute ``name``.

    Raises:
        InputError: The name is taken; or it has no name, no ``build`` or a field without a default or of a type that
            no option can have; or a field has the name of another part's field but another type, or that of a field of
            the recipe or the run.
    """
    mine = hints_of(part)
    _check_part(part, mine)
    for other in all_parts():
        theirs = hints_of(other)
        for field in dataclasses.fields(part):
            if field.name in _names(other) and _kind_of(mine[field.name]) != _kind_of(theirs[field.name]):
                raise InputError(
                    f'{part.choice} "{part.name}" has a field {field.name} of another type than {other.choice} '
                    f'"{other.name}" has; a name stands for one thing in all parts, so choose another name'
                )
    PARTS.setdefault(part.choice, Registry(part.choice)).add(part.name, part)
    return part


def _check_part(part: type[Part], hints: Mapping[str, Any]) -> None:
    """Raise InputError unless a part has what all code asks of one."""
    where = f"{part.choice} {part.__name__}"
    if not isinstance(getattr(part, "name", None), str):
        raise InputError(f'{where} has no name; give it a class attribute, such as name: ClassVar[str] = "mine"')
    base = next(each for each in reversed(part.__mro__) if issubclass(each, Part) and hasattr(each, "choice"))
    if getattr(part, "build", None) is getattr(base, "build", None):
        raise InputError(f"{where} has no build; write one that returns its module")
    taken = {name: kind for kind in _wholes(Described) for name in _names(kind)}
    for field in dataclasses.fields(part):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where} has a field {field.name} without a default; give it one")
        if not _is_option(hints[field.name]):
            raise InputError(
                f"{where} has a field {field.name} of type {hints[field.name]}; an option is a bool, int, float or "
                "str, one of the names of a Literal, a tuple[…, ...] of one of these, or another part"
            )
        if field.name in taken:
            raise InputError(
                f"{where} has a field {field.name}, which is a {taken[field.name].kind} already; choose another name"
            )


def _wholes(kind: type[Described]) -> Iterator[type[Described]]:
    """What is no part of a network, but says how it is trained: the recipe and the run."""
    for each in kind.__subclasses__():
        if not issubclass(each, Part):
            if each.kind != Described.kind:
                yield each
            yield from _wholes(each)


def _is_option(hint: Any) -> bool:
    """Whether a field of this type can be read from text and from JSON."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return all(isinstance(arg, str) for arg in args)
    if origin is Annotated:
        return _is_option(args[0])
    if origin in (typing.Union, types.UnionType):
        return all(arg is type(None) or _is_option(arg) for arg in args)
    if origin is tuple:
        return len(args) == 2 and args[1] is Ellipsis and _is_option(args[0])
    return isinstance(hint, type) and (hint in (bool, int, float, str) or issubclass(hint, Described))


def all_parts() -> Iterator[type[Part]]:
    """Every registered kind of every choice."""
    for registry in PARTS.values():
        yield from registry.values()


ConfigT = TypeVar("ConfigT", bound=Described)


def replace(config: ConfigT, overrides: Mapping[str, Any], what: str | None = None) -> ConfigT:
    """A copy of ``config`` with other values in some fields, its own or those of its parts.

    A name that several parts have is changed in all of them. A part is chosen by its name, and keeps the values of
    fields that the new kind has too; a mapping changes the fields of that part only; False or None leave out a part
    that may be absent, and True puts it in.

    Args:
        config: What to start from.
        overrides: Values by the names of their fields.
        what: What a name stands for, in errors; what the configuration says of itself if None.

    Raises:
        InputError: An unknown field (the nearest known one is named), or a value that does not fit its field.
    """
    found: set[str] = set()
    changed: ConfigT = _replace(config, overrides, found)
    for name in overrides:
        if name not in found:
            raise UnknownField(what or config.kind, name, flat(changed))
    return changed


def _replace(config: Any, overrides: Mapping[str, Any], found: set[str]) -> Any:
    """A copy of a part, or of those in a tuple, with other values inside; any other value as it is."""
    if isinstance(config, tuple):
        return tuple(_replace(item, overrides, found) for item in config)
    if not isinstance(config, Described):
        return config
    hints = hints_of(type(config))
    values = {}
    for field in dataclasses.fields(config):
        value = before = getattr(config, field.name)
        if field.name in overrides:
            found.add(field.name)
            value = _chosen(field.name, before, overrides[field.name], hints[field.name])
            if isinstance(before, Described) and value is None:
                found |= set(flat(before))  # the fields of a part that is left out need not be left out, too
        values[field.name] = _replace(value, overrides, found)
    return dataclasses.replace(config, **values)


def _chosen(name: str, before: Any, given: Any, hint: Any) -> Any:
    """What a field is given, where it holds a part: a name, a mapping, True or False stand for one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not _kinds(hint) or isinstance(given, Described):
        return given
    if origin is tuple:
        befores = before if isinstance(before, tuple) else ()
        items = _sequence(name, given)
        padded = [*befores, *[None] * len(items)]
        return tuple(_chosen(name, old, new, args[0]) for old, new in zip(padded, items, strict=False))
    (held,) = _kinds(hint)
    if given is False and args:
        return None
    if given is True:
        return before if before is not None else held()
    if isinstance(given, str) and issubclass(held, Part):
        given = {"name": given}
    if not isinstance(given, Mapping):
        return given
    fields = dict(given)
    wanted = fields.pop("name", None)
    if issubclass(held, Part):
        kinds = PARTS[held.choice]
        if wanted is None:
            if before is None:
                raise InputError(f'{name} has no "name"; known: {", ".join(kinds)}')
        elif not isinstance(wanted, str):
            raise InputError(f"{name} must be a name, got {shown(wanted)}")
        elif wanted not in kinds:
            raise InputError(f"{unknown_name(held.choice, wanted, kinds)} {OF_ONES_OWN}")
        elif before is None or wanted != before.name:
            kept = [] if before is None else [key for key in _names(before) if key in _names(kinds[wanted])]
            before = kinds[wanted](**{key: getattr(before, key) for key in kept})
    return replace(held() if before is None else before, fields)


def is_choice(hint: Any) -> typing.TypeGuard[type[Part]]:
    """Whether a field of an annotation holds a part that is chosen by its name."""
    return isinstance(hint, type) and issubclass(hint, Part)


def is_part(hint: Any) -> bool:
    """Whether a field of an annotation holds a part, or may hold one."""
    return bool(_kinds(hint))


def _kinds(hint: Any) -> list[type[Described]]:
    """The class of the part that a field of an annotation holds, or may hold; none if it holds none."""
    kinds = typing.get_args(hint) or (hint,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Described)]


def _held(value: Any) -> list[Described]:
    """The parts that the value of a field holds."""
    return [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Described)]


def flat(config: Described) -> dict[str, Any]:
    """Every field of a configuration and its parts by its name; a part stands by its own name.

    Where parts have a field of the same name but different values, the value is a tuple of them, in their order.
    """
    values: dict[str, list[Any]] = {}
    _collect(config, values)
    return {
        name: found[0] if all(each == found[0] for each in found) else tuple(found) for name, found in values.items()
    }


def own_parts(config: Described) -> list[str]:
    """The parts of a configuration that do not come with torchcaps: ``["routing mine"]``."""
    found = []
    for field in dataclasses.fields(config):
        for held in _held(getattr(config, field.name)):
            if isinstance(held, Part) and not type(held).__module__.startswith("torchcaps."):
                found.append(f"{held.choice} {held.name}")
            found += own_parts(held)
    return list(dict.fromkeys(found))


def tree(config_type: type[Described]) -> Iterator[tuple[type[Described], str, Any]]:
    """Every field that a configuration of a type may have, in whichever parts are registered.

    Args:
        config_type: The type; of a choice, all its kinds.

    Yields:
        The class that declares it, its name, and its annotation.
    """
    kinds: Iterable[type[Described]] = (config_type,)
    if is_choice(config_type) and not hasattr(config_type, "name"):
        kinds = PARTS[config_type.choice].values()
    for kind in kinds:
        hints = hints_of(kind)
        for name in _names(kind):
            if name in kind.alone:
                continue
            owner = next(each for each in kind.__mro__ if name in vars(each).get("__annotations__", {}))
            yield (owner if vars(owner).get("heading") else kind), name, hints[name]
            for held in _kinds(hints[name]):
                yield from tree(held)


def _collect(config: Described, values: dict[str, list[Any]]) -> None:
    hints = hints_of(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        held = _held(value)
        names = tuple(item.name for item in held if isinstance(item, Part))
        if not _kinds(hint):
            values.setdefault(field.name, []).append(value)
        elif names:
            values.setdefault(field.name, []).append(names if isinstance(value, tuple) else names[0])
        elif typing.get_args(hint):  # a part that may be absent
            values.setdefault(field.name, []).append(value is not None)
        for item in held:
            _collect(item, values)


def as_text(value: object) -> str:
    """A field's value as a person reads it, and types it: ``on``, ``none``, ``0.001``, ``512,1024``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(as_text, value)) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(config: Described | type[Described]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _kind_of(hint: Any) -> Any:
    """A type without its range."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _sequence(name: str, value: Any) -> list[Any] | tuple[Any, ...]:
    """``value``, a sequence of one thing for each layer."""
    if not isinstance(value, (tuple, list)):
        raise InputError(f"{name} must be a sequence, got {shown(value)}")
    if len(value) > MOST_LAYERS:
        raise InputError(f"{name} must have at most {MOST_LAYERS} entries, got {len(value)}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Described):
        return value.to_dict()
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _checked(name: str, value: Any, hint: Any) -> Any:
    """``value``, as its annotation wants it: ints become floats, lists tuples; anything else must fit already."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, allowed = args
        value = _checked(name, value, kind)
        allowed.check(name, value)
        return value
    if origin is Literal:
        if value not in args:
            raise InputError(f"{name} must be one of {', '.join(args)}, got {shown(value)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return value
        kinds = [arg for arg in args if arg is not type(None)]
        fitting = (arg for arg in kinds if isinstance(arg, type) and isinstance(value, arg))
        return _checked(name, value, next(fitting, kinds[0]))
    if origin is tuple:
        return tuple(_checked(name, item, args[0]) for item in _sequence(name, value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{name} must be of type {hint.__name__}, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be finite, got {value}")
    return value
