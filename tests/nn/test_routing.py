"""Routing algorithms: their numbers against their equations, and what a layer relies on, over every transform.

Dynamic routing has its equations, and all its options, in test_dynamic_routing.py.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchcaps
from calling import check_derivatives, check_ways
from nn import routing_oracle as oracle
from own_parts import Cosine, Silent
from routing_cases import ROUTINGS, TRANSFORMS
from support import assert_close, assert_finite, assert_raises, assert_same, with_gradients
from torchcaps import InputError, squash
from torchcaps.nn import (
    BuiltVotes,
    Capsules,
    ConvCapsules,
    DenseCapsules,
    EMCodeRouting,
    EMRouting,
    GroupedRouting,
    InvertedAttentionRouting,
    LayerSize,
    Routed,
    SelfAttentionRouting,
    SelfRouting,
    VBRouting,
)
from torchcaps.nn.routing import vb
from torchcaps.parts import PARTS, part_of
from torchcaps.testing import check_routing

# ---- the functions

Function = Callable[..., Any]


class Algorithm(NamedTuple):
    """Of votes V, activations a, two numbers u and b of each output capsule, and the number of iterations."""

    route: Function
    equations: Function


def routing_logits(votes: Any) -> Any:
    return (votes.nan_to_num().sum(3) if votes.ndim == 4 else votes.sum(2)) / 2


def for_components(each: Tensor, votes: Tensor) -> Tensor:
    return each[:1].expand(votes.shape[3])


ALGORITHMS = {
    "self-attention": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.self_attention_routing(
            V, bias=a[0][:, None] * u, mask=mask, return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.self_attention(V, a[:, None] * u),
    ),
    "inverted-attention": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.inverted_attention_routing(
            V, n, norm_weight=for_components(u, V), norm_bias=for_components(b, V), mask=mask, return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.inverted_attention(V, n, u[0], b[0], 1e-5),
    ),
    "self": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.self_routing(
            V, a, routing_logits(V), mask=mask, return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.self_routing(V, a, routing_logits(V)),
    ),
    "em": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.em_routing(
            V, a, u, b, n, final_lambda=0.5, cost_scale=0.7, mask=mask, return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.em(V, a, u, b, n, 0.5, 0.7),
    ),
    "em-code": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.em_routing_code(
            V, a, u, b / 100, n, final_beta=0.02, min_variance=0.001, mask=mask, return_coupling=True
        ),
        lambda V, a, u, b, n: oracle.em_code(V, a, u, b / 100, n, 0.02, 0.001),
    ),
    "vb": Algorithm(
        lambda V, a, u, b, n, mask=None: torchcaps.vb_routing(V, a, u, b, n, mask=mask, return_coupling=True),
        lambda V, a, u, b, n: oracle.vb(V, a, u, b, n),
    ),
}


def inputs(B: int = 3, I: int = 7, J: int = 5, D: int = 4, *, scale: float = 1.0) -> list[Tensor]:
    """Votes, activations and two learned numbers of each output capsule."""
    random = torch.Generator().manual_seed(0)
    votes = scale * torch.randn(B, I, J, D, generator=random, dtype=torch.float64)
    activations = torch.rand(B, I, generator=random, dtype=torch.float64)
    return [votes, activations, *torch.randn(2, J, generator=random, dtype=torch.float64)]


def given(routed: Routed) -> list[Tensor]:
    return [each for each in routed if each is not None]


MASK = torch.tensor([[1] * 7, [1, 0, 1, 1, 0, 0, 1], [0] * 7, [0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)


def test_every_algorithm_is_here() -> None:
    here = {part_of(type(make()))[1] for make, _ in ROUTINGS.values()}
    assert {*here, "grouped", "b2i"} == set(PARTS["routing"])  # the latter in test_interests.py


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numbers_are_those_of_the_equations(name: str) -> None:
    algorithm = ALGORITHMS[name]
    sizes = ((3, 7, 5, 4), (1, 2, 3, 1), (2, 1, 4, 6), (2, 9, 1, 16))
    for size, iterations, scale in itertools.product(sizes, (1, 2, 3), (0.1, 1.0, 4.0)):
        tensors = inputs(*size, scale=scale)
        routed = given(algorithm.route(*tensors, iterations))
        V, a, u, b = (tensor.numpy() for tensor in tensors)
        if name == "self-attention":
            a = np.broadcast_to(a[0], a.shape)  # its bias, which is the same in all images
        for image in range(size[0]):
            for got, wanted in zip(routed, algorithm.equations(V[image], a[image], u, b, iterations), strict=True):
                torch.testing.assert_close(got[image], torch.as_tensor(wanted), rtol=1e-9, atol=1e-12)
    images = 1 if name == "self-attention" else 0  # whose bias is of activations in the table
    nothing = torch.zeros(0, 3, 4, 5), torch.zeros(images, 3), torch.zeros(4), torch.zeros(4)
    assert algorithm.route(*nothing, 2).poses.shape == (0, 4, 5)
    leaves = [tensor.requires_grad_() for tensor in inputs(2, 3, 2, 3)]
    route = lambda *tensors: tuple(given(algorithm.route(*tensors, 3)))  # noqa: E731
    assert torch.autograd.gradcheck(route, leaves)
    assert torch.autograd.gradgradcheck(route, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_is_routed_as_its_own_capsules_alone(name: str) -> None:
    """Whatever is written at those that the mask leaves out, NaN too."""
    (V, a, u, b), route = inputs(4), ALGORITHMS[name].route
    a = a[:1].expand(4, 7)  # the bias of self-attention is the same in all images
    leaves = {"V": V.where(MASK[..., None, None], torch.nan), "a": a.where(MASK, torch.nan), "u": u, "b": b}
    leaves = {name: each.clone().requires_grad_() for name, each in leaves.items()}
    routed = route(*leaves.values(), 2, MASK)
    for row in (0, 1, 3):
        there = MASK[row]
        alone = route(V[row : row + 1, there], a[row : row + 1, there], u, b, 2)
        for got, wanted in zip(given(routed._replace(coupling=routed.coupling[:, there])), given(alone), strict=True):
            assert_close(got[row], wanted[0], 1e-9)
    assert not any(each[2].any() for each in given(routed)), "a row without capsules is zero"
    assert not routed.coupling[~MASK].any()
    assert_finite(with_gradients(routed, leaves).values())


def test_half_precision_is_float32_inside() -> None:
    votes, *others = (each.float() for each in inputs(4, 33, 6, 16))
    for (name, algorithm), dtype in itertools.product(ALGORITHMS.items(), (torch.float16, torch.bfloat16)):
        rounded, route = votes.to(dtype), algorithm.route
        if name == "self":
            logits = routing_logits(rounded.float())
            route = lambda V, a, *_, logits=logits: torchcaps.self_routing(V, a, logits, return_coupling=True)  # noqa: E731
        half, full = given(route(rounded, *others, 2)), given(route(rounded.float(), *others, 2))
        assert all(got.equal(wanted.to(dtype)) for got, wanted in zip(half, full, strict=True)), name


def test_couplings_below_the_precision_still_give_the_mean() -> None:
    """Far votes have couplings of 1e-300 and less, which float32 does not know; their mean exists all the same."""
    V, a, u, b = inputs(1, 5, 2, 8, scale=30.0)
    double = torchcaps.em_routing(V, a, u, b, 3).poses
    single = torchcaps.em_routing(*(tensor.float() for tensor in (V, a, u, b)), 3).poses
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


def test_self_routing_with_logits_at_the_edge_of_float32() -> None:
    """exp(-88) is hardly a normal number, exp(-104) is zero; the mean of an output capsule is there all the same."""
    V, a, _, _ = (tensor.float() for tensor in inputs(1, 6, 2, 4))
    a[:, 5] = 0
    for apart in (50.0, 87.0, 88.5, 92.0, 100.0, 103.0, 104.5, 300.0):
        logits = torch.tensor([apart, 0.0]).repeat(1, 6, 1)
        logits[..., 1] += torch.arange(6) / 10
        logits[:, 5] = torch.tensor([0.0, apart])  # the only one that chose the second, and it is not active
        found = []
        for dtype in (torch.float32, torch.float64):
            leaves = {"votes": V.to(dtype), "activations": a.to(dtype), "logits": logits.to(dtype)}
            leaves = {name: each.clone().requires_grad_() for name, each in leaves.items()}
            found.append(with_gradients(torchcaps.self_routing(*leaves.values(), return_coupling=True), leaves))
        single, double = found
        assert_finite(single.values())
        assert_same({name: each.double() for name, each in single.items()}, double, 1e-4, apart)
        assert (single["poses"].norm(dim=2) > 0.1).all(), "also of those that hardly anyone chose"


def test_digamma_of_exported_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.linspace(1, 20, 50), torch.tensor([1e3, 1e6])]).double()
    monkeypatch.setattr(vb, "is_exporting", lambda: True)
    torch.testing.assert_close(vb.digamma(x), torch.digamma(x), rtol=1e-9, atol=1e-9)


# ---- the modules

every_module = pytest.mark.parametrize("name", ROUTINGS)


def layer_of(name: str, transform: str = "dense", I: int = 7, J: int = 4) -> tuple[DenseCapsules, Capsules]:
    """A layer, its routing's parameters drawn at random, and capsules for it that want gradients."""
    K, D = TRANSFORMS[transform]
    layer = DenseCapsules(I, K, J, D, transform=transform, routing=ROUTINGS[name][0]()).double()
    for parameter in layer.routing.parameters():
        nn.init.normal_(parameter, std=0.3)
    poses, activations = torch.randn(5, I, K).double(), torch.rand(5, I).double()
    return layer, Capsules(poses.requires_grad_(), activations.requires_grad_())


