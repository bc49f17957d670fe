"""route = dynamic_routing of the votes, whatever the backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_batch_independent, assert_close, assert_finite, assert_raises
from torchcaps import compute_votes, dynamic_routing, route
from torchcaps.ops.dynamic_routing import BACKENDS

SIZES = [(2, 5, 3, 4, 6), (1, 7, 1, 1, 1), (3, 1, 4, 2, 3), (2, 63, 7, 5, 3)]  # B, I, J, D, K

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(B: int, I: int, J: int, D: int, K: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Poses, weight, bias and prior, all of which want gradients."""
    shapes = {"poses": (B, I, K), "weight": (I, J, D, K), "bias": (J, D), "prior": (I, J)}
    return {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def gradients(outputs: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((out * torch.randn(out.shape, dtype=out.dtype, generator=generator)).sum() for out in outputs)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def test_votes_by_hand() -> None:
    # W_11 = (1 2; 3 4), u_1 = (5, 6):  û = (1·5 + 2·6, 3·5 + 4·6) = (17, 39)
    weight = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])  # (I=1, J=1, D=2, K=2)
    assert_close(compute_votes(torch.tensor([[[5.0, 6.0]]]), weight), [[[[17.0, 39.0]]]])


def test_votes_by_loops() -> None:
    leaves = make(2, 3, 4, 5, 6)
    poses, weight = leaves["poses"], leaves["weight"]
    votes = compute_votes(poses, weight)
    for b, i, j in itertools.product(range(2), range(3), range(4)):
        assert_close(votes[b, i, j], weight[i, j] @ poses[b, i], 1e-12)


@every_backend
@pytest.mark.parametrize("num_iterations", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("leaky", [False, True])
def test_route_is_routing_of_the_votes(
    backend: Any, num_iterations: int, axis: Any, stop_gradient: bool, leaky: bool
) -> None:
    options: dict[str, Any] = {"softmax_over": axis, "stop_gradient": stop_gradient, "leaky": leaky, "eps": 1e-3}
    every_extra: list[tuple[str, ...]] = [(), ("bias",), *([("bias", "prior")] if backend != "recompute" else [])]
    for size, extras, coupling in itertools.product(SIZES, every_extra, (False, True)):
        leaves = {name: leaf for name, leaf in make(*size).items() if name in ("poses", "weight", *extras)}
        rest = {name: leaves[name] for name in extras} | options
        poses, weight = leaves["poses"], leaves["weight"]
        wanted = dynamic_routing(compute_votes(poses, weight), num_iterations, return_coupling=coupling, **rest)
        got = route(poses, weight, num_iterations, return_coupling=coupling, backend=backend, **rest)
        for ours, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, wanted)), strict=True):
            assert_close(ours, theirs, 1e-10)
        of_route, of_votes = gradients(got, leaves), gradients(wanted, leaves)
        for name in leaves:
            assert_close(of_route[name], of_votes[name], 1e-8)


@every_backend
@pytest.mark.parametrize("axis", ["outputs", "inputs"])
def test_any_memory_layout(backend: Any, axis: Any) -> None:
    leaves = make(3, 6, 4, 5, 2)
    poses, weight = leaves["poses"].detach(), leaves["weight"].detach()
    wanted = route(poses, weight, softmax_over=axis, backend="reference")
    laid_out = weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)  # as DenseCapsules keeps it
    strided = poses.repeat_interleave(2, 1)[:, ::2]
    for p, w in ((poses, laid_out), (poses.transpose(1, 2).contiguous().transpose(1, 2), laid_out), (strided, weight)):
        assert_close(route(p, w, softmax_over=axis, backend=backend), wanted, 1e-12)


@every_backend
@pytest.mark.parametrize("axis", ["outputs", "inputs"])
def test_batch_independence_and_zero_poses(backend: Any, axis: Any) -> None:
    leaves = make(3, 6, 4, 5, 2)
    weight = leaves["weight"]
    assert_batch_independent(
        lambda poses: route(poses, weight, softmax_over=axis, backend=backend), leaves["poses"].detach(), 1e-10
    )
    zeros = torch.zeros(2, 6, 2, dtype=torch.float64, requires_grad=True)
    capsules = route(zeros, weight, softmax_over=axis, backend=backend)
    capsules.sum().backward()
    assert_close(capsules, 0.0)
    assert_finite([zeros.grad, weight.grad])


