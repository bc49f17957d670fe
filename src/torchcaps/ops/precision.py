"""Float32 computation for inputs of half precision, everywhere outside convolutions and dense layers.

Two mechanisms do this. Functions convert half-precision inputs with :func:`full_dtype`, and convert their results back
once, at the end. :func:`computed_in_full_precision` turns autocast off for a function and for its gradients, because
autocast rounds the factors of matrix products.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchcaps.errors import WrongType
from torchcaps.tracing import is_graph_capture, is_in_autocast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and any other dtype unchanged."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_full_precision(x: Tensor) -> Tensor:
    """Convert a tensor of half precision to float32; see :func:`full_dtype`."""
    return x.to(full_dtype(x.dtype))


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off on ``device``, because softmax and squash magnify the rounding of half-precision products."""
    if _uses_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def computed_in_full_precision(function: FunctionT) -> FunctionT:
    """Turn autocast off while a function runs, and while its results are differentiated.

    Autocast also rounds the factors of gradients if ``backward`` is called inside its context. Therefore it is turned
    off for the steps of the backward pass between the function's results and its arguments. This does not apply to a
    graph of torch.compile, where ``torch._functorch.config.backward_pass_autocast`` decides for the whole graph.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = list(tensors_in((args, kwargs))) if is_in_autocast() else []
        if not arguments or not _uses_autocast(kind := arguments[0].device.type):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            results = function(*args, **kwargs)
        if torch.is_grad_enabled() and not is_graph_capture():
            _differentiate_without_autocast(kind, tensors_in(results), arguments)
        return results

    return cast(FunctionT, call)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results: in sequences, mappings and plain objects, but not in modules.

    Args:
        value: The arguments or results.
        seen: Identities of the objects that are being searched, because an object may refer to itself.
    """
    if isinstance(value, Tensor):
        yield value
        return
    seen = set() if seen is None else seen
    if isinstance(value, (list, tuple)):
        held = value
    elif isinstance(value, Mapping):
        held = tuple(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        held = tuple(vars(value).values())
    else:
        return
    if not torch.compiler.is_compiling():  # torch 2.11 cannot compile id()
        if id(value) in seen:
            return
        seen.add(id(value))
    for each in held:
        yield from tensors_in(each, seen)


def check_one_dtype(what: str, *tensors: Tensor | None) -> None:
    """Raise WrongType unless tensors are of one dtype, or autocast brings them to one."""
    present = [tensor for tensor in tensors if tensor is not None]
    dtypes = dict.fromkeys(tensor.dtype for tensor in present)
    if len(dtypes) > 1:
        cast = _uses_autocast(present[0].device.type)
        if not cast or torch.float64 in dtypes:  # autocast does not convert float64
            raise WrongType(f"{what} must be of one dtype, got {' and '.join(map(str, dtypes))}")


def _uses_autocast(kind: str) -> bool:
    if not is_in_autocast():
        return False
    is_available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(
        kind
    )  # torch 2.11 cannot compile the latter
    return is_available and torch.is_autocast_enabled(kind)


# ---- gradients


class _WithoutAutocast:
    """Two hooks that turn autocast off before a step of the backward pass and restore it afterwards.

    Autograd may run a step on another thread, so each thread has a separate stack of states.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.threads = kind, threading.local()

    def before(self, _gradients: Any) -> None:
        self.threads.__dict__.setdefault("states", []).append(torch.is_autocast_enabled(self.kind))
        torch.set_autocast_enabled(self.kind, False)

    def after(self, _inputs: Any, _outputs: Any) -> None:
        torch.set_autocast_enabled(self.kind, self.threads.states.pop())


def _differentiate_without_autocast(kind: str, results: Iterable[Tensor], arguments: Iterable[Tensor]) -> None:
    """Turn autocast off for each step of the backward pass from ``results`` back to ``arguments``."""
    hooks = _WithoutAutocast(kind)
    seen = {tensor.grad_fn for tensor in arguments}  # earlier steps belong to the caller
    pending = [tensor.grad_fn for tensor in results]
    while pending:
        step = pending.pop()
        # a step without next functions belongs to a leaf and outlives the graph, so it gets no hooks
        if step is None or step in seen or not step.next_functions:
            continue
        seen.add(step)
        step.register_prehook(hooks.before)
        step.register_hook(hooks.after)
        pending += [before for before, _ in step.next_functions]
