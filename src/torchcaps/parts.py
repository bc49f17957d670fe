"""Parts: what a network, and its training, is made of. Each is chosen by its name and declares its options once.

A part is a class that is registered under a name. An argument of its constructor *without* a default is a size, told by
the data. One *with* a default is an option: its annotation says its range, its ``Args:`` line is its help, and an
attribute of the same name holds its value. So options are checked, saved in config.json, read back, and set by their
names from Python and from the command line, and nothing is declared twice.

A part is written as its name, ``"dynamic"``, with the value of its first option if that is a text,
``"timm:resnet18"``, as a mapping, ``{"name": "dynamic", "leaky": True}``, or as the module itself. A tree is a mapping
in which every option of every part stands, as config.json holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self, TypeVar

from torch import nn

from torchcaps.checks import check, checked
from torchcaps.errors import InputError, shown, unknown_name

EntryT = TypeVar("EntryT")
ClassT = TypeVar("ClassT", bound=type)
Spec = str | Mapping[str, Any] | nn.Module | bool | None
"""How a part is written; True is the usual one, False and None leave out a part that may be absent."""
Tree = dict[str, Any]


class Registry(dict[str, EntryT]):
    """Entries of one kind, e.g. ``"preset"``, by their names, in the order in which they were added.

    Raises:
        InputError: ``registry[name]`` without such an entry; the nearest name is given.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        raise InputError(f"{unknown_name(self.kind, name, self)} One of your own is loaded by --plugin FILE.")

    def add(self, name: str, entry: EntryT) -> None:
        """Add an entry; raise InputError if the name is taken."""
        if name in self:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise InputError(f'there is {article} {self.kind} "{name}" already; choose another name')
        self[name] = entry


KINDS = ("backbone", "primary", "transform", "routing", "layer", "decoder", "loss", "network", "optimizer")
PARTS: dict[str, Registry[type]] = {kind: Registry(kind) for kind in KINDS}
"""The parts of each kind: ``PARTS["routing"]["dynamic"]``."""


@dataclass(frozen=True)
class Choice:
    """Marks an option that holds a part, ``Annotated[Spec, Choice("routing")]``, or a sequence of ``many``."""

    kind: str
    many: bool = False
    optional: bool = False
    """Whether the part may be left out."""


class Option(NamedTuple):
    """An argument of a constructor that has a default."""

    name: str
    default: Any
    hint: Any
    help: str
    choice: Choice | None
    """The kind of the parts that it holds, if it holds parts."""


@checked
def register(kind: str, name: str) -> Callable[[ClassT], ClassT]:
    """Add a class to the parts of a kind; the decorator of every part, one's own too.

    Args:
        kind: ``"backbone"``, ``"primary"``, ``"transform"``, ``"routing"``, ``"layer"``, ``"decoder"``, ``"loss"``,
            ``"network"`` or ``"optimizer"``.
        name: By which it is chosen.

    Raises:
        InputError: There is no such kind, or the name is taken; or an option has a type that no text can give, or the
            name of an option that stands for something else in another part.
    """
    if kind not in PARTS:
        raise unknown_name("kind of part", kind, PARTS)

    def add(cls: ClassT) -> ClassT:
        made: Any = cls
        made.__init__, made.part = checked(made.__init__), (kind, name)
        for option in options(cls).values():
            _check_option(kind, cls, option)
        PARTS[kind].add(name, cls)
        return cls

    return add


def part_of(cls: type) -> tuple[str, str]:
    """The kind and the name by which a class is registered."""
    kind, name = vars(cls).get("part", ("", ""))
    return kind, name


def find(kind: str, name: object) -> type:
    """The class of a part; raise InputError, with the nearest name, if there is none."""
    if not isinstance(name, str):
        raise InputError(f'{kind} must have a "name", one of {", ".join(PARTS[kind])}, got {shown(name)}')
    return PARTS[kind][name]


def options(cls: type) -> Mapping[str, Option]:
    """The options of a part, or of settings, by their names."""
    return _options(cls)  # mypy takes no class of a dataclass for hashable


@functools.cache
def _options(cls: Any) -> Mapping[str, Option]:
    hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__, include_extras=True)
    words = _words(cls)
    found = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is not parameter.empty:
            hint = hints.get(name, Any)
            choice = next((each for each in typing.get_args(hint) if isinstance(each, Choice)), None)
            found[name] = Option(name, parameter.default, hint, words.get(name, ""), choice)
    return types.MappingProxyType(found)


