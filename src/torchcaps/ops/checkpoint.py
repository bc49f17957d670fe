"""Work on some images at a time, of which the backward pass computes the middle again instead of keeping it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.machine import MIB
from torchcaps.ops.memory import get_working_memory, slices
from torchcaps.tracing import is_graph_capture

BLOCK = 2 * MIB
"""Bytes of the votes that a core works on at a time, for its caches; all that is made of them takes many times more."""
TENSORS_PER_VOTE = 16
"""Tensors of the votes' size that an algorithm with three iterations keeps for its gradient."""
ItemT = TypeVar("ItemT")


def blocks(rows: int, row_bytes: int, device: torch.device, multiple: int = 1) -> list[slice]:
    """How rows, each with ``row_bytes`` of votes, are cut, so that no more votes than those of a block are in memory.

    All are one block where they fit, and where torch makes a graph of the work. A block has a multiple of ``multiple``
    rows.
    """
    if is_graph_capture():
        return [slice(0, rows)]
    room = int(get_working_memory() * MIB / (TENSORS_PER_VOTE if torch.is_grad_enabled() else 1))
    if device.type == "cpu":
        room = min(room, BLOCK * torch.get_num_threads())
    return slices(rows, max(1, room // (row_bytes * multiple)) * multiple) or [slice(0, 0)]


def in_blocks(work: Callable[[ItemT], Sequence[Tensor]], items: Sequence[ItemT]) -> tuple[Tensor, ...]:
    """The results of all items, one after the other, joined along their first axis; of one item, kept as they are."""
    if len(items) == 1:
        return tuple(work(items[0]))
    results = [
        checkpoint(work, item, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else work(item)
        for item in items
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
