"""Dynamic routing: the loop against its equations, and the fused path against the loop, for every option."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn import routing_oracle as oracle
from support import assert_close, assert_differs, assert_finite, assert_raises, assert_same, with_gradients
from torchcaps import InputError, compute_votes, dynamic_routing, route, routing_rounds, squash
from torchcaps.errors import WrongType
from torchcaps.nn import BuiltVotes, DenseVotes, DynamicRouting, LayerSize, Routed, Shared
from torchcaps.nn.routing import dynamic

AXES = ("outputs", "inputs")
FLAGS = (False, True)
I, J, D, K = 63, 7, 5, 3
FEW, MANY = 3, 7
"""Images: the fused path holds the votes of so few, and never builds those of so many."""
EVERY: dict[str, tuple[Any, ...]] = {
    "num_iterations": (0, 1, 2, 3, 4),
    "softmax_over": AXES,
    "stop_gradient": FLAGS,
    "leaky": FLAGS,
    "bias": FLAGS,
    "return_coupling": FLAGS,
}
"""The values of each option; with a prior the loop serves, and eps is 1e-3."""

Leaves = dict[str, Tensor]


def every_combination() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*EVERY.values()):
        yield dict(zip(EVERY, values, strict=True))


def draw(batch: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Leaves:
    """All that is learned or given: leaves that want gradients."""
    shapes = {"poses": (batch, I, K), "weight": (I, J, D, K), "bias": (J, D), "prior": (I, J)}
    return {name: nn.Parameter(scale * torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}


# ---- the fused path is the loop


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the fused path is called with."""
    calls: list[object] = []
    whole = dynamic.route_recompute
    monkeypatch.setattr(dynamic, "route_recompute", lambda *given: calls.append(given) or whole(*given))
    return calls


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("batch", [FEW, MANY])
def test_the_fused_path_is_the_loop_for_every_option(
    dtype: torch.dtype, tol: float, batch: int, fused: list[object]
) -> None:
    given = {"votes", "poses", "weight", "backend", "prior"}
    for function in (dynamic_routing, route):
        assert set(inspect.signature(function).parameters) - given == {*EVERY, "eps"}, "add the option to EVERY"
    leaves = draw(batch, dtype)
    for options in every_combination():
        has_bias, coupling = options.pop("bias"), options.pop("return_coupling")
        used = {name: leaves[name] for name in ("poses", "weight", "bias")[: 2 + has_bias]}
        routing = DynamicRouting(**options, capsule_bias=has_bias, squash_eps=1e-3)
        routing.bias = used.get("bias")  # type: ignore[assignment]  # a parameter
        given = options | {"bias": routing.bias, "eps": 1e-3, "return_coupling": coupling}
        wanted = with_gradients(dynamic_routing(compute_votes(used["poses"], used["weight"]), **given), used)
        of_function = route(used["poses"], used["weight"], **given, backend="recompute")
        of_module = routing(DenseVotes(used["poses"], used["weight"]), return_coupling=coupling)
        assert_same(with_gradients(of_function, used), wanted, tol, given)
        assert_same(with_gradients(of_module, used), wanted, tol, given)
    assert len(fused) == 2 * math.prod(map(len, EVERY.values()))


def test_float32_is_as_exact_as_the_loop() -> None:
    """The fused path's error is at most twice the loop's."""
    for batch, axis, stop in itertools.product((FEW, MANY), AXES, FLAGS):
        shapes = {"poses": (batch, 200, 8), "weight": (200, 10, 16, 8)}
        leaves = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
        exact_leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        options: dict[str, Any] = {"softmax_over": axis, "stop_gradient": stop, "return_coupling": True}
        exact, plain, ours = (
            with_gradients(route(**each, **options, backend=backend), each)
            for each, backend in ((exact_leaves, "reference"), (leaves, "reference"), (leaves, "recompute"))
        )
        for name, wanted in exact.items():
            mine, theirs = ((found[name].double() - wanted).norm() for found in (ours, plain))
            assert mine <= 2 * theirs, f"{name}: {mine:.2e} off, the loop {theirs:.2e}"


