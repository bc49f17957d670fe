"""Each assertion of tests/support.py holds where it should and fails where it should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from calling import check_ways
from support import (
    assert_as_exact,
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    assert_same,
    assert_sums_to_one,
    has_mnist,
    holds,
)


def raising(error: Exception) -> None:
    raise error


def test_each_assertion_holds_where_it_should_and_fails_where_it_should() -> None:
    one, nan = torch.ones(2), torch.full((2,), math.nan)
    assert_close(one, [1.0, 1.0])
    assert not holds(assert_close, one, [1.0, 1.001])
    assert not holds(assert_close, nan, nan)
    assert_differs(one, torch.tensor([1.0, 1.1]))
    assert not holds(assert_differs, one, one)
    assert not holds(assert_differs, one, torch.zeros(2, 1))
    assert_same({"x": one}, {"x": one}, 0)
    for wrong in ({"x": torch.tensor([1.0, 1.1])}, {}, {"x": one[None]}, {"x": nan}):
        assert not holds(assert_same, wrong, {"x": one}, 0.05)
    assert holds(assert_same, {"x": 1000 * one}, {"x": 1000 * one + 1}, 0.01)
    exact, right, off, far_off = ({"x": one.double()}, *({"x": one + by} for by in (0, 1e-5, 3e-5)))
    assert holds(assert_as_exact, off, off, exact)
    for wrong, other in ((far_off, off), (off, right), ({}, off), ({"x": one[None]}, off), ({"x": nan}, off)):
        assert not holds(assert_as_exact, wrong, other, exact)
    assert_finite([one, None])
    assert not holds(assert_finite, [one, nan])
    assert not holds(assert_finite, [torch.tensor([math.inf])])
    coupling = torch.rand(2, 3, 4).softmax(2)
    assert_sums_to_one(coupling, "outputs")
    assert not holds(assert_sums_to_one, coupling, "inputs")
    batch = torch.arange(6.0).view(3, 2)
    assert_batch_independent(lambda x: x * 2, batch)
    assert not holds(assert_batch_independent, lambda x: x - x.mean(0), batch)
    assert not holds(assert_batch_independent, lambda x: 1e-9 * (x - x.mean(0)), batch)


@pytest.mark.filterwarnings("ignore")  # of a random number in a compiled graph
def test_each_way_of_calling_is_looked_at() -> None:
    x = torch.rand(3, 4).double()
    check_ways(lambda x: x.sin(), x)
    for wrong in (
        lambda x: x * (2 - torch.is_grad_enabled()),
        lambda x: x.as_strided((3, 4), (4, 1)).sin(),  # whatever the order in memory
        lambda x: x * (1 + torch.compiler.is_compiling()),
        lambda x: x[: 3 - x.is_meta],
        lambda x: x * (1 + torch._C._functorch.is_batchedtensor(x)),
        lambda x: x + torch.rand(1),
    ):
        assert not holds(check_ways, wrong, x)


def test_gradients_reach() -> None:
    for spoil, fine in (
        (lambda _: None, True),
        (lambda layer: setattr(layer.bias, "grad", None), False),
        (lambda layer: layer.weight.grad.zero_(), False),
        (lambda layer: layer.weight.grad.fill_(math.nan), False),
    ):
        layer = nn.Linear(2, 2)
        layer(torch.ones(1, 2)).sum().backward()
        spoil(layer)
        assert holds(assert_gradients_reach, layer) == fine


def test_raises() -> None:
    assert_raises(ValueError, raising, ValueError("too small"), say="small")
    assert not holds(lambda: assert_raises(ValueError, raising, ValueError("too big"), say="small"))
    assert not holds(lambda: assert_raises(ValueError, raising, UnicodeError("small"), say="small"))
    assert not holds(lambda: assert_raises(ValueError, lambda: None, say="small"))
    with pytest.raises(KeyError):  # another error is not swallowed
        assert_raises(ValueError, raising, KeyError("small"), say="small")


def test_mnist_is_found_only_where_it_is(tmp_path: Path) -> None:
    assert not has_mnist(None)
    assert not has_mnist(str(tmp_path))
    (tmp_path / "train-images-idx3-ubyte.gz").touch()
    assert has_mnist(str(tmp_path))
