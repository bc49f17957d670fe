"""Working memory: its limit, the pool of reused memory, work buffers, and the cutting of work into blocks that fit.

Every block is cut by :func:`cut`, within the limit that :func:`block_bytes` gives.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.checks import checked
from torchcaps.machine import MIB
from torchcaps.ranges import Range
from torchcaps.tracing import is_float32_on_cpu, is_graph_capture

GPU_SHARE = 1 / 16  # of a GPU's memory; small blocks leave it waiting for calls, at 512 MiB up to a third of the time
TENSORS_PER_VOTE = 16
"""Number of tensors of the votes' size that an algorithm with three iterations keeps for its gradient."""
MAX_PLAIN_BLOCK_MIB = 2
"""MiB of votes for each core in a block of a plain formula on a CPU. Results computed from them take many times as
much."""
ItemT = TypeVar("ItemT")

WORKING_MEMORY_MIB = 512.0  # the planes of MNIST's primary convolution at batch 128 take 380
ALIGNMENT_BYTES = 64  # a cache line
MAX_SIZE_RATIO = 3  # a free block is reused only if it is at most 3 times larger than needed
MIN_POOLED_BYTES = MIB  # for smaller tensors, the system's allocator is as fast


# ---- the limit


@checked
def set_working_memory(mib: Annotated[float, Range(0, 1e12, above=True)] | None) -> None:
    """Set the limit on the memory for work buffers of one call of a routing or a convolution.

    On a CPU:

    - Vote-free routing works in blocks that fit and have at most 16 MiB, because of the caches, or 8 MiB for each of
      several threads that work on blocks of their own. Capsules that compete
      with each other stay together. So a block is at least one input capsule with all its outputs
      (``softmax_over="outputs"``) or one output with all its inputs, and up to 16 images.
    - EM, variational Bayes and Heinsen's matrix routing compute the votes of as many images at a time as fit, at most
      8 MiB of votes for each core. Rows that compete with each other stay together.
    - Layers on a map whose types vote compute the votes of as many lines at a time as fit into a quarter, at most 2 MiB
      of votes, or 4 MiB in layers with 128 MiB of votes and more.
    - The transform of a convolution takes as many images at a time as fit. If too few fit, PyTorch's convolution runs.
    - In inference, networks pass as many images at a time through their convolutions as fit. They keep the transformed
      kernels of up to four convolutions, within this limit.

    On a GPU, all votes are built at once if the tensors that a gradient keeps of them fit, otherwise some images or
    lines at a time. If the votes exceed a limit that was set here, routings work in the blocks of a CPU instead, which
    takes the least memory and more time.

    The output, the gradients and the tensors saved for a backward pass are not counted. The setting is valid for all
    threads from the next call on. It changes results by rounding only.

    Args:
        mib: Limit in MiB, for all devices. None, the default: 512, on a GPU a sixteenth of its memory if that is more.
    """
    global _is_default
    _is_default = mib is None
    POOL.limit_mib = WORKING_MEMORY_MIB if mib is None else float(mib)
    POOL.trim()


def get_working_memory(device: torch.device | None = None) -> float:
    """Return the limit in MiB on the work buffers of one call on a device; see :func:`set_working_memory`.

    Args:
        device: Default: the CPU.
    """
    if device is None or device.type == "cpu" or not _is_default:
        return POOL.limit_mib
    return max(WORKING_MEMORY_MIB, gpu_memory_mib(device) * GPU_SHARE)


def is_working_memory_set() -> bool:
    """Return True if :func:`set_working_memory` has set a limit."""
    return not _is_default


_is_default = True


@functools.cache
def gpu_memory_mib(device: torch.device) -> float:
    """Return the memory of a GPU, MiB; 0 for other devices, and for fake tensors without a GPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory / MIB
    return torch.mps.recommended_max_memory() / MIB if device.type == "mps" else 0.0


# ---- the pool


class Pool:
    """Free blocks of memory from deleted tensors, up to ``limit_mib`` together with the blocks in use.

    The first touch of fresh memory costs more than most arithmetic on it: up to 100 ms for the 52 MB of a feature map
    of MNIST's network at batch 128. Therefore blocks are reused. NumPy allocates them in large pages if the system has
    them.
    """

    def __init__(self, limit_mib: float) -> None:
        self.limit_mib = limit_mib
        self._lock = threading.RLock()  # reentrant: a tensor may be deleted while its thread takes a block
        self._free: list[np.ndarray] = []
        self._lent = 0  # bytes

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def take(self, size: int) -> np.ndarray:
        """Return the smallest free block of at least ``size`` bytes, or a new one."""
        with self._lock:
            fitting = [
                (block.nbytes, n) for n, block in enumerate(self._free) if size <= block.nbytes <= MAX_SIZE_RATIO * size
            ]
            if not fitting:
                self.trim(size)
            block = self._free.pop(min(fitting)[1]) if fitting else np.empty(size, np.uint8)
            self._lent += block.nbytes
            return block

    def give_back(self, block: np.ndarray) -> None:
        """Keep a block for reuse."""
        with self._lock:
            self._lent -= block.nbytes
            self._free.append(block)
            self.trim()

    def trim(self, room: int = 0) -> None:
        """Free the oldest blocks until all blocks and ``room`` more bytes fit into the working memory."""
        with self._lock:
            held = room + self._lent + sum(block.nbytes for block in self._free)
            while self._free and held > self.limit_mib * MIB:
                held -= self._free.pop(0).nbytes


POOL = Pool(WORKING_MEMORY_MIB)
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while the process forks
    os.register_at_fork(after_in_child=POOL.renew_lock)


def new_empty(shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Return an uninitialised float32 tensor on the CPU. Its memory is reused after the tensor is deleted."""
    numbers = math.prod(shape)
    if 4 * numbers < MIN_POOLED_BYTES:
        return torch.empty(tuple(shape))
    block = POOL.take(4 * numbers + ALIGNMENT_BYTES)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    lease = block[start : start + 4 * numbers].view(np.float32).reshape(tuple(shape))
    # only the tensor's storage keeps this array alive, so the block returns when the storage is freed
    weakref.finalize(lease, POOL.give_back, block).atexit = False
    return torch.from_numpy(lease)  # not a view of a tensor, so that backward passes can add to it in place


