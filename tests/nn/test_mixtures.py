"""Mixtures of Gaussians: the ledger's fit against the same equations over PyTorch's own operations."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from routing_cases import random
from support import (
    COMPILES_KERNELS,
    assert_close,
    assert_finite,
    assert_raises,
    assert_same,
    plain_formulas,
    with_gradients,
)
from torchcaps.kernels.mixtures import fitting
from torchcaps.kernels.mixtures.makers import Maker
from torchcaps.nn import BuiltVotes, Capsules, ConvCapsules, DenseCapsules, LayerSize
from torchcaps.nn.routing import mixture
from torchcaps.nn.votes.base import Votes
from torchcaps.ops.memory import set_working_memory

ROUTINGS: dict[str, dict[str, Any]] = {
    "em": {"name": "em", "cost_scale": 1.0},
    "em, scaled by the number of inputs": {"name": "em", "final_lambda": 0.1},
    "em-code": {"name": "em-code", "on_map": True},
    "vb": {"name": "vb"},
    "heinsen-matrix": {"name": "heinsen-matrix"},
}
MAP, P = (2, 4, 3), 3
every_routing = pytest.mark.parametrize("name", ROUTINGS)


@pytest.fixture(autouse=True)
def _ledger_for_few_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ledger for the layers of these tests, although they have few votes."""
    monkeypatch.setattr(fitting, "MAX_PLAIN_MIB", 0.0)


def layers(routing: dict[str, Any]) -> dict[str, tuple[Any, Capsules]]:
    """Layers whose votes are of every kind, on maps and not, with what they route."""
    found: dict[str, Any] = {}
    for transform in ("dense", "matrix", "shared", "factored", "identity"):
        found[transform] = DenseCapsules(24, P * P, 4, P * P, transform=transform, routing=routing)
    for over in ("types", "types-and-positions"):
        options: Any = {"layer_kernel": 2, "layer_padding": 1, "compete_over": over, "transform": "matrix"}
        found[f"on a map, over {over}"] = ConvCapsules(2, P * P, 3, P * P, routing=routing, **options)
    for transform in ("dense", "matrix", "shared"):
        options = {"share_positions": True, "coordinates": "centres", "transform": transform}
        found[f"{transform}, shared by positions"] = DenseCapsules(MAP, P * P, 4, P * P, routing=routing, **options)
    capsules = Capsules(random(5, 24, P * P), random(5, 24, seed=1).sigmoid(), MAP)
    for layer in found.values():
        for n, parameter in enumerate(layer.double().eval().parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=n) * (1.0 if parameter.ndim > 3 else 0.3))
    return {name: (layer, capsules) for name, layer in found.items()}


def routed(layer: Any, capsules: Capsules, *, coupling: bool = True) -> dict[str, Tensor]:
    """What a layer gives for capsules, and all gradients."""
    given = capsules._replace(
        poses=capsules.poses.clone().requires_grad_(), activations=capsules.activations.clone().requires_grad_()
    )
    leaves = {"poses": given.poses, "activations": given.activations} | dict(layer.named_parameters())
    return with_gradients(layer.route(given, return_coupling=coupling), leaves)


