"""Pieces of work for several threads, each of which computes alone.

PyTorch opens a parallel region of OpenMP for each operation, and each region waits for its last thread. Here each
thread takes one piece of work after the other, so threads wait for each other once a pass. This is faster, and if
another program displaces a thread, the others take its share.

Threads of OpenMP that have nothing to do wait actively for some milliseconds and keep a core busy. Passes of a
convolution are long enough for this. An iteration of routing is not, so routing asks :func:`idle_threads_sleep`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor

from torchcaps.kernels.memory import block_bytes, slices, used_up

MAX_TURNS = 10_000
"""Turns of an OpenMP thread's waiting loop, up to which it counts as sleeping."""
MAX_SUMS = 16
"""Sums for each thread that :func:`sum_over_threads` holds at the same time. Threads share work evenly with several."""
MAX_SUMS_MIB = 16.0
"""MiB of all these sums. There is at least one for each thread."""


class _Workers:
    """Threads that wait for work, by their number and the processors that they may use."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):  # a child process has none of the threads, and cannot release the lock
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[int, frozenset[int]], ThreadPoolExecutor] = {}

    def pool(self, number: int) -> ThreadPoolExecutor | None:
        """Return so many threads that compute with one thread each; None if they would share too few processors.

        New threads may use the processors of the thread that starts them. OpenMP may have bound it to one of them
        (``OMP_PROC_BIND``), while the threads of OpenMP have one each.
        """
        processors = _processors()
        if 0 < len(processors) < number:
            return None
        with self._lock:
            key = number, processors
            if key not in self._pools:
                self._pools[key] = _new_pool(*key)
            return self._pools[key]


_WORKERS = _Workers()


class Stage:
    """Pieces of work that other pieces wait for. Iteration yields each piece once.

    Args:
        pieces: Pieces that may run at the same time.
        after: Stages that must be finished before a piece begins. They must have been iterated over before.
    """

    def __init__(self, pieces: Iterable[Callable[[], object]], *after: Stage) -> None:
        self._pieces, self._after = list(pieces), after
        self._unfinished, self._finished, self._lock = len(self._pieces), threading.Event(), threading.Lock()

    def __iter__(self) -> Iterator[Callable[[], None]]:
        return (partial(self._run, piece) for piece in used_up(self._pieces))

    def _run(self, piece: Callable[[], object]) -> None:
        for stage in self._after:
            stage._finished.wait()
        try:
            piece()
        finally:  # after an error, which reaches the caller, nobody waits for ever
            with self._lock:
                self._unfinished -= 1
                if self._unfinished == 0:
                    self._finished.set()


def spread_over_threads(pieces: Iterable[Callable[[], object]]) -> None:
    """Call each piece of work once, without gradients. Pieces begin in order, and several run at the same time.

    If there are fewer pieces than threads, all threads share each piece.
    """
    number, inference, remaining = torch.get_num_threads(), torch.is_inference_mode_enabled(), iter(pieces)
    lock = threading.Lock()

    def take(pieces: Iterator[Callable[[], object]]) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # modes belong to a thread
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                piece()
                del piece  # with the tensors that it holds

    first = list(islice(remaining, number))
    pool = None if number == 1 or len(first) < number else _WORKERS.pool(number)
    every = chain(used_up(first), remaining)
    if pool is None:
        take(every)
        return
    for done in [pool.submit(take, every) for _ in range(number)]:
        done.result()


def sum_over_threads(pieces: Sequence[Callable[..., object]], totals: Sequence[Tensor]) -> None:
    """Call each piece of work with tensors to which it adds, and add all sums to ``totals``.

    The order of the additions depends on the number of pieces and threads only, so rounding is always the same.
    """
    number = torch.get_num_threads()
    if number == 1 or len(pieces) < number:
        for piece in pieces:
            piece(*totals)
        return

    def add(some: slice, *sums: Tensor) -> None:
        for piece in pieces[some]:
            piece(*sums)

    fitting = block_bytes(totals[0].device, MAX_SUMS_MIB) // max(sum(total.nbytes for total in totals), 1)
    lanes = slices(len(pieces), -(-len(pieces) // max(number, min(number * MAX_SUMS, fitting))))
    sums = [total.new_zeros(len(lanes), *total.shape) for total in totals]
    spread_over_threads(partial(add, *each) for each in zip(lanes, *sums, strict=True))
    for total, each in zip(totals, sums, strict=True):
        total += each.sum(0)


def idle_threads_sleep() -> bool:
    """Return True if the environment lets threads of OpenMP sleep that wait for work."""
    turns = os.environ.get("GOMP_SPINCOUNT", "")
    return (turns.isdecimal() and int(turns) <= MAX_TURNS) or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def _processors() -> frozenset[int]:
    """Return the processors that the calling thread may use; nothing if the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _new_pool(number: int, processors: frozenset[int]) -> ThreadPoolExecutor:
    """Start so many threads, each bound to one processor if they take all of them.

    Without it, Linux often runs two threads on one processor and another program alone on the other one. A step of
    sabour2017 beside a busy program then takes 1.2 times as long.
    """
    started, each = threading.Barrier(number), list(processors) if len(processors) == number else []

    def use_one_thread() -> None:
        torch.get_num_threads()  # PyTorch sets the number at the first call in a thread, and would undo ours
        torch.set_num_threads(1)
        if each:
            with suppress(OSError):  # a sandbox may forbid it
                os.sched_setaffinity(0, {each.pop()})
        started.wait()

    pool = ThreadPoolExecutor(number, "torchcaps")
    for done in [pool.submit(use_one_thread) for _ in range(number)]:
        done.result()
    torch.set_num_threads(number)  # MKL has one setting for all threads
    return pool