@every_backend
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_mixed_precision_is_computed_in_the_higher(backend: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    low, high = dtypes
    leaves = make(2, 5, 3, 4, 6, high)
    poses, weight = leaves["poses"].detach().to(low), leaves["weight"].detach()
    got = route(poses, weight, backend=backend)
    assert got.dtype == high
    assert_close(got, route(poses.to(high), weight, backend="reference"), 1e-5)


@every_backend
def test_autocast_does_not_reach_into_routing(backend: Any) -> None:
    leaves = make(2, 5, 3, 4, 6, torch.float32)
    poses, weight = leaves["poses"], leaves["weight"]
    wanted = route(poses, weight, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = route(poses, weight, backend=backend)
    assert got.dtype == torch.float32
    assert_close(got, wanted, 1e-6)
    inside, outside = gradients(got, leaves), gradients(wanted, leaves)
    for name in ("poses", "weight"):
        assert_close(inside[name], outside[name], 1e-6)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend: Any, dtype: torch.dtype) -> None:
    leaves = make(2, 5, 3, 4, 6, torch.float32)
    poses, weight = (leaves[name].detach().to(dtype) for name in ("poses", "weight"))
    got = route(poses, weight, backend=backend)
    assert got.dtype == dtype
    assert_close(got.float(), route(poses.float(), weight.float()), 8 * torch.finfo(dtype).eps)


def test_bad_input() -> None:
    leaves = make(2, 5, 3, 4, 6)
    poses, weight = leaves["poses"], leaves["weight"]
    for bad in (weight[:4], weight[..., :5]):
        assert_raises(
            ValueError, route, poses, bad, say="(2, 5, 6) = (B, I, K) need a weight of shape (5, J, D, 6), got"
        )
    assert_raises(ValueError, route, poses[0], weight, say="poses must have shape (B, I, K), got (5, 6)")
    assert_raises(ValueError, route, poses, weight[0], say="weight must have shape (I, J, D, K), got (3, 4, 6)")
    assert_raises(TypeError, route, poses.long(), weight, say="poses must be a floating-point tensor, got torch.int64")
    assert_raises(TypeError, route, poses, weight.long(), say="weight must be a floating-point tensor, got torch.int64")
    for number in (-1, 10**12):
        say = f"route: num_iterations must be an integer from 0 to 1000, got {number}"
        assert_raises(ValueError, route, poses, weight, number, say=say)
    assert_raises(
        ValueError, route, poses, weight, bias=torch.ones(4, 3), say="bias must have shape (3, 4), got (4, 3)"
    )
    assert_raises(ValueError, route, poses, weight, prior=torch.ones(3, 5), say="prior must have shape (5, 3)")
    assert_raises(ValueError, route, poses, weight, backend="fast", say="backend must be one of auto, reference")
    say = 'route: backend="recompute" has no prior; leave it out, or take backend="reference"'
    assert_raises(ValueError, route, poses, weight, prior=leaves["prior"], backend="recompute", say=say)


def test_votes_refuse_what_does_not_fit() -> None:
    leaves = make(2, 5, 3, 4, 6)
    assert_raises(
        ValueError, compute_votes, leaves["poses"], leaves["weight"][:4], say="need a weight of shape (5, J, D, 6)"
    )
    assert_raises(
        TypeError, compute_votes, leaves["poses"].long(), leaves["weight"], say="poses must be a floating-point"
    )


@pytest.mark.parametrize("backend", ["reference", "recompute"])
def test_shapes_without_numbers(backend: Any) -> None:
    # the meta device knows no autocast; sizes and parameter counts are asked for on it
    poses, weight = torch.empty(2, 6, 4, device="meta"), torch.empty(6, 3, 5, 4, device="meta")
    assert route(poses, weight, backend=backend).shape == (2, 3, 5)
