"""Arguments are held to their annotations: a sentence names the function, the argument, and what would be right.

:func:`checked` reads what is written anyway: ranges of numbers, ``Literal``, ``bool``, and the shapes and kinds of
tensors in jaxtyping's words, in which a letter stands for one size throughout a call, and ``{self.name}`` for an
attribute of the method's own object.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from torchcaps.errors import InputError, WrongType, shown
from torchcaps.ranges import MOST_ENTRIES, Range, is_number

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that are computed with."""
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
_LAYOUTS = (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]  # the latter: torch.utils.mkldnn's
_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Sizes = dict[str, Any]
"""The sizes that letters stand for in a call, and under ``"device"`` the first tensor's name and device."""


def checked(function: FunctionT) -> FunctionT:
    """Check the arguments of each call against the function's annotations; nothing is checked while torch compiles.

    Raises:
        WrongType: An argument of another type; it is a TypeError too.
        InputError: A number out of its range, an unknown choice, a shape that does not fit the others, or tensors on
            different devices; it is a ValueError too.
    """
    names = list(inspect.signature(function).parameters)
    title = function.__qualname__.rpartition("<locals>.")[2]
    of_object = names[:1] == ["self"]
    method = title.rpartition(".")[2]
    suffix = "" if method == "forward" or method.startswith("_") else f".{method}"  # what is called by another name

    @functools.cache
    def tests(where: str) -> dict[str, tuple[str, Test]]:
        hints = typing.get_type_hints(function, include_extras=True)
        return {name: (f"{where}: {name}", test_of(hints[name])) for name in names if name in hints}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            sizes: Sizes = {}
            owner = args[0] if of_object else None
            of = tests(type(owner).__name__ + suffix if of_object else title)
            for name, value in itertools.chain(zip(names, args, strict=False), kwargs.items()):
                if name in of:
                    words, test = of[name]
                    test(words, value, sizes, owner)
        return function(*args, **kwargs)

    return cast(FunctionT, call)


def check(name: str, value: Any, hint: Any) -> None:
    """Raise unless a value fits an annotation; ``name`` is what errors call it."""
    test_of(hint)(name, value, {}, None)


Test = Callable[[str, Any, Sizes, Any], None]
"""Raises unless a value fits: its name, the value, the sizes of letters so far, and the object of a method."""


