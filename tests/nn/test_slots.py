"""Layers of slots: the equations written as plain loops in float64, and the properties that they promise."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routing_cases import random
from support import (
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    assert_same,
    with_gradients,
)
from torchcaps import InputError, create_model
from torchcaps.nn import Capsules, SlotAttention, SlotMixture
from torchcaps.nn.slots import SlotLayer
from torchcaps.testing import diagnose

B, I, K, J, D = 4, 7, 6, 3, 5
MASK = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0, 0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0, 1]], dtype=torch.bool)
KINDS = {"slots": SlotAttention, "slot-mixture": SlotMixture}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **options: Any) -> SlotLayer:
    """A small layer in float64 with parameters that are not those of the start."""
    torch.manual_seed(0)
    layer = KINDS[kind](None, K, J, D, mlp_width=8, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


def by_loops(layer: SlotLayer, poses: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """Slots of one image from the inputs that are present, one number after another, by torch's plain modules."""
    is_mixture = isinstance(layer, SlotMixture)
    inputs = [nn.functional.layer_norm(u, (K,), layer.norm_inputs.weight, layer.norm_inputs.bias) for u in poses]
    keys, values = ([weight @ each for each in inputs] for weight in (layer.key.weight, layer.value.weight))
    slots = list(starts)
    log_std, share = [torch.zeros_like(each) for each in slots], [torch.tensor(1 / J).double()] * J
    attention: list[Tensor] = []
    for _ in range(layer.num_iterations):
        logits = []
        for j in range(J):
            state = torch.cat([slots[j], log_std[j]]) if is_mixture else slots[j]
            norm = layer.norm_slots
            query = layer.query.weight @ nn.functional.layer_norm(state, state.shape, norm.weight, norm.bias)
            if is_mixture:
                mean, scale = query[:D], query[D:]
                distance = lambda k, mean=mean, scale=scale: (((k - mean) / scale.exp()) ** 2).sum() / 2 + scale.sum()  # noqa: E731
                logits.append([torch.log(share[j]) - distance(key) for key in keys])
            else:
                logits.append([key @ query / D**0.5 for key in keys])
        attention = [torch.stack([logits[j][i] for j in range(J)]).softmax(0) for i in range(len(keys))]
        for j in range(J):
            weights = [each[j] + layer.eps for each in attention]
            weights = [each / sum(weights) for each in weights]
            update = sum(w * v for w, v in zip(weights, values, strict=True))
            gated = nn.GRUCell.forward(layer.gru, update[None], slots[j][None])[0]
            normed = nn.functional.layer_norm(gated, (D,), layer.norm_mlp.weight, layer.norm_mlp.bias)
            slots[j] = gated + layer.mlp(normed)
            if is_mixture:
                spread = sum(w * (v - slots[j]) ** 2 for w, v in zip(weights, values, strict=True))
                log_std[j] = 0.5 * torch.log(spread + layer.eps)
                share[j] = sum(each[j] for each in attention) / len(attention) + layer.eps
    if is_mixture:
        slots = [layer.output(torch.cat(each)) for each in zip(slots, log_std, strict=True)]
    coupling = torch.stack(attention)
    return {"poses": torch.stack(slots), "activations": coupling.mean(0), "coupling": coupling}


@pytest.mark.parametrize("iterations", range(1, 6))
@pytest.mark.parametrize("start", ["noise", "queries", "given"])
@pytest.mark.parametrize("masked", [False, True])
@each_kind
def test_values_and_gradients_are_those_of_the_equations(kind: str, masked: bool, start: str, iterations: int) -> None:
    layer = make(kind, num_iterations=iterations, start_from="queries" if start == "queries" else "noise")
    leaves = {"poses": random(B, I, K).requires_grad_(), "starts": random(B, J, D, seed=1).requires_grad_()}
    starts = leaves["starts"] if start == "given" else None
    parameters = dict(layer.named_parameters())
    mask = MASK if masked else torch.ones_like(MASK)
    routed = layer.route(Capsules(leaves["poses"], mask=mask if masked else None), starts, return_coupling=True)
    first = layer.queries if start == "queries" else layer.mean + layer.log_std.exp() * layer._noise.double()
    alone = [by_loops(layer, leaves["poses"][n][mask[n]], first if starts is None else starts[n]) for n in range(B)]
    coupling = torch.zeros(B, I, J).double()
    coupling[mask] = torch.cat([each.pop("coupling") for each in alone])
    wanted = {name: torch.stack([each[name] for each in alone]) for name in alone[0]} | {"coupling": coupling}
    got, wanted = (with_gradients(each, leaves | parameters) for each in (routed, wanted))
    values = {name for name in got if not name.startswith("d ")}
    for names, tolerance in ((values, 1e-10), (got.keys() - values, 1e-9)):
        assert_same({name: got[name] for name in names}, {name: wanted[name] for name in names}, tolerance)


