"""Convolutions by products of planes and by columns against PyTorch's own, in all the ways PyTorch can call them."""

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from calling import check_ways
from routing_cases import detached
from support import assert_as_exact, assert_close, assert_raises, assert_same, with_gradients
from torchcaps.errors import InputError, WrongType
from torchcaps.kernels.convolution import choice, columns, passes, transform
from torchcaps.kernels.convolution.points import Plan, best_plan
from torchcaps.machine import MIB
from torchcaps.ops.convolution import Shape, choose, convolve
from torchcaps.ops.memory import get_working_memory, set_working_memory

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
    Case(4, 64, 64, (20, 20), (9, 9), (2, 2)),
    USUAL._replace(batch=0),
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
    monkeypatch.setattr(choice, "MAX_COST_RATIO", float("inf"))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way was taken, one name a call; nothing for PyTorch's own; and ``kernel`` where one is transformed."""
    taken: list[str] = []

    def hear(module: object, name: str, mark: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: taken.append(mark) or function(*args))

    hear(columns, "forward", "columns")
    hear(transform, "forward", "transform")
    hear(transform, "kernel_planes", "kernel")
    return taken


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
    features, weight, bias = leaves["features"], leaves["weight"], leaves.get("bias")
    return convolve(features, weight, bias, case.stride, case.padding, relu=case.relu, backend=way)


def plain(leaves: Tensors, case: Case, _: Any = None) -> Tensor:
    """The maps as PyTorch gives them."""
    maps = F.conv2d(leaves["features"], leaves["weight"], leaves.get("bias"), case.stride, case.padding)
    return F.relu(maps) if case.relu else maps


def results(maps: Tensor, leaves: Tensors) -> Tensors:
    """Maps, and the gradients that are wanted."""
    return with_gradients({"maps": maps}, {name: leaf for name, leaf in leaves.items() if leaf.requires_grad})


def double(leaves: Tensors) -> Tensors:
    return {name: leaf.detach().double().requires_grad_(leaf.requires_grad) for name, leaf in leaves.items()}


def check(case: Case, way: str) -> None:
    """Maps and gradients are those of F.conv2d, as exactly."""
    leaves = make(case)
    exact = double(leaves)
    ours, theirs = (results(function(leaves, case, way), leaves) for function in (fast, plain))
    assert all(each.dtype == torch.float32 for each in ours.values())
    assert ours["d weight"].is_contiguous(), "else the optimizer's gradient is a copy"
    assert_as_exact(ours, theirs, results(plain(exact, case), exact), rounding=2e-6)  # some are single sums


# ---- the numbers


