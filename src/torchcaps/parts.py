"""Parts: the modules of a network and its optimizer. Each is chosen by its name and declares its options once.

A part is a class that is registered under a name. An argument of its constructor *without* a default is a size, which
follows from the data. An argument *with* a default is an option: its annotation gives its range, its ``Args:`` line is
its help, and an attribute of the same name holds its value. That is enough to check an option, to save it in
config.json, to read it back, and to set it by its name from Python and from the command line.

A caller names a part in one of four ways:

- by its name: ``"dynamic"``;
- by its name and the value of its first option, if that is a text: ``"timm:resnet18"``;
- by a mapping: ``{"name": "dynamic", "leaky": True}``;
- by the module itself.

A tree is a mapping with every option of every part, as config.json holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

import torch
from torch import nn

from torchcaps.checks import check, checked
from torchcaps.errors import InputError, shown, unknown_name
from torchcaps.ranges import FROM_DATA

EntryT = TypeVar("EntryT")
ClassT = TypeVar("ClassT", bound=type)
InitT = TypeVar("InitT", bound=Callable[..., None])
Device = Annotated[torch.device | str | int | None, FROM_DATA]
"""Device of the parameters and buffers of a module; None: torch's default device."""
Dtype = Annotated[torch.dtype | None, FROM_DATA]
"""Floating-point type of the parameters and buffers of a module; None: torch's default type."""
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


@checked
def register(kind: str, name: str) -> Callable[[ClassT], ClassT]:
    """Register a class as a part of a kind: the decorator of every part, also of your own parts.

    Args:
        kind: ``"backbone"``, ``"primary"``, ``"transform"``, ``"routing"``, ``"layer"``, ``"decoder"``, ``"loss"``,
            ``"network"`` or ``"optimizer"``.
        name: Name by which users choose the part.

    Raises:
        InputError: The kind is unknown or the name is taken; an option has a type that the command line cannot
            express; or another part has an option of the same name and another type.
    """
    if kind not in PARTS:
        raise unknown_name("kind of part", kind, PARTS)

    def add(cls: ClassT) -> ClassT:
        made: Any = cls
        made.__init__, made.part = checked(placed(made.__init__)), (kind, name)
        if getattr(cls, "extra_repr", None) is nn.Module.extra_repr:
            made.extra_repr = summary
        for option in options(cls).values():
            _check_option(kind, cls, option)
        PARTS[kind].add(name, cls)
        return cls

    return add


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


def _check_option(kind: str, cls: type, option: Option) -> None:
    where = f"{kind} {cls.__name__} has an option {option.name}"
    if _type_of(option.hint) is None:
        raise InputError(
            f"{where} of type {option.hint}; an option must be a bool, int, float or str, a Literal of names, a "
            "tuple[…, ...] of one of these, or another part"
        )
    for other in all_parts():
        same = options(other).get(option.name)
        if same is not None and _type_of(same.hint) != _type_of(option.hint):
            raise InputError(
                f"{where} of another type than in {' '.join(part_of(other))}; a name has one type in all parts, so "
                "choose another name"
            )
    for settings in Settings.__subclasses__():
        if option.name in options(settings):
            raise InputError(f"{where}, which is a {settings.kind} already; choose another name")


