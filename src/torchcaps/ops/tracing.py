"""What torch does with the operations that are computed now, and functions with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PROXY = torch._C._TorchDispatchModeKey.PROXY
"""Marks that torch makes a graph of the operations that are called."""


def is_exporting() -> bool:
    """Whether a graph is being made of torch's own operations, as for ONNX."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it


def is_plain() -> bool:
    """Whether operations must be torch's own: while a graph is being exported, and under ``torch.func``."""
    return is_exporting() or (not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active())


def is_traced() -> bool:
    """Whether torch makes a graph at all: to export, to compile, or under its transforms."""
    return torch.compiler.is_compiling() or is_plain()


def is_immediate() -> bool:
    """Whether operations are computed at once, and differentiated backward if at all."""
    return not (is_traced() or torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack())


def operation(
    name: str,
    schema: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """A function with a gradient of its own, as eager code and ``torch.compile`` call it.

    To ``torch.compile`` it is one operation, which it does not look into. The arguments are those of
    :func:`torch.library.custom_op` and of :class:`torch.autograd.Function`; ``save`` is its ``setup_context``, and
    ``fake`` makes results without numbers.
    """
    methods = {"forward": forward, "setup_context": save or (lambda *_: None), "backward": backward}
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in methods.items()})
    compiled = torch.library.custom_op(f"torchcaps::{name}", forward, mutates_args=(), schema=schema)
    compiled.register_fake(fake)
    compiled.register_autograd(backward, setup_context=save)

    def run(*given: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(PROXY):  # the latter: in a gradient's graph
            return compiled(*given)
        if is_immediate() and not torch.is_grad_enabled():
            return forward(*given)  # autograd's own work is 3 % of one image's
        return function.apply(*given)

    return run