def new_empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor, whose memory is reused if it is float32 on the CPU."""
    if is_float32_on_cpu(tensor):
        return new_empty(tensor.shape)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# ---- blocks


def block_bytes(device: torch.device, cpu_mib: float, share: float = 1) -> int:
    """Return the limit in bytes on a block.

    Args:
        device: Device of the block.
        cpu_mib: Limit in MiB on a CPU, because of its caches.
        share: Number of such blocks that the working memory must hold.
    """
    mib = get_working_memory(device) / share
    return max(int((min(cpu_mib, mib) if device.type == "cpu" else mib) * MIB), 1)


def piece(size: int, most: int, multiple: int = 1) -> int:
    """Return the length of pieces when ``size`` is cut into nearly equal pieces of at most ``most``.

    Pieces have a multiple of ``multiple``, except the last one.
    """
    if size <= most:
        return max(size, 1)
    most = most // multiple * multiple or max(most, 1)
    pieces = -(-size // most)
    return min(most, -(-size // (pieces * multiple)) * multiple)


def slices(size: int, length: int) -> list[slice]:
    """Cut ``size`` items into slices of one length; the last one may be shorter."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


def used_up(items: list[ItemT]) -> Iterator[ItemT]:
    """Yield items one after the other, and keep none of them, so that their memory is free when they are done with."""
    while items:
        yield items.pop(0)


def cut(size: int, item_bytes: int, limit: int, multiple: int = 1) -> list[slice]:
    """Cut items into nearly equal slices of at most ``limit`` bytes; no items into one empty slice.

    Args:
        size: Number of items.
        item_bytes: Bytes of an item.
        limit: Bytes of a slice, :func:`block_bytes`. A slice has at least ``multiple`` items.
        multiple: Every slice has a multiple of this number of items, except the last one.
    """
    return slices(size, piece(size, max(limit // max(item_bytes, 1), multiple), multiple)) or [slice(0, 0)]


def blocks(rows: int, row_bytes: int, device: torch.device, multiple: int = 1) -> list[slice]:
    """Cut rows into blocks for a plain formula, so that only the votes of one block are in memory.

    All rows form one block if they fit, or if torch captures a graph.

    Args:
        rows: Number of rows.
        row_bytes: Bytes of votes in a row.
        device: Device of the votes.
        multiple: Every block has a multiple of this number of rows.
    """
    if is_graph_capture():
        return [slice(0, rows)]
    share = TENSORS_PER_VOTE if torch.is_grad_enabled() else 1
    limit = block_bytes(device, MAX_PLAIN_BLOCK_MIB * torch.get_num_threads(), share)
    return cut(rows, row_bytes, limit, multiple)


def in_blocks(work: Callable[[ItemT], Sequence[Tensor]], items: Sequence[ItemT]) -> tuple[Tensor, ...]:
    """Apply ``work`` to one item after the other and concatenate the results along their first axis.

    The backward pass computes intermediate results again instead of keeping them.
    """
    if len(items) == 1:
        return tuple(work(items[0]))
    results = [
        checkpoint(work, item, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else work(item)
        for item in items
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


# ---- buffers


class Buffers:
    """Work buffers of one call, reused by name because fresh memory would cost more than the arithmetic.

    Each thread has its own buffers.

    Args:
        like: Tensor with the dtype and device of the buffers.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._pooled = like, is_float32_on_cpu(like)
        self._flat: dict[tuple[int, str], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer ``name`` in ``shape``, with its old contents."""
        size, key = math.prod(shape), (threading.get_ident(), name)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = new_empty((size,)) if self._pooled else self._like.new_empty(size)
        return flat[:size].view(shape)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is contiguous, otherwise a copy of it in the buffer ``name``."""
        return tensor if tensor.is_contiguous() else self.take(name, tensor.shape).copy_(tensor)
