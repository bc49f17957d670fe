"""Threads that take one piece of work after the other."""

import operator
import os
import subprocess
import sys
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
from torchcaps.kernels import threads
from torchcaps.kernels.convolution import columns, transform
from torchcaps.kernels.dense.layer import Layer, Options, Tensors
from torchcaps.kernels.threads import Stage, _Workers, idle_threads_sleep, spread_over_threads, sum_over_threads
from torchcaps.machine import usable_cores
from torchcaps.ops.convolution import convolve

processors_here = threads._processors


@pytest.fixture(autouse=True)
def _sleeping_threads_on_many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setattr(threads, "_processors", lambda: frozenset(range(64)))


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


class Affinity:
    """A machine of some processors, which keeps the processors that each thread may use, as Linux does."""

    def __init__(self, processors: set[int], is_forbidden: bool) -> None:
        self.processors, self.is_forbidden, self.of_threads = processors, is_forbidden, dict[int, set[int]]()

    def sched_getaffinity(self, _: int) -> set[int]:
        return self.of_threads.get(threading.get_ident(), self.processors)

    def sched_setaffinity(self, _: int, processors: set[int]) -> None:
        if self.is_forbidden:
            raise PermissionError
        self.of_threads[threading.get_ident()] = processors

    def replace_functions(self, monkeypatch: pytest.MonkeyPatch, *, exist: bool = True) -> None:
        """Let the process run on this machine, without threads of before."""
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.delattr(os, name, raising=False)
            if exist:
                monkeypatch.setattr(os, name, getattr(self, name), raising=False)
        monkeypatch.setattr(threads, "_processors", processors_here)
        monkeypatch.setattr(threads, "_WORKERS", _Workers())


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_a_thread_has_blocks_of_the_same_size_however_many_there_are(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    tensors = Tensors(torch.zeros(64, 512, 8), torch.zeros(512, 100, 16, 8), None)
    layer = Layer(tensors, Options(3, over_inputs=False, stop_gradient=False, leaky=False, eps=1e-7))
    assert (layer.threads, layer.inputs[0], layer.batches[0]) == (cores, slice(0, 16), slice(0, 16))


@pytest.mark.parametrize(("mib", "sums"), [(16.0, 16), (0.5, 8), (0.01, 1)])
def test_sums_fit_into_their_memory(number: int, mib: float, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_SUMS_MIB", mib * number)
    added = set[int]()
    total = torch.zeros(2**14)  # 64 KiB

    def add(total: torch.Tensor) -> None:
        total += 1
        added.add(total.data_ptr())

    sum_over_threads([add] * 1000, [total])
    assert total.eq(1000).all()
    assert len(added) <= (1 if number == 1 else number * sums)


@pytest.mark.parametrize("is_forbidden", [False, True])
@pytest.mark.parametrize("processors", [1, 2, 3, 4, None])
def test_threads_have_a_processor_each_if_they_take_all_and_never_share_one(
    number: int, processors: int | None, is_forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = set(range(processors or 0))
    machine = Affinity(everywhere, is_forbidden)
    machine.replace_functions(monkeypatch, exist=processors is not None)  # macOS and Windows have neither
    together = number if processors is None or processors >= number else 1
    barrier, seen = threading.Barrier(together), list[tuple[bool, set[int]]]()

    def work() -> None:
        barrier.wait(10)
        seen.append((threading.current_thread() is threading.main_thread(), machine.sched_getaffinity(0)))

    for _ in range(2):  # with new threads, and with the same ones
        seen.clear()
        spread_over_threads([work] * number)
        assert {is_main for is_main, _ in seen} == {together == 1}
        if together == processors and together > 1 and not is_forbidden:
            assert sorted(min(each) for _, each in seen) == sorted(everywhere)
            assert all(len(each) == 1 for _, each in seen)
        else:
            assert all(each == everywhere for _, each in seen)
    assert machine.sched_getaffinity(0) == everywhere, "the caller keeps its processors"


@pytest.mark.parametrize("number", [2], indirect=True)
def test_threads_follow_a_process_that_gets_other_processors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Affinity({0, 1}, is_forbidden=False)
    machine.replace_functions(monkeypatch)
    for processors in ({0, 1}, {4, 5}, {3}, {0, 1, 2}):
        machine.processors, seen = processors, list[set[int]]()
        barrier = threading.Barrier(min(len(processors), number))

        def work(seen: list[set[int]] = seen, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            seen.append(machine.sched_getaffinity(0))

        spread_over_threads([work] * number)
        assert set.union(*seen) == processors


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="needs two processors")
@pytest.mark.parametrize("variables", [{"OMP_PROC_BIND": "true"}, {"GOMP_CPU_AFFINITY": "0-999"}, {}])
def test_threads_never_share_one_processor_where_openmp_binds_its_own(variables: dict[str, str]) -> None:
    code = (
        "import os, threading, torch\n"
        "from torchcaps.kernels.threads import spread_over_threads\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(10**6).exp()\n"
        "seen = set()\n"
        "spread_over_threads([lambda: seen.add((threading.current_thread().name, *os.sched_getaffinity(0)))] * 200)\n"
        "print(len({name for name, *_ in seen}), len({place for _, *places in seen for place in places}))"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | variables).stdout
    names, places = map(int, answer.split())
    assert names <= places


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
