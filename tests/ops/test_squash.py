"""squash and safe_norm against values worked by hand."""

import itertools
import math

import torch

from support import assert_close, assert_raises
from torchcaps.errors import InputError
from torchcaps.ops.squash import exponential_squash, safe_norm, squash

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_values_by_hand() -> None:
    assert_close(squash(torch.tensor([3.0, 4.0])), [15 / 26, 20 / 26])  # ‖(3, 4)‖ = 5: 25/26 · (3, 4)/5
    assert_close(safe_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), [5.0, math.sqrt(1e-7)])
    assert_close(safe_norm(torch.tensor([2.0, 2.0]), eps=1.0), 3.0)
    assert safe_norm(torch.ones(2, 3, 4), dim=1, keepdim=True).shape == (2, 1, 4)
    for function in (squash, safe_norm, exponential_squash):
        for axes, dim in (((2, 5, 3), 3), ((2, 5, 3), -4), ((), -1)):
            assert_raises(InputError, function, torch.ones(axes), dim, say=f"has no axis {dim}")


def test_they_are_their_formulas_along_any_axis() -> None:
    s = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for dim in range(-4, 4):
        norm = s.norm(dim=dim, keepdim=True)
        assert_close(squash(s, dim, eps=1e-24), norm**2 / (1 + norm**2) * s / norm, 1e-14)
        assert_close(safe_norm(s, dim, eps=1e-24), norm.squeeze(dim), 1e-14)
        assert_close(exponential_squash(s, dim), (1 - torch.exp(-norm)) * s / norm, 1e-14)
    assert squash(torch.randn(0, 3)).shape == (0, 3)
    assert exponential_squash(torch.zeros(2, 0)).shape == (2, 0)


def test_zero_has_a_gradient() -> None:
    for function, dtype in itertools.product((squash, safe_norm), FLOATS):
        zeros = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        result = function(zeros)
        result.sum().backward()
        assert result.dtype == dtype
        assert_close(zeros.grad, 0.0)
        assert_close(squash(zeros), 0.0)


def test_half_precision_accumulates_in_float32() -> None:
    """1 + 4,096 small squares: added one by one in half precision they are all rounded away."""
    for dtype, small in ((torch.bfloat16, 2.0**-6), (torch.float16, 2.0**-6.5)):
        s = torch.tensor([1.0] + [small] * 4096, dtype=dtype)
        wanted = s.double().norm()  # √2 or a little less
        assert wanted > 1.2
        assert_close(safe_norm(s), wanted.item(), torch.finfo(dtype).eps)
        assert_close(squash(s).double().norm(), (wanted**2 / (1 + wanted**2)).item(), 2 * torch.finfo(dtype).eps)
    large = torch.tensor([300.0, 400.0], dtype=torch.float16)
    assert_close(safe_norm(large), 500.0), "the square does not overflow"


def test_exponential_squash_is_exact_for_any_length() -> None:
    for dtype in (torch.float32, torch.float64):
        direction = torch.tensor([0.6, 0.0, -0.8], dtype=dtype)
        for length in (1e-30, 1e-12, 1e-5, 9.9e-4, 1.1e-3, 0.1, 1.0, 30.0, 1e10, 1e30):
            got, wanted = exponential_squash(length * direction), -math.expm1(-length) * direction.double()
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=0)
        zero = torch.zeros(3, dtype=dtype)
        assert torch.equal(exponential_squash(zero), zero)
        for short in (zero, torch.tensor([1e-30, 0.0, 0.0], dtype=dtype)):
            jacobian = torch.autograd.functional.jacobian(exponential_squash, short)
            torch.testing.assert_close(jacobian, torch.eye(3, dtype=dtype))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for factor in (1e-4, 1.0):  # a component is taken out of the root as a constant
        assert torch.autograd.gradcheck(lambda x, factor=factor: exponential_squash(factor * x), x)
        assert torch.autograd.gradgradcheck(lambda x, factor=factor: exponential_squash(factor * x), x)
