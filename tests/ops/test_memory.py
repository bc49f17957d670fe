"""Large blocks of memory that are used again, and what may not be."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from torchcaps.machine import MIB
from torchcaps.ops import memory
from torchcaps.ops.memory import (
    ALIGNMENT,
    SMALLEST,
    combine,
    contiguous,
    get_working_memory,
    new_empty,
    set_working_memory,
)

LARGE = (3, 5, 100_003)  # 6 MB


@pytest.fixture(autouse=True)
def _no_blocks() -> Iterator[None]:
    """No block is there at the start, and none is left."""
    before = get_working_memory()
    set_working_memory(1e-6)
    set_working_memory(before)
    yield
    set_working_memory(1e-6)
    set_working_memory(before)


def held() -> int:
    """Bytes that wait to be used again."""
    gc.collect()
    return sum(block.nbytes for block in memory._pool._free)


def test_a_tensor_like_any_other() -> None:
    for shape in (LARGE, (2**20,), (2, 0, 3), (), (7,), (SMALLEST // 4,), (SMALLEST // 4 - 1,)):
        tensor = new_empty(shape)
        assert type(tensor) is torch.Tensor
        assert tensor.shape == shape
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.fill_(3).eq(3).all()
    alive = [new_empty((SMALLEST // 4 + 1_001 * n,)) for n in range(9)]
    assert [tensor.data_ptr() % 64 for tensor in alive] == [0] * 9, "large ones start at a cache line"


def test_memory_is_used_again_when_its_tensor_is_gone() -> None:
    for _ in range(3):
        tensor = new_empty((SMALLEST // 4 - 1,))  # too small
        del tensor
    tensor = new_empty(LARGE)
    at = tensor.data_ptr()
    assert held() == 0
    del tensor
    assert held() >= 4 * math.prod(LARGE)
    again = new_empty((math.prod(LARGE) // 2,))  # half as large: it fits
    assert again.data_ptr() == at
    assert held() == 0
    other = new_empty(LARGE)
    assert other.data_ptr() != at


def test_not_for_what_is_much_smaller_or_larger() -> None:
    tensor = new_empty((4 * SMALLEST,))
    at, size = tensor.data_ptr(), 16 * SMALLEST + ALIGNMENT
    del tensor
    small, larger = new_empty((SMALLEST,)), new_empty((4 * SMALLEST + 1,))
    assert at not in (small.data_ptr(), larger.data_ptr())
    assert held() == size


def test_the_smallest_block_that_fits() -> None:
    at = {}
    tensors = [new_empty((SMALLEST * n,)) for n in (3, 1, 2)]
    for tensor in tensors:
        at[tensor.numel() // SMALLEST] = tensor.data_ptr()
    del tensor
    tensors.clear()
    alive = [new_empty((SMALLEST,)) for _ in range(3)]
    assert [tensor.data_ptr() for tensor in alive] == [at[1], at[2], at[3]]


@pytest.mark.parametrize("keep", ["view", "detached", "numpy", "storage", "saved"])
def test_memory_that_somebody_still_reads_is_not_used_again(keep: str) -> None:
    tensor = new_empty(LARGE).fill_(1)
    at = tensor.data_ptr()
    leaf = torch.ones(LARGE[2], requires_grad=True)
    reader: object = {
        "view": lambda: tensor[1, 2:3],
        "detached": lambda: tensor.detach().view(-1),
        "numpy": lambda: tensor.numpy(),
        "storage": lambda: tensor.untyped_storage(),
        "saved": lambda: (leaf * tensor).sum(),
    }[keep]()
    del tensor
    assert held() == 0
    other = new_empty(LARGE).fill_(2)
    assert other.data_ptr() != at
    if isinstance(reader, torch.Tensor) and keep == "saved":
        reader.backward()
        assert leaf.grad is not None
        assert leaf.grad.eq(15).all()
    elif isinstance(reader, torch.Tensor):
        assert reader.eq(1).all()
    del reader
    assert held() > 0, "it is given back in the end"


def test_blocks_beyond_the_working_memory_are_let_go() -> None:
    set_working_memory(10)
    tensors = [new_empty((SMALLEST,)) for _ in range(4)]  # of 4 MiB each
    last = [tensor.data_ptr() for tensor in tensors[2:]]
    while tensors:
        del tensors[0]
    assert 8 * MIB <= held() <= 10 * MIB
    set_working_memory(5)
    assert 4 * MIB <= held() <= 5 * MIB
    assert new_empty((SMALLEST,)).data_ptr() == last[-1], "those given back first go first"
    set_working_memory(1)
    assert held() == 0
    tensor = new_empty((SMALLEST,))  # more than may be kept: it is had all the same
    del tensor
    assert held() == 0


def test_a_new_block_makes_room() -> None:
    set_working_memory(10)
    tensors = [new_empty((SMALLEST,)) for _ in range(2)]
    tensors.clear()
    assert held() >= 8 * MIB
    large = new_empty((2 * SMALLEST,))  # 8 MiB: it and what waits do not fit together
    assert held() == 0
    assert large.numel() == 2 * SMALLEST


def test_operations_write_to_it_where_autograd_does_not_note_them() -> None:
    left, right = torch.rand(3, 500, 700, requires_grad=True), torch.rand(500, 700)
    factors, shape = (torch.rand(2, 700, 40), torch.rand(2, 40, 500)), (2, 700, 500)
    noted = combine(torch.mul, left, right), contiguous(left.mT)
    assert noted[0].requires_grad
    assert noted[1].is_contiguous()
    del noted
    assert held() == 0
    with torch.no_grad():
        for result, wanted in (
            (combine(torch.mul, left, right), left * right),
            (combine(torch.bmm, *factors, shape), torch.bmm(*factors)),
            (contiguous(left.mT), left.mT),
        ):
            before = held()
            assert result.equal(wanted)
        assert contiguous(left) is left
        assert combine(torch.mul, left.double(), right.double()).dtype == torch.float64
    del result, wanted
    assert held() > before == 0


def test_no_two_threads_get_the_same_memory() -> None:
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for n in range(60):
            tensors = [new_empty((SMALLEST // 4 + 500 * ((n + mark) % 5),)).fill_(mark) for _ in range(3)]
            wrong.extend(mark for tensor in tensors if not bool(tensor.eq(mark).all()))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < held() <= get_working_memory() * MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_child_takes_memory_though_another_thread_held_the_lock_when_it_forked() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._pool._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    child = os.fork()
    if child == 0:
        new_empty((2**20,))
        os._exit(0)
    end = time.monotonic() + 20
    while (gone := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    done.set()
    thread.join()
    if gone == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert gone == (child, 0)
