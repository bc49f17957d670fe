"""The ways in which PyTorch may call a function. Each of them gives what a plain call gives, and the same gradients."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from support import assert_same

Results = dict[str, Tensor]


def check_ways(function: Callable[..., Any], *tensors: Tensor, tol: float = 1e-10, hollow: bool = True) -> None:
    """Check a function of tensors, which gives a tensor or a tuple of them, called in every way.

    Args:
        function: The function; it must not depend on anything random.
        *tensors: What it is called with; all are differentiated.
        tol: How far results may be off, relative to the largest number of each.
        hollow: Whether to ask for shapes alone too; not where the function holds parameters, which have numbers.
    """
    given = [tensor.detach() for tensor in tensors]
    wanted = with_gradients(function, given)
    plain = {name: each for name, each in wanted.items() if name[0] != "d"}

    def same(got: Any, what: str) -> None:
        assert_same(named(got), plain, tol, what)

    for what, mode in (("no_grad", torch.no_grad()), ("inference mode", torch.inference_mode())):
        with mode:
            same(function(*given), what)
    before = [tensor.clone() for tensor in given]
    others = [torch.stack([tensor, -tensor], -1)[..., 0] for tensor in given]  # with gaps in memory
    turned = [tensor.permute(*reversed(range(tensor.ndim))).contiguous() for tensor in given]
    turned = [tensor.permute(*reversed(range(tensor.ndim))) for tensor in turned]
    for what, strided in (("with gaps", others), ("another order of memory", turned)):
        assert_same(with_gradients(function, strided), wanted, tol, what)
    assert all(one.equal(other) for one, other in zip(before, given, strict=True)), "arguments are not written to"

    call = lambda *leaves: torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False)  # noqa: E731
    assert_same(with_gradients(call, given), wanted, tol, "checkpoint")
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(with_gradients(compiled, given), wanted, tol, "compiled into one graph")
    exported = torch.export.export(_Module(function), tuple(given))
    assert not [node for node in exported.graph.nodes if "torchcaps" in str(node.target)], "operations of one's own"
    same(exported.module()(*given), "exported")
    for what, mode in (("meta", None), ("fake", FakeTensorMode())) if hollow else ():
        empty = [tensor.to("meta") if mode is None else mode.from_tensor(tensor) for tensor in given]
        with mode or torch.no_grad():
            found = named(function(*empty))
        assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in plain.items()}
        assert {each.dtype for each in found.values()} == {each.dtype for each in plain.values()}, what
    check_derivatives(function, given, tol)
    in_threads(lambda: assert_same(with_gradients(function, given), wanted, tol, "in a thread"))

    scaled = [torch.stack([tensor, tensor / 2]) for tensor in given]
    gradient = torch.func.grad(lambda *args: _total(function(*args)), tuple(range(len(given))))
    mapped = named(torch.vmap(function)(*scaled))
    mapped |= {f"d {place}": grads for place, grads in enumerate(torch.vmap(gradient)(*scaled))}
    for n in range(2):
        alone = with_gradients(function, [tensor[n] for tensor in scaled])
        assert_same({name: each[n] for name, each in mapped.items()}, alone, tol, "vmap")


def check_derivatives(function: Callable[..., Any], given: Sequence[Tensor], tol: float) -> None:
    """Check forward-mode and second derivatives of :func:`_total` against gradients, and against each other."""
    total = lambda *tensors: _total(function(*tensors))  # noqa: E731
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    generator = torch.Generator().manual_seed(1)
    along = tuple(torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor) for tensor in given)
    once, twice = (
        torch.autograd.grad(total(*leaves), leaves, create_graph=again, allow_unused=True, materialize_grads=True)
        for again in (False, True)
    )
    slope = torch.stack([(grad * step).sum() for grad, step in zip(once, along, strict=True)]).sum()
    found = {"torch.func.jvp": torch.func.jvp(total, tuple(given), along)[1]}
    with forward_ad.dual_level():
        dual = total(*(forward_ad.make_dual(*pair) for pair in zip(given, along, strict=True)))
        found["dual numbers"] = forward_ad.unpack_dual(dual).tangent
    assert_same(found, dict.fromkeys(found, slope), tol, "forward mode")
    assert_same(_by_place(twice), _by_place(once), tol, "gradients that can be differentiated")

    slopes = torch.stack([(grad * step).sum() for grad, step in zip(twice, along, strict=True)]).sum()
    backward = torch.autograd.grad(slopes, leaves, allow_unused=True, materialize_grads=True)
    gradients = torch.func.grad(total, tuple(range(len(given))))
    forward = torch.func.jvp(gradients, tuple(given), along)[1]
    assert_same(_by_place(backward), _by_place(forward), tol, "second derivatives")


def _by_place(tensors: Sequence[Tensor]) -> Results:
    return {f"d {place}": tensor.detach() for place, tensor in enumerate(tensors)}


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def in_threads(work: Callable[[], object]) -> None:
    """Do the same in three threads at once, three times."""
    start = threading.Barrier(3)

    def run() -> None:
        start.wait()
        for _ in range(3):
            work()

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(run) for _ in range(3)]:
            each.result()


def named(results: Any) -> Results:
    """A tensor, or a sequence of tensors, by their places."""
    each = results if isinstance(results, (tuple, list)) else (results,)
    return {f"result {place}": tensor.detach() for place, tensor in enumerate(each) if tensor is not None}


def with_gradients(function: Callable[..., Any], given: Sequence[Tensor]) -> Results:
    """The results, and the gradients of :func:`_total`."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    results = function(*leaves)
    grads = torch.autograd.grad(_total(results), leaves, allow_unused=True, materialize_grads=True)
    return named(results) | {f"d {place}": grad for place, grad in enumerate(grads)}


def _total(results: Any) -> Tensor:
    """A number to which every result adds in its own way."""
    each = results if isinstance(results, (tuple, list)) else (results,)
    learned = [tensor for tensor in each if tensor is not None]
    return torch.stack([(tensor * (tensor + 0.3).sin()).sum() for tensor in learned]).sum()
