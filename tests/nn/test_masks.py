"""Masks: each row's result is that of its own capsules alone, whatever is written at the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import torchcaps
from routing_cases import random
from support import assert_close, assert_finite, assert_raises, assert_same, with_gradients
from torchcaps.errors import InputError
from torchcaps.nn import BuiltVotes, Capsules, ConvCapsules, DenseCapsules, Routed

B, I, J, D = 4, 7, 3, 4
MASK = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7, [0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)

Function = Callable[..., Routed]


def spoil(tensor: Tensor, mask: Tensor = MASK) -> Tensor:
    """The tensor with NaN where no capsule is."""
    return tensor.where(mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2)), torch.nan)


def of_row(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The capsules of one row alone; what belongs to all images is cut to them."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] == (B, I):
            return tensor[row : row + 1, MASK[row]]
        return tensor[MASK[row]] if len(tensor) == I else tensor

    return {name: cut(tensor) for name, tensor in given.items()}


BETAS = {"beta_u": random(J, seed=5), "beta_a": random(J, seed=6)}
CODE = {"sigma_bias": BETAS["beta_u"].abs(), "activation_bias": 0.01 * BETAS["beta_a"]}
ACTIVE = {"activations": random(B, I, seed=3).sigmoid()}
FUNCTIONS: dict[str, tuple[Function, dict[str, Tensor]]] = {
    "dynamic": (torchcaps.dynamic_routing, {}),
    "dynamic over inputs": (partial(torchcaps.dynamic_routing, softmax_over="inputs"), {}),
    "leaky, biased, stopped": (
        partial(torchcaps.dynamic_routing, leaky=True, stop_gradient=True),
        {"bias": random(J, D, seed=7)},
    ),
    "leaky over inputs": (partial(torchcaps.dynamic_routing, leaky=True, softmax_over="inputs"), {}),
    "a prior for each image": (torchcaps.dynamic_routing, {"prior": random(B, I, J, seed=8)}),
    "no routing": (partial(torchcaps.dynamic_routing, num_iterations=0), {}),
    "self-attention": (torchcaps.self_attention_routing, {"bias": random(I, J, seed=9)}),
    "inverted attention": (torchcaps.inverted_attention_routing, {"norm_bias": random(D, seed=10)}),
    "self-routing": (torchcaps.self_routing, ACTIVE | {"routing_logits": random(B, I, J, seed=4)}),
    "em": (torchcaps.em_routing, ACTIVE | BETAS),
    "em as the code": (torchcaps.em_routing_code, ACTIVE | CODE),
    "vb": (torchcaps.vb_routing, ACTIVE | BETAS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_routed_as_its_own_capsules_alone(name: str) -> None:
    function, more = FUNCTIONS[name]
    given = {"votes": random(B, I, J, D)} | more
    spoilt = {n: spoil(t) if n in ("votes", "activations") else t for n, t in given.items()}
    leaves = {n: t.clone().requires_grad_() for n, t in spoilt.items()}
    routed = function(**leaves, mask=MASK, return_coupling=True)
    for row in (0, 1, 3):
        alone = function(**of_row(given, row), return_coupling=True)
        assert_close(routed.poses[row], alone.poses[0], 1e-9)
        assert_close(routed.coupling[row, MASK[row]], alone.coupling[0], 1e-9)
        if routed.activations is not None:
            assert_close(routed.activations[row], alone.activations[0], 1e-9)
    assert not any(each[2].any() for each in routed if each is not None)
    assert not routed.coupling[~MASK].any()
    assert_finite(with_gradients(routed, leaves).values())


def test_route_without_votes_has_masks_too() -> None:
    poses, weight, bias = random(B, I, 5), random(I, J, D, 5, seed=1), random(J, D, seed=2)
    for axis, stop in itertools.product(("outputs", "inputs"), (False, True)):
        options = {"softmax_over": axis, "stop_gradient": stop, "bias": bias, "return_coupling": True}
        leaves = {"poses": spoil(poses).requires_grad_(), "weight": weight.clone().requires_grad_()}
        ours, wanted = (
            with_gradients(torchcaps.route(**leaves, **options, mask=MASK, backend=backend), leaves)
            for backend in ("auto", "reference")
        )
        assert_same(ours, wanted, 1e-9)
        alone = torchcaps.route(poses[:1, MASK[0]], weight[MASK[0]], **options)
        assert_close(ours["poses"][:1], alone.poses, 1e-9)
        assert_close(ours["coupling"][:1, MASK[0]], alone.coupling, 1e-9)
    with pytest.raises(InputError, match="no mask over inputs"):
        torchcaps.route(poses, weight, softmax_over="inputs", mask=MASK, backend="recompute")


LAYERS = [
    ("shared", {"name": "dynamic", "softmax_over": "inputs", "capsule_bias": True}),
    ("shared", "em"),
    ("identity", "inverted-attention"),
    ("common", {"name": "dynamic", "leaky": True}),
    ("shared", {"name": "self-attention", "attention_bias": False}),
    ("shared", "heinsen-matrix"),
    ("shared", "heinsen-vector"),
    ("identity", "hvc"),
]


@pytest.mark.parametrize(("transform", "routing"), LAYERS)
def test_a_layer_takes_any_number_of_capsules(transform: str, routing: object) -> None:
    layer = DenseCapsules(None, D, J, D, transform=transform, routing=routing).double().eval()
    poses, active = random(B, I, D), ACTIVE["activations"]
    for parameter in layer.parameters():
        parameter.data += 0.1 * random(*parameter.shape, seed=11)
    got = layer(Capsules(spoil(poses), active, mask=MASK))
    got.scores().sum().backward()
    assert_finite(parameter.grad for parameter in layer.parameters())
    for row in (0, 1, 3):
        alone = layer(Capsules(poses[row : row + 1, MASK[row]], active[row : row + 1, MASK[row]]))
        assert_close(got.poses[row], alone.poses[0], 1e-9)
    assert not got.poses[2].any()


def test_capsules_that_are_not_there_change_nothing_on_maps() -> None:
    poses, active, mask = random(2, 12, 4), random(2, 12, seed=3).sigmoid(), random(2, 12, seed=12) > 0
    for options in (
        {"transform": "dense"},
        {"transform": "matrix", "routing": "em", "coordinates": "centres"},
        {"transform": "matrix", "coordinates": "hundredths", "share_positions": True},
        {"transform": "dense", "routing": "vb", "share_positions": True},
    ):
        layer = DenseCapsules((2, 3, 2), 4, J, 4, **options).double().eval()
        votes, activations = layer.votes(Capsules(spoil(poses, mask), active, mask=mask))
        full = layer.votes(Capsules(poses, active))[0].build()
        got = layer.routing(votes, activations, return_coupling=True)
        built = BuiltVotes(full, poses).masked(mask)
        wanted = layer.routing(built, active, return_coupling=True)
        for ours, expected in zip(got, wanted, strict=True):
            if expected is not None:
                assert_close(ours, expected, 1e-9)
        for n, part in enumerate((votes[slice(0, 1)], votes[slice(1, 2)])):
            assert_close(part.weighted_sum(None)[0], votes.weighted_sum(None)[n], 1e-9)


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
def test_layers_on_maps_hand_masks_on(compete_over: str) -> None:
    layer = ConvCapsules(2, 4, 3, 4, compete_over=compete_over, routing={"name": "em", "cost_scale": 1.0}).double()
    poses, active = random(2, 2 * 4 * 5, 4), random(2, 40, seed=3).sigmoid()
    mask = torch.ones(2, 2, 4, 5, dtype=torch.bool)
    mask[0, :, :, 2:] = False
    mask[1] = False
    mask = mask.flatten(1)
    got = layer(Capsules(spoil(poses, mask), active, (2, 4, 5), mask))
    silent = layer(Capsules(poses.where(mask.unsqueeze(2), 5.0), active * mask, (2, 4, 5)))
    there = got.mask.unflatten(1, got.grid)
    assert there[0, :, :, :2].all()
    assert not there[0, :, :, 2:].any()
    assert not there[1].any()
    assert_close(got.poses[got.mask], silent.poses[got.mask], 1e-9)
    assert not got.poses[~got.mask].any()


def test_weights_of_each_capsule_need_their_number() -> None:
    for transform in ("dense", "elementwise", "matrix"):
        assert_raises(InputError, DenseCapsules, None, 4, J, 4, transform=transform, say="in_capsules must be a number")
    said = "SelfRouting has weights for each input capsule"
    assert_raises(InputError, DenseCapsules, None, 4, J, 4, transform="shared", routing="self", say=said)