def leaves_of(layer: nn.Module, capsules: Capsules) -> dict[str, Tensor]:
    return {"poses": capsules.poses, "activations": capsules.activations} | dict(layer.named_parameters())  # type: ignore[dict-item]


@every_module
def test_it_has_the_properties_that_a_layer_relies_on(name: str) -> None:
    make, without = ROUTINGS[name]
    found = check_routing(make(), skip=without)
    if "coupling" not in without:
        assert found["coupling"] == f"sums to one over the {make().softmax_over}"


def of_parameters(routing: Any, votes: Tensor, activations: Tensor, poses: Tensor) -> Routed:
    """What the pure function of a module's algorithm gives for its parameters."""
    n, u, a = routing.num_iterations, getattr(routing, "beta_u", None), getattr(routing, "beta_a", None)
    kept: dict[str, Any] = {"return_coupling": True}
    match routing:
        case SelfAttentionRouting():
            return torchcaps.self_attention_routing(votes, bias=routing.bias, **kept)
        case InvertedAttentionRouting():
            kept |= {"norm_weight": routing.norm_weight, "norm_bias": routing.norm_bias}
            routed = torchcaps.inverted_attention_routing(votes, n, **kept)
            return routed._replace(activations=(routed.poses @ routing.score + routing.score_bias).sigmoid())
        case SelfRouting():
            logits = torch.einsum("ijk,bik->bij", routing.weight, poses) + routing.bias
            return torchcaps.self_routing(votes, activations, logits, **kept)
        case EMRouting():
            kept |= {"cost_scale": routing.cost_scale or 100 * votes.shape[2] / votes.shape[1]}
            a, kept["final_lambda"] = a / routing.final_lambda, routing.final_lambda
            return torchcaps.em_routing(votes, activations, u, a, n, **kept)
        case EMCodeRouting():
            return torchcaps.em_routing_code(votes, activations, u, a, n, **kept)
        case VBRouting():
            capsules, logits, coupling = torchcaps.vb_routing(votes, activations, u, a, **kept)
            scale = 1 / (1 + routing.pose_norm.eps) ** 0.5  # of a normalisation that has seen nothing
            return Routed(scale * capsules, (scale * logits).sigmoid(), coupling)
        case _:  # without a function, and dynamic routing
            return routing(BuiltVotes(votes, poses), activations, **kept)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "em-code on a map"])  # which counts less mass
