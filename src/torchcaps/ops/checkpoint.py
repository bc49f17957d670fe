"""Process some images at a time. The backward pass recomputes intermediate results instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.machine import MIB
from torchcaps.ops.memory import get_working_memory, slices
from torchcaps.tracing import is_graph_capture

MAX_BLOCK_BYTES = 2 * MIB
"""Bytes of votes for each core in a block on a CPU. Results computed from the votes take many times more."""
TENSORS_PER_VOTE = 16
"""Number of tensors of the votes' size that an algorithm with three iterations keeps for its gradient."""
ItemT = TypeVar("ItemT")


def blocks(rows: int, row_bytes: int, device: torch.device, multiple: int = 1) -> list[slice]:
    """Cut rows into blocks, so that only the votes of one block are in memory.

    All rows form one block if they fit, or if torch captures a graph.

    Args:
        rows: Number of rows.
        row_bytes: Bytes of votes in a row.
        device: Device of the votes; blocks are smaller on a CPU.
        multiple: Every block has a multiple of this number of rows.
    """
    if is_graph_capture():
        return [slice(0, rows)]
    room = int(get_working_memory(device) * MIB / (TENSORS_PER_VOTE if torch.is_grad_enabled() else 1))
    if device.type == "cpu":
        room = min(room, MAX_BLOCK_BYTES * torch.get_num_threads())
    return slices(rows, max(1, room // (row_bytes * multiple)) * multiple) or [slice(0, 0)]


def in_blocks(work: Callable[[ItemT], Sequence[Tensor]], items: Sequence[ItemT]) -> tuple[Tensor, ...]:
    """Apply ``work`` to one item after the other and concatenate the results along their first axis."""
    if len(items) == 1:
        return tuple(work(items[0]))
    results = [
        checkpoint(work, item, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else work(item)
        for item in items
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
