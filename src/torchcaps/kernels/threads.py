"""Many independent pieces of work for several threads, each of which computes with one thread.

PyTorch opens a parallel region of OpenMP for each operation, and each region waits for its last thread. Threads that
take one of hundreds of small products after the other wait for each other once. This is faster, and if another program
displaces a thread, the others take its share. It needs idle threads of OpenMP that sleep. By default they wait actively
and keep the cores busy, so that a step takes 1.15 times as long instead of 0.9.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

MAX_TURNS = 10_000
"""Turns of an OpenMP thread's waiting loop, up to which it counts as sleeping."""
_WORKERS: dict[int, ThreadPoolExecutor] = {}
"""Threads that wait for work, by their number."""
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child process has none of the threads
    os.register_at_fork(after_in_child=_WORKERS.clear)


def spread_over_threads(work: Callable[..., object], calls: Iterable[tuple[Any, ...]]) -> None:
    """Call ``work`` with each tuple of arguments, without gradients; the order of the calls is not fixed."""
    number, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    remaining, lock = iter(list(calls)), threading.Lock()

    def take() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # modes belong to a thread
            while True:
                with lock:
                    arguments = next(remaining, None)
                if arguments is None:
                    return
                work(*arguments)

    if number == 1 or not idle_threads_sleep():
        take()
        return
    for done in [_workers(number).submit(take) for _ in range(number)]:
        done.result()


def idle_threads_sleep() -> bool:
    """Return True if the environment lets threads of OpenMP sleep that wait for work."""
    turns = os.environ.get("GOMP_SPINCOUNT", "")
    return (turns.isdecimal() and int(turns) <= MAX_TURNS) or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def _workers(number: int) -> ThreadPoolExecutor:
    """Return so many threads that compute with one thread each."""
    with _LOCK:
        if number not in _WORKERS:
            started = threading.Barrier(number)

            def use_one_thread() -> None:
                torch.get_num_threads()  # PyTorch sets the number at the first call in a thread, and would undo ours
                torch.set_num_threads(1)
                started.wait()

            workers = ThreadPoolExecutor(number, "torchcaps")
            for done in [workers.submit(use_one_thread) for _ in range(number)]:
                done.result()
            torch.set_num_threads(number)  # MKL has one setting for all threads
            _WORKERS[number] = workers
        return _WORKERS[number]
