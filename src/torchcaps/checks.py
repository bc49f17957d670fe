"""Check arguments against their annotations; an error names the function, the argument and the values allowed.

:func:`checked` reads ranges of numbers, ``Literal``, ``bool``, and jaxtyping's shapes and dtypes of tensors. In a
shape, a letter is one size throughout a call, and ``{self.name}`` is an attribute of the method's object.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from torchcaps.errors import InputError, WrongType, shown
from torchcaps.ranges import MAX_ENTRIES, Range, is_number
from torchcaps.tracing import LAYOUTS, can_look
from torchcaps.words import counted

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes of computations."""
MAP_AXES = "ZHW"
"""Letters of the axes of lines, planes and volumes in messages, from the last one on."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of labels."""
_KINDS = {
    "Float": (FLOATS, "a floating-point tensor of at least 16 bits"),
    "Float32": ((torch.float32,), "float32 numbers"),
    "Int": (INTEGERS, "a tensor of integers"),
    "Int64": ((torch.int64,), "an int64 tensor"),
    "UInt8": ((torch.uint8,), "uint8 pixels of 0..255"),
    "Bool": ((torch.bool,), "a tensor of True and False"),
    "Shaped": ((*INTEGERS, torch.bool, *FLOATS), "a tensor of numbers"),
}
_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "True or False", Path: "a path"}
_COLLECTIONS: dict[Any, str] = {Sequence: "a sequence", Mapping: "a mapping", Callable: "a function"}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Sizes = dict[str, Any]
"""Size of each letter in a call; ``"device"`` holds the first tensor's name and device."""
Check = Callable[[str, Any, Sizes, Any], None]
"""Check of an argument: its name in messages, its value, the sizes so far, and the object of the method."""


def checked(function: FunctionT) -> FunctionT:
    """Check the arguments of each call against the function's annotations, except under torch.compile.

    An object with an attribute ``letters``, such as votes, fixes the sizes of these letters: as an argument, and for
    the arguments of its own methods.

    Raises:
        WrongType: An argument has the wrong type; also a TypeError.
        InputError: A number is out of range, a choice is unknown, shapes do not agree, or tensors are on different
            devices; also a ValueError.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name, each in parameters.items() if each.kind in _POSITIONAL]
    title = function.__qualname__.rpartition("<locals>.")[2]
    of_object = names[:1] == ["self"]
    method = title.rpartition(".")[2]
    suffix = "" if method == "forward" or method.startswith("_") else f".{method}"  # users do not type these names

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            sizes: Sizes = {}
            owner = args[0] if of_object else None
            where = type(owner).__name__ + suffix if of_object else title
            checks = _checks_of(function)
            _fix_letters("self", owner, sizes)
            for name, value in itertools.chain(zip(names, args, strict=False), kwargs.items()):
                if name in checks:
                    checks[name](f"{where}: {name}", value, sizes, owner)
        return function(*args, **kwargs)

    return cast(FunctionT, call)


@functools.cache  # not in the closure of `checked`, because torch.compile cannot wrap a cache in a closure
def _checks_of(function: Callable[..., Any]) -> Mapping[str, Check]:
    """Return the check of each argument of a function, without *args, **kwargs and names for type checkers."""
    hints: dict[str, Any] = {}
    names = inspect.unwrap(function).__globals__
    rest = {name for name, each in inspect.signature(function).parameters.items() if each.kind in _REST}
    for name, hint in function.__annotations__.items():
        if name in rest:
            continue
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError):
            hints |= typing.get_type_hints(alone, names, include_extras=True)
    return {name: _check_of(hint) for name, hint in hints.items()}


def check(name: str, value: Any, hint: Any, sizes: Sizes | None = None) -> None:
    """Raise unless a value fits an annotation; an annotation that limits nothing accepts every value.

    Args:
        name: Name of the value in error messages.
        value: The value.
        hint: The annotation.
        sizes: Size of each letter so far; new letters are added.

    Raises:
        WrongType: The value has the wrong type.
        InputError: The value has the right type, but does not fit.
    """
    _check_of(hint)(name, value, {} if sizes is None else sizes, None)


@functools.cache  # annotations are read once, because a network's forward pass makes dozens of checks
def _check_of(hint: Any) -> Check:
    """Return the check of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "dim_str") and hint.array_type is Tensor:
        kind, axes = _KINDS[hint.__name__.partition("[")[0]], tuple(map(Axis.read, hint.dim_str.split()))
        return partial(_check_tensor, *kind, axes)
    if origin is Annotated and isinstance(args[1], Range):
        return lambda name, value, _sizes, _owner: args[1].check(name, value)
    if origin is Annotated and inspect.isfunction(args[-1]):
        return lambda name, value, _sizes, _owner: args[-1](name, value)
    if origin in (Annotated, typing.NotRequired):
        return _check_of(args[0])
    if origin is Literal:
        return partial(_check_choice, args)
    if origin in (typing.Union, types.UnionType):
        choices_last = sorted(args, key=_is_choice)  # of a number's errors, the first one is then about its range
        others = [_check_of(each) for each in choices_last if each is not type(None)]
        return partial(_check_union, others, type(None) in args)
    if origin is tuple:  # tuple[X, ...] or a fixed number of entries
        is_open = args[-1] is Ellipsis
        return partial(_check_tuple, [_check_of(each) for each in args if each is not Ellipsis], is_open)
    if origin in (list, dict):
        return partial(_check_container, origin, [_check_of(each) for each in args])
    if typing.is_typeddict(hint):
        return lambda name, value, _sizes, _owner: check_contents(name, value, hint)
    if origin in _COLLECTIONS:
        return partial(_check_collection, origin, _check_of(args[0]) if origin is Sequence else None)
    if isinstance(hint, type) and hint is not Any:
        return partial(_check_type, hint)
    return lambda *_: None