def test_with_a_prior_the_loop_serves(fused: list[object]) -> None:
    leaves = draw(FEW)
    poses, weight, bias, prior = leaves.values()
    for axis, leaky in itertools.product(AXES, FLAGS):
        options: dict[str, Any] = {"softmax_over": axis, "leaky": leaky}
        given = {"bias": bias, "prior": prior, "return_coupling": True} | options
        wanted = with_gradients(dynamic_routing(compute_votes(poses, weight), 2, **given), leaves)
        for backend in ("auto", "reference"):
            assert_same(with_gradients(route(poses, weight, 2, **given, backend=backend), leaves), wanted, 1e-10)
        routing = DynamicRouting(2, capsule_bias=True, learn_prior=True, **options)
        routing.bias, routing.prior = bias, prior  # type: ignore[assignment]  # parameters
        assert_same(with_gradients(routing(DenseVotes(poses, weight), return_coupling=True), leaves), wanted, 1e-10)
        assert wanted["d prior"].count_nonzero() == I * J
    said = 'route: backend="recompute" has no prior; leave it out, or take backend="reference"'
    assert_raises(InputError, route, poses, weight, prior=prior, backend="recompute", say=said)
    routing = DynamicRouting()
    routing.backend = "reference"
    routing(DenseVotes(poses, weight))
    assert not fused


def test_other_votes_are_routed_by_the_loop() -> None:
    """Those of any other transform; built or not, the numbers are the same."""
    transform = Shared("normal", 0.3)
    transform.bind(LayerSize(I, K, J, D), 1.0)
    poses, options = draw(FEW)["poses"], {"capsule_bias": True, "learn_prior": True}
    votes = transform.double()(poses)
    for iterations, axis in itertools.product((1, 3), AXES):
        routing = DynamicRouting(iterations, softmax_over=axis, **options).double()  # type: ignore[arg-type]
        routing.bind(votes.size)
        for parameter in routing.double().parameters():
            nn.init.normal_(parameter)
        given: dict[str, Any] = {"softmax_over": axis, "bias": routing.bias, "prior": routing.prior}
        leaves = {"poses": poses} | dict(transform.named_parameters()) | dict(routing.named_parameters())
        wanted = dynamic_routing(votes.build(), iterations, **given, return_coupling=True)
        got = routing(votes, return_coupling=True)
        assert_same(with_gradients(got, leaves), with_gradients(wanted, leaves), 1e-9)


# ---- the loop is the equations


def test_by_hand() -> None:
    """Two inputs, two outputs, one component: squash(s) = s²/(1+s²) for s > 0. Votes û_1 = (2, 0), û_2 = (2, 2)."""
    votes = torch.tensor([[[[2.0], [0.0]], [[2.0], [2.0]]]], dtype=torch.float64)
    a, b, c = math.exp(1.6), math.exp(1.28), math.exp(8 / 13)
    cases: list[tuple[int, dict[str, Any], list[float], list[list[float]]]] = [
        # c = 1/2:  s_1 = ½·2 + ½·2 = 2, v_1 = 4/5;  s_2 = ½·0 + ½·2 = 1, v_2 = 1/2
        (1, {}, [0.8, 0.5], [[0.5, 0.5], [0.5, 0.5]]),
        # b_11 = b_21 = 2·0.8 = 1.6, b_12 = 0, b_22 = 2·0.5 = 1:  s_1 = 2·(c_11 + c_21) = 2.955349, s_2 = 2·c_22
        (2, {}, [0.897268, 0.334326], [[a / (a + 1), 1 / (a + 1)], [a / (a + math.e), math.e / (a + math.e)]]),
        # over inputs, c_i1 = 1/2 and c_22 = e/(1 + e) = 0.731059:  s_1 = 2, s_2 = 1.462117
        (2, {"softmax_over": "inputs"}, [0.8, 0.681304], [[0.5, 1 / (1 + math.e)], [0.5, math.e / (1 + math.e)]]),
        # c = 1/3 with the third competitor:  s_1 = 4/3, v_1 = (16/9)/(25/9);  s_2 = 2/3, v_2 = (4/9)/(13/9)
        (1, {"leaky": True}, [0.64, 4 / 13], [[1 / 3, 1 / 3]] * 2),
        # b_11 = b_21 = 2·0.64, b_12 = 0, b_22 = 2·4/13:  s_1 = 2·(c_11 + c_21) = 2.401040, s_2 = 2·c_22 = 0.574024
        (2, {"leaky": True}, [0.852180, 0.247839], [[b / (2 + b), 1 / (2 + b)], [b / (1 + b + c), c / (1 + b + c)]]),
        # s_1 = 2 + 1 = 3;  s_2 = 1 − 3 = −2
        (1, {"bias": torch.tensor([[1.0], [-3.0]])}, [0.9, -0.8], [[0.5, 0.5]] * 2),
        # c_11 = 3/4, c_12 = 1/4, input 2 even:  s_1 = ¾·2 + ½·2 = 2.5, s_2 = ½·2 = 1
        (1, {"prior": torch.tensor([[3.0, 1.0], [7, 7]]).log()}, [6.25 / 7.25, 0.5], [[0.75, 0.25], [0.5, 0.5]]),
    ]
    for iterations, options, poses, coupling in cases:
        routed = dynamic_routing(votes, iterations, eps=1e-24, return_coupling=True, **options)
        assert_close(routed.coupling[0], coupling, 1e-6)
        assert_close(routed.poses.flatten(), poses, 1e-6)