def _type_of(hint: Any) -> Any:
    """Return the type of an option without its ranges; None if the command line and JSON cannot express it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((arg for arg in args if isinstance(arg, Choice)), _type_of(args[0]))
    if origin is Literal:
        return args if all(isinstance(arg, str) for arg in args) else None
    if origin in (typing.Union, types.UnionType) or (origin is tuple and args[1:] == (Ellipsis,)):
        inner = tuple(_type_of(arg) for arg in args if arg not in (type(None), Ellipsis))
        return None if None in inner else (origin is tuple, *inner)
    return hint if hint in (bool, int, float, str) else None


def placed(init: InitT) -> InitT:
    """Let a constructor that names ``device`` and ``dtype`` make its parameters and buffers there, as torch.nn's do."""
    if "device" not in inspect.signature(init).parameters:
        return init

    @functools.wraps(init)
    def call(self: Any, *args: Any, device: Device = None, dtype: Dtype = None, **options: Any) -> None:
        name = type(self).__name__
        for option in MOVED_OPTIONS.keys() & options:
            raise InputError(f"{name}: there is no option {option} any more: {MOVED_OPTIONS[option]}")
        if dtype is not None and not dtype.is_floating_point:
            raise InputError(f"{name}: dtype must be a floating-point type such as torch.bfloat16, got {dtype}")
        try:
            place = contextlib.nullcontext() if device is None else torch.device(device)
        except RuntimeError:
            raise InputError(f'{name}: device must be a device such as "cpu" or "cuda", got {shown(device)}') from None
        with place:
            init(self, *args, **options)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    return cast(InitT, call)


def summary(part: nn.Module) -> str:
    """Return the sizes and options of a part for its ``repr``.

    Parts inside it are left out, because ``repr`` shows them as modules; so are options that are off by default.
    """
    sizes: Any = getattr(part, "size", None)  # of transforms and routings; a layer names its sizes
    shown_values: Tree = sizes._asdict() if hasattr(sizes, "_asdict") else {}
    known = options(type(part))
    for name in inspect.signature(type(part)).parameters:
        value = getattr(part, name, None)
        is_off = name in known and value == known[name].default and (not value or value == "none")
        if hasattr(part, name) and not (is_off or isinstance(value, nn.Module)):
            shown_values[name] = value
    return ", ".join(f"{name}={value!r}" for name, value in shown_values.items())


# ---- from a description to modules, and back


def build(kind: str, spec: Spec, **sizes: Any) -> Any:
    """Build the module that a caller named; return a module unchanged.

    Args:
        kind: Kind of the part.
        spec: Name, mapping or module.
        **sizes: Sizes that follow from the data. The constructor receives the ones that it has arguments for.

    Raises:
        InputError: An unknown part or option (the message suggests the nearest name), an option out of its range, or a
            constructor with an argument that is neither an option nor a known size.
    """
    if isinstance(spec, nn.Module):
        return spec
    values = complete(kind, spec)
    cls = find(kind, values.pop("name"))
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty and p.kind in named]
    for name in required:
        if name not in sizes:
            raise InputError(
                f"{kind} {cls.__name__} has an argument {name} without a default, which is no size of a {kind}; known "
                f"sizes: {', '.join(sizes) or 'none'}"
            )
    known = [name for name in inspect.signature(cls).parameters if name in sizes and name not in values]
    return cls(**{name: sizes[name] for name in known}, **values)


def describe(part: Any) -> Any:
    """Return the tree of a part, read from the attributes of the module; return any other value unchanged.

    Raises:
        InputError: The module's class is not registered, so no file could restore it; or the module does not keep the
            value of an option as an attribute.
    """
    if isinstance(part, nn.ModuleList):
        return tuple(describe(each) for each in part)
    if not isinstance(part, nn.Module):
        return part
    kind, name = part_of(type(part))
    if kind not in PARTS or PARTS[kind].get(name) is not type(part):
        raise InputError(
            f"a {type(part).__name__} cannot be saved: register its class with torchcaps.register, and build the "
            "network with its name"
        )
    for option in options(type(part)):
        if not hasattr(part, option):
            raise InputError(f"{type(part).__name__} must keep its option: write self.{option} = {option}")
    return {"name": name} | {option: describe(getattr(part, option)) for option in options(type(part))}


