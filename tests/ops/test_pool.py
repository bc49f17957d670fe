"""Large blocks of memory that are used again, and what may not be."""

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from calling import in_threads
from torchcaps.kernels import memory
from torchcaps.kernels.memory import ALIGNMENT_BYTES, MIN_POOLED_BYTES, new_empty
from torchcaps.machine import MIB
from torchcaps.ops.memory import get_working_memory, set_working_memory

LARGE = (3, 5, 100_003)  # 6 MB


@pytest.fixture(autouse=True)
def _no_blocks() -> Iterator[None]:
    """No block is there at the start, and none is left."""
    set_working_memory(1e-6)
    set_working_memory(None)
    yield
    set_working_memory(1e-6)


def held() -> int:
    """Bytes that wait to be used again."""
    gc.collect()
    return sum(block.nbytes for block in memory.POOL._free)


def test_a_tensor_like_any_other() -> None:
    for shape in (LARGE, (2, 0, 3), (), (7,), (MIN_POOLED_BYTES // 4,), (MIN_POOLED_BYTES // 4 - 1,)):
        tensor = new_empty(shape)
        assert (type(tensor), tensor.shape, tensor.dtype) == (torch.Tensor, shape, torch.float32)
        assert tensor.is_contiguous()
        assert tensor.fill_(3).eq(3).all()
    alive = [new_empty((MIN_POOLED_BYTES // 4 + 1_001 * n,)) for n in range(9)]
    assert [tensor.data_ptr() % 64 for tensor in alive] == [0] * 9, "large ones start at a cache line"


def test_memory_is_used_again_when_its_tensor_is_gone() -> None:
    small = new_empty((MIN_POOLED_BYTES // 4 - 1,))
    del small
    tensor = new_empty(LARGE)
    at = tensor.data_ptr()
    assert held() == 0
    del tensor
    assert held() >= 4 * math.prod(LARGE)
    again = new_empty((math.prod(LARGE) // 2,))  # half as large: it fits
    assert again.data_ptr() == at
    assert held() == 0
    assert new_empty(LARGE).data_ptr() != at


def test_not_for_what_is_much_smaller_or_larger() -> None:
    tensor = new_empty((4 * MIN_POOLED_BYTES,))
    at, size = tensor.data_ptr(), 16 * MIN_POOLED_BYTES + ALIGNMENT_BYTES
    del tensor
    small, larger = new_empty((MIN_POOLED_BYTES,)), new_empty((4 * MIN_POOLED_BYTES + 1,))
    assert at not in (small.data_ptr(), larger.data_ptr())
    assert held() == size


@pytest.mark.slow
def test_memory_that_somebody_still_reads_is_not_used_again() -> None:
    readers: Any = (lambda tensor: tensor[1, 2:3], torch.Tensor.numpy, torch.Tensor.untyped_storage)
    for read in readers:
        tensor = new_empty(LARGE).fill_(1)
        at, reader = tensor.data_ptr(), read(tensor)
        del tensor
        assert held() == 0
        assert new_empty(LARGE).fill_(2).data_ptr() != at
        del reader
        assert held() > 0, "it is given back in the end"
        set_working_memory(1e-6)
        set_working_memory(512)
    leaf = torch.ones(LARGE[2], requires_grad=True)
    total = (leaf * new_empty(LARGE).fill_(1)).sum()  # saved for its gradient
    new_empty(LARGE).fill_(2)
    total.backward()
    assert leaf.grad.eq(15).all()


@pytest.mark.slow
def test_blocks_beyond_the_working_memory_are_let_go() -> None:
    set_working_memory(10)
    tensors = [new_empty((MIN_POOLED_BYTES,)) for _ in range(4)]  # of 4 MiB each
    while tensors:
        del tensors[0]
    assert 8 * MIB <= held() <= 10 * MIB
    large = new_empty((2 * MIN_POOLED_BYTES,))  # 8 MiB: it and what waits do not fit together
    assert held() == 0
    del large, tensors
    set_working_memory(5)
    assert held() == 0
    tensors = [new_empty((MIN_POOLED_BYTES,)) for _ in range(2)]
    last = tensors[1].data_ptr()
    while tensors:
        del tensors[0]
    assert new_empty((MIN_POOLED_BYTES,)).data_ptr() == last, "those given back first go first"
    set_working_memory(1)
    assert held() == 0
    tensor = new_empty((MIN_POOLED_BYTES,))  # more than may be kept: it is had all the same
    del tensor
    assert held() == 0


def test_no_two_threads_get_the_same_memory() -> None:
    wrong: list[int] = []

    def work() -> None:
        mark = threading.get_ident() % 1000
        for n in range(20):
            tensors = [new_empty((MIN_POOLED_BYTES // 4 + 500 * ((n + mark) % 5),)).fill_(mark) for _ in range(3)]
            wrong.extend(mark for tensor in tensors if not bool(tensor.eq(mark).all()))

    in_threads(work)
    assert not wrong
    assert 0 < held() <= get_working_memory() * MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_child_takes_memory_though_another_thread_held_the_lock_when_it_forked() -> None:
    lock = memory.POOL._lock
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            new_empty((2**20,))
            os._exit(0)
        other.submit(lock.release).result()
    assert os.waitpid(child, 0) == (child, 0)
