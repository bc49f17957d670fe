"""Convolutions by products of planes and by columns against PyTorch's own, in all the ways PyTorch can call them."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import assert_close, assert_differs, assert_raises, holds
from torchcaps.errors import InputError, WrongType
from torchcaps.machine import MIB
from torchcaps.ops import convolution
from torchcaps.ops.convolution import Shape, choice, choose, columns, convolve, transform
from torchcaps.ops.convolution.points import INFINITY, Axis, Plan, best_plan, group_planes, is_real, points
from torchcaps.ops.memory import set_working_memory

WAYS = ("columns", "transform")
PRIMARY = Shape(256, 256, (20, 20), (9, 9), (2, 2))  # of MNIST's network

either_way = pytest.mark.parametrize("way", WAYS)

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """Sizes of a convolution, and what comes after it."""

    batch: int
    channels: int
    outputs: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    bias: bool = True
    relu: bool = False


USUAL = Case(3, 7, 5, (11, 10), (4, 3), (2, 1), (1, 2), relu=True)

CASES = [
    USUAL,
    Case(2, 3, 7, (20, 20), (9, 9), (2, 2)),  # the primary convolution, but narrow
    Case(2, 1, 7, (28, 28), (9, 9), relu=True),  # the one before
    Case(1, 1, 1, (1, 1), (1, 1)),
    Case(1, 1, 1, (9, 9), (9, 9), bias=False),  # one output
    Case(2, 3, 7, (30, 17), (3, 3), relu=True),  # several tiles, the last one cut
    Case(1, 7, 3, (27, 29), (5, 2), (1, 2)),
    Case(3, 1, 3, (8, 14), (1, 7), (3, 2), (0, 3)),  # rows between that nobody reads
    Case(3, 3, 1, (13, 12), (2, 2), (4, 3), bias=False),  # a kernel that is smaller than the stride
    Case(2, 7, 7, (15, 16), (6, 4), (4, 4), (2, 1), relu=True),
    Case(2, 3, 3, (10, 11), (8, 8), (3, 1)),
    Case(1, 7, 1, (26, 5), (3, 5), (1, 4), (1, 0), bias=False, relu=True),
]


def drawn(count: int) -> list[Case]:
    """Odd sizes, the same ones in every run."""
    rng, found = random.Random(0), []
    while len(found) < count:
        kernel, padding = ((rng.randint(0, 9), rng.randint(0, 9)) for _ in range(2))
        kernel, padding = tuple(max(1, k) for k in kernel), tuple(p // 4 for p in padding)
        size = tuple(max(1, k - 2 * p) + rng.randint(0, 16) for k, p in zip(kernel, padding, strict=True))
        widths = (rng.choice((1, 3, 7)) for _ in range(2))
        stride = rng.randint(1, 4), rng.randint(1, 4)
        found.append(Case(rng.randint(1, 3), *widths, size, kernel, stride, padding, *rng.choices((True, False), k=2)))
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the transform take all images at once, even where it does not pay."""
    monkeypatch.setattr(choice, "LEAST_GAIN", float("inf"))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way was taken, one name a call; nothing for PyTorch's own."""
    taken: list[str] = []
    for module, way in ((columns, "columns"), (transform, "transform")):
        _spy(monkeypatch, module, "forward", taken, way)
    return taken


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mark for each time that a kernel is transformed."""
    made: list[str] = []
    _spy(monkeypatch, transform, "kernel_planes", made, "made")
    return made


def _spy(monkeypatch: pytest.MonkeyPatch, module: object, name: str, heard: list[str], mark: str) -> None:
    function = getattr(module, name)

    def spied(*args: Any) -> Any:
        heard.append(mark)
        return function(*args)

    monkeypatch.setattr(module, name, spied)


def make(case: Case = USUAL, dtype: torch.dtype = torch.float32) -> Tensors:
    """Features, weight and, if the case has one, bias, all of which want gradients."""
    shapes = {
        "features": (case.batch, case.channels, *case.size),
        "weight": (case.outputs, case.channels, *case.kernel),
        "bias": (case.outputs,),
    }
    if not case.bias:
        del shapes["bias"]
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def fast(leaves: Tensors, case: Case, way: Any) -> Tensor:
    """The maps of the code under test."""
    features, weight, bias = (leaves.get(name) for name in ("features", "weight", "bias"))
    assert features is not None
    assert weight is not None
    return convolve(features, weight, bias, case.stride, case.padding, relu=case.relu, backend=way)


def plain(leaves: Tensors, case: Case, _: Any = None) -> Tensor:
    """The maps as PyTorch gives them."""
    maps = F.conv2d(leaves["features"], leaves["weight"], leaves.get("bias"), case.stride, case.padding)
    return F.relu(maps) if case.relu else maps


def with_gradients(maps: Tensor, leaves: Tensors, retain_graph: bool | None = None) -> Tensors:
    """Maps, and gradients of a fixed random projection of them."""
    cotangent = torch.randn(maps.shape, generator=torch.Generator().manual_seed(1)).to(maps.dtype)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(maps, list(wanted.values()), cotangent, retain_graph=retain_graph)
    return {"maps": maps.detach()} | {f"d {name}": grad for name, grad in zip(wanted, grads, strict=True)}


def double(leaves: Tensors) -> Tensors:
    return {name: leaf.detach().double().requires_grad_(leaf.requires_grad) for name, leaf in leaves.items()}


def assert_as_exact(got: Tensors, other: Tensors, exact: Tensors, rounding: float = 5e-7) -> None:
    """At most twice as far from the exact values as the other way, but for a rounding of the largest numbers."""
    assert got.keys() == other.keys() == exact.keys()
    for name, wanted in exact.items():
        assert got[name].shape == wanted.shape, name
        assert got[name].dtype == torch.float32
        ours, theirs = ((x[name].double() - wanted).norm() for x in (got, other))
        assert ours <= 2 * theirs + rounding * wanted.norm(), f"{name}: {ours:.2e} off, the other way {theirs:.2e}"


def assert_same(got: Tensors, wanted: Tensors, tol: float = 2e-6) -> None:
    """Equal up to ``tol``, relative to the largest."""
    assert got.keys() == wanted.keys(), (got.keys(), wanted.keys())
    for name in got:
        assert got[name].shape == wanted[name].shape, name
        scale = wanted[name].abs().max().clamp_min(1e-30)
        assert_close(got[name].double() / scale, wanted[name].double() / scale, tol)


def check(case: Case, way: str) -> None:
    """Maps and gradients are those of F.conv2d, as exactly."""
    leaves = make(case)
    exact = double(leaves)
    assert_as_exact(
        with_gradients(fast(leaves, case, way), leaves),
        with_gradients(plain(leaves, case), leaves),
        with_gradients(plain(exact, case), exact),
    )


def test_the_assertions_can_fail() -> None:
    exact = {"x": torch.ones(3, dtype=torch.float64)}
    right, off, far_off = ({"x": torch.ones(3) + by} for by in (0, 1e-5, 3e-5))
    assert holds(assert_as_exact, off, off, exact)
    assert not holds(assert_as_exact, far_off, off, exact)
    assert not holds(assert_as_exact, off, right, exact)
    assert not holds(assert_as_exact, exact, right, exact), "another dtype"
    assert holds(assert_same, right, exact)
    assert not holds(assert_same, off, exact)
    assert not holds(assert_same, {}, exact)


# ---- the points


@pytest.mark.parametrize("n", range(1, 25))
def test_points_are_as_many_numbers_as_coefficients(n: int) -> None:
    found = points(n)
    assert sum(1 if is_real(point) else 2 for point in found) == n
    both = [value for point in found for value in ([point] if is_real(point) else [point, np.conj(point)])]
    finite = [complex(value) for value in both if value != INFINITY]
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(finite, 2)), "a point stands twice"
    assert len(both) - len(finite) == 1


def correlate(tile: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The correlation by loops."""
    (m, n), (k, l) = (np.subtract(tile.shape, kernel.shape) + 1), kernel.shape
    return np.array([[(tile[y : y + k, x : x + l] * kernel).sum() for x in range(n)] for y in range(m)])