def _words(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of those that it derives from say of each argument, on one line each."""
    found = {}
    for each in reversed(cls.__mro__):
        section = inspect.cleandoc(vars(each).get("__doc__") or "").partition("Args:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.split(r"\n(?=\S)", section)[0], re.M):
            found[name] = " ".join(re.sub(r":\w+:`~?([^`]*)`|`+", r"\1", text).split())
    return found


def _check_option(kind: str, cls: type, option: Option) -> None:
    where = f"{kind} {cls.__name__} has an option {option.name}"
    if _type_of(option.hint) is None:
        raise InputError(
            f"{where} of type {option.hint}; an option is a bool, int, float or str, one of the names of a Literal, a "
            "tuple[…, ...] of one of these, or another part"
        )
    for other in all_parts():
        same = options(other).get(option.name)
        if same is not None and _type_of(same.hint) != _type_of(option.hint):
            raise InputError(
                f"{where} of another type than {' '.join(part_of(other))} has; a name stands for one thing in all "
                "parts, so choose another name"
            )
    for settings in Settings.__subclasses__():
        if option.name in options(settings):
            raise InputError(f"{where}, which is a {settings.kind} already; choose another name")


def _type_of(hint: Any) -> Any:
    """What options of one name have in common: the type without ranges; None for one that no text and no JSON gives."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((arg for arg in args if isinstance(arg, Choice)), _type_of(args[0]))
    if origin is Literal:
        return args if all(isinstance(arg, str) for arg in args) else None
    if origin in (typing.Union, types.UnionType) or (origin is tuple and args[1:] == (Ellipsis,)):
        inner = tuple(_type_of(arg) for arg in args if arg not in (type(None), Ellipsis))
        return None if None in inner else (origin is tuple, *inner)
    return hint if hint in (bool, int, float, str) else None


# ---- from a description to modules, and back


def build(kind: str, spec: Spec, **sizes: Any) -> Any:
    """The module that a description stands for; a module is returned as it is.

    Of the sizes, which the data tell, the constructor is given those that it asks for by their names.

    Raises:
        InputError: An unknown part or option (the nearest name is given), an option out of its range, or a constructor
            that asks for a size which nobody tells.
    """
    if isinstance(spec, nn.Module):
        return spec
    given = complete(kind, spec)
    cls = find(kind, given.pop("name"))
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty and p.kind in plain]
    for name in wanted:
        if name not in sizes:
            raise InputError(
                f"{kind} {cls.__name__} has an argument {name} without a default, which is no size of a {kind}; known "
                f"sizes: {', '.join(sizes) or 'none'}"
            )
    return cls(**{name: sizes[name] for name in wanted}, **given)


def describe(part: Any) -> Any:
    """The tree of a part, read off the module itself; any other value as it is.

    Raises:
        InputError: A module that is not registered, so that no file could bring it back, or that does not keep the
            value of an option.
    """
    if isinstance(part, nn.ModuleList):
        return tuple(describe(each) for each in part)
    if not isinstance(part, nn.Module):
        return part
    kind, name = part_of(type(part))
    if kind not in PARTS or PARTS[kind].get(name) is not type(part):
        raise InputError(
            f"a {type(part).__name__} cannot be saved: register its class by torchcaps.register, and build the network "
            "with its name"
        )
    for option in options(type(part)):
        if not hasattr(part, option):
            raise InputError(f"{type(part).__name__} must keep its option: write self.{option} = {option}")
    return {"name": name} | {option: describe(getattr(part, option)) for option in options(type(part))}


def complete(kind: str, spec: Spec, before: Mapping[str, Any] | None = None) -> Any:
    """The tree that a description stands for, each option checked; a module as it is.

    A tree that was there before gives the name where ``spec`` has none, and the values of options that both have.
    """
    if isinstance(spec, nn.Module):
        return spec
    before, given = before or {}, _mapping(kind, spec)
    name = given.pop("name", before.get("name"))
    own = options(find(kind, name))
    usual = {option.name: _chosen(option, None, option.default) for option in own.values()}
    return override(kind, {"name": name, **usual, **{key: before[key] for key in own if key in before}}, given)


def _mapping(kind: str, spec: Spec) -> Tree:
    if isinstance(spec, str):
        name, colon, first = spec.partition(":")
        return {"name": name} | ({next(iter(options(find(kind, name))), first): first} if colon else {})
    if not isinstance(spec, Mapping):
        raise InputError(f"{kind} must be a name, or a mapping of its name and options, got {shown(spec)}")
    return dict(spec)


# ---- other values by flat names


def override(kind: str, tree: Tree, changes: Mapping[str, Any], what: str | None = None) -> Tree:
    """A tree with other values of some options, of the part itself or of the parts in it.

    A name that several parts have is changed in all of them. A part is chosen by its name, and keeps the values of
    options that the new one has too; a mapping changes the options of that part only; False or None leave out a part
    that may be absent, and True puts it in. In a sequence, a mapping without a name changes the part at its place.
    Errors call a name ``what``.

    Raises:
        InputError: An unknown option (the nearest name is given), or a value that does not fit its option.
    """
    cls = find(kind, tree["name"])
    what = what or f'option of {kind} "{tree["name"]}"'
    return {"name": tree["name"]} | _override(cls, tree, changes, what)


