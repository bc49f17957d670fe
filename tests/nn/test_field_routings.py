"""The field's routing algorithms as modules: what a layer relies on, over every transform, and on maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from torchcaps.nn import (
    Capsules,
    ConvCapsules,
    Dense,
    DenseCapsules,
    Elementwise,
    EMCodeRouting,
    EMRouting,
    InvertedAttentionRouting,
    Matrix,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    Shared,
    VBRouting,
)
from torchcaps.testing import check_routing

Call = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
ROTATED = {"rotation"}  # by layer normalisation, or a variance of each component, which know the axes of a pose

ROUTINGS: dict[str, tuple[Callable[[], Routing], set[str]]] = {
    "self-attention": (SelfAttentionRouting, set()),
    "self-attention without bias": (lambda: SelfAttentionRouting(learn_bias=False), set()),
    "inverted attention": (InvertedAttentionRouting, ROTATED),
    "inverted attention, one iteration": (lambda: InvertedAttentionRouting(1), ROTATED),
    "self-routing": (SelfRouting, set()),
    "em": (EMRouting, ROTATED),
    "em, scaled": (lambda: EMRouting(2, final_lambda=0.1, cost_scale=None), ROTATED),
    "em-code": (EMCodeRouting, ROTATED),
    "em-code on a map": (lambda: EMCodeRouting(2, on_map=True), ROTATED),
    "vb": (lambda: VBRouting().eval(), ROTATED),  # in training, images of a batch are normalised together
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_it_has_the_properties_that_a_layer_relies_on(name: str) -> None:
    make, without = ROUTINGS[name]
    found = check_routing(make(), skip=without)
    assert found["coupling"] == "sums to one over the outputs"


def of_parameters(routing: Any, votes: Tensor, activations: Tensor, poses: Tensor) -> tuple[Tensor, ...]:
    """What the pure function of a module's algorithm gives for its parameters."""
    u, a = getattr(routing, "beta_u", None), getattr(routing, "beta_a", None)
    match routing:
        case SelfAttentionRouting():
            return torchcaps.self_attention_routing(votes, bias=routing.bias, return_coupling=True)
        case InvertedAttentionRouting():
            capsules, coupling = torchcaps.inverted_attention_routing(
                votes,
                routing.num_iterations,
                norm_weight=routing.norm_weight,
                norm_bias=routing.norm_bias,
                return_coupling=True,
            )
            return capsules, (capsules @ routing.score + routing.score_bias).sigmoid(), coupling
        case SelfRouting():
            logits = torch.einsum("ijk,bik->bij", routing.weight, poses) + routing.bias
            return torchcaps.self_routing(votes, activations, logits, return_coupling=True)
        case EMRouting():
            scale = 100 * votes.shape[2] / votes.shape[1] if routing.cost_scale is None else routing.cost_scale
            options = {"final_lambda": routing.final_lambda, "cost_scale": scale, "return_coupling": True}
            a = a / routing.final_lambda
            return torchcaps.em_routing(votes, activations, u, a, routing.num_iterations, **options)  # type: ignore[call-overload,no-any-return]
        case EMCodeRouting():
            return torchcaps.em_routing_code(votes, activations, u, a, routing.num_iterations, return_coupling=True)
        case _:
            capsules, logits, coupling = torchcaps.vb_routing(votes, activations, u, a, return_coupling=True)
            assert not routing.pose_norm.training
            scale = 1 / (1 + routing.pose_norm.eps) ** 0.5  # of a normalisation that has seen nothing
            return scale * capsules, (scale * logits).sigmoid(), coupling


TRANSFORMS = {
    "dense": (Dense, 6, 5),
    "shared": (Shared, 6, 5),
    "elementwise": (Elementwise, 5, 5),
    "matrix": (Matrix, 9, 9),
}


def layer_of(transform: str, routing: Routing, I: int = 7, J: int = 4) -> tuple[DenseCapsules, Tensor]:
    kind, K, D = TRANSFORMS[transform]
    layer = DenseCapsules(I, K, J, D, transform=kind("normal", 0.5), routing=routing).double()
    for parameter in routing.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer, torch.randn(5, I, K, dtype=torch.float64)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "em-code on a map"])
def test_over_any_transform_it_is_the_function_of_the_built_votes(
    name: str, transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = ROUTINGS[name][0]()
    layer, poses = layer_of(transform, routing)
    poses.requires_grad_()
    activations = torch.rand(5, 7, dtype=torch.float64, requires_grad=True)
    votes = layer.votes(Capsules(poses, activations))[0].build()
    wanted = of_parameters(routing, votes, activations, poses)
    leaves = [leaf for leaf in (poses, activations, *layer.parameters()) if leaf.requires_grad]

    def gradients(results: Any) -> list[Tensor | None]:
        total = sum((each * each.cos()).sum() for each in results)
        return list(torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True))

    for block in (2**40, 2 * votes[0].nbytes):  # all images at once, and two at a time
        monkeypatch.setattr("torchcaps.ops.votes.BLOCK", block)
        routed = layer.route(Capsules(poses, activations), return_coupling=True)
        got = [each for each in routed if each is not None]
        torch.testing.assert_close(got, list(wanted))
        torch.testing.assert_close(gradients(got), gradients(wanted))