def by_planes(first: Axis, second: Axis, tile: np.ndarray, kernel: np.ndarray) -> tuple[np.ndarray, int]:
    """The correlation by products of planes, and how many there are."""
    maps, planes = np.zeros((first.outputs, second.outputs)), 0
    for group in group_planes(first, second):
        (features, kernels, outputs), (A, G, M) = group.matrices, (matrix[group.rows] for matrix in first.matrices)
        left, right = features @ (A @ tile).ravel(), kernels @ (G @ kernel).ravel()
        maps += M.T @ (outputs.T @ (left * right)).reshape(-1, second.outputs)
        planes += len(left)
    return maps, planes


@pytest.mark.parametrize("n", range(1, 17))
def test_products_of_values_at_points_are_a_correlation(n: int) -> None:
    rng = np.random.default_rng(n)
    for r in sorted({1, 2, (n + 1) // 2, n - 1, n} & set(range(1, n + 1))):
        first = Axis(n + 1 - r, r)
        assert first.size == n
        for second in (Axis(1, 1), Axis(2, 3), Axis(3, 5), Axis(6, 5), Axis(n + 1 - r, r)):
            tile, kernel = rng.normal(size=(n, second.size)), rng.normal(size=(r, second.taps))
            maps, _ = by_planes(first, second, tile, kernel)
            wanted = correlate(tile, kernel)
            assert maps.shape == wanted.shape
            assert np.abs(maps - wanted).max() < 1e-10 * max(1, np.abs(wanted).max())


def test_two_outputs_of_three_taps_by_hand() -> None:
    # values at ∞, 0, 1, -1; from them  c3 = v∞,  c0 = v0,  c1 = (v1 - v-1)/2 - v∞,  c2 = (v1 + v-1)/2 - v0
    axis = Axis(2, 3)
    assert axis.points == [INFINITY, 0, 1, -1]
    features, kernel, outputs = axis.matrices
    assert kernel.tolist() == [[0, 0, 1], [1, 0, 0], [1, 1, 1], [1, -1, 1]]
    assert outputs.tolist() == [[0, 1], [1, 0], [1, 1], [1, -1]]
    assert np.allclose(features, [[0, -1, 0, 1], [1, 0, -1, 0], [0, 0.5, 0.5, 0], [0, -0.5, 0.5, 0]])
    assert Plan(Shape(1, 1, (4, 4), (3, 3), (1, 1)), (2, 2)).planes == 16  # for 2 · 2 · 3 · 3 = 36 multiplications
    maps, planes = by_planes(axis, axis, np.arange(16.0).reshape(4, 4), np.ones((3, 3)))
    assert planes == 16
    assert np.allclose(maps, [[45, 54], [81, 90]])  # nine times the middle one of nine


def test_multiplications_of_mnist_s_primary_convolution() -> None:
    plan = best_plan(PRIMARY, 128)
    assert plan.tile == (6, 6)
    assert plan.tiles == (1, 1)
    assert plan.planes == 142
    assert plan.summed == 4 * 256
    products = sum(span.stop - span.start for each in plan.spans for span in each) / PRIMARY.channels
    assert products == 517  # for 6 · 6 · 9 · 9 = 2916, and for 142 · 4 = 568 if no phase were shorter


# ---- the numbers


@either_way
@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_and_gradients_are_those_of_conv2d(case: Case, way: str, ways: list[str], always: None) -> None:
    check(case, way)
    assert set(ways) == {way}


@either_way
@pytest.mark.parametrize("part", range(4))
def test_drawn_sizes(part: int, way: str, always: None) -> None:
    for case in drawn(60)[part::4]:
        check(case, way)


@pytest.mark.parametrize("block", [1, 5_000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_columns_a_few_rows_at_a_time(case: Case, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK", block)
    check(case, "columns")


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_image_by_image(case: Case, ways: list[str]) -> None:
    set_working_memory(1e-6)
    check(case, "transform")
    assert len(ways) == case.batch


@pytest.mark.parametrize("case", [USUAL, CASES[1], CASES[5]], ids=str)
@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (3, 1), (4, 6), (5, 5), (7, 2), (12, 12)])
def test_tiles_of_any_size(case: Case, tile: tuple[int, int], always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "best_plan", lambda shape, images: Plan(shape, tile))
    check(case, "transform")


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("way", "batch", "most"), [("transform", 16, 1.0), ("transform", 4, 4.0), ("columns", 4, 4.0)])
def test_errors_beside_those_of_conv2d(
    constant: bool, way: str, batch: int, most: float, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sum of squares; with the paper's tiles, those of maps and kernel are no larger than PyTorch's."""
    case = Case(batch, 64, 64, (20, 20), (9, 9), (2, 2))
    leaves = make(case)
    if constant:
        leaves = {name: torch.full_like(leaf, 0.1).requires_grad_() for name, leaf in leaves.items()}
    if most == 1:  # the tile of the paper's sizes
        assert best_plan(PRIMARY, 128).tile == (6, 6)
        monkeypatch.setattr(convolution, "best_plan", lambda shape, images: Plan(shape, (6, 6)))
    exact = double(leaves)
    got, other = (with_gradients(function(leaves, case, way), leaves) for function in (fast, plain))
    wanted = with_gradients(plain(exact, case), exact)
    for name in ("maps", "d features", "d weight"):
        ours, theirs = ((x[name].double() - wanted[name]).square().sum() for x in (got, other))
        bound = max(most, 2.0 if name == "d features" else 0.0) * theirs
        assert ours <= bound, f"{name}: {ours:.2e}, PyTorch's {theirs:.2e}"


# ---- memory of what comes in and goes out


def orders(tensor: Tensor) -> Iterator[Tensor]:
    """The same numbers in other orders of memory."""
    tensor = tensor.detach()
    yield tensor.contiguous(memory_format=torch.channels_last)
    yield tensor.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    yield tensor.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    yield torch.stack([tensor, -tensor], -1)[..., 0]
    yield F.pad(tensor, (1, 2, 1, 0), value=float("nan"))[:, :, 1:, 1:-2]


@either_way
def test_any_order_of_memory(way: str, always: None) -> None:
    leaves = make()
    cotangent = torch.randn(fast(leaves, USUAL, way).shape)

    def run(features: Tensor, weight: Tensor, cotangent: Tensor) -> Tensors:
        given = leaves | {"features": features.detach().requires_grad_(), "weight": weight.detach().requires_grad_()}
        maps = fast(given, USUAL, way)
        grads = torch.autograd.grad(maps, list(given.values()), cotangent)
        return {"maps": maps.detach()} | dict(zip(given, grads, strict=True))

    features, weight = leaves["features"], leaves["weight"]
    wanted = run(features, weight, cotangent)
    for other in orders(features):
        assert other.equal(features)
        assert_same(run(other, weight, cotangent), wanted, 1e-6)
    for other in orders(weight):
        assert_same(run(features, other, cotangent), wanted, 1e-6)
    for other in orders(cotangent):
        assert_same(run(features, weight, other), wanted, 1e-6)
    expanded = torch.tensor(0.5).expand_as(cotangent)  # as of a mean
    assert_same(run(features, weight, expanded), run(features, weight, expanded.contiguous()), 1e-6)


@pytest.mark.parametrize("learning", [True, False])
@either_way
def test_what_comes_in_stays_as_it_is(way: str, learning: bool, always: None) -> None:
    for case in (USUAL, USUAL._replace(kernel=(1, 1), padding=(0, 0), stride=(1, 1))):
        leaves = {name: leaf.detach().requires_grad_(learning) for name, leaf in make(case).items()}
        before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        maps = fast(leaves, case, way)
        if learning:
            cotangent = torch.randn(maps.shape)
            held = cotangent.clone()
            maps.backward(cotangent)
            assert cotangent.equal(held)
        for name in leaves:
            assert leaves[name].equal(before[name])
            assert maps.untyped_storage().data_ptr() != leaves[name].untyped_storage().data_ptr()


@either_way
def test_maps_may_be_changed_in_place(way: str, always: None) -> None:
    case = USUAL._replace(relu=False)
    leaves = make(case)
    got = with_gradients(fast(leaves, case, way).relu_(), leaves)
    assert_same(got, with_gradients(plain(leaves, USUAL), leaves))
    kept = fast(leaves, USUAL, way).mul_(2)  # the ReLU's gradient needs its maps, as PyTorch's own does
    assert_raises(RuntimeError, kept.sum().backward, say="modified by an inplace operation")


# ---- gradients


@pytest.mark.parametrize("wanted", [{"features"}, {"weight"}, {"bias"}, {"weight", "bias"}, {"features", "bias"}])
@either_way
def test_only_the_gradients_that_are_wanted(wanted: set[str], way: str, always: None) -> None:
    leaves = make()
    alone = {name: leaf.detach().requires_grad_(name in wanted) for name, leaf in leaves.items()}
    every = with_gradients(fast(leaves, USUAL, way), leaves)
    got = with_gradients(fast(alone, USUAL, way), alone)
    assert_same(got, {name: every[name] for name in ("maps", *(f"d {each}" for each in leaves if each in wanted))})


@either_way
def test_no_gradients_without_leaves_that_want_any(way: str, always: None) -> None:
    leaves = make()
    with torch.no_grad():
        maps = fast(leaves, USUAL, way)
    assert not maps.requires_grad
    assert not fast({name: leaf.detach() for name, leaf in leaves.items()}, USUAL, way).requires_grad
    with torch.inference_mode():
        assert_same({"maps": fast(leaves, USUAL, way)}, {"maps": maps}, 1e-6)
    assert_same({"maps": maps}, {"maps": plain(leaves, USUAL).detach()})


@pytest.mark.parametrize("case", [USUAL, USUAL._replace(bias=False), USUAL._replace(relu=False)], ids=str)
@either_way
def test_second_derivatives(case: Case, way: str, ways: list[str], always: None) -> None:
    def penalty(function: Callable[..., Tensor], leaves: Tensors) -> Tensors:
        maps = function(leaves, case, way)
        slope = torch.randn(maps.shape, generator=torch.Generator().manual_seed(1)).to(maps.dtype)  # where maps are 0
        loss = (maps * (maps + slope)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        assert isinstance(total, Tensor)
        return {name: grad.detach() for name, grad in zip(leaves, grads, strict=True)} | {
            f"d {name}": grad
            for name, grad in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True)
        }

    leaves = make(case)
    assert_same(penalty(fast, leaves), penalty(plain, double(leaves)), 5e-6)
    assert set(ways) == {way}


@either_way
def test_the_graph_can_be_kept_for_a_second_pass(way: str, kernels: list[str], always: None) -> None:
    leaves = make()
    maps = fast(leaves, USUAL, way)
    first = with_gradients(maps, leaves, retain_graph=True)
    assert len(kernels) == (way == "transform"), "the planes of the forward pass serve the first"
    second = with_gradients(maps, leaves)
    assert len(kernels) == 2 * (way == "transform"), "and are let go then"
    assert_same(second, first, 1e-7)
    assert_raises(RuntimeError, with_gradients, maps, leaves, say="backward through the graph a second time")


@either_way
def test_checkpointing(way: str, always: None) -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = make()
    maps = checkpoint(
        lambda features: fast(leaves | {"features": features}, USUAL, way), leaves["features"], use_reentrant=False
    )
    assert isinstance(maps, Tensor)
    assert_same(with_gradients(maps, leaves), with_gradients(fast(leaves, USUAL, way), leaves), 1e-7)


# ---- the ways to call it


@either_way
def test_autocast_and_other_dtypes_go_PyTorch_s_way(way: str, ways: list[str]) -> None:  # noqa: N802
    leaves = make()
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = fast(leaves, USUAL, way), plain(leaves, USUAL)
    assert got.dtype == torch.bfloat16
    assert got.equal(wanted)
    for dtype in (torch.float64, torch.bfloat16):
        leaves = make(dtype=dtype)
        got = fast(leaves, USUAL, way)
        assert got.dtype == dtype
        assert_same(with_gradients(got, leaves), with_gradients(plain(leaves, USUAL), leaves), 1e-12)
    assert ways == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # forward mode uses it
@either_way
def test_torch_func_and_forward_mode(way: str, ways: list[str]) -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    features, weight = leaves["features"], leaves["weight"]
    along = torch.randn_like(weight)

    def both(use: Callable[[Callable[..., Tensor]], Any]) -> None:
        got, wanted = use(fast), use(plain)
        for ours, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, wanted)), strict=True):
            assert_close(ours, theirs, 1e-5)

    def of(function: Callable[..., Tensor], key: str) -> Callable[[Tensor], Tensor]:
        return lambda value: function(leaves | {key: value}, USUAL, way)

    both(lambda f: torch.vmap(of(f, "features"))(torch.stack([features, -features])))
    both(lambda f: torch.vmap(of(f, "weight"))(torch.stack([weight, along])))
    both(lambda f: torch.func.grad(lambda w: of(f, "weight")(w).square().sum())(weight))
    both(lambda f: torch.func.jacrev(lambda b: of(f, "bias")(b).sum((0, 2, 3)))(leaves["bias"]))
    both(lambda f: torch.func.jvp(of(f, "weight"), (weight,), (along,)))

    def dual(function: Callable[..., Tensor]) -> Any:
        with torch.autograd.forward_ad.dual_level():
            maps = of(function, "weight")(torch.autograd.forward_ad.make_dual(weight, along))
            return tuple(torch.autograd.forward_ad.unpack_dual(maps))

    both(dual)
    assert ways == []


class Small(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(64, 1, 9, 9)), nn.Parameter(torch.randn(64, 64, 9, 9) / 72)

    def forward(self, images: Tensor) -> Tensor:
        maps = convolve(images, self.first, relu=True, backend="columns")
        return convolve(maps, self.second, stride=2, backend="transform")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_compiled_exported_and_traced_networks_hold_conv2d(ways: list[str], always: None) -> None:
    model, images = Small(), torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        wanted = model(images)
        assert ways == ["columns", "transform"]
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        exported = torch.export.export(model, (images,))
        traced = torch.jit.trace(model, (images,), check_trace=False)
        for other in (compiled, exported.module(), traced):
            assert_close(other(images), wanted, 1e-5)
    assert len(ways) == 2
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if "relu" not in target] == ["aten.conv2d.default"] * 2
    assert str(traced.inlined_graph).count("aten::_convolution") == 2
    assert "from_numpy" not in str(traced.inlined_graph)


def test_make_fx_and_fake_tensors(ways: list[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = {name: leaf.detach() for name, leaf in make().items()}
    graph = make_fx(lambda features: fast(leaves | {"features": features}, USUAL, "transform"))(leaves["features"])
    assert "convolution" in str(graph.graph)
    assert_close(graph(leaves["features"]), plain(leaves, USUAL), 1e-5)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(leaf) for name, leaf in leaves.items()}
        shape = fast(fakes, USUAL, "transform").shape
    assert shape == plain(leaves, USUAL).shape
    assert ways == []


class Marked(Tensor):
    """A subclass of tensors."""


def test_meta_tensors_subclasses_and_layouts(ways: list[str]) -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    wanted = plain(leaves, USUAL)
    meta = fast({name: leaf.to("meta") for name, leaf in leaves.items()}, USUAL, "transform")
    assert meta.device.type == "meta"
    assert meta.shape == wanted.shape
    marked = fast(leaves | {"features": leaves["features"].as_subclass(Marked)}, USUAL, "transform")
    assert type(marked) is Marked
    assert_close(marked.as_subclass(Tensor), wanted, 1e-5)
    if torch.backends.mkldnn.is_available():
        blocked = fast(leaves | {"features": leaves["features"].to_mkldnn()}, USUAL._replace(relu=False), "transform")
        assert_close(blocked.to_dense(), plain(leaves, USUAL._replace(relu=False)), 1e-5)
    assert ways == []


@either_way
def test_threads_do_not_disturb_each_other(way: str, always: None) -> None:
    cases = [USUAL._replace(batch=1 + n, channels=30 + 8 * n, outputs=64, size=(20, 20)) for n in range(3)]
    layers = [make(case) for case in cases]
    wanted = [with_gradients(plain(leaves, case), leaves) for leaves, case in zip(layers, cases, strict=True)]
    found: list[list[Tensors]] = [[] for _ in layers]
    start = threading.Barrier(len(layers))

    def work(n: int) -> None:
        start.wait()
        for _ in range(4):
            found[n].append(with_gradients(fast(layers[n], cases[n], way), layers[n]))
            with torch.no_grad():
                found[n].append(found[n][-1] | {"maps": fast(layers[n], cases[n], way)})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(len(layers)):
        assert len(found[n]) == 8
        for got in found[n]:
            assert_same(got, wanted[n], 5e-6)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads; none of them computes
def test_a_forked_process_computes_the_right_thing() -> None:
    case = Case(4, 64, 64, (20, 20), (9, 9), (2, 2), relu=True)
    leaves = make(case)
    wanted = with_gradients(fast(leaves, case, "transform"), leaves)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        torch.set_num_threads(1)
        got = with_gradients(fast(leaves, case, "transform"), leaves)
        there.send({name: each.detach().numpy().tolist() for name, each in got.items()})

    process = context.Process(target=work)
    process.start()
    try:
        assert here.poll(60), "no answer"
        got = {name: torch.tensor(each) for name, each in here.recv().items()}
    finally:
        process.kill()
        process.join()
    assert_same(got, wanted, 1e-6)


# ---- working memory


LARGE = Case(5, 32, 32, (20, 20), (9, 9), (2, 2), relu=True)


def room_for(images: float, case: Case = LARGE) -> float:
    """MiB for the work buffers of so many images."""
    plan = best_plan(Shape(case.channels, case.outputs, case.size, case.kernel, case.stride), case.batch)
    return (plan.numbers_of_kernel + images * plan.numbers_of_image) * 4 / MIB


@pytest.mark.parametrize(("room", "pieces"), [(5.0, 1), (4.9, 2), (2.1, 3), (1.5, 5)])
def test_little_working_memory_makes_pieces(room: float, pieces: int, ways: list[str], always: None) -> None:
    leaves = make(LARGE)
    wanted = with_gradients(fast(leaves, LARGE, "transform"), leaves)
    ways.clear()
    set_working_memory(room_for(room) + 1e-9)
    assert_same(with_gradients(fast(leaves, LARGE, "transform"), leaves), wanted)
    assert ways == ["transform"] * pieces
    with torch.no_grad():
        assert_same({"maps": fast(leaves, LARGE, "transform")}, {"maps": wanted["maps"]})
    assert ways == ["transform"] * 2 * pieces


@pytest.mark.parametrize(("before", "after"), [(5.1, 2.1), (2.1, 5.1)])
def test_the_working_memory_may_change_before_the_backward_pass(before: float, after: float, always: None) -> None:
    leaves = make(LARGE)
    wanted = with_gradients(fast(leaves, LARGE, "transform"), leaves)
    set_working_memory(room_for(before))
    maps = fast(leaves, LARGE, "transform")
    set_working_memory(room_for(after))
    assert_same(with_gradients(maps, leaves), wanted)


def test_too_little_working_memory_leaves_it_to_pytorch(ways: list[str]) -> None:
    case = Case(4, 64, 64, (20, 20), (9, 9), (2, 2))
    shape = Shape(64, 64, *case[3:6])
    leaves = make(case)
    assert choose(shape, 512, True) == "transform"
    set_working_memory(0.1)
    assert choose(shape, 512, True) == "plain"
    assert_same(with_gradients(fast(leaves, case, "auto"), leaves), with_gradients(plain(leaves, case), leaves), 1e-7)
    assert ways == []


# ---- planes kept where nothing is learned


@pytest.fixture
def kept(always: None) -> Iterator[None]:
    convolution._kept.clear()
    yield
    convolution._kept.clear()


@pytest.mark.usefixtures("kept")
def test_the_kernel_s_planes_serve_the_next_call(kernels: list[str]) -> None:
    leaves = make()
    with torch.no_grad():
        first, second = (fast(leaves, USUAL, "transform") for _ in range(2))
        assert len(kernels) == 1
        assert first.equal(second)
        wider = leaves | {"features": torch.randn(2, 7, 30, 31)}  # in tiles of another size
        assert_same({"maps": fast(wider, USUAL, "transform")}, {"maps": plain(wider, USUAL)})
        assert len(kernels) == 2
        other = make()
        assert_same({"maps": fast(other, USUAL, "transform")}, {"maps": plain(other, USUAL)})
        assert len(kernels) == 3


@pytest.mark.usefixtures("kept")
def test_a_changed_kernel_is_noticed() -> None:
    layer = nn.Conv2d(7, 5, (4, 3))
    features = torch.randn(3, 7, 11, 10)
    saved = copy.deepcopy(layer.state_dict())

    def double_in_place() -> None:
        layer.weight.mul_(2)

    def double_data() -> None:
        layer.weight.data.mul_(2)

    def one_number() -> None:
        layer.weight.data[3, 2, 1, 0] += 1

    def replace_data() -> None:
        layer.weight.data = torch.randn_like(layer.weight)

    with torch.no_grad():
        before = convolve(features, layer.weight, backend="transform")
        for change in (double_in_place, double_data, one_number, replace_data, lambda: layer.load_state_dict(saved)):
            change()
            maps = convolve(features, layer.weight, backend="transform")
            assert_same({"maps": maps}, {"maps": F.conv2d(features, layer.weight)})
            assert change == double_in_place or not maps.equal(before)
            before = maps


@pytest.mark.usefixtures("kept")
def test_planes_go_when_their_kernel_goes() -> None:
    leaves = make()
    with torch.no_grad():
        fast(leaves, USUAL, "transform")
        assert len(convolution._kept) == 1
        del leaves["weight"]
        gc.collect()
        assert len(convolution._kept) == 0
        for _ in range(3):  # one kernel at a time, however many there are
            fast(make(), USUAL, "transform")
            assert len(convolution._kept) <= 1


# ---- the choice


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_few_images_of_one_channel_learn_by_columns_where_pytorch_is_slow(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    first = Shape(1, 256, (28, 28), (9, 9), (1, 1))
    assert choose(first, 8, True) == ("plain" if capability == "AVX512" else "columns")
    assert choose(first, 8, False) == "plain"


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_one_image_goes_by_columns_where_reading_the_weight_is_most_of_the_work(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose(PRIMARY, 1, True) == "columns"
    assert choose(PRIMARY, 1, False) == ("columns" if capability == "AVX512" else "plain")
    larger = Shape(256, 512, (16, 16), (9, 9), (2, 2))
    assert choose(larger, 1, False) == "columns", "its weight has 40 MiB"
    assert choose(Shape(256, 64, (20, 20), (9, 9), (2, 2)), 1, True) == "plain", "more places than channels"


def test_the_way_that_is_chosen() -> None:
    first = Shape(1, 256, (28, 28), (9, 9), (1, 1))
    for learning in (True, False):
        assert choose(PRIMARY, 128, learning) == "transform"
        assert choose(first, 128, learning) == "columns"
        assert choose(Shape(256, 256, (20, 20), (1, 1), (1, 1)), 128, learning) == "plain"
        assert choose(Shape(4, 4, (8, 8), (3, 3), (1, 1)), 2, learning) == "plain"
        assert choose(PRIMARY, 2, learning) == "plain"


@pytest.mark.parametrize("way", ["auto", "plain", *WAYS])
def test_an_empty_batch(way: str) -> None:
    case = USUAL._replace(batch=0)
    leaves = make(case)
    got, wanted = (with_gradients(function(leaves, case, way), leaves) for function in (fast, plain))
    assert got.keys() == wanted.keys()
    for name in got:
        assert got[name].shape == wanted[name].shape
        assert got[name].equal(wanted[name])


def test_auto_goes_the_way_that_is_chosen(monkeypatch: pytest.MonkeyPatch, ways: list[str], always: None) -> None:
    leaves, asked = make(), []

    def chosen(shape: Shape, images: int, learning: bool) -> str:
        asked.append((shape, images, learning))
        return WAYS[len(asked) % 2]

    monkeypatch.setattr(convolution, "choose", chosen)
    wanted = plain(leaves, USUAL)
    assert_close(fast(leaves, USUAL, "auto"), wanted, 1e-5)
    with torch.no_grad():
        assert_close(fast(leaves, USUAL, "auto"), wanted, 1e-5)
    assert ways == ["transform", "columns"]
    padded = Shape(7, 5, (13, 14), (4, 3), (2, 1))
    assert asked == [(padded, 3, True), (padded, 3, False)]


# ---- what it refuses


def test_numbers_and_pairs_for_stride_and_padding() -> None:
    leaves = {name: leaf.detach() for name, leaf in make().items()}
    for way in ("plain", *WAYS):
        wanted = F.conv2d(leaves["features"], leaves["weight"], None, 2, 1)
        for two, one in ((2, 1), ((2, 2), (1, 1)), ([2, 2], [1, 1])):
            got = convolve(leaves["features"], leaves["weight"], None, two, one, backend=way)  # type: ignore[arg-type]
            assert_close(got, wanted, 1e-5)


def test_what_does_not_fit() -> None:
    features, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    floats, fits = "must be a floating-point tensor", "features must be at least as large as the kernel"
    refused: list[tuple[type[Exception], tuple[Any, ...], str]] = [
        (WrongType, (features.long(), weight), f"features {floats}"),
        (WrongType, (features, weight.int()), f"weight {floats}"),
        (WrongType, (features, weight, bias.long()), f"bias {floats}"),
        (WrongType, (features, weight.double()), "features, weight and bias must be of one dtype, got torch.float"),
        (InputError, (features[0], weight), "features must have shape (B, C, H, W), got (3, 8, 8)"),
        (InputError, (features, weight[0]), "weight must have shape (O, 3, k, l), got (3, 3, 3)"),
        (InputError, (features, weight[:, :2]), "weight must have shape (O, 3, k, l), got (4, 2, 3, 3)"),
        (InputError, (features, weight, bias[None]), "bias must have shape (4,), got (1, 4)"),
        (InputError, (features, weight, bias[:3]), "bias must have shape (4,), got (3,)"),
        (InputError, (features, weight, bias, 0), "stride must be 1 to 4096, got 0"),
        (InputError, (features, weight, bias, (1, 2, 3)), "stride must have 2 entries, got (1, 2, 3)"),
        (WrongType, (features, weight, bias, "1"), "stride must be 1 to 4096, got '1'"),
        (InputError, (features, weight, bias, 1, (0, -1)), "padding must be 0 to 4095, got -1"),
        (InputError, (features[:, :, :2], weight), f"{fits}, and neither empty, got shapes (2, 3, 2, 8) and (4, 3"),
        (InputError, (features[..., :1], weight, None, 1, (1, 0)), fits),
        (InputError, (features, weight[:0]), fits),
        (InputError, (features[:, :, :0], weight[:, :, :1, :1], None, 1, 1), fits),
    ]
    for kind, args, said in refused:
        for way in ("auto", "transform"):
            assert_raises(kind, convolve, *args, backend=way, say=f"convolve: {said}")
    said = "backend must be one of auto, plain, columns, transform, got 'fast'"
    assert_raises(InputError, convolve, features, weight, backend="fast", say=said)
    assert_differs(convolve(features, weight, bias), convolve(features, weight))


def test_planes_that_were_kept_go_when_the_kernel_learns(always: None) -> None:
    leaves = make(USUAL)
    with torch.no_grad():
        fast(leaves, USUAL, "transform")
    assert leaves["weight"] in convolution._kept
    fast(leaves, USUAL, "transform")
    assert leaves["weight"] not in convolution._kept
