"""DynamicRouting keeps the options of torchcaps.route, every one of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from support import assert_close, assert_differs, assert_raises
from torchcaps import route
from torchcaps.nn import DynamicRouting, Routing

# other values than the defaults; each changes the capsules or their gradient
OTHER: dict[str, Any] = {
    "num_iterations": 2,
    "softmax_over": "inputs",
    "stop_gradient": True,
    "leaky": True,
    "eps": 0.5,
    "backend": "reference",
}


def test_every_option_of_route_is_kept() -> None:
    given = {"poses", "weight", "bias", "prior", "return_coupling"}
    assert set(inspect.signature(route).parameters) - given == set(OTHER)
    assert set(inspect.signature(DynamicRouting).parameters) == set(OTHER)


@pytest.mark.parametrize("name", OTHER)
def test_every_option_is_used(name: str) -> None:
    poses = torch.randn(2, 6, 3, requires_grad=True)
    weight = torch.randn(6, 4, 5, 3)
    capsules, nothing = DynamicRouting(**{name: OTHER[name]})(poses, weight)
    wanted = route(poses, weight, **{name: OTHER[name]})
    plain = route(poses, weight)
    assert nothing is None
    assert_close(capsules, wanted, 0)
    gradients = [torch.autograd.grad(v.sum(), poses)[0] for v in (capsules, wanted, plain)]
    assert_close(gradients[0], gradients[1], 0)
    if name == "backend":  # changes nothing but the way
        assert_close(gradients[0], gradients[2], 1e-4)
    else:
        assert_differs(gradients[0], gradients[2])


def test_bias_prior_and_coupling_go_through() -> None:
    poses, weight, bias, prior = torch.randn(2, 6, 3), torch.randn(6, 4, 5, 3), torch.randn(4, 5), torch.randn(6, 4)
    got = DynamicRouting()(poses, weight, bias, prior, return_coupling=True)
    wanted = route(poses, weight, bias=bias, prior=prior, return_coupling=True)
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 0)


def test_routing_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Routing()


def test_options_are_printed_and_checked() -> None:
    assert "num_iterations=2, softmax_over='inputs'" in repr(DynamicRouting(2, softmax_over="inputs"))
    for number in (-1, 1001):
        assert_raises(ValueError, DynamicRouting, number, say="DynamicRouting: num_iterations must be an integer")
    assert_raises(ValueError, DynamicRouting, softmax_over="x", say='softmax_over must be "outputs" or "inputs"')
    assert_raises(ValueError, DynamicRouting, eps=0, say="eps must be positive")
    known = "auto, reference, recompute, triton"
    for backend in ("x", None, ["auto"]):
        said = f"DynamicRouting: backend must be one of {known}, got {backend!r}"
        assert_raises(ValueError, DynamicRouting, backend=backend, say=said)
