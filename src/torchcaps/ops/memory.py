"""Working memory: its limit, the cutting of work into blocks that fit, and a pool of reusable memory."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.machine import MIB
from torchcaps.ranges import Range
from torchcaps.tracing import is_float32_on_cpu

WORKING_MEMORY_MIB = 512.0  # the planes of MNIST's primary convolution at batch 128 take 380
MAX_BLOCK_MIB = 16.0  # on a CPU, so that buffers stay in the caches; best for a large layer, near best for MNIST's
MAX_BATCH_SLICE = 128  # images on a CPU; more do not make the products faster there
ALIGNMENT_BYTES = 64  # a cache line
MAX_SIZE_RATIO = 3  # a free block is reused only if it is at most 3 times larger than needed
MIN_POOLED_BYTES = MIB  # for smaller tensors, the system's allocator is as fast


@checked
def set_working_memory(mib: Annotated[float, Range(0, 1e12, above=True)]) -> None:
    """Set the limit on the memory for work buffers of one call of a routing or a convolution.

    - Vote-free routing works in blocks that fit. On a CPU a block has at most 16 MiB, because of the caches. Capsules
      that compete with each other stay together. So a block is at least one input capsule with all its outputs
      (``softmax_over="outputs"``) or one output with all its inputs, and up to 16 images.
    - EM, variational Bayes and Heinsen's matrix routing compute the votes of as many images at a time as fit, on a CPU
      at most 4 MiB of votes for each core. Rows that compete with each other stay together.
    - The transform of a convolution takes as many images at a time as fit. If too few fit, PyTorch's convolution runs.
    - In inference, networks pass as many images at a time through their convolutions as fit. They keep the transformed
      kernels of up to four convolutions, within this limit.

    The output, the gradients and the tensors saved for a backward pass are not counted. The setting is valid for all
    threads from the next call on. It changes results by rounding only.

    Args:
        mib: Limit in MiB (default 512).
    """
    _pool.mib = float(mib)
    _pool.trim()


def get_working_memory() -> float:
    """Return the limit in MiB on the work buffers of one call; see :func:`set_working_memory`."""
    return _pool.mib


def block_bytes(device: torch.device) -> int:
    """Return the limit in bytes on the buffers of a block; on a CPU the caches limit it too."""
    mib = get_working_memory()
    return int((min(MAX_BLOCK_MIB, mib) if device.type == "cpu" else mib) * MIB)


def max_batch_slice(images: int, device: torch.device) -> int:
    """Return the largest number of images of a batch in one block."""
    return MAX_BATCH_SLICE if device.type == "cpu" else images


def slices(size: int, piece: int) -> list[slice]:
    """Cut ``size`` items into slices of length ``piece``; the last one may be shorter."""
    return [slice(start, min(start + piece, size)) for start in range(0, size, piece)]


def nearly_equal(size: int, most: int, multiple: int = 1) -> int:
    """Return the length of pieces when ``size`` is cut into nearly equal pieces of at most ``most``.

    Pieces have a multiple of ``multiple``, except the last one.
    """
    if size <= most:
        return max(size, 1)
    most = most // multiple * multiple or max(most, 1)
    pieces = -(-size // most)
    return min(most, -(-size // (pieces * multiple)) * multiple)


class _Pool:
    """Free blocks of memory from deleted tensors, up to ``mib`` together with the blocks in use.

    The first touch of fresh memory costs more than most arithmetic on it: up to 100 ms for the 52 MB of a feature map
    of MNIST's network at batch 128. Therefore blocks are reused. NumPy allocates them in large pages if the system has
    them.
    """

    def __init__(self) -> None:
        self.mib = WORKING_MEMORY_MIB
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
            while self._free and held > self.mib * MIB:
                held -= self._free.pop(0).nbytes


_pool = _Pool()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while the process forks
    os.register_at_fork(after_in_child=_pool.renew_lock)


def new_empty(shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Return an uninitialised float32 tensor on the CPU. Its memory is reused after the tensor is deleted."""
    numbers = math.prod(shape)
    if 4 * numbers < MIN_POOLED_BYTES:
        return torch.empty(tuple(shape))
    block = _pool.take(4 * numbers + ALIGNMENT_BYTES)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    lease = block[start : start + 4 * numbers].view(np.float32).reshape(tuple(shape))
    # only the tensor's storage keeps this array alive, so the block returns when the storage is freed
    weakref.finalize(lease, _pool.give_back, block).atexit = False
    return torch.from_numpy(lease)  # not a view of a tensor, so that backward passes can add to it in place


class Buffers:
    """Work buffers of one call, reused by name because fresh memory would cost more than the arithmetic.

    Args:
        like: Tensor with the dtype and device of the buffers.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._pooled = like, is_float32_on_cpu(like)
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer ``name`` in ``shape``, with its old contents."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = new_empty((size,)) if self._pooled else self._like.new_empty(size)
        return flat[:size].view(shape)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is contiguous, otherwise a copy of it in the buffer ``name``."""
        return tensor if tensor.is_contiguous() else self.take(name, tensor.shape).copy_(tensor)
