"""The convolution as one operation of compiled graphs: numbers, strides, planes that wait, and any number of images."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from support import COMPILES_KERNELS, assert_same
from torchcaps.kernels.convolution import choice, passes, transform
from torchcaps.nn import Convolution
from torchcaps.ops.convolution import convolve

OPERATION = torch.ops.torchcaps.convolve.default

WAYS = ("plain", "columns", "transform")
SIZES = ((7, 5, (11, 10), (4, 3), (2, 1)), (2, 4, (30, 17), (3, 3), (1, 1)), (16, 3, (9, 8), (5, 5), (1, 1)))
"""C, O, features, kernel and stride; the second one in several tiles, the last of which is cut."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every convolution goes this way."""
    monkeypatch.setattr(passes, "choose", lambda *_: request.param)
    monkeypatch.setattr(choice, "MAX_COST_RATIO", float("inf"))
    return str(request.param)


def make(case: Any, batch: int, *, bias: bool = True) -> list[Tensor | None]:
    channels, outputs, size, kernel, _ = case
    shapes = ((batch, channels, *size), (outputs, channels, *kernel), (outputs,))
    return [torch.randn(shape).requires_grad_() if bias or len(shape) > 1 else None for shape in shapes]


def results(call: Any, given: list[Tensor | None]) -> dict[str, Tensor]:
    """The maps, and the gradients of a sum in which every number counts."""
    maps = call(*given)
    leaves = [each for each in given if each is not None]
    grads = torch.autograd.grad((maps * (maps + 0.3).sin()).sum(), leaves)
    return {"maps": maps.detach()} | {f"d {n}": grad for n, grad in enumerate(grads)}


def test_torch_accepts_the_operation(way: str) -> None:
    case = SIZES[WAYS.index(way)]
    tensors = make(case, 3, bias=way != "plain")
    given = *tensors, [each is not None for each in tensors], list(case[4]), [1, 0], way != "columns", "auto"
    torch.library.opcheck(OPERATION, given, rtol=1e-4, atol=1e-4)
    for each in SIZES:  # the strides that the compiler is told, with gradients and without
        for learning in (True, False):
            tests = ("test_schema", "test_faketensor")
            options = list(each[4]), [0, 0], True, "auto"
            torch.library.opcheck(OPERATION, (*make(each, 2), [learning] * 3, *options), test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES[:2])
def test_compiled_is_eager_for_any_number_of_images(way: str, case: Any) -> None:
    def call(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(features, weight, bias, case[4], (1, 2), relu=True)

    has_bias = case == SIZES[0]
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    again = torch.compile(call, backend=graphs, fullgraph=True, dynamic=True)
    for batch in (13, 19, 23):  # no other size, or torch would take both for one
        given = make(case, batch, bias=has_bias)
        assert_same(results(again, given), results(call, given), 1e-5)
    assert graphs.frame_count == 1
    with torch.no_grad():
        given = make(case, 4, bias=has_bias)
        assert_same({"maps": again(*given)}, {"maps": call(*given)}, 1e-5)


def test_an_empty_batch() -> None:
    convolution = Convolution(3, 4, 3)
    torch._dynamo.reset()
    again = torch.compile(convolution, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (3, 0):
        maps = again(torch.randn(batch, 3, 8, 8), relu=True)
        maps.sum().backward()
        assert maps.shape == (batch, 4, 6, 6)


@COMPILES_KERNELS
def test_planes_wait_for_their_backward_pass_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    kernel_planes = transform.kernel_planes
    monkeypatch.setattr(transform, "kernel_planes", lambda *given: made.append("kernel") or kernel_planes(*given))
    monkeypatch.setattr(passes, "choose", lambda *_: "transform")
    monkeypatch.setattr(choice, "MAX_COST_RATIO", float("inf"))
    case = SIZES[0]

    def call(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(features, weight, bias, case[4])

    torch._dynamo.reset()
    again = torch.compile(call, backend="aot_eager", fullgraph=True)
    given = make(case, 3)
    maps = again(*given)
    maps.sum().backward(retain_graph=True)
    assert made == ["kernel"], "the kernel's planes are those of the forward pass"
    first = given[1].grad.clone()
    given[1].grad = None
    maps.sum().backward()
    assert made == ["kernel"] * 2, "a second backward pass makes them again"
    assert given[1].grad.equal(first)
    planes: list[Any] = []
    feature_planes = transform.feature_planes

    def noted(*call: Any) -> Any:
        every = list(feature_planes(*call))
        planes.extend(weakref.ref(each) for each in every)
        return every

    monkeypatch.setattr(transform, "feature_planes", noted)
    maps = again(*given)
    assert all(each() is not None for each in planes)
    del maps
    gc.collect()
    assert all(each() is None for each in planes), "the result was dropped"


@COMPILES_KERNELS
def test_planes_are_kept_between_compiled_calls_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "choose", lambda *_: "transform")
    monkeypatch.setattr(choice, "MAX_COST_RATIO", float("inf"))
    convolution, features = Convolution(3, 4, 3), torch.randn(2, 3, 8, 8)
    passes._kept.clear()
    torch._dynamo.reset()
    again = torch.compile(convolution, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        first = again(features)
        (kept,) = passes._kept.values()
        assert again(features).equal(first)
        assert list(passes._kept.values()) == [kept]


@COMPILES_KERNELS
def test_other_dtypes_autocast_and_pointwise_kernels_are_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(passes, "choose", lambda *given: asked.append(given) or "plain")

    def call(features: Tensor, weight: Tensor) -> Tensor:
        return convolve(features, weight, relu=True)

    features, weight, pointwise = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4, 3, 1, 1)
    for dtype, kernel, autocast in (
        (torch.float64, weight, False),
        (torch.bfloat16, weight, False),
        (torch.float32, pointwise, False),
        (torch.float32, weight, True),
    ):
        torch._dynamo.reset()
        given = features.to(dtype), kernel.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
            assert got.equal(F.conv2d(*given).relu())
    assert asked == []
    torch._dynamo.reset()
    torch.compile(call, backend="aot_eager", fullgraph=True)(features, weight)
    assert len(asked) == 1