def test_the_loop_is_the_equations_for_every_option() -> None:
    votes, bias, prior = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 4, 3), (4, 3), (5, 4)))
    for iterations, axis, leaky, has_bias, has_prior in itertools.product(range(5), AXES, FLAGS, FLAGS, FLAGS):
        given: dict[str, Any] = {"bias": bias} if has_bias else {}
        given |= {"prior": prior} if has_prior else {}
        options: dict[str, Any] = {"softmax_over": axis, "leaky": leaky, "eps": 1e-3}
        routed = dynamic_routing(votes, iterations, **options, **given, return_coupling=True)
        rounds = routing_rounds(votes, iterations, **options, **given)
        arrays = (has_bias * bias).numpy(), (has_prior * prior).numpy()
        for image in range(2):
            poses, coupling = oracle.dynamic(votes[image].numpy(), iterations, axis, *arrays, leaky, 1e-3)
            assert_close(routed.poses[image], torch.from_numpy(poses), 1e-12)
            assert_close(routed.coupling[image], torch.from_numpy(coupling), 1e-12)
        assert len(rounds) == iterations
        logits = has_prior * prior.expand(2, 5, 4)
        for number, each in enumerate(rounds, 1):
            wanted = dynamic_routing(votes, number, **options, **given, return_coupling=True)
            assert_close(each.logits, logits, 1e-12)
            assert_close(each.capsules, wanted.poses, 1e-12)
            assert_close(each.coupling, wanted.coupling, 1e-12)
            assert_close(each.weighted_sum, (each.coupling[..., None] * votes).sum(1) + has_bias * bias, 1e-12)
            assert_close(each.agreement, (votes * each.capsules[:, None]).sum(-1), 1e-12)
            logits = each.logits + each.agreement
    last = DynamicRouting(3, leaky=True).rounds(BuiltVotes(votes))[-1]
    assert last.capsules.equal(dynamic_routing(votes, 3, leaky=True).poses)


@pytest.mark.parametrize("axis", AXES)
def test_derivatives_are_those_of_finite_differences(axis: Any) -> None:
    inputs = [torch.randn(shape).double().requires_grad_() for shape in ((2, 3, 2, 2), (2, 2), (3, 2))]
    for iterations, leaky in itertools.product((0, 1, 3), FLAGS):

        def run(votes: Tensor, bias: Tensor, prior: Tensor, n: int = iterations, leaky: bool = leaky) -> Any:
            options: dict[str, Any] = {"softmax_over": axis, "leaky": leaky, "return_coupling": n > 0}
            routed = dynamic_routing(votes, n, bias=bias, prior=prior, **options)
            return routed.poses if routed.coupling is None else (routed.poses, routed.coupling)

        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("axis", AXES)
def test_stop_gradient_is_a_constant_coupling(axis: Any) -> None:
    leaves = draw(FEW)
    votes = compute_votes(leaves["poses"], leaves["weight"])
    options: dict[str, Any] = {"softmax_over": axis, "bias": leaves["bias"], "prior": leaves["prior"]}
    full = dynamic_routing(votes, **options, return_coupling=True)
    stopped = dynamic_routing(votes, stop_gradient=True, **options)
    constant = Routed(squash((full.coupling.detach()[..., None] * votes).sum(1) + leaves["bias"]))
    assert_same(with_gradients(stopped, leaves), with_gradients(constant, leaves), 1e-10)
    assert_differs(
        with_gradients(stopped, leaves)["d poses"], with_gradients(full._replace(coupling=None), leaves)["d poses"]
    )
    assert with_gradients(stopped, leaves)["d prior"].count_nonzero() == 0