def complete(kind: str, spec: Spec, before: Mapping[str, Any] | None = None) -> Any:
    """Return the complete tree of a part, with each option checked; return a module unchanged.

    Args:
        kind: Kind of the part.
        spec: Name, mapping or module.
        before: Tree of the part that is replaced. It supplies the name if ``spec`` has none, and the values of the
            options that both parts have.
    """
    if isinstance(spec, nn.Module):
        return spec
    before, changes = before or {}, _mapping(kind, spec)
    name = changes.pop("name", before.get("name"))
    known = options(find(kind, name))
    defaults = {option.name: _checked_value(option, None, option.default) for option in known.values()}
    kept = {key: before[key] for key in known if key in before}
    return override(kind, {"name": name, **defaults, **kept}, changes)


def _mapping(kind: str, spec: Spec) -> Tree:
    if isinstance(spec, str):
        name, colon, first = spec.partition(":")
        return {"name": name} | ({next(iter(options(find(kind, name))), first): first} if colon else {})
    if not isinstance(spec, Mapping):
        raise InputError(f"{kind} must be a name, or a mapping of its name and options, got {shown(spec)}")
    return dict(spec)


# ---- other values by flat names


def override(kind: str, tree: Tree, changes: Mapping[str, Any], what: str | None = None) -> Tree:
    """Return a tree with other values of some options, of the part itself or of the parts inside it.

    - An option that several parts have is changed in all of them.
    - The name of a part replaces the part, which keeps the values of the options that both have.
    - A mapping changes the options of that part only.
    - False or None removes an optional part, and True adds it.
    - In a sequence, a mapping without "name" modifies the part at its position.

    Args:
        kind: Kind of the part.
        tree: Complete tree of the part.
        changes: New values by the names of options.
        what: Words for an option in error messages.

    Raises:
        InputError: An unknown option (the message suggests the nearest name), or a value that does not fit its option.
    """
    cls = find(kind, tree["name"])
    what = what or f'option of {kind} "{tree["name"]}"'
    return {"name": tree["name"]} | _override(cls, tree, changes, what)


MOVED_OPTIONS = {"voters": 'the layer "conv-types" has votes of types, and the layer "conv" has votes of capsules'}
"""Options of earlier versions, and the sentence that says what replaces each."""


