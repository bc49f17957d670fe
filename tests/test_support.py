"""Each assertion of tests/support.py holds where it should and fails where it should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from support import (
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


def test_close() -> None:
    assert_close(torch.ones(2), [1.0, 1.0])
    assert not holds(assert_close, torch.ones(2), [1.0, 1.001])
    assert not holds(assert_close, torch.tensor(math.nan), torch.tensor(math.nan))


def test_differs() -> None:
    assert_differs(torch.ones(2), torch.tensor([1.0, 1.1]))
    assert not holds(assert_differs, torch.ones(2), torch.ones(2))
    assert not holds(assert_differs, torch.ones(2), torch.zeros(2, 1))


def test_same() -> None:
    one, off = {"x": torch.ones(2)}, {"x": torch.tensor([1.0, 1.1])}
    assert_same(one, dict(one), 0)
    for wrong in (off, {}, {"x": torch.ones(1, 2)}, {"x": torch.full((2,), math.nan)}):
        assert not holds(assert_same, wrong, one, 0.05)
    assert holds(assert_same, {"x": 1000 * one["x"]}, {"x": 1000 * one["x"] + 1}, 0.01)


def test_finite() -> None:
    assert_finite([torch.ones(2), None])
    assert not holds(assert_finite, [torch.ones(1), torch.tensor([math.nan])])
    assert not holds(assert_finite, [torch.tensor([math.inf])])


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


def test_batch_independent() -> None:
    batch = torch.arange(6.0).view(3, 2)
    assert_batch_independent(lambda x: x * 2, batch)
    assert not holds(assert_batch_independent, lambda x: x - x.mean(0), batch)
    assert not holds(assert_batch_independent, lambda x: 1e-9 * (x - x.mean(0)), batch)


def test_sums_to_one() -> None:
    coupling = torch.rand(2, 3, 4).softmax(2)
    assert_sums_to_one(coupling, "outputs")
    assert not holds(assert_sums_to_one, coupling, "inputs")


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
