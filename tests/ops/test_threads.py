"""Threads that take one piece of work after the other."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from support import assert_same
from torchcaps.kernels.convolution import transform
from torchcaps.kernels.threads import idle_threads_sleep, spread_over_threads
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
def test_every_call_is_made_once_by_threads_of_one_thread(number: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        results, seen = torch.zeros(40), set[tuple[int, int]]()

        def work(place: int) -> None:
            results[place] += place
            seen.add((threading.get_ident(), torch.get_num_threads()))

        spread_over_threads(work, ((place,) for place in range(40)))
    assert results.equal(torch.arange(40.0))
    assert {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == number, "the caller keeps its threads"


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
    with pytest.raises(ZeroDivisionError):
        spread_over_threads(lambda n: 1 // n, [(n,) for n in (1, 2, 0, 3)])
    done: list[int] = []
    spread_over_threads(done.append, [(n,) for n in range(5)])
    assert sorted(done) == list(range(5)), "the threads go on"


def test_a_convolution_is_that_of_one_product_after_the_other(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [torch.randn(shape).requires_grad_() for shape in ((3, 7, 11, 10), (5, 7, 4, 3), (5,))]

    def results() -> dict[str, torch.Tensor]:
        maps = convolve(*leaves, relu=True, backend="transform")
        grads = torch.autograd.grad(maps.square().sum(), leaves)
        with torch.inference_mode():
            again = convolve(*leaves, relu=True, backend="transform")
        return {"maps": maps.detach(), "again": again.clone()} | {str(n): grad for n, grad in enumerate(grads)}

    shared = results()

    def one_after_the_other(work, calls):  # type: ignore[no-untyped-def]
        for call in calls:
            work(*call)

    monkeypatch.setattr(transform, "spread_over_threads", one_after_the_other)
    assert_same(shared, results(), 1e-6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    spread_over_threads(lambda _: None, [(1,), (2,)])
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        done: list[int] = []
        spread_over_threads(done.append, [(n,) for n in range(5)])
        os._exit(0 if sorted(done) == list(range(5)) else 1)
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
