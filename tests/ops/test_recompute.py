"""Vote-free routing against the float64 reference, in every cut, and in all the ways PyTorch can call it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_close, assert_differs, assert_finite, assert_raises, holds
from torchcaps import route
from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.recompute import autograd, backward, layer, route_recompute
from torchcaps.ops.dynamic_routing.reference import compute_votes, route_votes
from torchcaps.ops.memory import get_working_memory, set_working_memory

SIZE = (7, 63, 7, 5, 3)  # B, I, J, D, K; too many images for the votes to be held

either_axis = pytest.mark.parametrize("axis", ["outputs", "inputs"])
either_gradient = pytest.mark.parametrize("stop", [False, True])


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small layers be cut along every axis."""
    monkeypatch.setattr(layer, "MAX_BATCH_SLICE", 2)
    monkeypatch.setattr(layer, "INPUT_MULTIPLE", 4)


Leaves = dict[str, Tensor]


def make(size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.float64, extras: bool = True) -> Leaves:
    """Poses, weight and, as an extra, the bias, all of which want gradients."""
    B, I, J, D, K = size
    shapes = {"poses": (B, I, K), "weight": (I, J, D, K)} | ({"bias": (J, D)} if extras else {})
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def vote_free(leaves: Leaves, r: int = 3, axis: str = "outputs", stop: bool = False, leaky: bool = False) -> Any:
    """Capsules and coupling of the code under test."""
    options = Options(r, axis == "inputs", stop, leaky, 1e-7)
    tensors = (leaves.get(name) for name in ("poses", "weight", "bias"))
    return route_recompute(*tensors, options, True)


def plain(leaves: Leaves, r: int = 3, axis: str = "outputs", stop: bool = False, leaky: bool = False) -> Any:
    """Capsules and coupling as the reference gives them."""
    votes = compute_votes(leaves["poses"], leaves["weight"])
    return route_votes(votes, r, axis, stop, leaves.get("bias"), None, leaky, 1e-7)


