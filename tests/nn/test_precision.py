"""Every routing over every transform, in every precision: within twice the error of the plain formulation."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as compiled_gradients

import torchcaps
from support import assert_as_exact, assert_same, pairwise
from torchcaps.nn import (
    BuiltVotes,
    CapsuleLayer,
    Capsules,
    ConvCapsules,
    ConvTypeCapsules,
    DenseCapsules,
    Routed,
    interest_scores,
    label_aware_attention,
)
from torchcaps.ops.precision import full_dtype
from torchcaps.parts import PARTS, build

B, I, J, D = 3, 6, 3, 4
HALF, SHORT, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDING = {DOUBLE: 1e-13, SINGLE: 2e-6}


class Mode(NamedTuple):
    """How a layer is called: dtypes of its poses and its parameters, and what runs inside bfloat16 autocast."""

    poses: torch.dtype
    weights: torch.dtype
    forward: bool = False
    backward: bool = False


MODES = {
    "bfloat16": Mode(HALF, HALF),
    "float16": Mode(SHORT, SHORT),
    "float64": Mode(DOUBLE, DOUBLE),
    "poses float64": Mode(DOUBLE, SINGLE),
    "weights float64": Mode(SINGLE, DOUBLE),
    "poses bfloat16": Mode(HALF, SINGLE),
    "weights bfloat16": Mode(SINGLE, HALF),
    "autocast forward": Mode(SINGLE, SINGLE, forward=True),
    "autocast": Mode(SINGLE, SINGLE, forward=True, backward=True),
    "autocast of bfloat16 poses": Mode(HALF, SINGLE, forward=True, backward=True),
}
TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dense": lambda t, u: torch.einsum("ijdk,bik->bijd", t.matrices.to(u), u),
    "shared": lambda t, u: torch.einsum("jdk,bik->bijd", t.weight.to(u), u),
    "common": lambda t, u: torch.einsum("dk,bik->bid", t.weight.to(u), u)[:, :, None].expand(-1, -1, J, -1),
    "factored": lambda t, u: torch.einsum("dk,jk,bik->bijd", t.weight.to(u), t.scale.to(u), u),
    "elementwise": lambda t, u: torch.einsum("ijd,bid->bijd", t.matrices.to(u), u),
    "matrix": lambda t, u: torch.einsum("ijrq,bipr->bijpq", t.matrices.to(u), u.unflatten(2, (2, 2))).flatten(3),
    "identity": lambda t, u: u[:, :, None].expand(-1, -1, J, -1),
}
"""Every transform, with its votes in plain PyTorch."""
ROUTINGS: dict[str, dict[str, Any]] = {name: {"name": name} for name in PARTS["routing"]} | {
    "dynamic, all options": {"name": "dynamic", "capsule_bias": True, "learn_prior": True, "leaky": True},
    "dynamic, over inputs": {"name": "dynamic", "softmax_over": "inputs", "stop_gradient": True},
    "b2i, queries": {"name": "b2i", "start_from": "queries"},
    "grouped em": {"name": "grouped", "group_routing": "em"},
}


def make_layer(transform: str, routing: str) -> DenseCapsules:
    torch.manual_seed(0)
    layer = DenseCapsules(I, 4, J, D, transform=transform, routing=ROUTINGS[routing]).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def as_of(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters and buffers of a module in a dtype; parameters want gradients."""
    state = {name: each.detach().to(dtype).requires_grad_() for name, each in module.named_parameters()}
    return state | {name: each.to(dtype) if each.is_floating_point() else each for name, each in module.named_buffers()}


def gradients(results: dict[str, Any], leaves: dict[str, Tensor], backward: Callable[[], Any]) -> dict[str, Tensor]:
    """Results and the gradients of all leaves, differentiated inside ``backward``."""
    found = {name: each for name, each in results.items() if each is not None}
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=DOUBLE)
    for each in found.values():
        weights = torch.randint(-4, 5, each.shape, generator=random)  # exact in every precision
        loss = loss + (each.double() * weights).sum()
    with backward():
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def autocast(on: bool) -> Callable[[], Any]:
    return (lambda: torch.autocast("cpu", torch.bfloat16)) if on else nullcontext