def plainly(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> dict[str, Tensor]:
    """The same by the equations over PyTorch's own operations."""
    with monkeypatch.context() as patch:
        plain_formulas(patch)
        return routed(*given, **options)


WAYS = [
    ("all", 1, False, 16.0),
    ("all", 3, True, 1e-9),
    ("silent", 1, True, 16.0),
    ("silent", 3, False, 1e-9),
    ("mask", 1, False, 1e-9),
    ("mask", 3, True, 16.0),
]
"""Inputs, iterations, whether the coupling is wanted, and MiB of a block: every two values meet."""


@pytest.mark.slow
@every_routing
def test_the_ledger_gives_what_plain_operations_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of every kind, masks, competitions, blocks, with the coupling and without."""
    mask = random(5, 24, seed=2) > -0.5
    mask[3] = False
    for what, (layer, capsules) in layers(ROUTINGS[name]).items():
        tolerance = 1e-7 if "map" in what else 1e-9  # windows with a single capsule have the least variance
        silent = capsules.activations.clone()
        silent[1, ::3], silent[2] = 0, 0
        inputs = {
            "all": capsules,
            "silent": capsules._replace(activations=silent),
            "mask": capsules._replace(mask=mask),
        }
        for which, iterations, coupling, block in WAYS:
            layer.routing.num_iterations = iterations
            wanted = plainly(monkeypatch, layer, inputs[which], coupling=coupling)
            assert_finite(wanted.values())
            with monkeypatch.context() as patch:
                patch.setattr(fitting, "MAX_BLOCK_MIB", block)
                got = routed(layer, inputs[which], coupling=coupling)
            assert_same(got, wanted, tolerance, (what, which, iterations))


@every_routing
def test_float32_is_as_exact_as_plain_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes that cluster ever closer, of matrices near the identity; errors summed over eight layers."""
    for shift, spread in ((0.0, 1.0), (3.0, 0.01), (10.0, 0.001)):
        errors: dict[str, list[float]] = {}
        for seed in range(8):
            layer = DenseCapsules(40, 16, 5, 16, transform="matrix", routing=ROUTINGS[name]).double().eval()
            with torch.no_grad():
                layer.transform.matrices.copy_(torch.eye(4) + spread * random(40, 5, 4, 4, seed=seed))
            poses = shift + random(4, 1, 16, seed=seed) + spread * random(4, 40, 16, seed=seed + 100)
            capsules = Capsules(poses, random(4, 40, seed=seed + 200).sigmoid())
            exact = plainly(monkeypatch, layer, capsules)
            layer, capsules = layer.float(), Capsules(poses.float(), capsules.activations.float())
            for way, got in enumerate((routed(layer, capsules), plainly(monkeypatch, layer, capsules))):
                for key, wanted in exact.items():
                    error = (got[key].detach().double() - wanted).norm() / wanted.norm()
                    errors.setdefault(key, [0.0, 0.0])[way] += error.item()
        for key, (ours, theirs) in errors.items():
            assert ours <= 2 * theirs + 1e-6, (key, shift, ours, theirs)


@every_routing
def test_half_precision_and_autocast_are_float32_inside(name: str) -> None:
    layer, capsules = DenseCapsules(24, 9, 4, 9, transform="matrix", routing=ROUTINGS[name]).eval(), None
    capsules = Capsules(random(5, 24, 9).float(), random(5, 24, seed=1).sigmoid().float())
    wanted = layer.route(capsules, return_coupling=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.route(capsules, return_coupling=True)
        loss = got.poses.square().sum() + got.activations.sum()
    for ours, exact in zip(got, wanted, strict=True):
        assert_close(ours, exact, 1e-6)
    loss.backward()
    assert_finite(parameter.grad for parameter in layer.parameters())
    for dtype in (torch.bfloat16, torch.float16):
        rounded = Capsules(*(each.to(dtype) for each in capsules[:2]))
        half = layer.to(dtype).route(rounded)
        full = layer.float().route(Capsules(*(each.float() for each in rounded[:2])))
        assert half.poses.dtype == dtype
        assert_close(half.poses.float(), full.poses, 2e-2)


@every_routing
def test_second_derivatives_are_those_of_plain_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a tensor that stands for two arguments, and of one that is not differentiated."""
    layer, capsules = layers(ROUTINGS[name])["on a map, over types-and-positions"]
    poses, active = capsules.poses.clone().requires_grad_(), capsules.activations

    def second() -> dict[str, Tensor]:
        out = layer.route(capsules._replace(poses=poses, activations=active))
        leaves = [poses, layer.transform.weight]
        first = torch.autograd.grad(out.poses.square().sum() + out.activations.sum(), leaves, create_graph=True)
        found = torch.autograd.grad(sum((each**2).sum() for each in first), leaves)
        return dict(zip(("d poses", "d weight"), found, strict=True))

    ours = second()
    with monkeypatch.context() as patch:
        plain_formulas(patch)
        assert_same(ours, second(), 1e-8)


def test_a_backward_pass_may_be_repeated_and_blocks_may_change_between(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, capsules = layers(ROUTINGS["em"])["matrix"]
    poses = capsules.poses.clone().requires_grad_()
    monkeypatch.setattr(fitting, "MAX_BLOCK_MIB", 1e-9)
    out = layer.route(capsules._replace(poses=poses)).poses.square().sum()
    monkeypatch.setattr(fitting, "MAX_BLOCK_MIB", 100)
    first, again = (torch.autograd.grad(out, poses, retain_graph=True)[0] for _ in range(2))
    assert_close(first, again, 1e-12)
    with torch.no_grad():
        poses += 1
    assert_raises(RuntimeError, torch.autograd.grad, out, poses, say="modified by an inplace operation")


def test_activation_checkpoints_keep_no_graph_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, capsules = layers(ROUTINGS["vb"])["dense"]
    poses, seen = capsules.poses.clone().requires_grad_(), []
    forward = mixture.mixture.forward

    def noted(*call: Any) -> Any:
        seen.append(call[-1])
        return forward(*call)

    monkeypatch.setattr(mixture.mixture, "forward", noted)
    run = lambda poses: layer.route(capsules._replace(poses=poses)).poses.square().sum()  # noqa: E731
    (wanted,) = torch.autograd.grad(run(poses), poses)
    assert seen == [True]
    (got,) = torch.autograd.grad(checkpoint(run, poses, use_reentrant=False), poses)
    assert_close(got, wanted, 1e-12)
    assert seen[1:] == [False, False]


@every_routing
def test_few_votes_are_kept_and_the_fewest_take_plain_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, capsules = layers(ROUTINGS[name])["matrix"]
    made: list[slice] = []
    make, found = Maker.make, {}
    monkeypatch.setattr(Maker, "make", lambda maker, rows: made.append(rows) or make(maker, rows))
    mib = 5 * 24 * 4 * P * P * 8 / 2**20
    for (plain, kept), times in {(0.0, 0.0): 2, (0.0, mib): 1, (0.99 * mib, mib): 1, (mib, mib): 0}.items():
        monkeypatch.setattr(fitting, "MAX_PLAIN_MIB", plain)
        monkeypatch.setattr(fitting, "MAX_KEPT_MIB", kept)
        made.clear()
        found[plain, kept] = routed(layer, capsules)
        assert len(made) == times
    first, *others = found.values()
    for other in others:
        assert_same(other, first, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "matrix") for name in ROUTINGS),
        ("em", "on a map, over types-and-positions"),
        ("vb", "shared, shared by positions"),
    ],
)
def test_torch_compile_sees_one_operation(name: str, what: str) -> None:
    layer, capsules = layers(ROUTINGS[name])[what]
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(capsules).poses, layer(capsules).poses, 1e-10)
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("mixture" in node for node in nodes) == 1
    assert not any(part in node for node in nodes for part in ("log_softmax", "logsumexp", "digamma"))
    torch._dynamo.reset()
    compiled = torch.compile(layer.route, backend="aot_eager", fullgraph=True)
    wanted = routed(layer, capsules)
    given = capsules._replace(poses=capsules.poses.clone().requires_grad_())
    leaves = {"poses": given.poses} | dict(layer.named_parameters())
    got = with_gradients(compiled(given, return_coupling=True), leaves)
    assert_same(got, {key: each for key, each in wanted.items() if key != "d activations"}, 1e-9)


@COMPILES_KERNELS
def test_a_compiled_backward_pass_uses_the_fits_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[slice] = []
    fit_block = fitting._fit_block
    monkeypatch.setattr(
        fitting, "_fit_block", lambda *given, **named: fitted.append(given[2]) or fit_block(*given, **named)
    )
    layer, capsules = layers(ROUTINGS["em"])["matrix"]
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output = compiled(capsules)
    output.poses.sum().backward(retain_graph=True)
    assert len(fitted) == 1
    first = layer.transform.weight.grad.clone()
    layer.zero_grad()
    output.poses.sum().backward()
    assert len(fitted) == 2, "a second backward pass fits again"
    assert layer.transform.weight.grad.equal(first)
    blocks: list[Any] = []
    ledger = fitting.Ledger
    monkeypatch.setattr(fitting, "Ledger", lambda *call: blocks.append(weakref.ref(made := ledger(*call))) or made)
    output = compiled(capsules)
    assert blocks[0]() is not None
    del output
    gc.collect()
    assert blocks[0]() is None, "the result was dropped"


class Doubled(Votes):
    """Votes that can only be built."""

    def __init__(self, poses: Tensor, weight: Tensor) -> None:
        super().__init__(poses, LayerSize(len(weight), poses.shape[2], *weight.shape[1:3]))
        self.weight = weight

    def _hidden(self, mask: Tensor) -> Votes:
        return Doubled(self.poses.where(mask.unsqueeze(2), 0), self.weight)

    def weighted_sum(self, coupling: Tensor | None) -> Tensor:
        raise NotImplementedError

    def agreement(self, parents: Tensor) -> Tensor:
        raise NotImplementedError

    def build(self) -> Tensor:
        return 2 * torch.einsum("bik,ijdk->bijd", self.poses, self.weight)


@every_routing
def test_votes_that_can_only_be_built_are_routed_a_block_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DenseCapsules(7, 3, 4, 5, routing=ROUTINGS[name]).double().eval()
    leaves = {"poses": random(5, 7, 3), "weight": random(7, 4, 5, 3), "activations": random(5, 7).sigmoid()}
    leaves = {name: each.requires_grad_() for name, each in leaves.items()}
    found = []
    monkeypatch.setattr("torchcaps.kernels.memory.MAX_PLAIN_BLOCK_MIB", 2 * 7 * 4 * 5 * 8 / 2**20)
    for make in (Doubled, lambda *given: BuiltVotes(Doubled(*given).build(), given[0])):
        votes = make(leaves["poses"], leaves["weight"])
        found.append(with_gradients(layer.routing(votes, leaves["activations"], return_coupling=True), leaves))
    assert_same(*found, 1e-10)


def test_blocks_fit_the_working_memory_and_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    _, capsules = layers(ROUTINGS["em"])["matrix"]
    tensors = capsules.activations, *torch.zeros(2, 4), capsules.poses, random(24, 4, P, P), None

    def lengths(children: Tensor | None = None) -> list[int]:
        options = fitting.Options("em", 1, (1.0, 1.0, 0.0, 1.0), "matrix", 25)
        call = fitting.Call(mixture._fit, fitting.Tensors(*tensors, None, children), options)
        return [each.stop - each.start for each in call.blocks()]

    row = 24 * 4 * P * P * 8 / 2**20
    assert lengths() == [5]
    monkeypatch.setattr(fitting, "MAX_BLOCK_MIB", 2 * row)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert lengths() == [2, 2, 1]
    assert lengths(torch.zeros(5, 24, dtype=torch.long)) == [5], "rows that compete stay together"
    monkeypatch.setattr(fitting, "MAX_BLOCK_MIB", 100)
    set_working_memory(fitting.MAX_BUFFERS * 3 * row)
    assert lengths() == [3, 2]
