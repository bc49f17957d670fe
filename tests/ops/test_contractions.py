"""The sums over votes, without votes, against einsum over the votes that are built."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calling import check_ways
from routing_cases import ORDERS, SIZES, draw_leaves, reordered
from support import assert_close, assert_raises
from torchcaps.errors import InputError
from torchcaps.ops.contractions import agreement, compute_votes, weighted_sum
from torchcaps.ops.memory import WORKING_MEMORY, set_working_memory

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
CUTS = (WORKING_MEMORY, 1e-4)
"""Working memory, MiB: for all at once, and for many blocks."""


def matrices(size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensors:
    """Poses, weight, coupling and parents, all of which want gradients."""
    (B, I, J, D, _), leaves = size, draw_leaves(size, dtype)
    others = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((B, I, J), (B, J, D)))
    return leaves["poses"], leaves["weight"], *others  # type: ignore[return-value]


def vectors(size: tuple[int, ...]) -> Tensors:
    """The same with vectors in place of matrices, so that K is D."""
    poses, weight, *others = matrices((*size[:4], size[3]))
    return poses, weight.detach()[..., 0].clone().requires_grad_(), *others  # type: ignore[return-value]


both_kinds = pytest.mark.parametrize("make", [matrices, vectors])


def by_votes(poses: Tensor, weight: Tensor, coupling: Tensor | None, parents: Tensor) -> tuple[Tensor, Tensor]:
    votes = compute_votes(poses, weight) if weight.ndim == 4 else weight * poses[:, :, None]
    sums = votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling, votes)
    return sums, torch.einsum("bijd,bjd->bij", votes, parents)


@both_kinds
def test_they_are_the_sums_over_votes(make: Callable[..., Tensors]) -> None:
    order = iter(ORDERS)
    for size, mib, weighted in itertools.product((*SIZES, (130, 4, 3, 2, 2)), CUTS, (True, False)):
        set_working_memory(mib)
        poses, weight, coupling, parents = factors = tuple(
            reordered(tensor, next(order, (3, 1, 0, 2))).requires_grad_() for tensor in make(size)
        )
        c = coupling if weighted else None
        for got, wanted in zip(
            (weighted_sum(poses, weight, c), agreement(poses, weight, parents)),
            by_votes(poses, weight, c, parents),
            strict=True,
        ):
            assert_close(got, wanted, 1e-12)
            seed = torch.randn_like(got)
            grads = (
                torch.autograd.grad((each * seed).sum(), factors, allow_unused=True, retain_graph=True)
                for each in (got, wanted)
            )
            for one, other in zip(*grads, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert_close(one, other, 1e-11)


@both_kinds
def test_derivatives_are_those_of_finite_differences(make: Callable[..., Tensors]) -> None:
    poses, weight, coupling, parents = make((2, 3, 2, 2, 2))
    for mib, summed in itertools.product(CUTS, ((poses, weight, coupling), (poses, weight))):
        set_working_memory(mib)
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(weighted_sum, summed)
            assert check(agreement, (poses, weight, parents))
    assert torch.autograd.gradcheck(weighted_sum, (poses, weight, coupling), check_forward_ad=True)
    assert torch.autograd.gradcheck(agreement, (poses, weight, parents), check_forward_ad=True)


def test_dtypes_and_autocast() -> None:
    exact = matrices((3, 40, 4, 5, 6))
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        poses, weight, coupling, parents = rounded = [tensor.detach().to(dtype) for tensor in exact]
        sums, agreed = weighted_sum(poses, weight, coupling), agreement(poses, weight, parents)
        assert sums.dtype == agreed.dtype == dtype
        wanted = by_votes(*(tensor.double() for tensor in rounded))
        for got, other in zip((sums, agreed), wanted, strict=True):
            assert_close(got.double() / other.abs().max(), other / other.abs().max(), tol)
        assert weighted_sum(poses, weight, coupling.double()).dtype == torch.float64, "the widest dtype decides"
    poses, weight, coupling, parents = (tensor.detach().float() for tensor in exact)
    with torch.autocast("cpu", torch.bfloat16):  # does not round
        found = weighted_sum(poses, weight, coupling), agreement(poses, weight, parents)
    for got, other in zip(found, by_votes(poses, weight, coupling, parents), strict=True):
        assert got.dtype == torch.float32
        assert_close(got, other, 1e-4)


def test_what_does_not_fit() -> None:
    poses, weight = torch.rand(2, 3, 5), torch.rand(3, 4, 6, 5)
    for function, more in ((weighted_sum, ()), (agreement, (torch.rand(2, 4, 6),)), (compute_votes, ())):
        assert_raises(InputError, function, poses, weight[..., 0], *more, say="as many components as poses, 5, got 6")


@both_kinds
def test_called_in_every_way(make: Callable[..., Tensors]) -> None:
    def sums(poses: Tensor, weight: Tensor, coupling: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
        given = poses, weight
        return weighted_sum(*given, coupling), weighted_sum(*given), agreement(*given, parents)

    check_ways(sums, *make((2, 3, 2, 4, 5)))
