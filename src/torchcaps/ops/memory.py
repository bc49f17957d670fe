"""Working memory: how much of it may be used, and large blocks of it that are used again."""

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

WORKING_MEMORY = 512.0  # MiB; the planes of MNIST's primary convolution at batch 128 take 380
BLOCK = 16.0  # MiB on a CPU: a block's buffers stay in the caches; best for a large layer, near best for MNIST's
MAX_BATCH_SLICE = 128  # images on a CPU; more do not make the products faster there
ALIGNMENT = 64  # bytes: a cache line
MOST_WASTE = 3  # times what is needed: a block that is larger stays for those who need it
SMALLEST = MIB  # bytes; the system's allocator is as fast for less


@checked
def set_working_memory(mib: Annotated[float, Range(0, 1e12, above=True)]) -> None:
    """Set how much memory the work buffers of one call of a routing or of a convolution may take.

    Vote-free routing works block by block, in blocks that fit. On a CPU they are no larger than its caches like, 16
    MiB; on a GPU smaller blocks would only mean more calls. Capsules that compete with each other stay together, so a
    block is at least one input capsule with all its outputs (``softmax_over="outputs"``) or one output with all its
    inputs, and up to 16 images. The transform of a convolution takes as many images at a time as fit; where too few do,
    the convolution is computed plainly. EM, variational Bayes and Heinsen's matrix routing make the votes of as many
    images at a time as fit, and on a CPU at most 4 MiB of votes a core; rows that compete with each other stay
    together. Networks that learn nothing take as many images through their convolutions at a time as fit, and keep the
    transformed kernels of up to four convolutions, of this size together.

    The output, the gradients and what routing saves for its backward pass come on top. The setting holds for all
    threads, from the next call on, and changes results by rounding only.

    Args:
        mib: MiB; 512 at the start.
    """
    _pool.mib = float(mib)
    _pool.trim()


def get_working_memory() -> float:
    """MiB that the work buffers of one call may take; see :func:`set_working_memory`."""
    return _pool.mib


def block_bytes(device: torch.device) -> int:
    """Return how many bytes the buffers of a block may take: on a CPU also no more than its caches like."""
    mib = get_working_memory()
    return int((min(BLOCK, mib) if device.type == "cpu" else mib) * MIB)


def max_batch_slice(images: int, device: torch.device) -> int:
    """Return the most images of a batch that are worked on together."""
    return MAX_BATCH_SLICE if device.type == "cpu" else images


def slices(size: int, piece: int) -> list[slice]:
    """``size`` things in pieces of that length; the last one may be shorter."""
    return [slice(start, min(start + piece, size)) for start in range(0, size, piece)]


def nearly_equal(size: int, most: int, multiple: int = 1) -> int:
    """Length of the nearly equal pieces, at most ``most`` long, that ``size`` is cut into."""
    if size <= most:
        return max(size, 1)
    most = most // multiple * multiple or max(most, 1)
    pieces = -(-size // most)
    return min(most, -(-size // (pieces * multiple)) * multiple)


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
            fitting = [
                (block.nbytes, n) for n, block in enumerate(self._free) if size <= block.nbytes <= MOST_WASTE * size
            ]
            if not fitting:
                self.trim(size)
            block = self._free.pop(min(fitting)[1]) if fitting else np.empty(size, np.uint8)
            self._lent += block.nbytes
            return block

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


class Buffers:
    """Work buffers of one call, used again and again: fresh memory would cost more than the arithmetic.

    Args:
        like: A tensor of the dtype and on the device of the buffers.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._pooled = like, is_float32_on_cpu(like)
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of that name in ``shape``, with whatever it holds."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = new_empty((size,)) if self._pooled else self._like.new_empty(size)
        return flat[:size].view(shape)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` itself if it is contiguous, else its copy in the buffer of that name."""
        return tensor if tensor.is_contiguous() else self.take(name, tensor.shape).copy_(tensor)
