"""The fused path in every cut, within its memory, and in all the ways that PyTorch can call it.

That its numbers are the loop's, for every option, is in tests/nn/test_dynamic_routing.py.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_close, assert_differs, assert_raises, assert_same, with_gradients
from torchcaps import compute_votes, route
from torchcaps.ops.fused import backward, forward, layer
from torchcaps.ops.memory import set_working_memory

SIZE = (7, 63, 7, 5, 3)  # B, I, J, D, K; too many images for the votes to be held
FEW = (3, *SIZE[1:])
WAYS: list[dict[str, Any]] = [
    {"softmax_over": axis, "stop_gradient": stop} for axis in ("outputs", "inputs") for stop in (False, True)
]

Leaves = dict[str, Tensor]


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small layers be cut along every axis."""
    monkeypatch.setattr(layer, "MAX_BATCH_SLICE", 2)
    monkeypatch.setattr(layer, "INPUT_MULTIPLE", 4)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The votes that were built."""
    votes: list[Tensor] = []
    make = forward.make_votes
    monkeypatch.setattr(forward, "make_votes", lambda layer: votes.append(make(layer)) or votes[-1])
    return votes


def make(size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.float64) -> Leaves:
    """Poses, weight and bias, all of which want gradients."""
    B, I, J, D, K = size
    shapes = {"poses": (B, I, K), "weight": (I, J, D, K), "bias": (J, D)}
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def detached(leaves: Leaves) -> Leaves:
    return {name: leaf.detach() for name, leaf in leaves.items()}


def routed(leaves: Leaves, backend: Any = "recompute", **options: Any) -> Leaves:
    """Capsules, coupling and gradients."""
    return with_gradients(route(**leaves, return_coupling=True, backend=backend, **options), leaves)


def as_the_loop(leaves: Leaves, **options: Any) -> None:
    assert_same(routed(leaves, **options), routed(leaves, "reference", **options), 1e-10, options)


# ---- how a call is cut


def blocks_of(poses: Tensor, weight: Tensor, over_inputs: bool) -> layer.Blocks:
    return layer.Layer(poses, weight, None, layer.Options(3, over_inputs, False, False, 1e-7)).blocks


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize(
    ("mib", "over_outputs", "over_inputs"),
    [(16, (1, 1, 4), (1, 1, 4)), (0.05, (1, 4, 4), (4, 1, 4)), (1e-6, (1, 63, 4), (7, 1, 4))],
)
def test_every_cut(mib: float, over_outputs: tuple[int, ...], over_inputs: tuple[int, ...]) -> None:
    set_working_memory(mib)
    leaves, (B, I, J, D, K) = make(), SIZE
    for pieces, over in ((over_outputs, False), (over_inputs, True)):
        cut = blocks_of(torch.empty(B, I, K).double(), torch.empty(I, J, D, K).double(), over)
        assert (len(cut.outputs), len(cut.inputs), len(cut.batches)) == pieces
    for way, r, leaky in itertools.product(WAYS, (0, 1, 2, 4), (False, True)):
        as_the_loop(leaves, num_iterations=r, leaky=leaky, **way)
    for size in ((1, 4, 3, 2, 2), (0, 5, 2, 3, 2), (3, 1, 1, 1, 1), (33, 40, 2, 3, 4)):
        for way in WAYS:
            as_the_loop(make(size), **way)


def test_shapes_alone_are_not_cut() -> None:
    """On the meta device there is nothing to keep in the caches, and a large layer has very many blocks."""
    poses, weight = torch.empty(2, 2**20, 8, device="meta"), torch.empty(2**20, 10, 16, 8, device="meta")
    for over_inputs in (True, False):
        cut = blocks_of(poses, weight, over_inputs)
        assert [len(pieces) for pieces in (cut.outputs, cut.inputs, cut.batches)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("size", "r", "mib", "wanted"),
    [
        ((1, *SIZE[1:]), 2, 16, True),
        ((6, *SIZE[1:]), 4, 16, True),
        ((7, *SIZE[1:]), 3, 16, False),  # too many images
        ((0, *SIZE[1:]), 3, 16, False),
        *((FEW, r, 16, False) for r in (0, 1)),  # a single sum
        (FEW, 3, 0.05, False),  # votes, logits and coupling: 3·7·63·(5 + 2) numbers of 8 bytes are 0.07 MiB
        (FEW, 3, 0.08, True),
        ((6, 3000, 20, 6, 1), 3, 64, False),  # 16.5 MiB: more memory is allowed, but the votes would leave the caches
    ],
)
def test_when_votes_are_held(size: tuple[int, ...], r: int, mib: float, wanted: bool, held: list[Tensor]) -> None:
    set_working_memory(mib)
    leaves = detached(make(size))
    route(**leaves, num_iterations=r, backend="recompute")
    assert bool(held) == wanted
    if wanted:
        assert_close(held[0].permute(1, 3, 0, 2), compute_votes(leaves["poses"], leaves["weight"]), 1e-12)


# ---- memory


class _Watched(layer.Buffers):
    """Buffers that remember all of their kind."""

    calls: list[_Watched]

    def __init__(self, like: Tensor) -> None:
        super().__init__(like)
        self.calls.append(self)

    @property
    def mib(self) -> float:
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values()) / layer.MIB


@pytest.mark.parametrize("size", [(64, 288, 10, 16, 8), (16, 256, 40, 16, 8), (200, 30, 5, 4, 4)])
def test_buffers_keep_within_the_working_memory(size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "Buffers", _Watched)
    for mib, axis in itertools.product((1.0, 4.0), ("outputs", "inputs")):
        monkeypatch.setattr(_Watched, "calls", [], raising=False)
        set_working_memory(mib)
        routed(make(size, torch.float32), softmax_over=axis)
        forward_call, backward_call = _Watched.calls
        assert 0 < forward_call.mib <= backward_call.mib <= mib


def test_what_is_saved_for_the_backward_pass() -> None:
    B, I, J, D, _ = size = (16, 40, 6, 16, 8)
    leaves = make(size)
    for stop in (False, True):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            route(**leaves, stop_gradient=stop, backend="recompute")
        ours = sum(t.numel() for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves.values()))
        assert ours == 3 * B * J * D + (B * I * J if stop else 0), "s¹ s² s³; with a constant coupling, that; no votes"
    with torch.no_grad():
        assert route(**leaves, backend="recompute").poses.grad_fn is None


@pytest.mark.parametrize("wanted", ["poses", "weight", "bias"])
def test_only_the_gradients_that_are_wanted_are_computed(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    kind = backward.Gradients
    monkeypatch.setattr(backward, "Gradients", lambda *grads: started.append(kind(*grads)) or started[-1])
    leaves = make()
    for way in WAYS:
        alone = {name: leaf.detach().requires_grad_(name == wanted) for name, leaf in leaves.items()}
        result = route(**alone, return_coupling=True, backend="recompute", **way)
        assert result.coupling.requires_grad != way["stop_gradient"]
        everything, name = routed(leaves, "reference", **way), f"d {wanted}"
        assert_close(with_gradients(result, {wanted: alone[wanted]})[name], everything[name], 1e-10)
        assert [name for name in started[-1]._fields if getattr(started[-1], name) is not None] == [wanted]


# ---- dtypes and orders of memory


@pytest.mark.parametrize("size", [SIZE, FEW])
def test_half_precision_rounds_arguments_and_results_only(size: tuple[int, ...]) -> None:
    for dtype, way in itertools.product((torch.bfloat16, torch.float16), WAYS):
        half = make(size, dtype)
        single = {name: leaf.detach().float().requires_grad_() for name, leaf in half.items()}
        results = [route(**leaves, return_coupling=True, backend="recompute", **way) for leaves in (half, single)]
        cotangent = torch.randn(results[0].poses.shape).to(dtype)
        for name in half:
            grads = [
                torch.autograd.grad(result.poses, leaves[name], cotangent.to(leaves[name].dtype), retain_graph=True)[0]
                for result, leaves in zip(results, (half, single), strict=True)
            ]
            assert grads[0].dtype == dtype
            assert grads[0].equal(grads[1].to(dtype)), name
        assert results[0].poses.equal(results[1].poses.to(dtype))
        assert results[0].coupling.equal(results[1].coupling.to(dtype))
    mixed = make(size, torch.float32)
    mixed["poses"] = mixed["poses"].detach().bfloat16().requires_grad_()
    mixed["bias"] = mixed["bias"].detach().double().requires_grad_()
    found = routed(mixed)
    assert found["poses"].dtype == found["coupling"].dtype == torch.float32
    assert {name: found[f"d {name}"].dtype for name in mixed} == {name: leaf.dtype for name, leaf in mixed.items()}


@pytest.mark.parametrize("size", [SIZE, FEW])
def test_any_strides(size: tuple[int, ...]) -> None:
    leaves = make(size)
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    for way in WAYS:
        wanted = routed(leaves, "reference", **way)
        for order in itertools.permutations(range(4)):
            strided = {}
            for name, leaf in leaves.items():
                axes = [n for n in order if n < leaf.ndim]
                turned = leaf.detach().permute(axes).contiguous().permute([axes.index(n) for n in range(leaf.ndim)])
                strided[name] = turned.requires_grad_()
            assert_same(routed(strided, **way), wanted, 1e-10)
        gaps = {name: torch.stack([leaf, leaf], -1).detach()[..., 0].requires_grad_() for name, leaf in leaves.items()}
        assert_same(routed(gaps, **way), wanted, 1e-10)
    assert all(leaves[name].equal(before[name]) for name in leaves), "arguments are not written to"


# ---- the ways to call it


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch.func.jvp uses it
def test_other_derivatives_say_what_to_do() -> None:
    leaves = make()
    poses = route(**leaves, backend="recompute").poses
    (grad,) = torch.autograd.grad(poses.sum(), leaves["poses"], create_graph=True)
    assert_raises(NotImplementedError, grad.sum().backward, say='backend="reference"')
    given = detached(leaves)
    ahead = (given.pop("poses"),)
    said = 'backend="reference" goes forward'
    function = lambda poses: route(poses, **given).poses  # noqa: E731
    assert_raises(NotImplementedError, torch.func.jvp, function, ahead, ahead, say=said)


def test_inference_mode_vmap_and_gradients_of_each_image() -> None:
    for size, way in itertools.product((SIZE, FEW), WAYS):
        leaves = make(size)
        given = detached(leaves)
        with torch.inference_mode():
            assert_close(route(**given).poses, route(**given, backend="reference").poses, 1e-10)
        poses = torch.stack([given["poses"], -2 * given["poses"]])
        weight = torch.stack([given["weight"], 3 * given["weight"]], 1)
        for inference in (False, True):
            with torch.inference_mode(inference):
                function = lambda u, W, way=way: route(u, W, return_coupling=True, **way)[::2]  # noqa: E731
                got = torch.vmap(function, (0, 1))(poses, weight)
                for n in range(2):
                    wanted = route(poses[n], weight[:, n], return_coupling=True, backend="reference", **way)
                    assert_close(got[0][n], wanted.poses, 1e-10)
                    assert_close(got[1][n], wanted.coupling, 1e-10)

        def loss(weight: Tensor, poses: Tensor, way: dict[str, Any] = way) -> Tensor:
            return route(poses[None], weight, **way).poses.square().sum()

        each = torch.vmap(torch.func.grad(loss), (None, 0))(given["weight"], given["poses"])
        assert_differs(each[0], each[1])
        for n, image in enumerate(given["poses"]):
            (wanted_grad,) = torch.autograd.grad(loss(leaves["weight"], image), leaves["weight"])
            assert_close(each[n], wanted_grad, 1e-10)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend: str) -> None:
    for way, coupling in itertools.product(WAYS, (False, True)):

        def network(leaves: Leaves, way: dict[str, Any] = way, coupling: bool = coupling) -> Any:
            doubled = leaves | {"poses": 2 * leaves["poses"]}
            result = route(**doubled, leaky=True, return_coupling=coupling, backend="recompute", **way)
            return result._replace(poses=2 * result.poses)

        leaves = make(FEW if coupling else SIZE)
        torch._dynamo.reset()
        got, wanted = torch.compile(network, backend=backend, fullgraph=True)(leaves), network(leaves)
        assert_same(with_gradients(got, leaves), with_gradients(wanted, leaves), 1e-12)


@pytest.mark.parametrize("r", [0, 2])
def test_the_registered_operation_is_what_it_says(r: int) -> None:
    leaves = make((2, 4, 3, 2, 2))
    for stop in (False, True):
        scalars = (r, False, stop, False, 1e-7, True)
        torch.library.opcheck(torch.ops.torchcaps.route.default, (*leaves.values(), *scalars))
        half = [leaf.detach().bfloat16() for leaf in leaves.values()]
        torch.library.opcheck(torch.ops.torchcaps.route.default, (*half, *scalars))


def test_exported_graphs_hold_torch_s_own_operations() -> None:
    class Layer(torch.nn.Module):
        def forward(self, poses: Tensor, weight: Tensor) -> Tensor:
            return route(poses, weight).poses

    leaves = detached(make())
    given = leaves["poses"], leaves["weight"]
    exported = torch.export.export(Layer(), given)
    assert "torchcaps" not in str(exported.graph)
    assert_close(exported.module()(*given), route(*given, backend="recompute").poses, 1e-10)


def test_threads_do_not_disturb_each_other() -> None:
    layers = [make((6 + n % 2, 40 + 8 * n, 4, 5, 3)) for n in range(4)]
    wanted = [routed(leaves, "reference") for leaves in layers]
    found: list[list[Leaves]] = [[] for _ in layers]
    start = threading.Barrier(len(layers))

    def work(n: int) -> None:
        start.wait()
        found[n].extend(routed(layers[n]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(len(layers)):
        assert len(found[n]) == 20
        for got in found[n]:
            assert_same(got, wanted[n], 1e-10)
