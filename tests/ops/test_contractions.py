"""The sums over votes, without votes, against einsum over the votes that are built."""

import itertools

import pytest
import torch
from torch import Tensor

from calling import check_ways
from routing_cases import ORDERS, SIZES, Leaves, draw_leaves, reordered
from support import assert_close, assert_same, with_gradients
from torchcaps.kernels.memory import WORKING_MEMORY_MIB
from torchcaps.ops.contractions import agreement, compute_votes, weighted_sum
from torchcaps.ops.memory import set_working_memory

cut = pytest.mark.parametrize("mib", [WORKING_MEMORY_MIB, 1e-4])
"""Working memory: for all at once, and for many blocks."""


def draw(size: tuple[int, ...]) -> Leaves:
    """Poses, weight, coupling and parents, all of which want gradients."""
    (B, I, J, D, _), leaves = size, draw_leaves(size)
    others = {"coupling": torch.randn(B, I, J), "parents": torch.randn(B, J, D)}
    del leaves["bias"]
    return leaves | {name: each.double().requires_grad_() for name, each in others.items()}


def sums(poses: Tensor, weight: Tensor, coupling: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
    given = poses, weight
    return weighted_sum(*given, coupling), weighted_sum(*given), agreement(*given, parents)


def by_votes(poses: Tensor, weight: Tensor, coupling: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
    votes = compute_votes(poses, weight)
    weighted = torch.einsum("bij,bijd->bjd", coupling, votes)
    return weighted, votes.sum(1), torch.einsum("bijd,bjd->bij", votes, parents)


@cut
def test_they_are_the_sums_over_votes(mib: float) -> None:
    set_working_memory(mib)
    orders = itertools.cycle(ORDERS)
    for size in (*SIZES, (130, 4, 3, 2, 2)):
        leaves = {name: reordered(each, next(orders)).requires_grad_() for name, each in draw(size).items()}
        for ours, theirs in zip(sums(**leaves), by_votes(**leaves), strict=True):
            got, wanted = (with_gradients({"sum": each}, leaves) for each in (ours, theirs))
            assert_same(got, wanted, 1e-11, size)


@cut
def test_derivatives_are_those_of_finite_differences(mib: float) -> None:
    set_working_memory(mib)
    leaves = tuple(draw((2, 3, 2, 2, 2)).values())
    assert torch.autograd.gradgradcheck(sums, leaves)


def test_dtypes_and_autocast() -> None:
    exact = [each.detach() for each in draw((3, 40, 4, 5, 6)).values()]
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        rounded = [each.to(dtype) for each in exact]
        for got, wanted in zip(sums(*rounded), by_votes(*(each.double() for each in rounded)), strict=True):
            assert got.dtype == dtype
            assert_close(got.double() / wanted.abs().max(), wanted / wanted.abs().max(), tol)
        poses, weight, coupling, _ = rounded
        assert weighted_sum(poses, weight, coupling.double()).dtype == torch.float64, "the widest dtype decides"
    single = [each.float() for each in exact]
    with torch.autocast("cpu", torch.bfloat16):  # does not round
        found = sums(*single)
    for got, wanted in zip(found, by_votes(*single), strict=True):
        assert got.dtype == torch.float32
        assert_close(got, wanted, 1e-4)


def test_called_in_every_way() -> None:
    check_ways(sums, *draw((2, 3, 2, 4, 5)).values())
