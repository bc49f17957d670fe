"""Heinsen's routings, the sum of HVC, and routing in groups: their numbers against their equations, and their masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import expit
from torch import Tensor, nn

from nn.routing_oracle import Array, softmax
from support import assert_raises
from torchcaps import dynamic_routing
from torchcaps.errors import InputError
from torchcaps.nn import (
    Capsules,
    ConvCapsules,
    DenseCapsules,
    EMRouting,
    GroupedRouting,
    HeinsenMatrixRouting,
    HeinsenVectorRouting,
    HVCRouting,
)
from torchcaps.testing import check_routing

B, I, K, J, D = 3, 7, 5, 4, 6
MASK = torch.tensor([[1] * 7, [1, 0, 1, 1, 0, 0, 1], [0] * 7], dtype=torch.bool)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(in_capsules: int | None, routing: Any, transform: str = "dense") -> DenseCapsules:
    """A layer whose parameters are all moved from where they start."""
    torch.manual_seed(0)
    layer = DenseCapsules(in_capsules, K, J, D, transform=transform, routing=routing).double().eval()
    for n, parameter in enumerate(layer.parameters()):
        parameter.data += 0.5 * random(*parameter.shape, seed=n)
    return layer


def heinsen_matrix(V: Array, a: Array, use: Array, ignore: Array, iterations: int, eps: float) -> tuple[Array, ...]:
    """The source's GenerativeMatrixRouting of one image, capsule by capsule."""
    inputs, outputs, dim = V.shape
    R = np.full((inputs, outputs), 1 / outputs)
    for t in range(iterations):
        if t > 0:
            log_p = np.zeros((inputs, outputs))
            for i in range(inputs):
                for j in range(outputs):
                    log_p[i, j] = -((V[i, j] - mu[j]) ** 2 / (2 * variance[j])).sum() - np.log(variance[j] ** 0.5).sum()
            R = softmax(np.log(expit(score)) + log_p)
        score, mu, variance = np.zeros(outputs), np.zeros((outputs, dim)), np.zeros((outputs, dim))
        for j in range(outputs):
            used = a * R[:, j]
            score[j] = (use[:, j] * used).sum() - (ignore[:, j] * (a - used)).sum()
            share = used / (used.sum() + eps)
            mu[j] = sum(share[i] * V[i, j] for i in range(inputs))
            variance[j] = sum(share[i] * (V[i, j] - mu[j]) ** 2 for i in range(inputs)) + eps
    return mu, expit(score), R


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("in_capsules", [I, None])
def test_heinsens_matrix_routing_is_that_of_its_equations(iterations: int, in_capsules: int | None) -> None:
    transform = "dense" if in_capsules else "shared"
    layer = moved(in_capsules, HeinsenMatrixRouting(iterations, variance_eps=1e-3), transform)
    capsules = Capsules(random(B, I, K), random(B, I, seed=1).sigmoid(), mask=MASK)
    routed, own = layer.route(capsules, return_coupling=True), layer.routing
    V = layer.transform(capsules.poses).build() + own.bias
    for row in (0, 1):
        there = MASK[row]
        use, ignore = (each.expand(I, -1)[there].numpy(force=True) for each in (own.beta_use, own.beta_ignore))
        given = V[row, there].numpy(force=True), capsules.activations[row, there].numpy()
        wanted = heinsen_matrix(*given, use, ignore, iterations, 1e-3)
        for got, number in zip((routed.poses, routed.activations, routed.coupling[:, there]), wanted, strict=True):
            np.testing.assert_allclose(got[row].numpy(force=True), number, rtol=1e-9, atol=1e-12)
    assert not any(each[2].any() for each in routed), "a row without capsules is zero"