def test_of(hint: Any) -> Test:
    """The test that stands for an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "dim_str"):
        return _tensor_test(hint)
    if origin is Annotated:
        return _range_test(args[1]) if isinstance(args[1], Range) else _anything
    if origin is Literal:
        return functools.partial(_one_of, args)
    if origin in (typing.Union, types.UnionType):
        return _union_test(args)
    if origin is tuple:  # of any length, or so many of one kind
        return functools.partial(_each, test_of(args[0]), None if args[1] is Ellipsis else len(args))
    return functools.partial(_of_type, hint) if isinstance(hint, type) and hint is not Any else _anything


def _anything(name: str, value: Any, sizes: Sizes, owner: Any) -> None:
    """What an annotation says nothing of is not checked."""


def _of_type(kind: type, name: str, value: Any, _sizes: Sizes, _owner: Any) -> None:
    fits = is_number(value) if kind is float else isinstance(value, kind)
    if not fits or (kind is int and isinstance(value, bool)):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise WrongType(f"{name} must be {_NAMES.get(kind, f'{article} {kind.__name__}')}, got {_short(value)}")


def _one_of(choices: tuple[Any, ...], name: str, value: Any, _sizes: Sizes, _owner: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def _range_test(within: Range) -> Test:
    usual = int if within.whole else float  # right at once where it lies inside, as each call of a function asks

    def test(name: str, value: Any, _sizes: Sizes, _owner: Any) -> None:
        if type(value) is not usual or within.odd or not within.least < value < within.most:
            within.check(name, value)

    return test


def _each(test: Test, length: int | None, name: str, value: Any, sizes: Sizes, owner: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise WrongType(f"{name} must be a sequence, got {shown(value)}")
    if length is not None and len(value) != length:
        raise InputError(f"{name} must have {length} entries, got {shown(value)}")
    if len(value) > MOST_ENTRIES:
        raise InputError(f"{name} must have at most {MOST_ENTRIES} entries, got {len(value)}")
    for item in value:
        test(name, item, sizes, owner)


def _union_test(args: tuple[Any, ...]) -> Test:
    """One of several annotations; what fits none is held to the first, or of tensors to the one of its axes."""
    optional = type(None) in args
    hints = [arg for arg in args if arg is not type(None)]
    tests = [test_of(hint) for hint in hints]

    def test(name: str, value: Any, sizes: Sizes, owner: Any) -> None:
        if value is None and optional:
            return None
        found: list[InputError] = []
        for each in tests:
            try:
                return each(name, value, sizes, owner)
            except InputError as error:
                found.append(error.with_traceback(None))  # a traceback keeps the caller's tensors alive
        shapes = [str(error).partition(" must have shape ")[2].partition(", got")[0] for error in found]
        if len(shapes) > 1 and all(shapes):
            raise InputError(f"{name} must have shape {' or '.join(dict.fromkeys(shapes))}, got {tuple(value.shape)}")
        raise next((error for error in found if not isinstance(error, WrongType)), found[-1])

    return tests[0] if len(tests) == 1 and not optional else test


def _tensor_test(hint: Any) -> Test:
    dtypes, words = _KINDS[hint.__name__.partition("[")[0]]
    letters = tuple(hint.dim_str.split())
    open_at = next((n for n, letter in enumerate(letters) if letter == "..." or letter.startswith("*")), None)
    after = 0 if open_at is None else len(letters) - open_at - 1  # axes behind those that may be any number
    fixed = letters if open_at is None else letters[:open_at] + letters[open_at + 1 :]
    told = {letter: functools.partial(_told, letter) for letter in letters if letter[0] == "{" or letter.isdigit()}

    def test(name: str, value: Any, sizes: Sizes, owner: Any) -> None:
        if not isinstance(value, Tensor) or value.dtype not in dtypes:
            raise WrongType(f"{name} must be {words}, got {_kind(value)}")
        if value.layout not in _LAYOUTS or value.is_nested:
            raise WrongType(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")
        first, device = sizes.setdefault("device", (name, value.device))
        if value.device != device:
            where, _, own = name.rpartition(": ")
            both = f"{first.rpartition(': ')[2]} and {own}"
            raise InputError(f"{where}: {both} must be on one device, got {device} and {value.device}")
        if not fixed and open_at is not None:
            return
        shape = seen = value.shape
        if open_at is not None:
            seen = shape[:open_at] + shape[max(len(shape) - after, 0) :]
        fits = len(shape) == len(fixed) if open_at is None else len(shape) >= len(fixed)
        found: Sizes = {}
        for letter, size in zip(fixed, seen, strict=False):
            wanted = sizes.get(letter)
            if wanted is None:
                # an attribute of 0 stands for any number
                wanted = told[letter](owner) or size if letter in told else found.get(letter, size)
            fits = fits and wanted == size
            found[letter] = size
        if not fits:
            raise InputError(_wrong_shape(name, letters, shape, sizes, owner))
        sizes.update(found)

    return test


def _told(letter: str, owner: Any) -> int:
    """The size that a number, or an attribute of a method's object, stands for."""
    return int(letter) if letter.isdigit() else operator.attrgetter(letter.removeprefix("{self.")[:-1])(owner)


def _wrong_shape(name: str, letters: Sequence[str], shape: Sequence[int], sizes: Sizes, owner: Any) -> str:
    fixed = [letter[0] == "{" or letter.isdigit() for letter in letters]
    known = [_told(each, owner) or None if told else sizes.get(each) for each, told in zip(letters, fixed, strict=True)]
    names = [letter.removeprefix("{self.").removesuffix("}") for letter in letters]
    words = [name if size is None else str(size) for name, size in zip(names, known, strict=True)]
    reasons = [
        f"{letter[len('{self.') : -1]} is {size}"
        for letter, size, got in zip(letters, known, shape, strict=False)
        if letter[0] == "{" and size not in (None, got) and len(shape) == len(letters)
    ]
    why = f": {', '.join(reasons)}" if reasons else ""
    return f"{name} must have shape ({', '.join(words)}{',' * (len(words) == 1)}), got {tuple(shape)}{why}"


def _kind(value: object) -> str:
    if isinstance(value, types.MethodType):  # such as capsules.scores
        return f"the method {value.__name__}; call it: {value.__name__}()"
    return f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _short(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else shown(value)


# ---- what no annotation says


def check_classes(name: str, labels: Tensor, num_classes: int) -> None:
    """Raise InputError unless labels lie in 0..num_classes-1, as far as one :func:`can_look`."""
    if can_look(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise InputError(f"{name} must be in 0..{num_classes - 1}, got {int(labels.min())}..{int(labels.max())}")


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor are there, and can be looked at without waiting for a device.

    There are none yet in a graph that is being compiled or exported, and under ``torch.vmap`` no single ones.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not torch._C._len_torch_dispatch_stack()
