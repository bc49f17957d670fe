"""Working memory: its limit, and the cutting of work into blocks and buffers that fit."""

from __future__ import annotations

import functools
import math
from typing import Annotated

import torch
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.machine import MIB
from torchcaps.ops.pool import POOL, WORKING_MEMORY_MIB, new_empty
from torchcaps.ranges import Range
from torchcaps.tracing import is_float32_on_cpu

MAX_BLOCK_MIB = 16.0  # on a CPU, so that buffers stay in the caches; best for a large layer, near best for MNIST's
GPU_SHARE = 1 / 16  # of a GPU's memory; small blocks leave it waiting for calls, at 512 MiB up to a third of the time
MAX_BATCH_SLICE = 128  # images on a CPU; more do not make the products faster there


@checked
def set_working_memory(mib: Annotated[float, Range(0, 1e12, above=True)] | None) -> None:
    """Set the limit on the memory for work buffers of one call of a routing or a convolution.

    - Vote-free routing works in blocks that fit. On a CPU a block has at most 16 MiB, because of the caches. Capsules
      that compete with each other stay together. So a block is at least one input capsule with all its outputs
      (``softmax_over="outputs"``) or one output with all its inputs, and up to 16 images.
    - EM, variational Bayes and Heinsen's matrix routing compute the votes of as many images at a time as fit, on a CPU
      at most 8 MiB of votes for each core. Rows that compete with each other stay together.
    - Layers on a map whose types vote compute the votes of as many lines at a time as fit into a quarter, on a CPU at
      most 2 MiB of votes, or 4 MiB in layers with 128 MiB of votes and more.
    - The transform of a convolution takes as many images at a time as fit. If too few fit, PyTorch's convolution runs.
    - In inference, networks pass as many images at a time through their convolutions as fit. They keep the transformed
      kernels of up to four convolutions, within this limit.

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


def block_bytes(device: torch.device) -> int:
    """Return the limit in bytes on the buffers of a block; on a CPU the caches limit it too."""
    mib = get_working_memory(device)
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