def test_over_any_transform_it_is_the_function_of_the_built_votes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for transform in TRANSFORMS:
        layer, capsules = layer_of(name, transform)
        leaves = leaves_of(layer, capsules)
        votes = layer.votes(capsules)[0].build()
        wanted = with_gradients(of_parameters(layer.routing, votes, capsules.activations, capsules.poses), leaves)
        for block in (2**40, 2 * votes[0].nbytes):  # all images at once, and two at a time
            monkeypatch.setattr("torchcaps.kernels.memory.MAX_PLAIN_BLOCK_MIB", block / 2**20)
            assert_same(with_gradients(layer.route(capsules, return_coupling=True), leaves), wanted, 1e-8, block)
        lengths = layer(capsules._replace(activations=Capsules(capsules.poses).scores()))
        assert_close(layer(capsules.poses).poses, lengths.poses, 1e-10)
        rounds, last = layer.routing.rounds(*layer.votes(capsules)), layer.route(capsules, return_coupling=True)
        if not name.startswith(("self", "inverted", "heinsen-vector")):
            assert len(rounds) == layer.routing.num_iterations
        if name != "vb":  # whose poses are normalised afterwards
            assert_close(rounds[-1].capsules, last.poses, 1e-10)
            assert (rounds[-1].activations is None) == (last.activations is None)
            assert last.activations is None or torch.allclose(rounds[-1].activations, last.activations)
        assert_close(rounds[-1].coupling, last.coupling, 1e-10)
        assert_finite(each for step in rounds for each in step)


