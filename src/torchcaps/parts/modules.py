"""Classes and modules of parts: register a class, build a module from its description, and describe a module."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from torch import nn

from torchcaps.checks import FLOATS, checked
from torchcaps.errors import InputError, WrongType, shown, unknown_name
from torchcaps.parts.registry import PARTS, Choice, Option, Spec, Tree, all_parts, find, options, part_of
from torchcaps.parts.trees import MOVED_OPTIONS, Settings, complete
from torchcaps.ranges import FROM_DATA

ClassT = TypeVar("ClassT", bound=type)
InitT = TypeVar("InitT", bound=Callable[..., None])


def _check_device(name: str, device: Any) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError):  # torch has each of them for devices that it lacks
        raise InputError(f'{name} must be a device of this machine, such as "cpu", got {shown(device)}') from None


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype is not None and dtype not in FLOATS:
        kind = InputError if isinstance(dtype, torch.dtype) else WrongType
        raise kind(f"{name} must be a floating-point type of at least 16 bits such as torch.bfloat16, got {dtype!r}")


Device = Annotated[torch.device | str | int | None, FROM_DATA, _check_device]
"""Device of the parameters and buffers of a module; None: torch's default device."""
Dtype = Annotated[torch.dtype | None, FROM_DATA, _check_dtype]
"""Floating-point type of the parameters and buffers of a module; None: torch's default type."""


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
        with contextlib.nullcontext() if device is None else torch.device(device):
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
