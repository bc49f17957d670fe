"""Masks: each row's result is that of its own capsules alone, whatever is written at the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import torchcaps
from torchcaps.errors import InputError
from torchcaps.nn import Capsules, ConvCapsules, DenseCapsules, DenseVotes, Routed

B, I, J, D = 4, 7, 3, 4
MASK = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7, [0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)

Function = Callable[..., Routed]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spoil(tensor: Tensor, mask: Tensor = MASK) -> Tensor:
    """The tensor with NaN where no capsule is."""
    return tensor.where(mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2)), torch.nan)


def of_row(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The capsules of one row alone; what belongs to all images is cut to them."""
    keep = MASK[row]
    cut = {"votes": lambda t: t[row : row + 1, keep], "activations": lambda t: t[row : row + 1, keep]}
    cut |= {"routing_logits": lambda t: t[row : row + 1, keep], "prior": lambda t: t[row : row + 1, keep]}
    return {name: cut.get(name, lambda t: t[keep] if len(t) == I else t)(tensor) for name, tensor in given.items()}


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


def same(got: Routed, wanted: Routed, keep: Tensor) -> None:
    assert torch.allclose(got.poses, wanted.poses, rtol=1e-9, atol=1e-12)
    if wanted.activations is not None:
        assert torch.allclose(got.activations, wanted.activations, rtol=1e-9, atol=1e-12)
    assert torch.allclose(got.coupling[:, keep], wanted.coupling, rtol=1e-9, atol=1e-12)
    assert not got.coupling[:, ~keep].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_routed_as_its_own_capsules_alone(name: str) -> None:
    function, more = FUNCTIONS[name]
    given = {"votes": random(B, I, J, D)} | more
    spoilt = {n: spoil(t) if n in ("votes", "activations") else t for n, t in given.items()}
    leaves = {n: t.clone().requires_grad_() for n, t in spoilt.items()}
    routed = function(**leaves, mask=MASK, return_coupling=True)
    for row in (0, 1, 3):
        alone = function(**of_row(given, row), return_coupling=True)
        same(Routed(*(each if each is None else each[row : row + 1] for each in routed)), alone, MASK[row])
    empty = [each[2] for each in routed if each is not None]
    assert not any(each.any() for each in empty)
    total = routed.poses.square().sum() + (0 if routed.activations is None else routed.activations.sum())
    for leaf, gradient in zip(
        leaves, torch.autograd.grad(total, list(leaves.values()), allow_unused=True), strict=True
    ):
        assert gradient is None or gradient.isfinite().all(), leaf


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
@pytest.mark.parametrize("stop", [False, True])
def test_route_without_votes_has_masks_too(softmax_over: str, stop: bool) -> None:
    poses, weight, bias = random(B, I, 5), random(I, J, D, 5, seed=1), random(J, D, seed=2)
    options = {"softmax_over": softmax_over, "stop_gradient": stop, "bias": bias, "return_coupling": True}
    results = []
    for backend in ("auto", "reference"):
        given = spoil(poses).requires_grad_(), weight.clone().requires_grad_()
        routed = torchcaps.route(*given, **options, mask=MASK, backend=backend)
        results.append((*routed[::2], *torch.autograd.grad(routed.poses.square().sum(), given)))
    for ours, wanted in zip(*results, strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-12)
    alone = torchcaps.route(poses[:1, MASK[0]], weight[MASK[0]], **options)
    same(Routed(results[0][0][:1], coupling=results[0][1][:1]), alone, MASK[0])
    if softmax_over == "inputs":
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
    torch.manual_seed(0)
    layer = DenseCapsules(None, D, J, D, transform=transform, routing=routing).double().eval()
    poses, active = random(B, I, D), ACTIVE["activations"]
    for parameter in layer.parameters():
        parameter.data += 0.1 * random(*parameter.shape, seed=11)
    got = layer(Capsules(spoil(poses), active, mask=MASK))
    got.scores().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    for row in (0, 1, 3):
        alone = layer(Capsules(poses[row : row + 1, MASK[row]], active[row : row + 1, MASK[row]]))
        assert torch.allclose(got.poses[row], alone.poses[0], rtol=1e-9, atol=1e-12)
    assert not got.poses[2].any()


@pytest.mark.parametrize("transform", ["dense", "elementwise", "matrix"])
def test_weights_of_each_capsule_need_their_number(transform: str) -> None:
    with pytest.raises(InputError, match="in_capsules must be a number"):
        DenseCapsules(None, 4, J, 4, transform=transform)
    with pytest.raises(InputError, match="SelfRouting has weights for each input capsule"):
        DenseCapsules(None, 4, J, 4, transform="shared", routing="self")


@pytest.mark.parametrize(
    "options",
    [
        {"transform": "dense"},
        {"transform": "matrix", "routing": "em", "coordinates": "centres"},
        {"transform": "matrix", "coordinates": "hundredths", "share_positions": True},
        {"transform": "dense", "routing": "vb", "share_positions": True},
    ],
)
def test_capsules_that_are_not_there_change_nothing_on_maps(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    layer = DenseCapsules((2, 3, 2), 4, J, 4, **options).double().eval()
    poses, active, mask = random(2, 12, 4), random(2, 12, seed=3).sigmoid(), random(2, 12, seed=12) > 0
    votes, activations = layer.votes(Capsules(spoil(poses, mask), active, mask=mask))
    full = layer.votes(Capsules(poses, active))[0].build()
    got = layer.routing(votes, activations, return_coupling=True)
    built = torchcaps.nn.BuiltVotes(full, poses).masked(mask)
    wanted = layer.routing(built, active, return_coupling=True)
    for ours, expected in zip(got, wanted, strict=True):
        assert expected is None or torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)
    for n, part in enumerate((votes[slice(0, 1)], votes[slice(1, 2)])):
        assert torch.allclose(part.weighted_sum(None)[0], votes.weighted_sum(None)[n])


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
def test_layers_on_maps_hand_masks_on(compete_over: str) -> None:
    torch.manual_seed(0)
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
    assert torch.allclose(got.poses[got.mask], silent.poses[got.mask], rtol=1e-9, atol=1e-12)
    assert not got.poses[~got.mask].any()


def test_a_mask_costs_nothing_where_there_is_none() -> None:
    votes = DenseVotes(random(B, I, 5), random(I, J, D, 5))
    assert votes.masked(None) is votes


def test_any_number_of_capsules_is_an_axis_of_an_exported_graph() -> None:
    torch.manual_seed(0)
    layer = DenseCapsules(None, D, J, D, transform="shared").eval()
    axes = {"capsules": {0: torch.export.Dim("batch"), 1: torch.export.Dim("number", min=2)}}
    program = torch.export.export(layer, (torch.rand(2, 5, D),), dynamic_shapes=axes)
    poses = torch.rand(3, 11, D)
    assert torch.allclose(program.module()(poses).poses, layer(poses).poses, atol=1e-6)
