"""What functions and layers ask of their arguments: a sentence names the function, the argument, and what fits.

Each check takes the ``caller``, which is the layer or function to name in an error, and arguments with their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.ranges import is_number, is_whole_number

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that are computed with."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of labels."""
NUMBERS = (*INTEGERS, torch.bool, *FLOATS)
"""Dtypes of targets, whether labels or rows of zeros and ones."""
LARGEST_SIZE = 2**31 - 1
"""Of a layer, a kernel, a stride or a padding."""


def check_dense(
    caller: str,
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    wanted: str = "a tensor of numbers",
    layouts: Sequence[torch.layout] = (torch.strided,),
) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor of one of the ``dtypes``, which ``wanted`` describes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        raise TypeError(f"{caller}: {name} must be {wanted}, got {_kind(tensor)}")
    if tensor.layout not in layouts or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{caller}: {name} must be a dense tensor, got {kind}")


def check_floating(caller: str, name: str, tensor: Tensor, layouts: Sequence[torch.layout] = (torch.strided,)) -> None:
    """Raise TypeError unless ``tensor`` is a dense floating-point tensor of at least 16 bits."""
    if isinstance(tensor, Tensor) and tensor.dtype in FLOATS and tensor.layout in layouts and not tensor.is_nested:
        return  # before any words are made: this is asked several times in each layer
    bits = " of at least 16 bits" if isinstance(tensor, Tensor) and tensor.is_floating_point() else ""
    check_dense(caller, name, tensor, FLOATS, f"a floating-point tensor{bits}", layouts)


def check_tensor(
    caller: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    layouts: Sequence[torch.layout] = (torch.strided,),
    fixed_by: Sequence[str] = (),
) -> None:
    """As :func:`check_floating`, and raise ValueError unless ``tensor`` has a shape; a letter stands for any size.

    ``fixed_by`` names the argument of the layer that fixed each size, where there is one: the error then names it too.
    """
    check_floating(caller, name, tensor, layouts)
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for size, wanted in zip(sizes, shape, strict=False):
        fits = fits and (size == wanted or isinstance(wanted, str))
    if not fits:
        wanted = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        wrong = [
            f"{argument} is {size}, got {got}"
            for argument, size, got in zip(fixed_by, shape, sizes, strict=False)
            if argument and len(sizes) == len(shape) and size != got
        ]
        why = f": {', '.join(wrong)}" if wrong else ""
        raise ValueError(f"{caller}: {name} must have shape ({wanted}), got {tuple(sizes)}{why}")


def check_integers(caller: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor of integers."""
    check_dense(caller, name, tensor, INTEGERS, "a tensor of integers")


def check_classes(caller: str, name: str, labels: Tensor, num_classes: int) -> None:
    """Raise ValueError unless labels lie in 0..num_classes-1, as far as one :func:`can_look`."""
    if can_look(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"{caller}: {name} must be in 0..{num_classes - 1}, got {int(labels.min())}..{int(labels.max())}"
        )


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor are there, and can be looked at without waiting for a device.

    There are none yet in a graph that is being compiled or exported, and under ``torch.vmap`` no single ones.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not torch._C._len_torch_dispatch_stack()


def is_exporting() -> bool:
    """Whether a graph is being made of torch's own operations, as for ONNX; the fast paths make way for it."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it


def check_one_device(caller: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device; None is on any."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if _differ(given):
        raise ValueError(f"{caller}: {_names(given)} must be on one device, got {_names(given.values())}")


def check_one_dtype(caller: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless all tensors are of one dtype, or autocast brings them to one; None is of any."""
    if len({tensor.dtype for tensor in tensors.values() if tensor is not None}) <= 1:
        return  # whether or not there is autocast
    given = {name: _computed_in(tensor) for name, tensor in tensors.items() if tensor is not None}
    if _differ(given):
        raise TypeError(f"{caller}: {_names(given)} must be of one dtype, got {_names(given.values())}")


def check_sizes(caller: str, *, least: int = 1, **sizes: Any) -> None:
    """Raise TypeError unless sizes are integers, and ValueError unless they lie in ``least``..2³¹ - 1."""
    for name, size in sizes.items():
        if type(size) is int and least <= size <= LARGEST_SIZE:
            continue  # asked at each call of a convolution: the usual integer is known at once
        if not is_whole_number(size):
            raise TypeError(f"{caller}: {name} must be an integer, got {size!r}")
        if size < least:
            raise ValueError(f"{caller}: {name} must be at least {least}, got {size}")
        if size > LARGEST_SIZE:
            raise ValueError(f"{caller}: {name} must be at most {LARGEST_SIZE}, got {size}")


def check_size_lists(caller: str, **lists: Any) -> None:
    """Raise unless options are sequences (TypeError) of sizes of at least one (:func:`check_sizes`)."""
    for name, sizes in lists.items():
        if isinstance(sizes, str) or not isinstance(sizes, Sequence):
            raise TypeError(f"{caller}: {name} must be a sequence of integers, got {sizes!r}")
        for size in sizes:
            check_sizes(caller, **{name: size})


def check_numbers(caller: str, **numbers: Any) -> None:
    """Raise TypeError unless options are numbers, and ValueError for an integer of more than 64 bits."""
    for name, number in numbers.items():
        if not is_number(number):
            raise TypeError(f"{caller}: {name} must be a number, got {_kind(number)}")
        if is_whole_number(number) and abs(number) >= 2**63:  # torch has no larger integers
            raise ValueError(f"{caller}: {name} must be below 2⁶³, got {number}")


def check_flags(caller: str, **flags: Any) -> None:
    """Raise TypeError unless options are True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{caller}: {name} must be True or False, got {_kind(flag)}")


def check_choice(caller: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of its choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{caller}: {name} must be one of {', '.join(choices)}, got {value!r}")


def check_axis(caller: str, name: str, tensor: Tensor, dim: int) -> None:
    """Raise TypeError unless ``dim`` is an integer, and ValueError unless ``tensor`` has that axis, from either end."""
    if not is_whole_number(dim):
        raise TypeError(f"{caller}: dim must be an integer, got {dim!r}")
    if tensor.ndim == 0:
        raise ValueError(f"{caller}: {name} must have at least one axis, got a single number, of shape ()")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(
            f"{caller}: dim must be {-tensor.ndim} to {tensor.ndim - 1} for {name} of shape {tuple(tensor.shape)}, "
            f"got {dim}"
        )


def _differ(given: Mapping[str, object]) -> bool:
    first, *others = given.values()
    return any(other != first for other in others)


def _names(things: Iterable[object]) -> str:
    return " and ".join(map(str, things))


def _computed_in(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):  # autocast leaves float64 alone
        return tensor.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