def rounded(
    mode: Mode, layer: nn.Module, dtype: torch.dtype | None, number: int = I
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and state of the layer, as a mode rounds them, and then in ``dtype``, or as they are."""
    random = torch.Generator().manual_seed(2)
    poses = torch.randn(B, number, 4, generator=random, dtype=DOUBLE)
    active = torch.rand(B, number, generator=random, dtype=DOUBLE)
    inputs = {"poses": poses.to(mode.poses), "active": active.to(mode.poses)}
    inputs = {name: each.to(dtype or each.dtype).requires_grad_() for name, each in inputs.items()}
    state = as_of(layer, mode.weights)
    if dtype is not None:
        state = {
            name: each.detach().to(dtype).requires_grad_(each.requires_grad) if each.is_floating_point() else each
            for name, each in state.items()
        }
    return inputs, state


class Plain(nn.Module):
    """The plain formulation: votes built by torch's einsum, and then routed."""

    def __init__(self, layer: DenseCapsules, votes: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.votes = layer, votes

    def forward(self, poses: Tensor, active: Tensor) -> Routed:
        votes = BuiltVotes(self.votes(self.layer.transform, poses), poses)
        return self.layer.routing(votes, active, return_coupling=True)


class Ours(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, active: Tensor) -> Routed:
        return self.layer.route(Capsules(poses, active), return_coupling=True)


def called(module: nn.Module, inputs: dict[str, Tensor], state: dict[str, Tensor], mode: Mode) -> dict[str, Tensor]:
    """Results of a layer, and gradients of its inputs and parameters."""
    state = {f"layer.{name}": each for name, each in state.items()}
    with autocast(mode.forward)():
        routed = torch.func.functional_call(module, state, (inputs["poses"], inputs["active"]))
    leaves = inputs | {name: each for name, each in state.items() if each.requires_grad}
    return gradients(routed._asdict(), leaves, autocast(mode.backward))


@functools.cache
def plainly(transform: str, routing: str, poses: torch.dtype, weights: torch.dtype, dtype: torch.dtype) -> Any:
    """The plain formulation, computed in ``dtype``, of numbers that are rounded to the other two."""
    layer, mode = make_layer(transform, routing), Mode(poses, weights)
    return called(Plain(layer, TRANSFORMS[transform]), *rounded(mode, layer, dtype), Mode(dtype, dtype))


@pytest.mark.parametrize(("transform", "routing", "mode"), pairwise(PARTS["transform"], ROUTINGS, MODES))
def test_a_layer_is_as_exact_as_the_plain_formulation(transform: str, routing: str, mode: str) -> None:
    how, layer = MODES[mode], make_layer(transform, routing)
    dtype = how.poses if transform == "identity" else torch.promote_types(how.poses, how.weights)
    given = transform, routing, how.poses, how.weights
    got = called(Ours(layer), *rounded(how, layer, None), how)
    assert {each.dtype for name, each in got.items() if not name.startswith("d ")} == {dtype}
    other = {name: each.to(got[name].dtype) for name, each in plainly(*given, full_dtype(dtype)).items()}
    assert_as_exact(got, other, plainly(*given, DOUBLE), ROUNDING[full_dtype(dtype)])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("transform", ["dense", "shared"])
def test_a_routing_is_exact_without_a_layer(transform: str, routing: str) -> None:
    """Called by itself inside autocast, for its result and for its rounds."""
    layer = make_layer(transform, routing).float()
    poses = torch.randn(B, I, 4)
    layer.eval()
    plain = layer.routing(*layer.votes(Capsules(poses)), return_coupling=True)
    rounds = layer.routing.rounds(*layer.votes(Capsules(poses)))[-1]
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.routing(*layer.votes(Capsules(poses)), return_coupling=True)
        seen = layer.routing.rounds(*layer.votes(Capsules(poses)))[-1]
    for one, other in zip((*got, *seen), (*plain, *rounds), strict=True):
        assert one is other is None or torch.equal(one, other)


MAPS: dict[str, Callable[[Any], CapsuleLayer]] = {
    "shared positions and coordinates": lambda routing: DenseCapsules(
        (2, 3, 2), 4, J, D, transform="matrix", routing=routing, share_positions=True, coordinates="centres"
    ),
    "map": lambda routing: ConvCapsules(2, 4, J, D, layer_kernel=2, routing=routing),
    "positions compete": lambda routing: ConvCapsules(
        2, 4, J, D, layer_kernel=2, layer_padding=1, compete_over="types-and-positions", routing=routing
    ),
    "batch normalisation": lambda routing: ConvCapsules(2, 4, J, D, layer_kernel=2, pose_norm=True, routing=routing),
    "types vote": lambda routing: ConvTypeCapsules(2, 4, J, D, layer_padding="same", routing=routing),
}


class OnMap(nn.Module):
    """Capsules of a layer on a map of 2×3×2 capsules."""

    def __init__(self, layer: CapsuleLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, active: Tensor) -> Routed:
        found = self.layer(Capsules(poses, active, (2, 3, 2)))
        return Routed(found.poses, found.activations)


@pytest.mark.parametrize(("kind", "routing", "mode"), pairwise(MAPS, PARTS["routing"], MODES))
def test_a_layer_on_a_map_is_as_exact_as_in_full_precision(kind: str, routing: str, mode: str) -> None:
    torch.manual_seed(0)
    how, layer = MODES[mode], MAPS[kind](routing).double()
    full = full_dtype(torch.promote_types(how.poses, how.weights))
    got = called(OnMap(layer), *rounded(how, layer, None, 12), how)
    other, exact = (
        called(OnMap(layer), *rounded(how, layer, dtype, 12), Mode(dtype, dtype)) for dtype in (full, DOUBLE)
    )
    assert_as_exact(got, {name: each.to(got[name].dtype) for name, each in other.items()}, exact, ROUNDING[full])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["slots", "slot-mixture"])
def test_a_layer_of_slots_is_as_exact_as_in_full_precision(kind: str, mode: str) -> None:
    torch.manual_seed(0)
    how, layer = MODES[mode], build("layer", kind, in_capsules=None, in_dim=4, out_capsules=J).double().eval()
    full = full_dtype(torch.promote_types(how.poses, how.weights))
    got = called(Ours(layer), *rounded(how, layer, None), how)
    other, exact = (called(Ours(layer), *rounded(how, layer, dtype), Mode(dtype, dtype)) for dtype in (full, DOUBLE))
    assert_as_exact(got, {name: each.to(got[name].dtype) for name, each in other.items()}, exact, ROUNDING[full])


# ---- functions


def draw_arguments() -> dict[str, Tensor]:
    """What the functions below take, in float64."""
    shapes = {"votes": (B, I, J, D), "prior": (B, I, J), "bias": (J, D), "u": (J,), "a": (J,), "scale": (D,)}
    shapes |= {"poses": (B, I, 4), "weight": (I, J, D, 4), "parents": (B, J, D), "links": (I, J), "items": (B, D)}
    random = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(shape, generator=random, dtype=DOUBLE) for name, shape in shapes.items()}
    return drawn | {"active": torch.rand(B, I, generator=random, dtype=DOUBLE)}


