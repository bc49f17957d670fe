"""What torch does with the operations that are computed now, and functions with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PROXY = torch._C._TorchDispatchModeKey.PROXY
"""Marks that torch makes a graph of the operations that are called."""


def is_exporting() -> bool:
    """Whether a graph is being made of torch's own operations, as for ONNX; the fast paths make way for it."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it


def is_traced() -> bool:
    """Whether torch makes a graph at all: to export, to compile, or under its transforms."""
    return is_exporting() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


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
    jvp: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """A function with a gradient of its own, as eager code, ``torch.func`` and ``torch.compile`` call it.

    To ``torch.compile`` it is one operation, which it does not look into; to ``torch.vmap`` a loop, as the members may
    differ in their weights. The arguments are those of :func:`torch.library.custom_op` and of
    :class:`torch.autograd.Function`; ``save`` is its ``setup_context``, and ``fake`` makes results without numbers.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
        members = [
            run(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in zip(given, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        if isinstance(members[0], Tensor):
            return torch.stack(members), 0
        results = tuple(map(torch.stack, zip(*members, strict=True)))
        return results, (0,) * len(results)

    methods = {"forward": forward, "setup_context": save or (lambda *_: None), "backward": backward, "jvp": jvp}
    methods["vmap"] = vmap
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