class UnknownOption(InputError):  # noqa: N818  one kind of wrong input
    """A name that is not one of the known options.

    Args:
        what: Words for an option in the message.
        name: The unknown name.
        known: Names of the known options.
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(known)
        #: Kind and name of each registered part that has such an option.
        self.owners = [part_of(cls) for cls in all_parts() if name in options(cls)]
        if name in MOVED_OPTIONS:
            super().__init__(f'there is no {what} "{name}" any more: {MOVED_OPTIONS[name]}')
        elif self.owners:
            owners = " and ".join(f'{kind} "{part}"' for kind, part in self.owners)
            super().__init__(f'there is no {what} "{name}" with the parts that you chose; it belongs to {owners}')
        else:
            super().__init__(str(unknown_name(what, name, self.known)))


def _override(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], what: str) -> Tree:
    matched: set[str] = set()
    changed = _changed(cls, tree, changes, matched)
    for name in changes:
        if name not in matched:
            raise UnknownOption(what, name, flat(changed))
    return changed


def _changed(cls: type, tree: Mapping[str, Any], changes: Mapping[str, Any], matched: set[str]) -> Tree:
    """Return the options of a part, or of settings, with other values, also in the parts inside it.

    The names of the options that were matched are added to ``matched``.
    """
    out = {}
    for option in options(cls).values():
        value = before = tree[option.name]
        if option.name in changes:
            matched.add(option.name)
            value = _checked_value(option, before, changes[option.name])
            if isinstance(before, Mapping) and value is None:
                matched |= set(flat(before))  # options of a removed part may be named, but have no effect
        inner = functools.partial(_changed_inside, option.choice, changes=changes, matched=matched)
        out[option.name] = _map_parts(value, inner)
    return out


def _changed_inside(choice: Choice | None, held: Any, *, changes: Mapping[str, Any], matched: set[str]) -> Any:
    """Apply the changes to the settings or the part that an option holds; return any other value unchanged."""
    if isinstance(held, Settings):
        return type(held)(**_changed(type(held), held.fields, changes, matched))
    if isinstance(held, Mapping) and choice is not None:
        return {"name": held["name"]} | _changed(find(choice.kind, held["name"]), held, changes, matched)
    return held


def _map_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _checked_value(option: Option, before: Any, new: Any) -> Any:
    """Check the value for an option; return the complete tree if the option holds a part."""
    choice = option.choice
    if isinstance(before, Settings) and isinstance(new, Mapping):
        return before.replace(new)
    if choice is None:
        check(option.name, new, option.hint)
        return tuple(new) if isinstance(new, list) else new
    if not choice.many:
        return _complete_part(choice, before, new, option.default)
    check(option.name, new, tuple[Any, ...])
    # a mapping without "name" modifies the existing part at this position; anything else replaces it
    existing = [*(before or ()), *[None] * len(new)]
    modifies = [isinstance(each, Mapping) and "name" not in each for each in new]
    return tuple(
        _complete_part(choice, old if keep else None, each)
        for old, each, keep in zip(existing, new, modifies, strict=False)
    )


def _complete_part(choice: Choice, before: Any, new: Any, default: Spec = None) -> Any:
    if choice.optional and (new is False or new is None):
        return None
    if new is True:
        new = default or next(iter(PARTS[choice.kind])) if before is None else {}
    return complete(choice.kind, new, before if isinstance(before, Mapping) else None)


# ---- looking at trees


def flat(tree: Mapping[str, Any]) -> Tree:
    """Return every option of a tree by its name; a part appears as its name, or as None if it is left out.

    If several parts have an option of the same name with different values, the value is a tuple of them, in the order
    of the parts.
    """
    values: dict[str, list[Any]] = {}

    def collect(held: Any) -> None:
        for each in held if isinstance(held, tuple) else (held,):
            fields = each.fields if isinstance(each, Settings) else each
            for name, value in fields.items() if isinstance(fields, Mapping) else ():
                if name != "name" and not isinstance(value, Settings):
                    names = _map_parts(value, lambda part: part["name"] if isinstance(part, Mapping) else part)
                    values.setdefault(name, []).append(names)
                collect(value)

    collect(tree)
    return {name: held[0] if all(v == held[0] for v in held) else tuple(held) for name, held in values.items()}


def all_parts() -> Iterator[type]:
    """Iterate over the classes of all parts of all kinds."""
    for registry in PARTS.values():
        yield from registry.values()


def own_parts(kind: str, tree: Mapping[str, Any]) -> list[str]:
    """Return the parts of a tree that do not come with torchcaps: ``["routing mine"]``."""
    cls = find(kind, tree["name"])
    names = [] if cls.__module__.startswith("torchcaps.") else [f"{kind} {tree['name']}"]
    for option in options(cls).values():
        value = tree[option.name]
        for each in value if isinstance(value, tuple) else (value,):
            if option.choice is not None and isinstance(each, Mapping):
                names += own_parts(option.choice.kind, each)
    return list(dict.fromkeys(names))


# ---- settings: options without a module


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of frozen dataclasses whose fields are options: a recipe, a run."""

    kind: typing.ClassVar[str] = "setting"

    def __post_init__(self) -> None:
        for option in options(type(self)).values():
            value = _checked_value(option, None, getattr(self, option.name))
            if isinstance(value, int) and not isinstance(value, bool) and typing.get_args(option.hint)[:1] == (float,):
                value = float(value)
            object.__setattr__(self, option.name, value)

    @property
    def fields(self) -> Tree:
        """Value of each field by its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_dict(self) -> Tree:
        """Return the fields as plain values for JSON."""
        return {name: each.to_dict() if isinstance(each, Settings) else each for name, each in self.fields.items()}

    def replace(self, changes: Mapping[str, Any], what: str | None = None) -> Self:
        """Return a copy with other values by flat names; see :func:`override` for arguments and errors."""
        return type(self)(**_override(type(self), self.fields, changes, what or self.kind))