@each_kind
def test_images_do_not_mix_and_slots_are_exchangeable(kind: str) -> None:
    layer, poses = make(kind), random(B, I, K)
    assert_batch_independent(lambda each: layer(each).poses, poses, 1e-12)
    order = torch.tensor([2, 0, 1])
    starts = random(B, J, D, seed=1)
    got, wanted = (
        layer.route(poses, starts[:, order], return_coupling=True),
        layer.route(poses, starts, return_coupling=True),
    )
    assert_close(got.poses, wanted.poses[:, order], 1e-12)
    assert_close(got.coupling, wanted.coupling[..., order], 1e-12)
    turned = layer.route(poses.flip(1), starts, return_coupling=True)
    assert_close(turned.poses, wanted.poses, 1e-12)
    assert_close(turned.coupling, wanted.coupling.flip(1), 1e-12)
    assert_close(wanted.coupling.sum(2), 1.0, 1e-12)
    assert_close(wanted.activations.sum(1), 1.0, 1e-12)


@each_kind
def test_noise_is_drawn_anew_in_training_and_never_in_evaluation(kind: str) -> None:
    layer, poses = make(kind), random(B, I, K)
    assert layer(poses).poses.equal(layer(poses).poses)
    assert_close(layer(poses[[0, 0]]).poses[1], layer(poses[[0, 0]]).poses[0], 1e-12)
    again = copy.deepcopy(layer)
    assert again(poses).poses.equal(layer(poses).poses)
    layer.train()
    assert_differs(layer(poses).poses, layer(poses).poses)
    same = layer(poses[[0, 0]]).poses
    assert_differs(same[0], same[1])
    torch.manual_seed(3)
    first = layer(poses).poses
    torch.manual_seed(3)
    assert layer(poses).poses.equal(first)


@each_kind
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e6])
def test_gradients_are_finite_and_reach_every_parameter(kind: str, scale: float) -> None:
    layer = make(kind).float()
    poses = (scale * random(B, I, K)).float().requires_grad_()
    out = layer(Capsules(poses, mask=MASK))
    out.poses.square().sum().backward()
    assert_finite([out.poses, out.activations, poses.grad, *(each.grad for each in layer.parameters())])
    if scale == 1e6:
        assert_gradients_reach(layer)


@each_kind
def test_a_row_without_inputs_gives_zeros(kind: str) -> None:
    layer, mask = make(kind), MASK.clone()
    mask[1] = False
    poses = random(B, I, K).requires_grad_()
    routed = layer.route(Capsules(poses, mask=mask), return_coupling=True)
    assert not any(each[1].any() for each in routed)
    routed.poses.sum().backward()
    assert_finite([poses.grad, *(each.grad for each in layer.parameters())])


@each_kind
def test_the_doctor_finds_nothing(kind: str) -> None:
    layer = KINDS[kind](None, 8, 5, 16)
    assert diagnose(layer, (4, 12, 8)) == []
    assert diagnose(layer, (4, 12, 8), mask=torch.arange(12) < torch.tensor([[12], [3], [7], [1]])) == []


@each_kind
def test_graphs_functions_of_torch_func_and_second_derivatives(kind: str) -> None:
    layer, poses = make(kind, num_iterations=2), random(B, I, K)
    called = lambda each: layer(Capsules(each)).poses  # noqa: E731
    wanted = called(poses)
    assert_close(torch.compile(called, fullgraph=True, backend="aot_eager")(poses), wanted, 1e-10)
    assert_close(torch.vmap(lambda one: called(one[None])[0])(poses), wanted, 1e-10)
    _, tangent = torch.func.jvp(called, (poses,), (torch.ones_like(poses),))
    assert_close(tangent, (called(poses + 1e-6) - called(poses - 1e-6)) / 2e-6, 1e-5)
    assert torch.autograd.gradgradcheck(called, (poses[:1, :3].clone().requires_grad_(),))


@each_kind
def test_a_layer_of_slots_is_an_inner_layer_of_a_network(kind: str) -> None:
    layers = ({"name": kind, "num_capsules": 6, "capsule_dim": 8}, "dense")
    network = create_model("compact", (1, 28, 28), 4, layers=layers)
    assert network(torch.rand(2, 1, 28, 28)).scores.shape == (2, 4)
    assert_raises(InputError, network.layer, 1, say=f"layer 1 is a {KINDS[kind].__name__}, which has no votes")


@each_kind
def test_what_does_not_fit_is_one_sentence(kind: str) -> None:
    layer, name = KINDS[kind](I, K, J, D), KINDS[kind].__name__
    for arguments, said in (
        ((torch.rand(B, I + 1, K),), f"{name}: poses must have shape (B, {I}, {K}), got ({B}, {I + 1}, {K})"),
        ((torch.rand(B, I, K), torch.rand(B, J + 1, D)), f"{name}: starts must have shape ({B}, {J}, {D})"),
        ((Capsules(torch.rand(B, I, K), mask=MASK[:, 1:]),), f"{name}: mask must have shape ({B}, {I})"),
    ):
        assert_raises(InputError, layer, *arguments, say=said)
    assert_raises(InputError, KINDS[kind](None, K, J), torch.zeros(2, 0, K), say="at least one input capsule")
    assert KINDS[kind](None, K, J)(torch.zeros(0, 4, K)).poses.shape == (0, J, 64)
    for option, value in itertools.product(("num_iterations", "mlp_width"), (0,)):
        assert_raises(InputError, KINDS[kind], I, K, J, **{option: value}, say=option)
