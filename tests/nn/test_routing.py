"""Routing algorithms as modules: DynamicRouting is torchcaps.dynamic_routing over the votes of any transform."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_batch_independent, assert_close, assert_differs, assert_gradients_reach, assert_raises
from torchcaps import InputError, dynamic_routing, route, routing_rounds, squash
from torchcaps.nn import (
    Dense,
    DenseCapsules,
    DenseVotes,
    DynamicRouting,
    Elementwise,
    LayerSize,
    Matrix,
    Routed,
    Routing,
    Shared,
    Votes,
)

# other values than the defaults; each changes the capsules or their gradient
OTHER: dict[str, Any] = {
    "num_iterations": 2,
    "softmax_over": "inputs",
    "stop_gradient": True,
    "leaky": True,
    "eps": 0.5,
    "backend": "reference",
}
LEARNED = {"bias", "learn_prior"}


def test_every_option_of_route_is_kept() -> None:
    given = {"poses", "weight", "prior", "return_coupling"}
    assert set(inspect.signature(route).parameters) - given - LEARNED == set(OTHER)
    assert set(inspect.signature(DynamicRouting).parameters) == set(OTHER) | LEARNED


@pytest.mark.parametrize("name", OTHER)
def test_every_option_is_used(name: str) -> None:
    poses = torch.randn(2, 6, 3, requires_grad=True)
    weight = torch.randn(6, 4, 5, 3)
    capsules, activations, coupling = DynamicRouting(**{name: OTHER[name]})(DenseVotes(poses, weight))
    wanted = route(poses, weight, **{name: OTHER[name]})
    plain = route(poses, weight)
    assert activations is None
    assert coupling is None
    assert_close(capsules, wanted, 0)
    gradients = [torch.autograd.grad(v.sum(), poses)[0] for v in (capsules, wanted, plain)]
    assert_close(gradients[0], gradients[1], 0)
    if name == "backend":  # changes nothing but the way
        assert_close(gradients[0], gradients[2], 1e-4)
    else:
        assert_differs(gradients[0], gradients[2])


def test_options_are_printed_and_checked() -> None:
    assert "num_iterations=2, softmax_over='inputs'" in repr(DynamicRouting(2, softmax_over="inputs"))
    assert "bias=True, learn_prior=True" in repr(DynamicRouting(bias=True, learn_prior=True))
    for number in (-1, 1001):
        assert_raises(ValueError, DynamicRouting, number, say="DynamicRouting: num_iterations must be an integer")
    assert_raises(ValueError, DynamicRouting, softmax_over="x", say='softmax_over must be "outputs" or "inputs"')
    assert_raises(ValueError, DynamicRouting, eps=0, say="eps must be positive")
    for name in ("bias", "learn_prior", "leaky", "stop_gradient"):
        assert_raises(TypeError, DynamicRouting, **{name: 1}, say=f"DynamicRouting: {name} must be True or False")
    known = "auto, reference, recompute"
    for backend in ("x", None, ["auto"]):
        said = f"DynamicRouting: backend must be one of {known}, got {backend!r}"
        assert_raises(ValueError, DynamicRouting, backend=backend, say=said)
    votes = DenseVotes(torch.randn(2, 6, 3), torch.randn(6, 4, 5, 3))
    said = "DynamicRouting: return_coupling must be True or False"
    assert_raises(TypeError, DynamicRouting(), votes, return_coupling=1, say=said)


# ---- over every transform

TRANSFORMS = {
    "dense": (Dense, 6, 5),
    "shared": (Shared, 6, 5),
    "elementwise": (Elementwise, 5, 5),
    "matrix": (Matrix, 9, 9),
}
"""With K and D that each can have."""
I, J = 63, 7


def layer_of(transform: str, routing: DynamicRouting, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """A layer with a routing over a transform, its bias and prior drawn at random, and poses for it."""
    kind, K, D = TRANSFORMS[transform]
    layer = DenseCapsules(I, K, J, D, transform=kind("normal", 0.3), routing=routing)
    for parameter in routing.parameters():
        nn.init.normal_(parameter)
    return layer.to(dtype), torch.randn(3, I, K, dtype=dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "leaky": {"leaky": True},
    "bias and prior": {"bias": True, "learn_prior": True},
    "stopped": {"stop_gradient": True, "bias": True},
    "eps": {"eps": 0.1},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_over_any_transform_it_is_dynamic_routing_of_the_built_votes(transform: str, options: str) -> None:
    for iterations, axis in itertools.product((0, 1, 3), ("outputs", "inputs")):
        routing = DynamicRouting(iterations, softmax_over=axis, **OPTIONS[options])  # type: ignore[arg-type]
        layer, poses = layer_of(transform, routing)
        poses.requires_grad_()
        given = {name: value for name, value in OPTIONS[options].items() if name not in LEARNED}
        wanted = dynamic_routing(
            layer.transform(poses).build(),
            iterations,
            softmax_over=axis,  # type: ignore[arg-type]
            bias=routing.bias,
            prior=routing.prior,
            return_coupling=True,
            **given,
        )
        got = layer.route(poses, return_coupling=True)
        assert_close(got.poses, wanted[0], 1e-10)
        assert_close(got.coupling, wanted[1], 1e-10)
        assert layer(poses).poses.dtype == torch.float64
        leaves = [poses, *layer.parameters()]
        cotangent = torch.randn_like(wanted[0])
        mine, theirs = (
            torch.autograd.grad(each, leaves, cotangent, allow_unused=True, materialize_grads=True)
            for each in (got.poses, wanted[0])
        )
        for one, other in zip(mine, theirs, strict=True):
            scale = other.abs().max().clamp_min(1e-30)
            assert_close(one / scale, other / scale, 1e-8)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rounds_are_those_of_the_built_votes(transform: str) -> None:
    routing = DynamicRouting(3, leaky=True, bias=True, learn_prior=True)
    layer, poses = layer_of(transform, routing)
    votes = layer.transform(poses)
    wanted = routing_rounds(votes.build(), 3, leaky=True, bias=routing.bias, prior=routing.prior)
    got = routing.rounds(votes)
    assert len(got) == len(wanted) == 3
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.activations is theirs.activations is None
        for one, other in zip(mine[:5], theirs[:5], strict=True):
            assert_close(one, other, 1e-10)
    assert_close(got[-1].capsules, layer(poses).poses, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_lower_precision_is_near_and_stays_what_it_is(transform: str, dtype: torch.dtype) -> None:
    layer, poses = layer_of(transform, DynamicRouting(2), dtype)
    got = layer.route(poses, return_coupling=True)
    assert got.poses.dtype == got.coupling.dtype == dtype
    exact = layer.double().route(poses.double(), return_coupling=True)
    assert_close(got.poses.double(), exact.poses, 1e-5 if dtype == torch.float32 else 3e-2)
    assert_close(got.coupling.double(), exact.coupling, 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_images_do_not_mix_and_children_have_no_order(transform: str) -> None:
    layer, poses = layer_of(transform, DynamicRouting(3))
    assert_batch_independent(lambda batch: layer(batch).poses, poses, 1e-10)
    wanted = layer.route(poses, return_coupling=True)
    order = torch.randperm(I)
    with torch.no_grad():
        if transform != "shared":
            layer.transform.weight.copy_(layer.transform.weight[order].clone())
    got = layer.route(poses[:, order], return_coupling=True)
    assert_close(got.poses, wanted.poses, 1e-10)
    assert_close(got.coupling, wanted.coupling[:, order], 1e-10)


def test_bias_and_prior_belong_to_one_layer() -> None:
    for options in ({"bias": True}, {"learn_prior": True}):
        routing = DynamicRouting(**options)
        assert not list(routing.parameters()), "their shapes are those of a layer"
        routing.bind(LayerSize(6, 3, 4, 5))
        assert {name: tuple(each.shape) for name, each in routing.named_parameters()} == (
            {"bias": (4, 5)} if "bias" in options else {"prior": (6, 4)}
        )
        said = "DynamicRouting: a routing with parameters belongs to one layer; make one for each"
        assert_raises(ValueError, routing.bind, LayerSize(6, 3, 4, 5), say=said)
    shared = DynamicRouting()
    for _ in range(2):
        shared.bind(LayerSize(6, 3, 4, 5))
    layer = DenseCapsules(6, 3, 4, 5, routing=DynamicRouting(bias=True, learn_prior=True))
    layer(torch.randn(2, 6, 3)).poses.square().sum().backward()
    assert_gradients_reach(layer)


# ---- one's own


def test_routing_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Routing()  # type: ignore[abstract]


class Once(Routing):
    """Coupling by the agreement with the sum of the votes."""

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        coupling = votes.compete(votes.agreement(votes.weighted_sum(None)))
        return Routed(squash(votes.weighted_sum(coupling)), coupling=coupling if return_coupling else None)


class Silent(Once):
    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        return super().forward(votes, activations)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_routing_that_says_nothing_of_its_rounds_has_one(transform: str) -> None:
    kind, K, D = TRANSFORMS[transform]
    layer = DenseCapsules(I, K, J, D, transform=kind(), routing=Once())
    votes = layer.transform(torch.randn(2, I, K))
    built = votes.build()
    (only,) = layer.routing.rounds(votes)
    attention = torch.einsum("bijd,bjd->bij", built, built.sum(1))
    assert_close(only.coupling, attention.softmax(2), 1e-4)
    assert_close(only.logits.softmax(2), only.coupling, 1e-5)
    total = torch.einsum("bij,bijd->bjd", only.coupling, built)
    assert_close(only.weighted_sum, total, 1e-4)
    assert_close(only.capsules, squash(total), 1e-4)
    assert_close(only.agreement, torch.einsum("bijd,bjd->bij", built, only.capsules), 1e-4)
    said = "Silent returns no coupling, so there is none to show"
    assert_raises(InputError, Silent().rounds, votes, say=said)


def test_the_start_suits_the_competition() -> None:
    size = LayerSize(50, 8, 10, 16)
    for axis, wanted in (("outputs", 10 / 800**0.5), ("inputs", 50 / 800**0.5), (None, 1 / 800**0.5)):
        routing = Once()
        routing.softmax_over = axis  # type: ignore[assignment]
        assert routing.balanced_std(size) == pytest.approx(wanted)