def _check_choice(choices: tuple[str, ...], name: str, value: Any, _sizes: Sizes, _owner: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def _check_tuple(of: list[Check], is_open: bool, name: str, value: Any, sizes: Sizes, owner: Any) -> None:
    """Check each entry of a tuple against its own annotation, or all of any number against one (``is_open``)."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise WrongType(f"{name} must be a sequence, got {shown(value)}")
    if is_open and len(value) > MAX_ENTRIES:
        raise InputError(f"{name} must have at most {MAX_ENTRIES} entries, got {len(value)}")
    if not is_open and len(value) != len(of):
        raise InputError(f"{name} must have {counted(len(of), 'entry')}, got {shown(value)}")
    for of_item, item in zip(of * len(value) if is_open else of, value, strict=True):
        of_item(name, item, sizes, owner)


def _check_container(
    kind: type[list[Any] | dict[Any, Any]], of: list[Check], name: str, value: Any, _sizes: Sizes, _owner: Any
) -> None:
    """Check a list, or a dict with its keys."""
    if not isinstance(value, kind):
        raise WrongType(f"{name} must be a {kind.__name__}, got {shown(value)}")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if kind is dict:
            of[0](f"a key of {name}", key, {}, None)
        of[-1](f"{name}[{key!r}]", item, {}, None)


def _check_collection(kind: Any, of_item: Check | None, name: str, value: Any, sizes: Sizes, owner: Any) -> None:
    is_text = isinstance(value, str) and kind is not Callable
    if is_text or not isinstance(value, kind):
        raise WrongType(f"{name} must be {_COLLECTIONS[kind]}, got {_got(value)}")
    if of_item is not None and isinstance(value, list | tuple):
        for item in value:
            of_item(name, item, sizes, owner)


def _check_type(kind: type, name: str, value: Any, sizes: Sizes, _owner: Any) -> None:
    if not _is_instance(value, kind):
        raise WrongType(f"{name} must be {_NAMES.get(kind) or with_article(kind.__name__)}, got {_got(value)}")
    _fix_letters(name, value, sizes)


def _fix_letters(name: str, value: Any, sizes: Sizes) -> None:
    """Add the sizes of an object's ``letters``, where ``"device"`` is its device."""
    for letter, size in getattr(value, "letters", {}).items():
        if letter == "device":
            _check_device(name, size, sizes)
        elif sizes.setdefault(letter, size) != size:
            raise InputError(f"{name} must have {letter}={sizes[letter]}, got {letter}={size}")


def _check_device(name: str, device: torch.device, sizes: Sizes) -> None:
    first, known = sizes.setdefault("device", (name, device))
    if device != known:
        where, _, own = name.rpartition(": ")
        both = f"{first.rpartition(': ')[2]} and {own}"
        raise InputError(f"{where}: {both} must be on one device, got {known} and {device}")


def _is_instance(value: Any, hint: type) -> bool:
    if hint is float or getattr(hint, "_is_protocol", False):  # an object without a protocol's methods fails later
        return hint is not float or is_number(value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(getattr(value, "_orig_mod", value), hint)  # a module that torch.compile wraps


def _got(value: object) -> str:
    """Return the ``repr`` of a plain value, and the type of any other, because a module's ``repr`` fills lines."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | list | tuple | dict):
        return shown(value)
    return "a tensor" if isinstance(value, Tensor) else with_article(type(value).__name__)


def with_article(word: str) -> str:
    """Return a word with "a" or "an" before it, as it is spoken: "a UNet", "an LSTM", "an Unflatten"."""
    is_spelled = word[:2].isupper() and word[:1].isalpha()  # letter by letter, such as the L of "LSTM", an "el"
    vowels = "AEFHILMNORSX" if is_spelled else "AEIOaeio" if re.match("(?i)une|uni(?!n)|us[eu]", word) else "AEIOUaeio"
    return f"{'an' if word[:1] in vowels else 'a'} {word}"


def check_contents(name: str, contents: Any, kind: type) -> None:
    """Raise InputError unless a mapping read from a file has the fields of a ``TypedDict`` or a dataclass.

    Each value is checked against the annotation of its field. Fields of a dataclass and ``NotRequired`` fields may be
    missing. Unknown entries are ignored.
    """
    if not isinstance(contents, Mapping):
        raise WrongType(f"{name} must be a mapping, got {shown(contents)}")
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        if field in contents:
            check(f"{name}.{field}", contents[field], hint)
        elif typing.is_typeddict(kind) and typing.get_origin(hint) is not typing.NotRequired:
            raise InputError(f"{name} has no {field}")


def _is_choice(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal


def _check_union(of: list[Check], may_be_none: bool, name: str, value: Any, sizes: Sizes, owner: Any) -> None:
    """Check a value against several annotations; report the most telling error if it fits none of them."""
    if value is None and may_be_none:
        return None
    errors: list[InputError] = []
    for each in of:
        try:
            return each(name, value, sizes, owner)
        except InputError as error:
            errors.append(error.with_traceback(None))  # a traceback keeps the caller's tensors alive
    shapes = [str(error).partition(" must have shape ")[2].partition(", got")[0] for error in errors]
    if len(shapes) > 1 and all(shapes):
        raise InputError(f"{name} must have shape {' or '.join(dict.fromkeys(shapes))}, got {tuple(value.shape)}")
    musts = [str(error).partition(f"{name} must be ")[2].partition(", got ") for error in errors]
    if all(words and isinstance(error, WrongType) for (words, *_), error in zip(musts, errors, strict=True)):
        *others, last = dict.fromkeys(words for words, *_ in musts)
        words = f"{', '.join(others)} or {last}" if others else last
        raise WrongType(f"{name} must be {words}, got {musts[-1][2]}")
    raise next((error for error in errors if not isinstance(error, WrongType)), errors[-1])


class Axis(NamedTuple):
    """An axis in the annotation of a tensor."""

    word: str
    """Name or size of the axis: its part of the annotation, without braces and ``self.``, such as ``B`` or ``3``."""
    is_rest: bool
    """True for ``*`` and ``...``: any number of axes of any size."""
    number: int | None
    """Size of an axis that the annotation writes as a number, such as ``3``; None for a name."""
    read_size: Callable[[Any], int] | None
    """Reads the size from the method's object, for an axis such as ``{self.size.in_dim}``. 0: any size."""

    @classmethod
    def read(cls, word: str) -> Axis:
        name = word.removeprefix("{self.").removesuffix("}")
        number = int(word) if word.isdigit() else None
        return cls(name, word[0] in "*.", number, operator.attrgetter(name) if word[0] == "{" else None)

    def size(self, owner: Any) -> int | None:
        """Return the size; None or 0 if the annotation and the object leave it open."""
        return self.number if self.read_size is None else self.read_size(owner)


def _check_tensor(
    dtypes: tuple[torch.dtype, ...],
    words: str,
    axes: tuple[Axis, ...],
    name: str,
    value: Any,
    sizes: Sizes,
    owner: Any,
) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        refuse_fx(value)
        raise WrongType(f"{name} must be {words}, got {_kind(value)}")
    if value.layout not in LAYOUTS or value.is_nested:
        raise WrongType(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")
    _check_device(name, value.device, sizes)
    new_sizes = dict(sizes)
    if not _fits(axes, value.shape, new_sizes, owner):
        raise InputError(_wrong_shape(name, axes, value.shape, sizes, owner))
    sizes.update(new_sizes)


def _fits(axes: tuple[Axis, ...], shape: Sequence[int], sizes: Sizes, owner: Any) -> bool:
    """Return True if a shape fits; add the sizes of new letters."""
    if len(axes) != len(shape):
        rest = next((n for n, axis in enumerate(axes) if axis.is_rest), len(axes))
        if len(shape) < len(axes) - 1 or rest == len(axes):
            return False
        axes, shape = axes[:rest] + axes[rest + 1 :], [*shape[:rest], *shape[len(shape) - len(axes) + rest + 1 :]]
    for (word, is_rest, number, read_size), size in zip(axes, shape, strict=True):
        if is_rest:
            continue
        known = number if read_size is None else read_size(owner)
        if (known or sizes.setdefault(word, size)) != size:
            return False
    return True


def _wrong_shape(name: str, axes: Sequence[Axis], shape: Sequence[int], sizes: Sizes, owner: Any) -> str:
    known = [axis.size(owner) or sizes.get(axis.word) for axis in axes]
    words = [_letters(axis, owner) if size is None else str(size) for axis, size in zip(axes, known, strict=True)]
    reasons = [
        f"{axis.word} is {size}"
        for axis, size, got in zip(axes, known, shape, strict=False)
        if axis.read_size is not None and size not in (None, got) and len(shape) == len(axes)
    ]
    why = f": {', '.join(reasons)}" if reasons else ""
    return f"{name} must have shape ({', '.join(words)}{',' * (len(words) == 1)}), got {tuple(shape)}{why}"


def _letters(axis: Axis, owner: Any) -> str:
    """Return the letters of an axis; those of all axes of a map if the method's object has a number of them, dims."""
    dims = getattr(owner, "dims", None)
    return ", ".join(MAP_AXES[-dims:]) if axis.is_rest and isinstance(dims, int) else axis.word


def _kind(value: object) -> str:
    if isinstance(value, types.MethodType):  # such as capsules.scores
        return f"the method {value.__name__}; call it: {value.__name__}()"
    return f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


# ---- checks that no annotation can express


def refuse_fx(value: object) -> None:
    """Raise WrongType under ``torch.fx.symbolic_trace``, because its proxies of tensors have no shapes to check."""
    if isinstance(value, torch.fx.Proxy):
        raise WrongType(
            "torch.fx.symbolic_trace cannot trace parts of torchcaps, which read the shapes of tensors; use "
            "torch.export.export, or forward hooks to read features"
        )


def check_classes(name: str, labels: Tensor, num_classes: int) -> None:
    """Raise InputError unless labels are in 0..num_classes-1, if :func:`torchcaps.tracing.can_look` allows a look."""
    if can_look(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise InputError(f"{name} must be in 0..{num_classes - 1}, got {int(labels.min())}..{int(labels.max())}")