class UnknownOption(InputError):  # noqa: N818  one kind of wrong input
    """A name that is not one of the known options; ``what`` was looked up, in words."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(known)
        #: Parts that could be chosen and have such an option, by their kind and name.
        self.owners = [part_of(cls) for cls in all_parts() if name in options(cls)]
        if self.owners:
            owners = " and ".join(f'{kind} "{part}"' for kind, part in self.owners)
            super().__init__(f'there is no {what} "{name}" with the parts that are chosen; it belongs to {owners}')
        else:
            super().__init__(str(unknown_name(what, name, self.known)))


def _override(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], what: str) -> Tree:
    found: set[str] = set()
    changed = _changed(cls, tree, changes, found)
    for name in changes:
        if name not in found:
            raise UnknownOption(what, name, flat(changed))
    return changed


def _changed(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], found: set[str]) -> Tree:
    """The options of a part, or of settings, with other values, also in what they hold; ``found`` is added to."""

    def inside(held: Any) -> Any:
        if isinstance(held, Settings):
            return type(held)(**_changed(type(held), held.fields, changes, found))
        if isinstance(held, Mapping) and option.choice is not None:
            kind, name = option.choice.kind, held["name"]
            return {"name": name} | _changed(find(kind, name), held, changes, found)
        return held

    out = {}
    for option in options(cls).values():
        value = before = tree[option.name]
        if option.name in changes:
            found.add(option.name)
            value = _chosen(option, before, changes[option.name])
            if isinstance(before, Mapping) and value is None:
                found |= set(flat(before))  # the options of a part that is left out need not be left out, too
        out[option.name] = _each(value, inside)
    return out


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _chosen(option: Option, before: Any, given: Any) -> Any:
    """What an option is given: checked, and where it holds a part, the tree that a description stands for."""
    choice = option.choice
    if isinstance(before, Settings) and isinstance(given, Mapping):
        return before.replace(given)
    if choice is None:
        check(option.name, given, option.hint)
        return tuple(given) if isinstance(given, list) else given
    if not choice.many:
        return _part(choice, before, given, option.default)
    check(option.name, given, tuple[Any, ...])
    padded = [*(before or ()), *[None] * len(given)]  # only what has no name of its own changes what stands there
    changes = [isinstance(new, Mapping) and "name" not in new for new in given]
    return tuple(_part(choice, old if c else None, new) for old, new, c in zip(padded, given, changes, strict=False))


def _part(choice: Choice, before: Any, given: Any, usual: Spec = None) -> Any:
    if choice.optional and (given is False or given is None):
        return None
    if given is True:
        given = usual or next(iter(PARTS[choice.kind])) if before is None else {}
    return complete(choice.kind, given, before if isinstance(before, Mapping) else None)


# ---- looking at trees


def flat(tree: Mapping[str, Any]) -> Tree:
    """Every option of a tree by its name; a part stands by its own name, or by None where it is left out.

    Where parts have an option of the same name but different values, the value is a tuple of them, in their order.
    """
    values: dict[str, list[Any]] = {}

    def collect(held: Any) -> None:
        for each in held if isinstance(held, tuple) else (held,):
            fields = each.fields if isinstance(each, Settings) else each
            for name, value in fields.items() if isinstance(fields, Mapping) else ():
                if name != "name" and not isinstance(value, Settings):
                    names = _each(value, lambda part: part["name"] if isinstance(part, Mapping) else part)
                    values.setdefault(name, []).append(names)
                collect(value)

    collect(tree)
    return {name: found[0] if all(v == found[0] for v in found) else tuple(found) for name, found in values.items()}


def all_parts() -> Iterator[type]:
    """The class of every part of every kind."""
    for registry in PARTS.values():
        yield from registry.values()


def own_parts(kind: str, tree: Mapping[str, Any]) -> list[str]:
    """The parts of a tree that do not come with torchcaps: ``["routing mine"]``."""
    cls = find(kind, tree["name"])
    found = [] if cls.__module__.startswith("torchcaps.") else [f"{kind} {tree['name']}"]
    for option in options(cls).values():
        value = tree[option.name]
        for each in value if isinstance(value, tuple) else (value,):
            if option.choice is not None and isinstance(each, Mapping):
                found += own_parts(option.choice.kind, each)
    return list(dict.fromkeys(found))


# ---- settings: options of what is no module


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen dataclass whose fields are options, as those of a part: a recipe, a run."""

    kind: typing.ClassVar[str] = "setting"

    def __post_init__(self) -> None:
        for option in options(type(self)).values():
            value = _chosen(option, None, getattr(self, option.name))
            if isinstance(value, int) and not isinstance(value, bool) and typing.get_args(option.hint)[:1] == (float,):
                value = float(value)
            object.__setattr__(self, option.name, value)

    @property
    def fields(self) -> Tree:
        """The value of each field by its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_dict(self) -> Tree:
        """The same as JSON takes it."""
        return {name: each.to_dict() if isinstance(each, Settings) else each for name, each in self.fields.items()}

    def replace(self, changes: Mapping[str, Any], what: str | None = None) -> Self:
        """A copy with other values by flat names; arguments and errors are those of :func:`override`."""
        return type(self)(**_override(type(self), self.fields, changes, what or self.kind))