def with_gradients(function: Callable[..., Any], leaves: Leaves, *options: Any, coupling: bool = True) -> Leaves:
    """Outputs and gradients of a fixed random projection of them."""
    capsules, shares = function(leaves, *options)
    generator = torch.Generator().manual_seed(1)
    outputs = [capsules, shares] if coupling and shares.requires_grad else [capsules]
    cotangents = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype) for out in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    found = {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {"capsules": capsules, "coupling": shares} | found


def assert_same(got: Leaves, wanted: Leaves, tol: float = 1e-10) -> None:
    assert got.keys() == wanted.keys(), (got.keys(), wanted.keys())
    for name in got:
        assert got[name].shape == wanted[name].shape, name
        assert_close(got[name], wanted[name], tol)


def assert_as_exact(got: Leaves, other: Leaves, exact: Leaves) -> None:
    """Not more than twice as far from the exact values as the other way to compute them."""
    for name, wanted in exact.items():
        ours, theirs = ((x[name].double() - wanted).norm() for x in (got, other))
        assert ours <= 2 * theirs, f"{name}: {ours:.2e} off, the other way {theirs:.2e}"


def test_the_assertions_can_fail() -> None:
    exact = {"x": torch.ones(3, dtype=torch.float64)}
    off, far_off = {"x": exact["x"] + 1e-6}, {"x": exact["x"] + 3e-6}
    assert holds(assert_as_exact, off, off, exact)
    assert not holds(assert_as_exact, far_off, off, exact)
    assert holds(assert_same, exact, exact)
    assert not holds(assert_same, off, exact)
    assert not holds(assert_same, {}, exact)


# ---- the numbers


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("mib", [16, 0.05, 1e-6])
@pytest.mark.parametrize("r", [0, 1, 2, 3, 4])
@either_axis
@either_gradient
@pytest.mark.parametrize("leaky", [False, True])
def test_outputs_and_gradients_are_the_reference_s(mib: float, r: int, axis: str, stop: bool, leaky: bool) -> None:
    set_working_memory(mib)
    for extras, coupling in itertools.product((False, True), (False, True)):
        leaves = make(extras=extras)
        got = with_gradients(vote_free, leaves, r, axis, stop, leaky, coupling=coupling)
        assert_same(got, with_gradients(plain, leaves, r, axis, stop, leaky, coupling=coupling))


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize(
    ("mib", "axis", "pieces"),
    [
        (16, "outputs", (1, 1, 4)),
        (0.05, "outputs", (1, 4, 4)),
        (1e-6, "outputs", (1, 63, 4)),
        (16, "inputs", (1, 1, 4)),
        (0.05, "inputs", (4, 1, 4)),
        (1e-6, "inputs", (7, 1, 4)),
    ],
)
def test_the_cuts_above_are_what_they_are_meant_to_be(mib: float, axis: str, pieces: tuple[int, int, int]) -> None:
    set_working_memory(mib)
    B, I, J, D, K = SIZE
    poses, weight = torch.empty(B, K, I, dtype=torch.float64), torch.empty(J, D, K, I, dtype=torch.float64)
    cut = layer.Blocks.of(poses, weight, axis == "inputs")
    assert (len(cut.outputs), len(cut.inputs), len(cut.batches)) == pieces


@pytest.mark.parametrize("size", [(1, 4, 3, 2, 2), (0, 5, 2, 3, 2), (3, 1, 1, 1, 1), (33, 40, 2, 3, 4)])
@either_axis
def test_other_sizes(size: tuple[int, ...], axis: str) -> None:
    for mib in (16, 0.01):
        set_working_memory(mib)
        leaves = make(size)
        assert_same(with_gradients(vote_free, leaves, 3, axis), with_gradients(plain, leaves, 3, axis))


@pytest.mark.parametrize("r", [0, 1, 2, 3])
@either_axis
@pytest.mark.parametrize("leaky", [False, True])
def test_gradients_are_those_of_finite_differences(r: int, axis: str, leaky: bool) -> None:
    leaves = make((2, 4, 3, 2, 2))

    def function(*tensors: Tensor) -> Any:
        capsules, coupling = vote_free(dict(zip(leaves, tensors, strict=True)), r, axis, False, leaky)
        return (capsules, coupling) if coupling.requires_grad else capsules

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@either_axis
@either_gradient
def test_float32_is_as_exact_as_the_plain_formulation(axis: str, stop: bool) -> None:
    leaves = make((8, 200, 10, 16, 8), torch.float32)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    assert_as_exact(
        with_gradients(vote_free, leaves, 3, axis, stop),
        with_gradients(plain, leaves, 3, axis, stop),
        with_gradients(plain, exact, 3, axis, stop),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@either_axis
@either_gradient
def test_half_precision_rounds_arguments_and_results_only(dtype: torch.dtype, axis: str, stop: bool) -> None:
    half = make(dtype=dtype)
    single = {name: leaf.detach().float().requires_grad_() for name, leaf in half.items()}
    cotangent = torch.randn(SIZE[0], SIZE[2], SIZE[3]).to(dtype)
    found = []
    for leaves in (half, single):
        capsules, coupling = vote_free(leaves, 3, axis, stop)
        capsules.backward(cotangent.to(capsules.dtype))
        grads = {f"d {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        found.append({"capsules": capsules, "coupling": coupling} | grads)
    assert found[0].keys() == found[1].keys() >= {"d poses", "d weight", "d bias"}
    for name in found[0]:
        assert found[0][name].dtype == dtype
        assert found[0][name].equal(found[1][name].to(dtype)), name


@either_gradient
def test_gradients_have_the_dtypes_of_their_leaves(stop: bool) -> None:
    leaves = make(dtype=torch.float32)
    leaves["poses"] = leaves["poses"].detach().bfloat16().requires_grad_()
    leaves["bias"] = leaves["bias"].detach().double().requires_grad_()
    capsules, coupling = vote_free(leaves, 3, "outputs", stop)
    assert capsules.dtype == coupling.dtype == torch.float32
    capsules.sum().backward()
    for name in leaves:
        assert leaves[name].grad is not None
        assert leaves[name].grad.dtype == leaves[name].dtype


@either_axis
@either_gradient
def test_any_strides(axis: str, stop: bool) -> None:
    leaves = make()
    wanted = with_gradients(plain, leaves, 3, axis, stop)
    for order in itertools.permutations(range(4)):
        strided = {
            name: leaf.detach().permute([n for n in order if n < leaf.ndim]).contiguous()
            for name, leaf in leaves.items()
        }
        back = {
            name: [[n for n in order if n < leaf.ndim].index(n) for n in range(leaf.ndim)]
            for name, leaf in leaves.items()
        }
        strided = {name: strided[name].permute(back[name]).requires_grad_() for name in leaves}
        assert_same(with_gradients(vote_free, strided, 3, axis, stop), wanted)
    gaps = {name: torch.stack([leaf, leaf], -1).detach()[..., 0].requires_grad_() for name, leaf in leaves.items()}
    assert_same(with_gradients(vote_free, gaps, 3, axis, stop), wanted)


@either_axis
@either_gradient
def test_zero_poses_have_finite_gradients(axis: str, stop: bool) -> None:
    leaves = make(extras=False)
    leaves["poses"] = torch.zeros_like(leaves["poses"]).requires_grad_()
    assert_finite(with_gradients(vote_free, leaves, 3, axis, stop).values())


def test_inputs_are_not_written_to() -> None:
    leaves = make()
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    with_gradients(vote_free, leaves)
    for name in leaves:
        assert leaves[name].equal(before[name])


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
@pytest.mark.parametrize("mib", [1.0, 4.0])
@either_axis
def test_buffers_keep_within_the_working_memory(
    size: tuple[int, ...], mib: float, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Watched, "calls", [], raising=False)
    monkeypatch.setattr(layer, "Buffers", _Watched)
    set_working_memory(mib)
    with_gradients(vote_free, make(size, torch.float32, extras=False), 3, axis)
    forward, backward = _Watched.calls
    assert 0 < forward.mib <= backward.mib <= mib


def test_working_memory_must_be_positive() -> None:
    set_working_memory(0.5)
    assert get_working_memory() == 0.5
    for bad in (0, -1, float("nan"), float("inf")):
        assert_raises(ValueError, set_working_memory, bad, say="must be positive and finite")
    assert get_working_memory() == 0.5


@either_gradient
def test_no_votes_are_saved_for_the_backward_pass(stop: bool) -> None:
    B, I, J, D, _ = size = (16, 40, 6, 16, 8)
    leaves = make(size, extras=False)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        route_recompute(*leaves.values(), None, Options(3, False, stop, False, 1e-7), False)
    ours = sum(t.numel() for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves.values()))
    assert ours == 3 * B * J * D + (B * I * J if stop else 0)  # s¹ s² s³; with a constant coupling, that


def test_nothing_is_saved_without_gradients() -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    assert vote_free(leaves)[0].grad_fn is None
    with torch.no_grad():
        assert vote_free(make())[0].grad_fn is None


@pytest.mark.parametrize("wanted", ["poses", "weight", "bias"])
@either_axis
@either_gradient
def test_only_the_gradients_that_are_wanted_are_computed(
    wanted: str, axis: str, stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start = backward.Gradients.start
    monkeypatch.setattr(backward.Gradients, "start", lambda *args: started.append(start(*args)) or started[-1])
    leaves = make()
    grads = with_gradients(plain, leaves, 3, axis, stop)
    alone = {name: leaf.detach().requires_grad_(name == wanted) for name, leaf in leaves.items()}
    capsules, coupling = vote_free(alone, 3, axis, stop)
    assert coupling.requires_grad != stop
    assert_same(
        with_gradients(lambda _: (capsules, coupling), {wanted: alone[wanted]}),
        {name: grads[name] for name in ("capsules", "coupling", f"d {wanted}")},
    )
    assert [name for name in started[0]._fields if getattr(started[0], name) is not None] == [wanted]


# ---- the ways to call it


def test_second_derivatives_say_what_to_do() -> None:
    leaves = make()
    (grad,) = torch.autograd.grad(vote_free(leaves)[0].sum(), leaves["poses"], create_graph=True)
    assert_raises(NotImplementedError, grad.sum().backward, say='backend="reference"')


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch.func.jvp uses it
def test_forward_mode_says_what_to_do() -> None:
    leaves = {name: each.detach() for name, each in make().items()}
    poses = leaves.pop("poses")
    assert_raises(
        NotImplementedError,
        torch.func.jvp,
        lambda poses: vote_free(leaves | {"poses": poses})[0],
        (poses,),
        (torch.ones_like(poses),),
        say='backend="reference"',
    )


@either_axis
def test_autocast_does_not_reach_into_routing(axis: str) -> None:
    leaves = make(dtype=torch.float32)
    wanted = with_gradients(vote_free, leaves, 3, axis)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(with_gradients(vote_free, leaves, 3, axis), wanted, 1e-7)


def test_inference_mode() -> None:
    leaves = make()
    wanted = plain(leaves)
    with torch.inference_mode():
        for ours, theirs in zip(vote_free(leaves), wanted, strict=True):
            assert_close(ours, theirs, 1e-10)
        poses, weight, bias = leaves.values()
        turned = torch.vmap(lambda u: route(u, weight, 3, bias=bias))(torch.stack([poses, -poses]))
        assert_close(turned[0], wanted[0], 1e-10)
        assert_differs(turned[0], turned[1])


@either_axis
@either_gradient
@pytest.mark.parametrize("extras", [False, True])
def test_compiles_into_one_graph(axis: str, stop: bool, extras: bool) -> None:
    def routed(leaves: Leaves, doubled: int) -> Any:
        options = Options(3, axis == "inputs", stop, True, 1e-7)
        poses, weight, bias = doubled * leaves["poses"], leaves["weight"], leaves.get("bias")
        capsules, shares = route_recompute(poses, weight, bias, options, extras)
        return 2 * capsules, capsules.detach() if shares is None else shares

    leaves = make(extras=extras)
    compiled = torch.compile(routed, backend="aot_eager" if extras else "eager", fullgraph=True)
    assert_same(with_gradients(compiled, leaves, 2), with_gradients(routed, leaves, 2), 1e-12)


@pytest.mark.parametrize("r", [0, 2])
@either_gradient
def test_the_registered_operation_is_what_it_says(r: int, stop: bool) -> None:
    leaves = make((2, 4, 3, 2, 2))
    scalars = (r, False, stop, False, 1e-7, True)
    torch.library.opcheck(autograd._route_op, (*leaves.values(), *scalars))
    half = {name: leaf.detach().bfloat16() for name, leaf in leaves.items()}
    torch.library.opcheck(autograd._route_op, (*half.values(), *scalars))


def test_exported_graphs_hold_torch_s_own_operations() -> None:
    class Layer(torch.nn.Module):
        def forward(self, poses: Tensor, weight: Tensor) -> Tensor:
            return route(poses, weight)

    leaves = {name: leaf.detach() for name, leaf in make(extras=False).items()}
    exported = torch.export.export(Layer(), tuple(leaves.values()))
    assert "torchcaps" not in str(exported.graph)
    assert_close(exported.module()(*leaves.values()), vote_free(leaves)[0], 1e-10)


def test_vmap_over_poses_and_over_layers() -> None:
    leaves = {name: leaf.detach() for name, leaf in make(extras=False).items()}
    poses = torch.stack([leaves["poses"], -2 * leaves["poses"]])
    weight = torch.stack([leaves["weight"], 3 * leaves["weight"]], 1)
    got = torch.vmap(lambda u, W: route(u, W, return_coupling=True), (0, 1))(poses, weight)
    for n in range(2):
        for ours, theirs in zip(got, plain({"poses": poses[n], "weight": weight[:, n]}), strict=True):
            assert_close(ours[n], theirs, 1e-10)


@either_gradient
def test_torch_func_gives_gradients_of_each_image(stop: bool) -> None:
    leaves = make(extras=False)

    def loss(weight: Tensor, poses: Tensor) -> Tensor:
        return route(poses[None], weight, stop_gradient=stop).square().sum()

    poses, weight = leaves["poses"].detach(), leaves["weight"].detach()
    each = torch.vmap(torch.func.grad(loss), (None, 0))(weight, poses)
    assert_differs(each[0], each[1])
    for n in range(len(poses)):
        (wanted,) = torch.autograd.grad(loss(leaves["weight"], poses[n]), leaves["weight"])
        assert_close(each[n], wanted, 1e-10)


def test_threads_do_not_disturb_each_other() -> None:
    layers = [make((6, 40 + 8 * n, 4, 5, 3)) for n in range(4)]
    wanted = [with_gradients(plain, leaves) for leaves in layers]
    found: list[list[Leaves]] = [[] for _ in layers]
    start = threading.Barrier(len(layers))

    def work(n: int) -> None:
        start.wait()
        for _ in range(20):
            found[n].append(with_gradients(vote_free, layers[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(len(layers)):
        assert len(found[n]) == 20
        for got in found[n]:
            assert_same(got, wanted[n])


@pytest.mark.parametrize("over_inputs", [True, False])
def test_shapes_alone_are_not_cut(over_inputs: bool) -> None:
    """On the meta device there is nothing to keep in the caches, and a large layer has very many blocks."""
    poses, weight = torch.empty(2, 8, 2**20, device="meta"), torch.empty(10, 16, 8, 2**20, device="meta")
    cut = layer.Blocks.of(poses, weight, over_inputs)
    assert (len(list(cut)), cut.batches) == (1, [slice(0, 2)])
