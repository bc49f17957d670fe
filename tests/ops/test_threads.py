"""Threads that take one piece of work after the other."""

import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch

from support import assert_same, with_gradients
from torchcaps import route
from torchcaps.kernels.convolution import columns, transform
from torchcaps.kernels.threads import Stage, idle_threads_sleep, spread_over_threads, sum_over_threads
from torchcaps.ops.convolution import convolve


@pytest.fixture(autouse=True)
def _sleeping_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")


@pytest.fixture(params=[1, 2, 3])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("pieces", [2, 40])
def test_every_piece_is_taken_once(number: int, pieces: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        results, seen = torch.zeros(pieces), set[tuple[bool, int]]()

        def work(place: int) -> None:
            results[place] += place
            seen.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))

        spread_over_threads(partial(work, place) for place in range(pieces))
    assert results.equal(torch.arange(float(pieces)))
    shared = number == 1 or pieces < number  # fewer pieces than threads: the caller computes with all threads
    assert seen == {(True, number) if shared else (False, 1)}
    assert torch.get_num_threads() == number, "the caller keeps its threads"


def test_a_stage_waits_for_the_stages_before_it(number: int) -> None:
    done: list[str] = []

    def work(name: str, seconds: float) -> None:
        time.sleep(seconds)
        done.append(name)

    first = Stage([partial(work, "slow", 0.1), partial(work, "fast", 0.0)])
    second = Stage([partial(work, "after", 0.0)] * 3, first)
    other = Stage([partial(work, "beside", 0.0)])
    spread_over_threads(chain(first, other, second))
    assert sorted(done) == ["after", "after", "after", "beside", "fast", "slow"]
    assert set(done[-3:]) == {"after"}
    if number > 1:
        assert done.index("beside") < done.index("slow"), "pieces that wait for nothing run beside the slow one"


def test_a_stage_keeps_no_piece_that_is_done(number: int) -> None:
    tensors = [torch.zeros(3) for _ in range(4)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    stage = Stage([tensor.sum for tensor in tensors])
    del tensors
    spread_over_threads(stage)
    assert not any(each() is not None for each in alive)
    del stage


def test_sums_are_the_same_to_the_last_bit_each_time(number: int) -> None:
    numbers = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))

    def add(place: int, total: torch.Tensor, count: torch.Tensor) -> None:
        total += numbers[place]
        count += 1

    def summed() -> torch.Tensor:
        total, count = torch.ones(1000), torch.zeros(())
        sum_over_threads([partial(add, place) for place in range(50)], [total, count])
        assert count == 50
        return total

    first = summed()
    assert_same({"sum": first}, {"sum": 1 + numbers.sum(0)}, 1e-5)
    assert all(summed().equal(first) for _ in range(5))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not bound to processors here")
def test_threads_that_take_all_processors_have_one_each(number: int) -> None:
    processors, seen = os.sched_getaffinity(0), list[set[int]]()
    barrier = threading.Barrier(max(number, 1))

    def work() -> None:
        barrier.wait()
        seen.append(os.sched_getaffinity(0))

    spread_over_threads([work] * number)
    if 1 < number == len(processors):
        assert sorted(map(len, seen)) == [1] * number
        assert set.union(*seen) == processors
    else:
        assert seen == [processors] * number
    assert os.sched_getaffinity(0) == processors


@pytest.mark.parametrize(
    ("turns", "policy", "sleep"),
    [("1000", "", True), ("", "passive", True), ("", "PASSIVE", True), ("", "", False), ("300000", "", False)],
)
def test_only_where_idle_threads_of_openmp_sleep(
    turns: str, policy: str, sleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", turns)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert idle_threads_sleep() == sleep


def test_an_error_in_a_thread_reaches_the_caller(number: int) -> None:
    divided = Stage([partial(operator.floordiv, 1, n) for n in (1, 2, 0, 3)])
    with pytest.raises(ZeroDivisionError):
        spread_over_threads(chain(divided, Stage([list] * 9, divided)))
    done: list[int] = []
    spread_over_threads(partial(done.append, n) for n in range(5))
    assert sorted(done) == list(range(5)), "the threads go on"


def convolved(backend: str) -> dict[str, torch.Tensor]:
    leaves = [torch.randn(shape).requires_grad_() for shape in ((9, 7, 11, 10), (5, 7, 4, 3), (5,))]
    maps = convolve(*leaves, relu=True, backend=backend)  # type: ignore[arg-type]
    grads = torch.autograd.grad(maps.square().sum(), leaves)
    with torch.inference_mode():
        again = convolve(*leaves, relu=True, backend=backend)  # type: ignore[arg-type]
    return {"maps": maps.detach(), "again": again.clone()} | {str(n): grad for n, grad in enumerate(grads)}


def routed(**options: Any) -> dict[str, torch.Tensor]:
    leaves = {"poses": torch.randn(9, 300, 8), "weight": 0.1 * torch.randn(300, 5, 6, 8), "bias": torch.randn(5, 6)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    result = route(**leaves, return_coupling=True, backend="recompute", **options)
    return {"coupling": result.coupling} | with_gradients(result, leaves)


KERNELS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "transform": partial(convolved, "transform"),
    "columns": partial(convolved, "columns"),
    "routing": partial(routed, num_iterations=3),
    "routing, stopped": partial(routed, num_iterations=3, stop_gradient=True),
    "routing over inputs": partial(routed, num_iterations=2, softmax_over="inputs"),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_has_the_results_of_one_thread_and_the_same_ones_each_time(
    kernel: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "MAX_BLOCK_NUMBERS", 1)  # many small pieces
    monkeypatch.setattr(transform, "MAX_CHUNK_MIB", 1e-3)

    def results(threads: int) -> dict[str, torch.Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        return KERNELS[kernel]()

    shared = results(number)
    assert_same(shared, results(1), 1e-5)
    again = results(number)
    assert all(each.equal(again[name]) for name, each in shared.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    spread_over_threads([list, list])
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        done: list[int] = []
        spread_over_threads(partial(done.append, n) for n in range(5))
        os._exit(0 if sorted(done) == list(range(5)) else 1)
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
