"""Masks: each row's result is that of its own capsules alone, whatever is written at the others."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from routing_cases import random
from support import assert_close, assert_finite, assert_raises, assert_same, pairwise, with_gradients
from torchcaps.errors import InputError
from torchcaps.nn import (
    BuiltVotes,
    CapsuleLayer,
    Capsules,
    ConvCapsules,
    ConvTypeCapsules,
    DeconvCapsules,
    DenseCapsules,
    Routed,
    SlotAttention,
    SlotMixture,
    interest_scores,
    label_aware_attention,
)
from torchcaps.nn.slots import SlotLayer
from torchcaps.parts import PARTS

B, I, J, D = 4, 7, 3, 4
MASK = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7, [0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)


def spoil(tensor: Tensor, mask: Tensor = MASK, value: float = torch.nan) -> Tensor:
    """The tensor with NaN, or another value, where no capsule is."""
    return tensor.where(mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2)), value)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_a_row_is_routed_as_its_own_capsules_alone(iterations: int, leaky: bool) -> None:
    poses, weight, bias, prior = random(B, I, 5), random(I, J, D, 5, seed=1), random(J, D, seed=2), random(B, I, J)
    for axis, stop, start in itertools.product(("outputs", "inputs"), (False, True), (None, prior)):
        options = {"softmax_over": axis, "stop_gradient": stop, "leaky": leaky, "bias": bias, "return_coupling": True}
        leaves = {"poses": spoil(poses).requires_grad_(), "weight": weight.clone().requires_grad_()}
        votes = torchcaps.compute_votes(leaves["poses"], leaves["weight"])
        by_loop = torchcaps.dynamic_routing(votes, iterations, **options, prior=start, mask=MASK)
        routed = torchcaps.route(**leaves, num_iterations=iterations, **options, prior=start, mask=MASK)
        for row in (0, 1, 3):
            there = MASK[row]
            cut = None if start is None else start[row : row + 1, there]
            alone = torchcaps.route(poses[row : row + 1, there], weight[there], iterations, **options, prior=cut)
            for got in (by_loop, routed):
                assert_close(got.poses[row], alone.poses[0], 1e-9)
                assert_close(got.coupling[row, there], alone.coupling[0], 1e-9)
                assert not got.poses[2].any()
                assert not got.coupling[~MASK].any()
        assert_finite(with_gradients(routed, leaves).values())
    with pytest.raises(InputError, match="no mask over inputs"):
        torchcaps.route(poses, weight, softmax_over="inputs", mask=MASK, backend="recompute")


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


# ---- nothing at masked places is read: by no argument, in no result, in no gradient

NOT_NUMBERS = {"NaN": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
Arguments = dict[str, Tensor]


def require_unread(
    function: Callable[..., Any], arguments: Arguments, mask: Tensor, value: float, others: Arguments
) -> None:
    """A function of per-input arguments gives the same with ``value`` at masked places as with zeros, finite."""
    found = []
    for written in (value, 0.0):
        leaves = {name: spoil(each, mask, written).requires_grad_() for name, each in arguments.items()} | others
        found.append(with_gradients(function(**leaves), leaves))
    got, wanted = found
    assert_finite(got.values())
    assert_same(got, wanted, 1e-12)
    for name in arguments:
        assert not got[f"d {name}"][~mask].any(), f"the gradient of {name} is not zero at masked places"


def parameters_of(layer: nn.Module) -> Arguments:
    """The parameters of a layer, moved at random, so that none is zero."""
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return dict(layer.named_parameters())


LAYERS: dict[str, Callable[[Any], CapsuleLayer]] = {
    **{
        f"{name} transform": lambda routing, name=name: DenseCapsules(12, 4, J, 4, transform=name, routing=routing)
        for name in PARTS["transform"]
    },
    "shared positions and coordinates": lambda routing: DenseCapsules(
        (2, 3, 2), 4, J, 4, transform="matrix", routing=routing, share_positions=True, coordinates="centres"
    ),
    "map": lambda routing: ConvCapsules(2, 4, J, 4, layer_kernel=2, routing=routing),
    "map, positions compete": lambda routing: ConvCapsules(
        2, 4, J, 4, layer_kernel=2, layer_padding=1, compete_over="types-and-positions", routing=routing
    ),
    "map, types vote": lambda routing: ConvTypeCapsules(
        2, 4, J, 4, layer_padding="same", vote_bias=True, routing=routing
    ),
    "larger map": lambda routing: DeconvCapsules(2, 4, J, 4, routing=routing),
}
ROUTINGS: dict[str, Any] = {name: name for name in PARTS["routing"]} | {
    "dynamic over inputs": {"name": "dynamic", "softmax_over": "inputs", "leaky": True},
    "dynamic with a prior": {"name": "dynamic", "learn_prior": True},
    "b2i with queries": {"name": "b2i", "start_from": "queries"},
    "grouped em": {"name": "grouped", "group_routing": "em"},
}


@pytest.mark.parametrize(("kind", "routing", "value"), pairwise(LAYERS, ROUTINGS, NOT_NUMBERS))
def test_no_layer_reads_what_is_masked(kind: str, routing: str, value: str) -> None:
    layer = LAYERS[kind](ROUTINGS[routing]).double().eval()
    mask = torch.tensor([[1, 0, 1, 1, 0, 0] * 2, [1] * 12, [0] * 12], dtype=torch.bool)

    def route(poses: Tensor, activations: Tensor, **_: Tensor) -> Routed:
        return layer.route(Capsules(poses, activations, (2, 3, 2), mask), return_coupling=True)

    arguments = {"poses": random(3, 12, 4), "activations": random(3, 12, seed=1).sigmoid()}
    require_unread(route, arguments, mask, NOT_NUMBERS[value], parameters_of(layer))


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("start", ["noise", "queries"])
@pytest.mark.parametrize("kind", [SlotAttention, SlotMixture])
def test_no_layer_of_slots_reads_what_is_masked(kind: type[SlotLayer], start: Any, value: str) -> None:
    layer = kind(I, 5, J, D, start_from=start).double().eval()

    def route(poses: Tensor, **_: Tensor) -> Routed:
        return layer.route(Capsules(poses, None, None, MASK), return_coupling=True)

    require_unread(route, {"poses": random(B, I, 5)}, MASK, NOT_NUMBERS[value], parameters_of(layer))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "dynamic_routing": (torchcaps.dynamic_routing, ("votes", "prior"), ("bias",)),
    "dynamic_routing over inputs": (
        lambda **given: torchcaps.dynamic_routing(**given, softmax_over="inputs"),
        ("votes", "prior"),
        (),
    ),
    "route": (torchcaps.route, ("poses",), ("weight",)),
    "route with a prior": (torchcaps.route, ("poses", "prior"), ("weight",)),
    "route by reference": (lambda **given: torchcaps.route(**given, backend="reference"), ("poses",), ("weight",)),
    "em_routing": (torchcaps.em_routing, ("votes", "activations"), ("beta_u", "beta_a")),
    "em_routing_code": (torchcaps.em_routing_code, ("votes", "activations"), ("sigma_bias", "activation_bias")),
    "vb_routing": (torchcaps.vb_routing, ("votes", "activations"), ("beta_u", "beta_a")),
    "self_routing": (torchcaps.self_routing, ("votes", "activations", "routing_logits"), ()),
    "self_attention_routing": (torchcaps.self_attention_routing, ("votes",), ()),
    "inverted_attention_routing": (torchcaps.inverted_attention_routing, ("votes",), ("norm_weight",)),
    "routing_rounds": (lambda **given: torchcaps.routing_rounds(**given)[-1], ("votes", "prior"), ()),
}
"""Functions with a mask: their arguments with a place for each input capsule, and others."""
SHAPES = {"votes": (B, I, J, D), "poses": (B, I, 5), "activations": (B, I), "prior": (B, I, J), "bias": (J, D)}
SHAPES |= {"routing_logits": (B, I, J), "weight": (I, J, D, 5), "norm_weight": (D,)}


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_reads_what_is_masked(name: str, value: str) -> None:
    function, names, more = FUNCTIONS[name]
    arguments, others = ({each: random(*SHAPES.get(each, (J,)), seed=3) for each in part} for part in (names, more))
    others = {each: tensor.requires_grad_() for each, tensor in others.items()}
    if "activations" in arguments:
        arguments["activations"] = arguments["activations"].sigmoid()
    require_unread(lambda **given: function(**given, mask=MASK), arguments, MASK, NOT_NUMBERS[value], others)


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_start_or_bias_of_all_images_is_not_read_where_no_image_has_the_capsule(value: str) -> None:
    mask = MASK[[0, 3]]
    nowhere = ~mask.any(0)
    votes = random(2, I, J, D).requires_grad_()
    for function, name in ((torchcaps.dynamic_routing, "prior"), (torchcaps.self_attention_routing, "bias")):
        found = []
        for written in (NOT_NUMBERS[value], 0.0):
            given = random(I, J).where(~nowhere.unsqueeze(1), written).requires_grad_()
            routed = function(votes, **{name: given}, mask=mask, return_coupling=True)
            found.append(with_gradients(routed, {"votes": votes, name: given}))
        assert_finite(found[0].values())
        assert_same(*found, 1e-12)


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("power", [None, 0.0, 0.5, 1.0, 2.0])
def test_no_interest_that_a_user_lacks_is_read(power: float | None, value: str) -> None:
    mask = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
    items = {"items": random(3, D, seed=5).requires_grad_()}

    def attend(interests: Tensor, items: Tensor) -> dict[str, Tensor]:
        return {"user": label_aware_attention(interests, items, power, mask)}

    def score(interests: Tensor, items: Tensor) -> dict[str, Tensor]:
        return {"scores": interest_scores(interests, items, mask)[:2]}

    for function in (attend, score):
        require_unread(function, {"interests": random(3, 3, D, seed=4)}, mask, NOT_NUMBERS[value], items)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("transform", PARTS["transform"])
def test_a_second_mask_narrows_the_first(transform: str, routing: str) -> None:
    layer = DenseCapsules(12, 4, J, 4, transform=transform, routing=ROUTINGS[routing]).double().eval()
    poses, active = random(3, 12, 4), random(3, 12, seed=1).sigmoid()
    first, second = random(3, 12, seed=2) > -0.5, random(3, 12, seed=3) > -0.5
    votes, _ = layer.votes(Capsules(poses, mask=first))
    assert torch.equal(votes.masked(second).mask, first & second)
    got = layer.routing(votes.masked(second), active, return_coupling=True)
    wanted = layer.route(Capsules(poses, active, mask=first & second), return_coupling=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        assert other is None or torch.allclose(one, other, rtol=0, atol=1e-12)
    assert not got.coupling[~(first & second)].any()
    built = BuiltVotes.of(BuiltVotes.of(votes.build(), first), second)
    assert torch.equal(built.mask, first & second)


@pytest.mark.parametrize("transform", ["shared", "common", "factored", "identity"])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name not in ("self", "grouped", "grouped em")])
def test_no_input_capsules_at_all_are_refused_in_words(transform: str, routing: str) -> None:
    if routing in ("dynamic with a prior", "self-attention"):
        return  # these have weights for each input capsule
    layer = DenseCapsules(None, 4, J, 4, transform=transform, routing=ROUTINGS[routing])
    assert_raises(InputError, layer, torch.zeros(2, 0, 4), say="at least one input capsule")
    assert layer(torch.zeros(0, 5, 4)).poses.shape == (0, J, 4)
