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
        if is_recording_operations():
            return compiled(*given)
        if is_eager() and not torch.is_grad_enabled():
            return forward(*given)  # autograd's own work is 3 % of one image's
        return function.apply(*given)

    return run