@pytest.mark.parametrize("name", ROUTINGS)
def test_without_activations_lengths_stand_for_them(name: str) -> None:
    layer, poses = layer_of("dense", ROUTINGS[name][0]())
    torch.testing.assert_close(layer(poses)[:2], layer(Capsules(poses, Capsules(poses).scores()))[:2])


@pytest.mark.parametrize("name", ROUTINGS)
def test_its_last_round_is_its_result(name: str) -> None:
    layer, poses = layer_of("dense", ROUTINGS[name][0]())
    votes, _ = layer.votes(Capsules(poses))
    wanted, rounds = layer.route(poses, return_coupling=True), layer.routing.rounds(votes)
    if name.startswith("em"):
        assert len(rounds) == layer.routing.num_iterations
        torch.testing.assert_close(rounds[-1].activations, wanted.activations)
    if name != "vb":  # whose poses are normalised afterwards
        torch.testing.assert_close(rounds[-1].capsules, wanted.poses)
    torch.testing.assert_close(rounds[-1].coupling, wanted.coupling)
    assert all(each.isfinite().all() for step in rounds for each in step if each is not None)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_routing_with_parameters_belongs_to_one_layer(name: str) -> None:
    if name == "self-attention without bias":
        return
    routing = ROUTINGS[name][0]()
    DenseCapsules(3, 4, 2, 4, routing=routing)
    with pytest.raises(ValueError, match="belongs to one layer; make one for each"):
        DenseCapsules(3, 4, 2, 4, routing=routing)


# ---- on maps


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_window_as_large_as_the_map_is_a_dense_layer(name: str, compete_over: Any) -> None:
    on_map = ConvCapsules(2, 4, 3, 4, kernel_size=3, compete_over=compete_over, routing=ROUTINGS[name][0]()).double()
    dense = DenseCapsules(18, 4, 3, 4, routing=ROUTINGS[name][0]()).double()
    dense.load_state_dict(on_map.state_dict())
    poses, activations = torch.randn(3, 18, 4, dtype=torch.float64), torch.rand(3, 18, dtype=torch.float64)
    got, wanted = on_map(Capsules(poses, activations, (2, 3, 3))), dense(Capsules(poses, activations))
    torch.testing.assert_close(got[:2], wanted[:2])


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name.startswith(("em", "vb"))])
def test_where_positions_compete_blocks_are_whole_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ConvCapsules(2, 4, 3, 4, kernel_size=2, compete_over="types-and-positions", routing=ROUTINGS[name][0]())
    layer.double()
    poses = torch.randn(4, 2 * 16, 4, dtype=torch.float64, requires_grad=True)
    given = Capsules(poses, torch.rand(4, 32, dtype=torch.float64), (2, 4, 4))
    wanted = layer(given)
    gradient = torch.autograd.grad(wanted.poses.cos().sum() + wanted.activations.sum(), poses)
    monkeypatch.setattr("torchcaps.ops.votes.BLOCK", 1)  # an image's windows are more, and stay together
    got = layer(given)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.poses.cos().sum() + got.activations.sum(), poses), gradient)
    coupling = layer.route(given, return_coupling=True).coupling
    of_children = torch.zeros(4, 33, dtype=torch.float64)
    children = layer.window_capsules((2, 4, 4)).flatten().expand(4, -1)
    of_children.scatter_add_(1, children, coupling.sum(2).unflatten(0, (4, -1)).flatten(1))
    torch.testing.assert_close(of_children[:, 1:], torch.ones(4, 32, dtype=torch.float64))


# ---- what is learned


def test_vb_normalises_over_the_batch_and_takes_one_image_too() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=VBRouting())
    routed = layer(torch.randn(64, 6, 4))
    torch.testing.assert_close(routed.poses.mean((0, 2)), torch.zeros(3), atol=1e-5, rtol=0)
    assert layer.routing.pose_norm.running_mean.abs().max() > 0
    before = layer.routing.pose_norm.running_var.clone()
    assert layer(torch.randn(1, 6, 4)).activations.isfinite().all()
    assert torch.equal(layer.routing.pose_norm.running_var, before)


def test_coupling_is_uniform_at_the_start_of_self_routing() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=SelfRouting())
    coupling = layer.route(torch.randn(2, 6, 4), return_coupling=True).coupling
    torch.testing.assert_close(coupling, torch.full((2, 6, 3), 1 / 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMRouting(0), "EMRouting: num_iterations must be an integer from 1 to 1000, got 0"),
        (lambda: EMRouting(cost_scale=-1.0), "EMRouting: cost_scale must be positive and finite"),
        (lambda: EMCodeRouting(final_beta=0.0), "EMCodeRouting: final_beta must be positive and finite"),
        (lambda: VBRouting(2.5), "VBRouting: num_iterations must be an integer"),  # type: ignore[arg-type]
        (lambda: InvertedAttentionRouting(eps=0.0), "InvertedAttentionRouting: eps must be positive"),
    ],
)
def test_options_are_checked(make: Callable[[], Routing], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
