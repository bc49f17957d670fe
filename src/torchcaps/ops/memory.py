"""Working memory: how much of it may be used, and large blocks of it that are used again."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.checks import check_numbers

WORKING_MEMORY = 512.0  # MiB; the planes of MNIST's primary convolution at batch 128 take 380
ALIGNMENT = 64  # bytes: a cache line
MOST_WASTE = 3  # times what is needed: a block that is larger stays for those who need it
SMALLEST = MIB  # bytes; the system's allocator is as fast for less


def set_working_memory(mib: float) -> None:
    """Set how much memory the work buffers of one call of a routing or of a convolution may take.

    Vote-free routing works block by block, in blocks that fit (and that are no larger than the processor's caches
    like: 16 MiB). Capsules that compete with each other stay together, so a block is at least one input capsule with
    all its outputs (``softmax_over="outputs"``) or one output with all its inputs, and up to 16 images; if even that
    does not fit, it is used all the same. The transform of a convolution takes as many images at a time as fit; where
    too few do to be worth while, the convolution is computed plainly. Networks heed it too where nothing is learned:
    as many images go through their convolutions at a time as fit.

    The output, the gradients and what routing saves for its backward pass come on top. The setting holds for all
    threads, from the next call on, and changes results by rounding only.

    Args:
        mib: MiB, positive and finite; 512 at the start.

    Raises:
        TypeError: ``mib`` is no number.
        ValueError: ``mib`` is not positive and finite.
    """
    check_numbers("set_working_memory", mib=mib)
    if not 0 < mib < float("inf"):
        raise ValueError(f"set_working_memory: mib must be positive and finite, got {mib}")
    _pool.mib = float(mib)
    _pool.trim()


def get_working_memory() -> float:
    """MiB that the work buffers of one call may take; see :func:`set_working_memory`."""
    return _pool.mib


class _Pool:
    """Blocks of memory that tensors have given back, as many as the working memory, ``mib``, allows.

    Memory that the system has just given to a process costs more to touch for the first time than most arithmetic on
    it: up to 100 ms for the 52 MB of a feature map of MNIST's network at batch 128. NumPy asks for it in large pages
    where the system has them, and a block that was given back is used again.
    """

    def __init__(self) -> None:
        self.mib = WORKING_MEMORY
        self._lock = threading.RLock()  # a tensor may die, and give back, while its thread takes
        self._free: list[np.ndarray] = []
        self._lent = 0  # bytes

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def take(self, size: int) -> np.ndarray:
        """The smallest block of at least ``size`` bytes."""
        with self._lock:
            fitting = [block for block in self._free if size <= block.nbytes <= MOST_WASTE * size]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self._free = [other for other in self._free if other is not block]
                size = block.nbytes
            else:
                block = None
                self.trim(size)
            self._lent += size
        return np.empty(size, np.uint8) if block is None else block

    def give_back(self, block: np.ndarray) -> None:
        """Keep a block for the next tensor that it fits."""
        with self._lock:
            self._lent -= block.nbytes
            self._free.append(block)
            self.trim()

    def trim(self, room: int = 0) -> None:
        """Let the oldest blocks go until all, and ``room`` bytes to come, fit into the working memory."""
        with self._lock:
            held = room + self._lent + sum(block.nbytes for block in self._free)
            while self._free and held > self.mib * MIB:
                held -= self._free.pop(0).nbytes


_pool = _Pool()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while the process forks
    os.register_at_fork(after_in_child=_pool.renew_lock)


def new_empty(shape: Sequence[int]) -> Float[Tensor, "..."]:
    """A float32 tensor on the CPU whose numbers are not set, in memory that is used again when the tensor is gone."""
    numbers = math.prod(shape)
    if 4 * numbers < SMALLEST:
        return torch.empty(tuple(shape))
    block = _pool.take(4 * numbers + ALIGNMENT)
    start = -block.ctypes.data % ALIGNMENT
    lease = block[start : start + 4 * numbers].view(np.float32).reshape(tuple(shape))
    # the tensor's storage keeps this array alive, and nothing else does
    weakref.finalize(lease, _pool.give_back, block).atexit = False
    return torch.from_numpy(lease)  # not a view of a tensor, so that backward passes add to it in place


def combine(
    operation: Callable[..., Tensor], left: Tensor, right: Tensor, shape: Sequence[int] | None = None
) -> Tensor:
    """``operation(left, right)``, in memory as of :func:`new_empty` where it can be so.

    Args:
        operation: One that takes ``out``.
        left: Its first argument.
        right: Its second one.
        shape: That of the result; None where both arguments are broadcast.
    """
    if not (_fits(left) and _fits(right)):
        return operation(left, right)
    return operation(left, right, out=new_empty(shape or torch.broadcast_shapes(left.shape, right.shape)))


def contiguous(tensor: Tensor) -> Tensor:
    """``tensor.contiguous()``, in memory as of :func:`new_empty` where it can be so."""
    if tensor.is_contiguous() or not _fits(tensor):
        return tensor.contiguous()
    return new_empty(tensor.shape).copy_(tensor)


def _fits(tensor: Tensor) -> bool:
    """Whether what is made of a tensor may be written to memory that is used again: if torch does not note it."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and not torch.is_grad_enabled()
