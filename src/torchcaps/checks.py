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
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from torchcaps.errors import InputError, WrongType, shown
from torchcaps.ranges import MAX_ENTRIES, Range, is_number
from torchcaps.tracing import LAYOUTS, can_look

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes of computations."""
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


def checked(function: FunctionT) -> FunctionT:
    """Check the arguments of each call against the function's annotations, except under torch.compile.

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
            hints = _hints_of(function)
            for name, value in itertools.chain(zip(names, args, strict=False), kwargs.items()):
                if name in hints:
                    check(f"{where}: {name}", value, hints[name], sizes, owner)
        return function(*args, **kwargs)

    return cast(FunctionT, call)


@functools.cache  # not in the closure of `checked`, because torch.compile cannot wrap a cache in a closure
def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function, without *args, **kwargs and names for type checkers."""
    found: dict[str, Any] = {}
    names = inspect.unwrap(function).__globals__
    rest = {name for name, each in inspect.signature(function).parameters.items() if each.kind in _REST}
    for name, hint in function.__annotations__.items():
        if name in rest:
            continue
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError):
            found |= typing.get_type_hints(alone, names, include_extras=True)
    return found


def check(name: str, value: Any, hint: Any, sizes: Sizes | None = None, owner: Any = None) -> None:
    """Raise unless a value fits an annotation; an annotation that limits nothing accepts every value.

    Args:
        name: Name of the value in error messages.
        value: The value.
        hint: The annotation.
        sizes: Size of each letter so far; new letters are added.
        owner: Object of the method, whose attributes give sizes.

    Raises:
        WrongType: The value has the wrong type.
        InputError: The value has the right type, but does not fit.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    sizes = {} if sizes is None else sizes
    if hasattr(hint, "dim_str") and hint.array_type is Tensor:
        _check_tensor(name, value, hint, sizes, owner)
    elif origin is Annotated and isinstance(args[1], Range):
        args[1].check(name, value)
    elif origin is typing.NotRequired:
        check(name, value, args[0], sizes, owner)
    elif origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise InputError(f"{name} must be one of {', '.join(args)}, got {shown(value)}")
    elif origin in (typing.Union, types.UnionType):
        _check_union(name, value, args, sizes, owner)
    elif origin is tuple:  # tuple[X, ...] or a fixed number of X
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise WrongType(f"{name} must be a sequence, got {shown(value)}")
        if args[1] is not Ellipsis and len(value) != len(args):
            raise InputError(f"{name} must have {len(args)} entries, got {shown(value)}")
        if len(value) > MAX_ENTRIES:
            raise InputError(f"{name} must have at most {MAX_ENTRIES} entries, got {len(value)}")
        for item in value:
            check(name, item, args[0], sizes, owner)
    elif origin in (list, dict):
        if not isinstance(value, origin):
            raise WrongType(f"{name} must be a {origin.__name__}, got {shown(value)}")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if origin is dict:
                check(f"a key of {name}", key, args[0])
            check(f"{name}[{key!r}]", item, args[-1])
    elif typing.is_typeddict(hint):
        check_contents(name, value, hint)
    elif origin in _COLLECTIONS:
        is_text = isinstance(value, str) and origin is not Callable
        if is_text or not isinstance(value, origin):
            raise WrongType(f"{name} must be {_COLLECTIONS[origin]}, got {_got(value)}")
        if origin is Sequence and isinstance(value, list | tuple):
            for item in value:
                check(name, item, args[0], sizes, owner)
    elif isinstance(hint, type) and hint is not Any and not _is_instance(value, hint):
        raise WrongType(f"{name} must be {_NAMES.get(hint) or with_article(hint.__name__)}, got {_got(value)}")


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
    """Return a word with "a" or "an" before it."""
    return f"{'an' if word[:1] in 'AEIOUaeio' else 'a'} {word}"


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


def _check_union(name: str, value: Any, hints: tuple[Any, ...], sizes: Sizes, owner: Any) -> None:
    """Check a value against several annotations; report the most telling error if it fits none of them."""
    if value is None and type(None) in hints:
        return None
    errors: list[InputError] = []
    if not isinstance(value, str):  # the other annotations say more about it
        hints = tuple(hint for hint in hints if typing.get_origin(hint) is not Literal) or hints
    for hint in hints:
        if hint is not type(None):
            try:
                return check(name, value, hint, sizes, owner)
            except InputError as error:
                errors.append(error.with_traceback(None))  # a traceback keeps the caller's tensors alive
    shapes = [str(error).partition(" must have shape ")[2].partition(", got")[0] for error in errors]
    if len(shapes) > 1 and all(shapes):
        raise InputError(f"{name} must have shape {' or '.join(dict.fromkeys(shapes))}, got {tuple(value.shape)}")
    raise next((error for error in errors if not isinstance(error, WrongType)), errors[-1])


def _check_tensor(name: str, value: Any, hint: Any, sizes: Sizes, owner: Any) -> None:
    dtypes, words = _KINDS[hint.__name__.partition("[")[0]]
    refuse_fx(value)
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        raise WrongType(f"{name} must be {words}, got {_kind(value)}")
    if value.layout not in LAYOUTS or value.is_nested:
        raise WrongType(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")
    first, device = sizes.setdefault("device", (name, value.device))
    if value.device != device:
        where, _, own = name.rpartition(": ")
        both = f"{first.rpartition(': ')[2]} and {own}"
        raise InputError(f"{where}: {both} must be on one device, got {device} and {value.device}")
    axes = hint.dim_str.split()
    for n, axis in enumerate(axes):
        if axis[0] in "*.":  # any number of axes of any size
            axes[n : n + 1] = [""] * (value.ndim + 1 - len(axes))
            break
    fits, new_sizes = len(axes) == value.ndim, dict(sizes)
    for axis, size in zip(axes, value.shape, strict=False):
        if axis and new_sizes.setdefault(axis, _axis_size(axis, owner) or size) != size:
            fits = False
    if not fits:
        raise InputError(_wrong_shape(name, hint.dim_str.split(), value.shape, sizes, owner))
    sizes.update(new_sizes)


def _axis_size(axis: str, owner: Any) -> int | None:
    """Return the size of an axis that is a number or an attribute (0: any size); None if it is a letter."""
    if axis.isdigit():
        return int(axis)
    return operator.attrgetter(axis.removeprefix("{self.")[:-1])(owner) if axis[0] == "{" else None


def _wrong_shape(name: str, axes: Sequence[str], shape: Sequence[int], sizes: Sizes, owner: Any) -> str:
    known = [_axis_size(axis, owner) or sizes.get(axis) for axis in axes]
    names = [axis.removeprefix("{self.").removesuffix("}") for axis in axes]
    words = [axis if size is None else str(size) for axis, size in zip(names, known, strict=True)]
    reasons = [
        f"{word} is {size}"
        for axis, word, size, got in zip(axes, names, known, shape, strict=False)
        if axis[0] == "{" and size not in (None, got) and len(shape) == len(axes)
    ]
    why = f": {', '.join(reasons)}" if reasons else ""
    return f"{name} must have shape ({', '.join(words)}{',' * (len(words) == 1)}), got {tuple(shape)}{why}"


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
