"""Functions with hand-written gradients, for eager code and for ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchcaps.tracing import is_eager, is_recording_operations


def operation(
    name: str,
    schema: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """Build a function with a hand-written gradient for eager code and ``torch.compile``.

    ``torch.compile`` treats the function as one opaque operation.

    Args:
        name: Name of the operation in the namespace ``torchcaps``.
        schema: Types of arguments and results, as for :func:`torch.library.custom_op`.
        forward: Function that computes the results.
        fake: Function that returns results without numbers, for tracing.
        backward: Backward pass, as for :class:`torch.autograd.Function`.
        save: ``setup_context`` of :class:`torch.autograd.Function`.
    """
    methods = {"forward": forward, "setup_context": save or (lambda *_: None), "backward": backward}
    function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in methods.items()})
    compiled = torch.library.custom_op(f"torchcaps::{name}", forward, mutates_args=(), schema=schema)
    compiled.register_fake(fake)
    compiled.register_autograd(backward, setup_context=save)

    def run(*given: Any) -> Any:
        if is_recording_operations():
            return compiled(*given)
        if is_eager() and not torch.is_grad_enabled():
            return forward(*given)  # autograd's overhead is 3 % of the time of one image
        return function.apply(*given)

    return run
