"""What torch does with the operations that are computed now: whether it makes a graph of them, or maps over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether a graph is being made of torch's own operations, as for ONNX; the fast paths make way for it."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]  # torch's types lack it


def is_traced() -> bool:
    """Whether torch makes a graph at all: to export, to compile, or under its transforms."""
    return is_exporting() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def one_by_one(function: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], given: tuple[Any, ...]) -> Any:
    """``torch.vmap`` of a function of one or of several results: a loop, as the members may differ in their weights."""
    members = [
        function(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in zip(given, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    if isinstance(members[0], Tensor):
        return torch.stack(members), 0
    results = tuple(map(torch.stack, zip(*members, strict=True)))
    return results, (0,) * len(results)
