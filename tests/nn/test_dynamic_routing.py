"""Dynamic routing: the loop against its equations; the fused path and second derivatives against the loop."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from calling import check_derivatives
from nn import routing_oracle as oracle
from routing_cases import FEW, MANY, OPTIONS, WAYS, Leaves, detached, draw_cases, draw_leaves, reordered, small_cuts  # noqa: F401
from support import (
    assert_as_exact,
    assert_close,
    assert_differs,
    assert_finite,
    assert_raises,
    assert_same,
    second_derivatives,
    with_gradients,
)
from torchcaps import InputError, compute_votes, dynamic_routing, route, routing_rounds, squash
from torchcaps.nn import BuiltVotes, DenseVotes, DynamicRouting, Routed
from torchcaps.nn.votes import dense
from torchcaps.ops.memory import set_working_memory

AXES = ("outputs", "inputs")
FLAGS = (False, True)
_, I, J, D, K = FEW


def draw(dtype: torch.dtype = torch.float64) -> Leaves:
    """All that is learned or given, of few images."""
    return draw_leaves(FEW, dtype) | {"prior": torch.randn(I, J, dtype=dtype).requires_grad_()}


# ---- the fused path is the loop


@pytest.mark.slow
@pytest.mark.usefixtures("small_cuts")
def test_the_fused_path_and_its_derivatives_are_those_of_the_loop_for_every_option() -> None:
    for function in (dynamic_routing, route):
        given = {"votes", "poses", "weight", "backend", "prior", "mask", "rounds"}  # masks: test_masks.py
        given |= {"agreement", "squash"}  # the loop serves these: the test below, and test_maps.py for slabs
        assert set(inspect.signature(function).parameters) - given == {*OPTIONS, "eps"}, "add the option to OPTIONS"
    for size, order, mib, options in draw_cases():
        case = f"{size} {order} {mib} {options}"
        has_bias, coupling = options.pop("bias"), options.pop("return_coupling")
        leaves = draw_leaves(size, order=order)
        used = {name: leaves[name] for name in ("poses", "weight", "bias")[: 2 + has_bias]}
        held = {name: leaf.detach().clone() for name, leaf in used.items()}
        routing = DynamicRouting(**options, capsule_bias=has_bias, squash_eps=1e-3)
        routing.bias = used.get("bias")  # type: ignore[assignment]  # a parameter
        given = options | {"bias": routing.bias, "eps": 1e-3, "return_coupling": coupling}
        loop = dynamic_routing(compute_votes(used["poses"], used["weight"]), **given)
        wanted, wanted_twice = with_gradients(loop, used), second_derivatives(loop, used)
        set_working_memory(mib)
        of_function = route(used["poses"], used["weight"], **given, backend="recompute")
        of_module = routing(DenseVotes(used["poses"], used["weight"]), return_coupling=coupling)
        for found in (of_function, of_module):
            assert_same(with_gradients(found, used), wanted, 1e-10, case)
        assert_same(second_derivatives(of_function, used), wanted_twice, 1e-10, case)
        assert all(used[name].equal(held[name]) for name in used), "arguments are not written to"


@pytest.mark.parametrize("agreement", ["product", "cosine"])
@pytest.mark.parametrize("squashed", ["each", "last"])
def test_agreement_and_squash_follow_the_equations(agreement: Any, squashed: Any) -> None:
    """Of built votes and of votes that are not built, which the fused path must not take."""
    leaves = draw_leaves(FEW)
    poses, weight, bias = leaves.values()
    votes = compute_votes(poses, weight)
    logits = votes.new_zeros(votes.shape[:3])
    for iteration in (1, 2, 3):
        sums = (logits.softmax(2).unsqueeze(3) * votes).sum(1) + bias
        capsules = squash(sums, eps=1e-3) if squashed == "each" or iteration == 3 else sums
        products = (votes * capsules.unsqueeze(1)).sum(3)
        lengths = votes.norm(dim=3) * capsules.norm(dim=2).unsqueeze(1)
        logits = logits + (products / lengths if agreement == "cosine" else products)
    wanted = with_gradients({"poses": capsules}, leaves)
    routing = DynamicRouting(3, agreement=agreement, squash=squashed, squash_eps=1e-3)
    routing.bias = bias  # type: ignore[assignment]  # a parameter
    for given in (BuiltVotes(votes), DenseVotes(poses, weight)):
        found = with_gradients({"poses": routing(given).poses}, leaves)
        assert_same(found, wanted, 1e-10, type(given).__name__)


def test_second_derivatives_of_layers_that_share_their_weight() -> None:
    leaves = draw_leaves((2, 4, 4, 3, 3))  # poses of the second layer are made of the weight too

    def stacked(poses: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return route(route(poses, weight, bias=bias).poses, weight, bias=bias).poses

    check_derivatives(stacked, list(detached(leaves).values()), 1e-10)


def test_float32_is_as_exact_as_the_loop() -> None:
    for batch, way in itertools.product((3, 7), WAYS):
        shapes = {"poses": (batch, 200, 8), "weight": (200, 10, 16, 8)}
        leaves = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
        exact_leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        exact, plain, ours = (
            with_gradients(route(**each, **way, return_coupling=True, backend=backend), each)
            for each, backend in ((exact_leaves, "reference"), (leaves, "reference"), (leaves, "recompute"))
        )
        assert_as_exact(ours, plain, exact, rounding=0)


def test_with_a_prior_the_loop_serves() -> None:
    leaves = draw()
    poses, weight, bias, prior = leaves.values()
    for axis, leaky in itertools.product(AXES, FLAGS):
        options: dict[str, Any] = {"softmax_over": axis, "leaky": leaky}
        given = {"bias": bias, "prior": prior, "return_coupling": True} | options
        wanted = with_gradients(dynamic_routing(compute_votes(poses, weight), 2, **given), leaves)
        assert_same(with_gradients(route(poses, weight, 2, **given), leaves), wanted, 1e-10)
        routing = DynamicRouting(2, capsule_bias=True, learn_prior=True, **options)
        routing.bias, routing.prior = bias, prior  # type: ignore[assignment]  # parameters
        assert_same(with_gradients(routing(DenseVotes(poses, weight), return_coupling=True), leaves), wanted, 1e-10)
        assert wanted["d prior"].count_nonzero() == I * J
    said = 'route: backend="recompute" has no prior'
    assert_raises(InputError, route, poses, weight, prior=prior, backend="recompute", say=said)


LOOPS: dict[str, dict[str, Any]] = {
    "prior": {"prior": True},
    "mask over inputs": {"mask": True, "softmax_over": "inputs"},
    "cosine": {"agreement": "cosine"},
    "squash": {"squash": "last"},
}
"""Options that the kernel does not have."""


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("door", "loop"),
    [*(("layer", loop) for loop in LOOPS), ("function", "prior"), ("function", "mask over inputs")],
)
def test_options_without_a_kernel_build_votes_for_the_reference_only(
    door: str, loop: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(LOOPS[loop])
    built, sums = list[int](), list[int]()
    build, weighted_sum = DenseVotes.build, dense.weighted_sum
    monkeypatch.setattr(DenseVotes, "build", lambda votes: (built.append(1), build(votes))[1])
    monkeypatch.setattr(dense, "weighted_sum", lambda *tensors: (sums.append(1), weighted_sum(*tensors))[1])
    leaves = draw()
    poses, weight, _, prior = leaves.values()
    mask = torch.ones(poses.shape[:2], dtype=torch.bool) if options.pop("mask", False) else None
    if door == "function":
        prior_of = {"prior": prior} if options.pop("prior", False) else {}
        route(poses, weight, **prior_of, **options, mask=mask, backend=backend)
    else:
        routing = DynamicRouting(learn_prior=options.pop("prior", False), **options)
        if routing.learn_prior:
            routing.prior = torch.nn.Parameter(prior.detach())
        routing.backend = backend
        votes = DenseVotes(poses, weight)
        routing(votes if mask is None else votes.masked(mask))
    if loop == "cosine" and backend == "auto":  # the lengths of votes are those of built votes
        assert sums
    else:
        assert (bool(built), bool(sums)) == ((True, False) if backend == "reference" else (False, True))


# ---- the loop is the equations


def test_the_loop_is_the_equations_for_every_option() -> None:
    votes, bias, prior = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 4, 3), (4, 3), (5, 4)))
    for iterations, axis, leaky, has_bias, has_prior in itertools.product(range(5), AXES, FLAGS, FLAGS, FLAGS):
        given: dict[str, Any] = {"softmax_over": axis, "leaky": leaky, "eps": 1e-3}
        given |= {"bias": bias} if has_bias else {}
        given |= {"prior": prior} if has_prior else {}
        routed = dynamic_routing(votes, iterations, **given, return_coupling=True)
        arrays = (has_bias * bias).numpy(), (has_prior * prior).numpy()
        for image in range(2):
            poses, coupling = oracle.dynamic(votes[image].numpy(), iterations, axis, *arrays, leaky, 1e-3)
            assert_close(routed.poses[image], torch.from_numpy(poses), 1e-12)
            assert_close(routed.coupling[image], torch.from_numpy(coupling), 1e-12)
        rounds = routing_rounds(votes, iterations, **given)
        assert len(rounds) == iterations
        logits = has_prior * prior.expand(2, 5, 4)
        for number, each in enumerate(rounds, 1):
            wanted = dynamic_routing(votes, number, **given, return_coupling=True)
            assert_close(each.logits, logits, 1e-12)
            assert_close(each.capsules, wanted.poses, 1e-12)
            assert_close(each.coupling, wanted.coupling, 1e-12)
            assert_close(each.weighted_sum, (each.coupling[..., None] * votes).sum(1) + has_bias * bias, 1e-12)
            assert_close(each.agreement, (votes * each.capsules[:, None]).sum(-1), 1e-12)
            logits = each.logits + each.agreement
    last = DynamicRouting(3, leaky=True).rounds(BuiltVotes(votes))[-1]
    assert last.capsules.equal(dynamic_routing(votes, 3, leaky=True).poses)


def test_stop_gradient_is_a_constant_coupling() -> None:
    leaves = draw()
    votes = compute_votes(leaves["poses"], leaves["weight"])
    for axis in AXES:
        options: dict[str, Any] = {"softmax_over": axis, "bias": leaves["bias"], "prior": leaves["prior"]}
        full = dynamic_routing(votes, **options, return_coupling=True)
        stopped = with_gradients(dynamic_routing(votes, stop_gradient=True, **options), leaves)
        constant = Routed(squash((full.coupling.detach()[..., None] * votes).sum(1) + leaves["bias"]))
        assert_same(stopped, with_gradients(constant, leaves), 1e-10)
        assert_differs(stopped["d poses"], with_gradients(full._replace(coupling=None), leaves)["d poses"])
        assert stopped["d prior"].count_nonzero() == 0


@pytest.mark.parametrize("backend", ["reference", "recompute"])
def test_numbers_of_any_size_and_precision(backend: Any) -> None:
    leaves = {name: leaf for name, leaf in draw(torch.float32).items() if name in ("poses", "weight")}
    poses, weight = leaves.values()
    for way, leaky, scale in itertools.product(WAYS, FLAGS, (0.0, 1e4)):
        routed = route(scale * poses, weight, **way, leaky=leaky, backend=backend)
        assert_finite(with_gradients(routed, leaves).values())
    with torch.autocast("cpu", torch.bfloat16):
        inside = route(poses, weight, backend=backend)
    outside = route(poses, weight, backend=backend)
    assert_same(with_gradients(inside, leaves), with_gradients(outside, leaves), 1e-6)
    low = poses.detach().half()
    mixed = {"poses": low.clone().requires_grad_(), "weight": weight, "bias": torch.ones(J, D, dtype=torch.float64)}
    found = with_gradients(route(**mixed, backend=backend), {name: mixed[name] for name in leaves})
    assert [each.dtype for each in found.values()] == [torch.float32, torch.float16, torch.float32]
    assert_close(found["poses"], route(low.float(), weight, bias=torch.ones(J, D), backend=backend).poses, 1e-3)
    votes = compute_votes(low, weight.detach().half())
    assert torch.equal(dynamic_routing(votes).poses, dynamic_routing(votes.float()).poses.half())
    shapes = route(poses.detach().to("meta"), weight.detach().to("meta"), backend=backend)
    assert shapes.poses.shape == (FEW[0], J, D), "sizes are asked for on a device without numbers"


def test_options_and_tensors_that_do_not_fit() -> None:
    votes, poses, weight = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 3), torch.randn(5, 4, 2, 3)
    assert_raises(InputError, dynamic_routing, votes[:, :0], say="votes must be of at least one capsule")
    assert_raises(InputError, route, poses, weight[:, :0], say="weight must be of at least one capsule and component")
    for options in ({"stop_gradient": True}, {"num_iterations": 0}):
        assert_raises(InputError, DynamicRouting, learn_prior=True, **options, say="learn_prior needs stop_gradient=")