def heinsen_vector(u: Array, own: dict[str, Array], weight: Array, iterations: int) -> tuple[Array, Array]:
    """The source's EfficientVectorRouting of one sequence without padding, pair by pair; ``weight`` (J, D, K)."""
    number, outputs = len(u), len(weight)
    x = u / math.sqrt(number)
    row = lambda name, i: own[name][i if len(own[name]) > 1 else 0]  # noqa: E731
    f = np.array([expit(row("data_weight", i) @ x[i] + row("data_bias", i)) for i in range(number)])
    beta = own["beta"] + u @ own["beta_weight"] if "beta_weight" in own else own["beta"]
    R = np.full((number, outputs), 1 / outputs)
    for t in range(iterations):
        if t > 0:
            S = np.zeros((number, outputs))
            for j in range(outputs):
                predicted = v[j] @ own["predict"] * own["predict_scale"][j] + own["predict_bias"][j]
                for i in range(number):
                    S[i, j] = np.log(expit(u[i] @ predicted * row("match_scale", i)[j] + row("match_bias", i)[j]))
            R = softmax(S)
        v = np.zeros((outputs, weight.shape[1]))
        for j in range(outputs):
            for i in range(number):
                credit = beta[0, i, j] * f[i] * R[i, j] - beta[1, i, j] * (f[i] - f[i] * R[i, j])
                v[j] += credit * (weight[j] @ x[i] + own["vote_bias"][j])
            v[j] = (v[j] - v[j].mean()) / np.sqrt(v[j].var() + 1e-5)
    return v, R


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("in_capsules", [I, None])
def test_heinsens_vector_routing_is_that_of_its_equations(iterations: int, in_capsules: int | None) -> None:
    """Also of a row that is padded, where the source divides by the padded length."""
    layer = moved(in_capsules, HeinsenVectorRouting(iterations), "shared")
    poses = random(B, I, K)
    routed = layer.route(Capsules(poses.where(MASK[..., None], torch.nan), mask=MASK), return_coupling=True)
    own = {name: each.numpy(force=True) for name, each in layer.routing.named_parameters()}
    of_inputs = {"data_weight": 0, "data_bias": 0, "match_scale": 0, "match_bias": 0, "beta": 1}
    for row in (0, 1):
        there = MASK[row]
        cut = own | {n: own[n].compress(there, axis) for n, axis in of_inputs.items() if in_capsules}
        poses_there = poses[row, there].numpy()
        v, R = heinsen_vector(poses_there, cut, layer.transform.weight.numpy(force=True), iterations)
        np.testing.assert_allclose(routed.poses[row].numpy(force=True), v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(routed.coupling[row, there].numpy(force=True), R, rtol=1e-9, atol=1e-12)
        scores = expit(v @ own["score"] + own["score_bias"])
        np.testing.assert_allclose(routed.activations[row].numpy(force=True), scores, rtol=1e-9)
    assert not any(each[2].any() for each in routed), "a row without capsules is zero"


def test_hvc_is_the_normalised_sum_of_the_votes() -> None:
    layer = moved(I, HVCRouting()).train()
    poses, norm = random(B, I, K), layer.routing
    s = torch.einsum("ijdk,bik->bjd", layer.transform.weight, poses)
    mean, variance = s.mean((0, 1)), s.var((0, 1), correction=0)  # as the source: over all axes but the last
    wanted = ((s - mean) / (variance + 1e-3).sqrt() + norm.bias).relu()
    torch.testing.assert_close(layer(poses).poses, wanted)
    torch.testing.assert_close(norm.norm.running_mean, mean / 10)
    assert layer.eval()(poses).poses.max() > 1, "lengths are logits"
    got = layer(Capsules(poses, mask=MASK)).poses
    torch.testing.assert_close(got[0], layer(poses).poses[0])
    assert not got[2].any()


@pytest.mark.parametrize("transform", ["dense", "shared"])
def test_groups_are_routed_by_themselves_and_summed(transform: str) -> None:
    layer = moved(8, GroupedRouting(4), transform)
    poses = random(B, 8, K)
    mask = torch.ones(B, 8, dtype=torch.bool)
    mask[1, :3] = False  # a group and a half
    routed = layer.route(Capsules(poses, mask=mask), return_coupling=True)
    votes, total, couplings = layer.transform(poses).build(), 0, []
    for n, group in enumerate(layer.routing.groups):
        part = slice(2 * n, 2 * n + 2)
        own = dynamic_routing(votes[:, part], prior=group.prior, mask=mask[:, part], return_coupling=True)
        total, couplings = total + own.poses, [*couplings, own.coupling]
    torch.testing.assert_close(routed.poses, total)
    torch.testing.assert_close(routed.coupling, torch.cat(couplings, 1))
    assert not torch.equal(layer.routing.groups[0].prior, layer.routing.groups[1].prior)


def test_groups_of_another_routing() -> None:
    layer = moved(8, {"name": "grouped", "group_routing": "em"})
    routed = layer.route(random(B, 8, K))
    parts = [DenseCapsules(4, K, J, D, routing=EMRouting()).double() for _ in range(2)]
    for n, part in enumerate(parts):
        part.transform.weight.data = layer.transform.weight[4 * n : 4 * n + 4]
        part.routing.load_state_dict(layer.routing.groups[n].state_dict())
    halves = [part.route(random(B, 8, K)[:, 4 * n : 4 * n + 4]) for n, part in enumerate(parts)]
    torch.testing.assert_close(routed.poses, halves[0].poses + halves[1].poses)
    torch.testing.assert_close(routed.activations, (halves[0].activations + halves[1].activations) / 2)
    for compete_over in ("types", "types-and-positions"):
        on_map = ConvCapsules(2, 4, 3, 4, layer_kernel=2, compete_over=compete_over, routing="grouped")
        capsules = on_map(Capsules(torch.rand(2, 24, 4), grid=(2, 3, 4)))
        assert capsules.poses.isfinite().all()
    assert_raises(InputError, DenseCapsules, 7, K, J, D, routing="grouped", say="num_groups must divide the 7 input")
    said = "GroupedRouting has weights for each input capsule"
    assert_raises(InputError, DenseCapsules, None, K, J, D, routing="grouped", transform="shared", say=said)


OF_PLACES = ("input order", "output order")
CHECKED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "heinsen-matrix": (HeinsenMatrixRouting(), ("rotation",)),
    "heinsen-vector": (HeinsenVectorRouting(), (*OF_PLACES, "rotation")),
    "hvc": (HVCRouting().eval(), ("rotation", "lengths", "coupling")),
    "grouped": (GroupedRouting(), ("sizes of one", "masks", "input order", "lengths")),  # 7 are no 2 equal groups
}


@pytest.mark.parametrize("name", CHECKED)
def test_they_have_the_properties_of_a_routing(name: str) -> None:
    routing, without = CHECKED[name]
    check_routing(routing, in_capsules=8, skip=without)


@pytest.mark.parametrize("name", CHECKED)
def test_they_learn_under_autocast_and_show_their_coupling(name: str) -> None:
    torch.manual_seed(0)
    layer = DenseCapsules(8, K, J, D, routing=name)
    with torch.autocast("cpu", torch.bfloat16):
        F.mse_loss(layer(torch.rand(5, 8, K)).scores(), torch.zeros(5, J)).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    rounds = layer.routing.rounds(*layer.votes(torch.rand(5, 8, K)))
    assert rounds[-1].coupling.shape == (5, 8, J)
    assert isinstance(layer.routing, nn.Module)