Given = dict[str, Tensor]
FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "dynamic_routing": (("votes", "prior", "bias"), lambda v, p, b: torchcaps.dynamic_routing(v, prior=p, bias=b)),
    "route": (("poses", "weight", "bias"), lambda u, w, b: torchcaps.route(u, w, bias=b)),
    "route by reference": (
        ("poses", "weight", "bias"),
        lambda u, w, b: torchcaps.route(u, w, bias=b, backend="reference"),
    ),
    "em_routing": (("votes", "active", "u", "a"), torchcaps.em_routing),
    "em_routing_code": (("votes", "active", "u", "a"), torchcaps.em_routing_code),
    "vb_routing": (("votes", "active", "u", "a"), torchcaps.vb_routing),
    "self_routing": (("votes", "active", "prior"), torchcaps.self_routing),
    "self_attention_routing": (("votes", "links"), lambda v, b: torchcaps.self_attention_routing(v, bias=b)),
    "inverted_attention_routing": (
        ("votes", "scale"),
        lambda v, s: torchcaps.inverted_attention_routing(v, norm_weight=s),
    ),
    "routing_rounds": (("votes", "prior"), lambda v, p: torchcaps.routing_rounds(v, prior=p)[-1]),
    "compute_votes": (("poses", "weight"), torchcaps.compute_votes),
    "weighted_sum": (("poses", "weight", "prior"), torchcaps.weighted_sum),
    "plain weighted_sum": (("poses", "weight"), torchcaps.weighted_sum),
    "agreement": (("poses", "weight", "parents"), torchcaps.agreement),
    "label_aware_attention": (("parents", "items"), lambda v, e: label_aware_attention(v, e, 2.0)),
    "interest_scores": (("parents", "items"), interest_scores),
}
"""Functions of tensors, and what they take."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_as_exact_as_in_full_precision(name: str, mode: str) -> None:
    """The first argument is of one dtype, the others are of another."""
    (names, function), how, found = FUNCTIONS[name], MODES[mode], []
    dtypes = {each: how.weights if n else how.poses for n, each in enumerate(names)}
    arguments = {each: draw_arguments()[each].to(dtype) for each, dtype in dtypes.items()}
    full = how.poses if names[0] == "votes" else functools.reduce(torch.promote_types, dtypes.values())
    full = full_dtype(full)  # the dtype of votes decides
    for dtype in (None, full, DOUBLE):
        leaves = {each: value.to(dtype or value.dtype).requires_grad_() for each, value in arguments.items()}
        with autocast(how.forward and dtype is None)():
            got = function(*leaves.values())
        results = got._asdict() if hasattr(got, "_asdict") else {"result": got}
        found.append(gradients(results, leaves, autocast(how.backward and dtype is None)))
    ours, other, exact = found
    other = {each: value.to(ours[each].dtype) for each, value in other.items()}
    assert_as_exact(ours, other, exact, ROUNDING[full])


def test_a_loss_after_the_layer_keeps_its_autocast() -> None:
    """Only the layer's own gradients are exact: what the caller computes is rounded as the caller wants it."""
    layer, before, after = make_layer("dense", "dynamic").float(), nn.Linear(4, 4), nn.Linear(D, 1)
    poses = torch.randn(B, I, 4)
    with torch.autocast("cpu", torch.bfloat16):
        features = before(poses)
        capsules = layer(features.float()).poses
        seen: list[bool] = []
        features.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        capsules.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        after(capsules).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True, True]
    assert before.weight.grad is not None


@pytest.mark.parametrize("routing", ["dynamic", "em", "heinsen-vector"])
def test_a_compiled_layer_is_exact_if_torch_leaves_autocast_out_of_gradients(routing: str) -> None:
    layer, found = make_layer("dense", routing).float(), []
    with compiled_gradients.patch(backward_pass_autocast="off"):
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            poses = torch.randn(B, I, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
            leaves = {"poses": poses} | dict(layer.named_parameters())
            with torch.autocast("cpu", torch.bfloat16):
                capsules = function(poses)
            found.append(gradients({"poses": capsules.poses, "active": capsules.activations}, leaves, nullcontext))
    assert_same(found[1], found[0], 5e-6)  # 2.5e-6 with torch 2.11