def test_columns_are_conv2d(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (columns.MAX_BLOCK_NUMBERS, 1, 5_000):
        monkeypatch.setattr(columns, "MAX_BLOCK_NUMBERS", block)
        for case in CASES if block != columns.MAX_BLOCK_NUMBERS else CASES + drawn(40):
            check(case, "columns")
    assert set(ways) == {"columns"}


def test_products_of_planes_are_conv2d(always: None, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES + drawn(60):
        check(case, "transform")
    for case, tile in itertools.product((USUAL, CASES[1], CASES[5]), [(1, 1), (2, 3), (3, 1), (4, 6), (7, 2), (12, 9)]):
        with monkeypatch.context() as patch:
            patch.setattr(passes, "best_plan", lambda shape, images, tile=tile: Plan(shape, tile))
            check(case, "transform")
    assert set(ways) == {"transform", "kernel"}
    for case in CASES[:8]:
        ways.clear()
        set_working_memory(1e-6)
        check(case, "transform")
        assert ways.count("transform") == case.batch


@either_way
def test_maps_are_one_s_own(way: str, always: None) -> None:
    for learning in (True, False):
        case = USUAL._replace(kernel=(1, 1), padding=(0, 0), stride=(1, 1))
        leaves = {name: leaf.detach().requires_grad_(learning) for name, leaf in make(case).items()}
        maps = fast(leaves, case, way)
        for leaf in leaves.values():
            assert maps.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
    leaves = make()
    got = results(fast(leaves, USUAL._replace(relu=False), way).relu_(), leaves)
    assert_same(got, results(plain(leaves, USUAL), leaves))
    kept = fast(leaves, USUAL, way).mul_(2)  # the ReLU's gradient needs its maps, as PyTorch's own does
    assert_raises(RuntimeError, kept.sum().backward, say="modified by an inplace operation")


# ---- gradients


@either_way
def test_only_the_gradients_that_are_wanted(way: str, always: None) -> None:
    leaves = make()
    maps = fast(leaves, USUAL, way)
    every = results(maps, leaves)
    assert_same(results(maps, leaves), every, 1e-7), "the graph can be kept for a second pass"
    for wanted in ({"features"}, {"weight"}, {"bias"}, {"weight", "bias"}, {"features", "bias"}):
        alone = {name: leaf.detach().requires_grad_(name in wanted) for name, leaf in leaves.items()}
        got = results(fast(alone, USUAL, way), alone)
        assert_same(got, {name: every[name] for name in ("maps", *(f"d {each}" for each in leaves if each in wanted))})
    assert not fast(detached(leaves), USUAL, way).requires_grad


@either_way
def test_second_derivatives(way: str, ways: list[str], always: None) -> None:
    def penalty(function: Callable[..., Tensor], leaves: Tensors, case: Case) -> Tensors:
        maps = function(leaves, case, way)
        slope = torch.randn(maps.shape, generator=torch.Generator().manual_seed(1)).to(maps.dtype)  # where maps are 0
        grads = torch.autograd.grad((maps * (maps + slope)).sum(), list(leaves.values()), create_graph=True)
        total = torch.stack([grad.square().sum() for grad in grads]).sum()
        again = torch.autograd.grad(total, list(leaves.values()))
        found = {name: grad.detach() for name, grad in zip(leaves, grads, strict=True)}
        return found | {f"d {name}": grad for name, grad in zip(leaves, again, strict=True)}

    for case in (USUAL, USUAL._replace(bias=False), USUAL._replace(relu=False)):
        leaves = make(case)
        assert_same(penalty(fast, leaves, case), penalty(plain, double(leaves), case), 5e-6)
    assert set(ways) - {"kernel"} == {way}


# ---- the ways to call it


@either_way
def test_called_in_every_way(way: str, always: None, ways: list[str]) -> None:
    call = lambda features, weight, bias: convolve(  # noqa: E731
        features, weight, bias, USUAL.stride, USUAL.padding, relu=True, backend=way
    )
    check_ways(call, *make().values(), tol=1e-5)
    assert ways


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # forward mode uses it
@either_way
def test_autocast_other_dtypes_and_forward_mode_are_pytorch_s(way: str, ways: list[str]) -> None:
    leaves = make()
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = fast(leaves, USUAL, way), plain(leaves, USUAL)
    assert got.dtype == torch.bfloat16
    assert got.equal(wanted)
    for dtype in (torch.float64, torch.bfloat16):
        rounded = make(dtype=dtype)
        got = fast(rounded, USUAL, way)
        assert got.dtype == dtype
        assert_same(results(got, rounded), results(plain(rounded, USUAL), rounded), 1e-12)
    leaves = detached(leaves)
    given = (leaves["weight"],), (torch.randn_like(leaves["weight"]),)
    ahead = (torch.func.jvp(lambda w, f=f: f(leaves | {"weight": w}, USUAL, way), *given) for f in (fast, plain))
    for ours, theirs in zip(*ahead, strict=True):
        assert_close(ours, theirs, 1e-5)
    assert ways == []


# ---- working memory

LARGE = Case(5, 32, 32, (20, 20), (9, 9), (2, 2), relu=True)


def room_for(images: float) -> float:
    """MiB for the work buffers of so many images."""
    plan = best_plan(Shape(LARGE.channels, LARGE.outputs, *LARGE[3:6]), LARGE.batch)
    return (plan.numbers_of_kernel + images * plan.numbers_of_image) * 4 / MIB + 1e-9


def test_little_working_memory_makes_pieces(ways: list[str], always: None) -> None:
    leaves, before = make(LARGE), get_working_memory()
    wanted = results(fast(leaves, LARGE, "transform"), leaves)
    for room, pieces in ((5.0, 1), (4.9, 2), (2.1, 3), (1.5, 5)):
        ways.clear()
        set_working_memory(room_for(room))
        assert_same(results(fast(leaves, LARGE, "transform"), leaves), wanted)
        assert ways.count("transform") == pieces
        with torch.no_grad():
            assert_same({"maps": fast(leaves, LARGE, "transform")}, {"maps": wanted["maps"]})
        assert ways.count("transform") == 2 * pieces
    for ahead, back in ((5.1, 2.1), (2.1, 5.1)):  # it may change before the backward pass
        set_working_memory(room_for(ahead))
        maps = fast(leaves, LARGE, "transform")
        set_working_memory(room_for(back))
        assert_same(results(maps, leaves), wanted)
    shape = Shape(64, 64, (20, 20), (9, 9), (2, 2))
    set_working_memory(before)
    assert choose(shape, 512, True) == "transform"
    set_working_memory(0.1)
    assert choose(shape, 512, True) == "plain"


# ---- planes kept where nothing is learned


def test_the_kernel_s_planes_serve_the_next_call(ways: list[str], always: None) -> None:
    leaves, wider = make(), torch.randn(2, 7, 30, 31)
    passes._kept.clear()
    with torch.no_grad():
        first, second = (fast(leaves, USUAL, "transform") for _ in range(2))
        assert ways.count("kernel") == 1
        assert first.equal(second)
        for other in (leaves | {"features": wider}, make()):  # in tiles of another size; another kernel
            assert_same({"maps": fast(other, USUAL, "transform")}, {"maps": plain(other, USUAL)})
        assert ways.count("kernel") == 3
        other["weight"].data[3, 2, 1, 0] += 1  # behind the back of any counter of versions
        assert_same({"maps": fast(other, USUAL, "transform")}, {"maps": plain(other, USUAL)})
        del other
        gc.collect()
        assert list(passes._kept) == [leaves["weight"]], "they go with their kernel"


def test_networks_used_in_turn_keep_their_planes(ways: list[str], always: None) -> None:
    passes._kept.clear()
    networks = [make() for _ in range(passes.MAX_KEPT_KERNELS + 1)]
    with torch.no_grad():
        for number in (2, len(networks) - 1, len(networks)):
            ways.clear()
            for _ in range(2):
                for leaves in networks[:number]:
                    assert_same({"maps": fast(leaves, USUAL, "transform")}, {"maps": plain(leaves, USUAL)})
            assert ways.count("kernel") == {2: 2, 4: 2, 5: 6}[number], "of five, one is dropped each time"
        planes = next(iter(passes._kept.values()))[2]
        set_working_memory(2.5 * sum(group.nbytes for group in planes) / MIB)
        networks.append(make())
        fast(networks[-1], USUAL, "transform")
        assert len(passes._kept) == 2, "all kept planes fit into the working memory"
    fast(networks[-1], USUAL, "transform")
    assert len(passes._kept) == 1, "a kernel that is being trained is forgotten"


# ---- the choice


def test_the_way_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, larger = Shape(1, 256, (28, 28), (9, 9), (1, 1)), Shape(256, 512, (16, 16), (9, 9), (2, 2))
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        wide = capability == "AVX512"
        assert choose(first, 8, True) == ("plain" if wide else "columns"), "where PyTorch is slow"
        assert choose(first, 8, False) == "plain"
        assert choose(PRIMARY, 1, True) == "columns"  # where reading the weight is most of the work
        assert choose(PRIMARY, 1, False) == "columns"
        assert choose(larger, 1, False) == "columns"
        assert choose(Shape(256, 64, (20, 20), (9, 9), (2, 2)), 1, True) == "plain", "more places than channels"
        for learning in (True, False):
            assert choose(PRIMARY, 128, learning) == "transform"
            assert choose(first, 128, learning) == "columns"
            assert choose(Shape(256, 256, (20, 20), (1, 1), (1, 1)), 128, learning) == "plain"
            assert choose(Shape(4, 4, (8, 8), (3, 3), (1, 1)), 2, learning) == "plain"
            assert choose(PRIMARY, 2, learning) == "plain"


def test_auto_goes_the_way_that_is_chosen(monkeypatch: pytest.MonkeyPatch, ways: list[str], always: None) -> None:
    chosen = {(Shape(7, 5, (13, 14), (4, 3), (2, 1)), 3, learning): WAYS[learning] for learning in (False, True)}
    monkeypatch.setattr(passes, "choose", lambda *asked: chosen[asked])
    fast(make(), USUAL, "auto")
    with torch.no_grad():
        fast(make(), USUAL, "auto")
    assert ways == ["kernel", "transform", "columns"]


# ---- arguments


def test_numbers_pairs_and_what_does_not_fit() -> None:
    features, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for way in ("plain", *WAYS):
        got = convolve(features, weight, None, [2, 2], 1, backend=way)  # type: ignore[arg-type]
        assert_close(got, F.conv2d(features, weight, None, 2, 1), 1e-5)
    assert_raises(WrongType, convolve, features, weight.double(), say="must be of one dtype, got torch.float")
    fits = "convolve: features must be at least as large as the kernel, and neither empty, got shapes"
    for args in (
        (features[:, :, :2], weight),
        (features[..., :1], weight, None, 1, (1, 0)),
        (features, weight[:0]),
        (features[:, :, :0], weight[:, :, :1, :1], None, 1, 1),
    ):
        assert_raises(InputError, convolve, *args, say=fits)
    with torch.autocast("cpu", torch.bfloat16):
        assert_raises(WrongType, convolve, features.double(), weight, say="must be of one dtype")