@pytest.mark.parametrize("backend", ["reference", "recompute"])
def test_numbers_of_any_size_and_precision(backend: Any) -> None:
    leaves = {name: leaf for name, leaf in draw(FEW, torch.float32).items() if name in ("poses", "weight")}
    poses, weight = leaves.values()
    for axis, stop, leaky, scale in itertools.product(AXES, FLAGS, FLAGS, (0.0, 1e4)):
        options: dict[str, Any] = {"softmax_over": axis, "stop_gradient": stop, "leaky": leaky, "backend": backend}
        assert_finite(with_gradients(route(scale * poses, weight, **options), leaves).values())
    single = [leaf.detach() for leaf in (poses, weight)]
    for low in (torch.bfloat16, torch.float16):
        for given in ([each.to(low) for each in single], [single[0].to(low), single[1]]):
            got = route(*given, return_coupling=True, backend=backend)
            wanted = route(*(each.float() for each in given), return_coupling=True, backend=backend)
            assert got.poses.dtype == got.coupling.dtype == torch.promote_types(given[0].dtype, given[1].dtype)
            tol = 16 * torch.finfo(low).eps if backend == "reference" else torch.finfo(low).eps
            assert_close(got.poses.float(), wanted.poses, tol)
            assert_close(got.coupling.float(), wanted.coupling, tol)
    with torch.autocast("cpu", torch.bfloat16):
        inside = route(poses, weight, backend=backend)
    outside = route(poses, weight, backend=backend)
    assert_same(with_gradients(inside, leaves), with_gradients(outside, leaves), 1e-6)
    votes = compute_votes(*(leaf.detach() for leaf in (poses, weight))).half()
    assert torch.equal(dynamic_routing(votes).poses, dynamic_routing(votes.float()).poses.half())
    assert route(poses[:0], weight, backend=backend).poses.shape == (0, J, D)
    shapes = route(poses.detach().to("meta"), weight.detach().to("meta"), backend=backend)
    assert shapes.poses.shape == (FEW, J, D), "sizes are asked for on a device without numbers"


# ---- what is refused


def test_options_and_tensors_that_do_not_fit() -> None:
    votes = torch.randn(2, 5, 4, 3)
    for function, given in ((dynamic_routing, [votes]), (routing_rounds, [votes]), (DynamicRouting, [])):
        said = f"{function.__name__}: "
        for number in (-1, 1001, 10**5000):
            assert_raises(InputError, function, *given, number, say=f"{said}num_iterations must be 0 to 1000, got")
        assert_raises(InputError, function, *given, softmax_over="j", say=f"{said}softmax_over must be one of outputs")
        assert_raises(WrongType, function, *given, leaky=1, say=f"{said}leaky must be True or False")
    for function in (dynamic_routing, routing_rounds):
        assert_raises(WrongType, function, votes.long(), say="votes must be a floating-point tensor")
        assert_raises(InputError, function, votes[0], say="votes must have shape (B, I, J, D), got (5, 4, 3)")
        assert_raises(InputError, function, votes[:, :0], say="votes must be of at least one capsule")
        assert_raises(InputError, function, votes, eps=0.0, say="eps must be 1e-24 to 1, got 0.0")
        for name in ("bias", "prior"):
            assert_raises(InputError, function, votes, **{name: torch.ones(3)}, say=f"{name} must have shape (")
    poses, weight = torch.randn(2, 5, 3), torch.randn(5, 4, 2, 3)
    assert_raises(InputError, route, poses, weight[:4], say="weight must have shape (5, J, D, 3), got (4, 4, 2, 3)")
    assert_raises(InputError, route, poses, weight[:, :0], say="weight must be of at least one capsule and component")
    assert_raises(InputError, route, poses, weight, bias=torch.ones(2, 4), say="bias must have shape (4, 2), got (2,")
    assert_raises(InputError, route, poses, weight, backend="fast", say="backend must be one of auto, reference")
    for options in ({"stop_gradient": True}, {"num_iterations": 0}):
        assert_raises(InputError, DynamicRouting, learn_prior=True, **options, say="learn_prior needs stop_gradient=")