@pytest.mark.parametrize("over", ["types", "types-and-positions"])
@pytest.mark.parametrize("name", ["em", "em-code", "vb"])
def test_blocks_give_what_one_block_gives(name: str, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions compete, a block is of whole images."""
    layer = ConvCapsules(2, 4, 3, 4, layer_kernel=2, compete_over=over, routing=ROUTINGS[name][0]()).double()
    poses, activations = torch.randn(4, 32, 4).double(), torch.rand(4, 32).double()
    capsules = Capsules(poses.requires_grad_(), activations.requires_grad_(), (2, 4, 4))
    found = []
    for block in (2**40, 1):
        monkeypatch.setattr("torchcaps.kernels.memory.MAX_PLAIN_BLOCK_MIB", block / 2**20)
        found.append(with_gradients(layer.route(capsules, return_coupling=True), leaves_of(layer, capsules)))
    assert_same(found[1], found[0], 1e-9)


@every_module
def test_forward_mode_and_second_derivatives(name: str) -> None:
    layer, capsules = layer_of(name)
    call = lambda *both: tuple(given(layer.route(Capsules(*both), return_coupling=True)))  # noqa: E731
    check_derivatives(call, capsules[:2], 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic, learned", "self-attention", "em", "vb"])
def test_called_in_every_way(name: str) -> None:
    layer, capsules = layer_of(name)
    call = lambda *both: tuple(given(layer.route(Capsules(*both), return_coupling=True)))  # noqa: E731
    check_ways(call, *capsules[:2], tol=1e-8, hollow=False)


@every_module
def test_a_window_as_large_as_the_map_is_a_dense_layer(name: str) -> None:
    for compete_over in ("types", "types-and-positions"):
        torch.manual_seed(0)
        routing = ROUTINGS[name][0]()
        assert not list(routing.parameters()), "their shapes are those of a layer"
        on_map = ConvCapsules(2, 4, 3, 4, compete_over=compete_over, routing=routing).double()  # type: ignore[arg-type]
        dense = DenseCapsules(18, 4, 3, 4, routing=ROUTINGS[name][0]()).double()
        dense.load_state_dict(on_map.state_dict())
        poses, activations = torch.randn(3, 18, 4).double(), torch.rand(3, 18).double()
        mine = on_map.route(Capsules(poses, activations, (2, 3, 3)), return_coupling=True)
        theirs = dense.route(Capsules(poses, activations), return_coupling=True)
        for got, wanted in zip(given(mine), given(theirs), strict=True):
            assert_close(got, wanted, 1e-10)
    if list(routing.parameters()):
        said = f"{type(routing).__name__}: this routing already belongs to a layer; make one for each"
        assert_raises(InputError, DenseCapsules, 3, 4, 2, 5, routing=routing, say=said)
    else:
        DenseCapsules(3, 4, 2, 5, routing=routing)


def test_vb_normalises_over_the_batch_and_takes_one_image_too() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=VBRouting())
    routed = layer(torch.randn(64, 6, 4))
    torch.testing.assert_close(routed.poses.mean((0, 2)), torch.zeros(3), atol=1e-5, rtol=0)
    assert layer.routing.pose_norm.running_mean.abs().max() > 0
    before = layer.routing.pose_norm.running_var.clone()
    assert layer(torch.randn(1, 6, 4)).activations.isfinite().all()
    assert torch.equal(layer.routing.pose_norm.running_var, before)


# ---- those without a function

OF_INPUTS = {"data_weight", "data_bias", "match_scale", "match_bias", "beta", "beta_use", "beta_ignore", "bias"}
"""Parameters that belong to input capsules, or that these share."""


def moved(in_capsules: int | None, routing: Any, transform: str) -> DenseCapsules:
    """A layer of 5, 4 and 6 components and outputs whose parameters are all moved from where they start."""
    layer = DenseCapsules(in_capsules, 5, 4, 6, transform=transform, routing=routing).double().eval()
    for parameter in layer.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("in_capsules", [7, None])
@pytest.mark.parametrize("routing", ["heinsen-matrix", "heinsen-vector"])
def test_heinsens_routings_are_those_of_his_equations(routing: str, in_capsules: int | None, iterations: int) -> None:
    """Also of a row that is padded, where the source of the latter divides by the padded length."""
    transform = "factored" if routing == "heinsen-vector" else "dense" if in_capsules else "shared"
    layer = moved(in_capsules, {"name": routing, "num_iterations": iterations}, transform)
    poses, activations = torch.randn(4, 7, 5).double(), torch.rand(4, 7).double()
    capsules = Capsules(poses.where(MASK[..., None], torch.nan), activations, mask=MASK)
    routed = layer.route(capsules, return_coupling=True)
    own = {name: each.detach() for name, each in layer.routing.named_parameters()}
    if "beta_weight" in own:
        own["beta"] = own["beta"] + poses.unsqueeze(1) @ own["beta_weight"]  # (B, 2, I, J)
    for row in (0, 1, 3):
        there, cut = MASK[row], {name: each.numpy() for name, each in own.items()}
        for name in own.keys() & OF_INPUTS:
            axis = 1 if name == "beta" else 0
            each = own[name][row] if own[name].ndim == 4 else own[name]
            cut[name] = each.expand(*each.shape[:axis], 7, *each.shape[axis + 1 :]).numpy().compress(there, axis)
        if routing == "heinsen-vector":
            factors = layer.transform.scale.numpy(force=True), layer.transform.weight.mT.numpy(force=True)
            wanted = oracle.heinsen_vector(poses[row, there].numpy(), cut, *factors, iterations)
        else:
            V = layer.transform.votes(*layer.transform(poses)).build()[row, there].numpy(force=True) + cut["bias"]
            given = V, activations[row, there].numpy(), cut["beta_use"], cut["beta_ignore"]
            wanted = oracle.heinsen_matrix(*given, iterations, 1e-5)
        for got, number in zip((routed.poses, routed.activations, routed.coupling[:, there]), wanted, strict=True):
            np.testing.assert_allclose(got[row].numpy(force=True), number, rtol=1e-9, atol=1e-12)
    assert not any(each[2].any() for each in routed), "a row without capsules is zero"


def test_hvc_is_the_normalised_sum_of_the_votes() -> None:
    layer, poses = moved(7, "hvc", "dense").train(), torch.randn(3, 7, 5).double()
    s = torch.einsum("ijdk,bik->bjd", layer.transform.matrices, poses)
    mean, variance = s.mean((0, 1)), s.var((0, 1), correction=0)  # as the source: over all axes but the last
    assert_close(layer(poses).poses, ((s - mean) / (variance + 1e-3).sqrt() + layer.routing.bias).relu(), 1e-9)
    assert_close(layer.routing.norm.running_mean, mean / 10, 1e-9)
    assert layer.eval()(poses).poses.max() > 1, "lengths are logits"


@pytest.mark.parametrize(("routing", "transform"), [("dynamic", "dense"), ("dynamic", "shared"), ("em", "dense")])
def test_groups_are_routed_by_themselves_and_summed(routing: str, transform: str) -> None:
    layer = moved(8, {"name": "grouped", "num_groups": 4, "group_routing": routing}, transform)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, :3] = False  # a group and a half
    capsules = Capsules(torch.randn(3, 8, 5).double(), torch.rand(3, 8).double(), mask=mask)
    routed = layer.route(capsules, return_coupling=True)
    votes, found = layer.transform.votes(*layer.transform(capsules.poses)).build(), []
    for n, group in enumerate(layer.routing.groups):
        part = slice(2 * n, 2 * n + 2)
        own = BuiltVotes(votes[:, part], capsules.poses[:, part]).masked(mask[:, part])
        found.append(group(own, capsules.activations[:, part], return_coupling=True))
    assert_close(routed.poses, sum(each.poses for each in found), 1e-9)
    assert_close(routed.coupling, torch.cat([each.coupling for each in found], 1), 1e-9)
    if routed.activations is not None:
        assert_close(routed.activations, sum(each.activations for each in found) / 4, 1e-9)


def test_groups_on_maps_and_sizes_that_do_not_fit() -> None:
    of_seven = ("sizes of one", "masks")  # whose numbers of capsules are no two equal groups
    check_routing(GroupedRouting(), in_capsules=8, skip=(*of_seven, "input order", "lengths"))
    for compete_over in ("types", "types-and-positions"):
        on_map = ConvCapsules(2, 4, 3, 4, layer_kernel=2, compete_over=compete_over, routing="grouped")
        assert_finite([on_map(Capsules(torch.rand(2, 24, 4), grid=(2, 3, 4))).poses])
    assert_raises(InputError, DenseCapsules, 7, 5, 4, 6, routing="grouped", say="num_groups must divide the number of")
    said = "GroupedRouting has weights for each input capsule"
    assert_raises(InputError, DenseCapsules, None, 5, 4, 6, routing="grouped", transform="shared", say=said)


# ---- one's own


def test_a_routing_of_ones_own_has_one_round_and_a_start_that_suits_its_competition() -> None:
    votes = BuiltVotes(torch.randn(2, 7, 4, 5).double())
    (only,) = Cosine().rounds(votes)
    assert_close(only.coupling, Cosine()(votes, return_coupling=True).coupling)
    assert_close(only.logits.softmax(2), only.coupling)
    assert_close(only.weighted_sum, votes.weighted_sum(only.coupling))
    assert_close(only.capsules, squash(only.weighted_sum))
    assert_close(only.agreement, votes.agreement(only.capsules))
    silent = Silent()
    assert_raises(InputError, silent.rounds, votes, say="Silent returns no coupling, so there is none to show")
    for axis, competitors in (("outputs", 10), ("inputs", 50), (None, 1)):
        silent.softmax_over = axis  # type: ignore[assignment]
        assert silent.balanced_std(LayerSize(50, 8, 10, 16)) == pytest.approx(competitors / 800**0.5)
