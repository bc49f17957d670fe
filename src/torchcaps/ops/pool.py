"""[pool] Reuse the memory of deleted tensors on a CPU, because fresh memory costs more than most arithmetic on it.

Convolutions and work buffers use it. Nothing else in ``ops`` needs to know how it works.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB

WORKING_MEMORY_MIB = 512.0  # the planes of MNIST's primary convolution at batch 128 take 380
ALIGNMENT_BYTES = 64  # a cache line
MAX_SIZE_RATIO = 3  # a free block is reused only if it is at most 3 times larger than needed
MIN_POOLED_BYTES = MIB  # for smaller tensors, the system's allocator is as fast


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
