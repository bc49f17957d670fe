"""Very few images are routed from held votes: the same numbers, gradients too, in every way to call it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_close
from torchcaps import route
from torchcaps.ops.dynamic_routing.recompute import forward
from torchcaps.ops.memory import set_working_memory

SIZE = (3, 63, 7, 5, 3)  # B, I, J, D, K

either_axis = pytest.mark.parametrize("axis", ["outputs", "inputs"])
either_gradient = pytest.mark.parametrize("stop", [False, True])

Tensors = dict[str, Tensor]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The votes that were built."""
    votes: list[Tensor] = []
    make = forward.make_votes
    monkeypatch.setattr(forward, "make_votes", lambda layer: votes.append(make(layer)) or votes[-1])
    return votes


def make(size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.float64, extras: bool = True) -> Tensors:
    B, I, J, D, K = size
    shapes = {"poses": (B, I, K), "weight": (I, J, D, K)} | ({"bias": (J, D)} if extras else {})
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def routed(leaves: Tensors, backend: Any, **options: Any) -> Tensors:
    """Capsules, coupling and the gradients of a fixed random projection of them."""
    outputs = route(**leaves, return_coupling=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype) for out in outputs]
    loss = sum((out * grad).sum() for out, grad in zip(outputs, grads, strict=True) if out.requires_grad)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {f"d {name}": grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return dict(zip(("capsules", "coupling"), outputs, strict=True)) | named


def assert_same(got: Tensors, wanted: Tensors, tol: float = 1e-10) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_close(got[name], wanted[name], tol)


@pytest.mark.parametrize("r", [2, 3, 4])
@either_axis
@either_gradient
@pytest.mark.parametrize("leaky", [False, True])
def test_outputs_and_gradients_are_the_reference_s(
    r: int, axis: str, stop: bool, leaky: bool, built: list[Tensor]
) -> None:
    options = {"num_iterations": r, "softmax_over": axis, "stop_gradient": stop, "leaky": leaky}
    for extras, batch in itertools.product((False, True), (1, 3)):
        leaves = make((batch, *SIZE[1:]), extras=extras)
        assert_same(routed(leaves, "recompute", **options), routed(leaves, "reference", **options))
    assert len(built) == 4


def test_votes_are_the_reference_s(built: list[Tensor]) -> None:
    from torchcaps import compute_votes

    leaves = make(extras=False)
    route(**leaves, backend="recompute")
    assert_close(built[0].permute(1, 3, 0, 2), compute_votes(**leaves), 1e-12)


@pytest.mark.parametrize(
    ("size", "r", "mib", "held"),
    [
        ((1, *SIZE[1:]), 3, 16, True),
        ((6, *SIZE[1:]), 4, 16, True),
        ((7, *SIZE[1:]), 3, 16, False),  # too many images
        ((0, *SIZE[1:]), 3, 16, False),
        ((1, *SIZE[1:]), 2, 16, True),
        *((SIZE, r, 16, False) for r in (0, 1)),  # a single sum
        (SIZE, 3, 0.05, False),  # votes, logits and coupling: 3·7·63·(5 + 2) numbers of 8 bytes are 0.07 MiB
        (SIZE, 3, 0.08, True),
        ((6, 3000, 20, 6, 1), 3, 16, False),  # 16.5 MiB
        ((6, 3000, 20, 6, 1), 3, 64, False),  # more memory is allowed, but the votes would leave the caches
    ],
)
def test_when_votes_are_held(size: tuple[int, ...], r: int, mib: float, held: bool, built: list[Tensor]) -> None:
    set_working_memory(mib)
    leaves = {name: leaf.detach() for name, leaf in make(size, extras=False).items()}
    route(**leaves, num_iterations=r, backend="recompute")
    assert bool(built) == held


@either_axis
def test_float32_is_as_exact_as_the_plain_formulation(axis: str, built: list[Tensor]) -> None:
    leaves = make((2, 400, 10, 16, 8), torch.float32)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    found = {name: routed(leaves, name, softmax_over=axis) for name in ("recompute", "reference")}
    for name, wanted in routed(exact, "reference", softmax_over=axis).items():
        ours, theirs = ((found[way][name].double() - wanted).norm() for way in ("recompute", "reference"))
        assert ours <= 2 * theirs, f"{name}: {ours:.2e} off, plain float32 {theirs:.2e}"
    assert built


@either_axis
def test_half_precision_rounds_arguments_and_results_only(axis: str, built: list[Tensor]) -> None:
    half = {name: leaf.detach() for name, leaf in make(dtype=torch.bfloat16).items()}
    single = {name: leaf.float() for name, leaf in half.items()}
    got, wanted = (route(**leaves, softmax_over=axis, backend="recompute") for leaves in (half, single))
    assert got.dtype == torch.bfloat16
    assert got.equal(wanted.bfloat16())
    assert len(built) == 2


@either_axis
def test_any_memory_layout(axis: str, built: list[Tensor]) -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    wanted = route(**leaves, softmax_over=axis, backend="reference")
    orders = {"poses": (0, 2, 1), "weight": (1, 2, 3, 0), "bias": (1, 0)}
    turned = {
        name: leaf.permute(orders[name]).contiguous().permute([orders[name].index(n) for n in range(leaf.ndim)])
        for name, leaf in leaves.items()
    }
    gaps = {name: torch.stack([leaf, leaf], -1)[..., 0] for name, leaf in leaves.items()}
    for laid_out in (leaves, turned, gaps):
        assert_close(route(**laid_out, softmax_over=axis, backend="recompute"), wanted, 1e-12)
    assert len(built) == 3


def test_arguments_are_not_written_to() -> None:
    leaves = {name: leaf.detach() for name, leaf in make((1, *SIZE[1:])).items()}
    before = {name: leaf.clone() for name, leaf in leaves.items()}
    route(**leaves, backend="recompute")
    for name in leaves:
        assert leaves[name].equal(before[name]), name


def test_poses_without_components_have_zero_votes(built: list[Tensor]) -> None:
    bias = torch.rand(4, 3)
    got, wanted = (
        route(torch.empty(2, 5, 0), torch.empty(5, 4, 3, 0), bias=bias, backend=backend)
        for backend in ("recompute", "reference")
    )
    assert built
    assert_close(got, wanted)


def test_inference_mode_and_compiled_graphs(built: list[Tensor]) -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    wanted = route(**leaves, backend="reference")
    with torch.inference_mode():
        assert_close(route(**leaves, backend="recompute"), wanted, 1e-10)
    compiled = torch.compile(lambda tensors: route(**tensors, backend="recompute"), backend="eager", fullgraph=True)
    assert_close(compiled(leaves), wanted, 1e-10)
    assert len(built) == 2
