"""squash and safe_norm against values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from support import assert_close, assert_raises
from torchcaps.errors import InputError, WrongType
from torchcaps.ops.squash import exponential_squash, safe_norm, squash

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def naive_squash(s: Tensor, dim: int = -1) -> Tensor:
    """The formula as printed, with ‖s‖: no gradient at zero."""
    norm = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    return norm**2 / (1 + norm**2) * s / norm


# ‖(3, 4)‖ = 5: squash = 25/26 · (3, 4)/5.  ‖(1, 2, 2)‖ = 3: 9/10 · (1, 2, 2)/3.  ‖(0.5)‖ = 0.5: 0.25/1.25 · 1.
@pytest.mark.parametrize(
    ("vector", "squashed", "length"),
    [
        ([3.0, 4.0], [15 / 26, 20 / 26], 25 / 26),
        ([1.0, 2.0, 2.0], [0.3, 0.6, 0.6], 0.9),
        ([0.5], [0.2], 0.2),
        ([-0.5], [-0.2], 0.2),
    ],
)
def test_values_by_hand(vector: list[float], squashed: list[float], length: float) -> None:
    result = squash(torch.tensor(vector))
    assert_close(result, squashed)
    assert_close(safe_norm(result), length)


def test_norm_by_hand() -> None:
    assert_close(safe_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), [5.0, math.sqrt(1e-7)])
    assert_close(safe_norm(torch.tensor([2.0, 2.0]), eps=1.0), 3.0)
    assert safe_norm(torch.ones(2, 3, 4), dim=1).shape == (2, 4)
    assert safe_norm(torch.ones(2, 3, 4), dim=1, keepdim=True).shape == (2, 1, 4)


def test_three_ways_to_write_squash_agree(rng: torch.Generator) -> None:
    """The demonstration of Géron's notebook."""
    s = torch.randn(5, 7, dtype=torch.float64, generator=rng)
    norm = s.norm(dim=-1, keepdim=True)
    first = norm**2 / (1 + norm**2) * s / norm
    second = (1 - 1 / (1 + norm**2)) * (s / norm)  # a fraction below one of the unit vector
    third = norm * s / (1 + norm**2)
    assert_close(second, first, 1e-14)
    assert_close(third, first, 1e-14)
    assert_close(squash(s, eps=1e-24), first, 1e-14)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -3, -4])
def test_any_dim_and_shape(dim: int, rng: torch.Generator) -> None:
    s = torch.randn(2, 3, 4, 5, generator=rng)
    assert_close(squash(s, dim), naive_squash(s, dim), 1e-5)
    assert_close(safe_norm(s, dim), s.norm(dim=dim), 1e-5)
    assert squash(torch.randn(0, 3)).shape == (0, 3)


def test_length_grows_with_the_input_and_stays_below_one() -> None:
    lengths = squash(torch.logspace(-4, 3, 50, dtype=torch.float64)[:, None]).norm(dim=-1)
    assert (lengths.diff() > 0).all()
    assert lengths[0] < 1e-7
    assert 0.99999 < lengths[-1] < 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [squash, safe_norm])
def test_the_gradient_at_zero_is_zero(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    s = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    result = function(s)
    result.sum().backward()
    assert result.dtype == dtype
    assert_close(s.grad, 0.0)
    assert_close(squash(s), 0.0)


@pytest.mark.parametrize("function", [squash, safe_norm])
def test_gradients_are_those_of_finite_differences(function: Callable[..., Tensor], rng: torch.Generator) -> None:
    s = torch.randn(3, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    assert torch.autograd.gradcheck(function, (s,))
    assert torch.autograd.gradcheck(lambda x: function(x, 0, eps=0.1), (s * 1e-3,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    """1 + 4,096 small squares: added one by one in half precision they are all rounded away."""
    small = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-6.5
    s = torch.tensor([1.0] + [small] * 4096, dtype=dtype)
    wanted = s.double().norm()  # √2 or a little less
    total = torch.zeros((), dtype=dtype)
    for square in s.square():
        total = total + square
    assert total == 1, "accumulated in half precision"
    assert wanted > 1.2
    assert_close(safe_norm(s), wanted.item(), torch.finfo(dtype).eps)
    assert_close(squash(s).double().norm(), (wanted**2 / (1 + wanted**2)).item(), 2 * torch.finfo(dtype).eps)


def test_float16_does_not_overflow_in_the_square() -> None:
    assert_close(safe_norm(torch.tensor([300.0, 400.0], dtype=torch.float16)), 500.0)


@pytest.mark.parametrize("function", [squash, safe_norm, exponential_squash])
def test_bad_input(function: Callable[..., Tensor]) -> None:
    name = function.__name__
    for other in (torch.ones(3, dtype=torch.int64), [1.0, 2.0], None, np.ones(3)):
        assert_raises(WrongType, function, other, say=f"{name}: x must be a floating-point tensor")
    for axes, dim in (((2, 5, 3), 3), ((2, 5, 3), -4), ((), -1)):
        assert_raises(InputError, function, torch.ones(axes), dim, say=f"x of shape {axes} has no axis {dim}")
    assert_raises(WrongType, function, torch.ones(3), 0.5, say=f"{name}: dim must be an integer, got")
    if function is not exponential_squash:
        for eps in (0.0, -1e-7, math.nan):
            assert_raises(InputError, function, torch.ones(3), eps=eps, say=f"{name}: eps must be")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1e-30, 1e-12, 1e-5, 9.9e-4, 1.1e-3, 0.1, 1.0, 30.0, 1e10, 1e30])
def test_exponential_squash_is_exact_for_any_length(length: float, dtype: torch.dtype) -> None:
    direction = torch.tensor([0.6, 0.0, -0.8], dtype=dtype)
    wanted = -math.expm1(-length) * direction.double()
    got = exponential_squash(length * direction)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_exponential_squash_of_zero_has_the_identity_as_derivative() -> None:
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(3, dtype=dtype)
        assert torch.equal(exponential_squash(zero), zero)
        assert torch.equal(torch.autograd.functional.jacobian(exponential_squash, zero), torch.eye(3, dtype=dtype))
        short = torch.tensor([1e-30, 0.0, 0.0], dtype=dtype)
        torch.testing.assert_close(
            torch.autograd.functional.jacobian(exponential_squash, short), torch.eye(3, dtype=dtype)
        )


def test_exponential_squash_can_be_differentiated_twice() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for factor in (1e-4, 1.0):
        torch.autograd.gradcheck(lambda x, factor=factor: exponential_squash(factor * x), x)
        torch.autograd.gradgradcheck(lambda x, factor=factor: exponential_squash(factor * x), x)


def test_exponential_squash_along_another_axis_and_without_components() -> None:
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(exponential_squash(x, 1), exponential_squash(x.transpose(1, 2)).transpose(1, 2))
    assert exponential_squash(torch.zeros(2, 0)).shape == (2, 0)
