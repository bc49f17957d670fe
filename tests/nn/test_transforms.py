"""Votes that are asked against votes that are built by einsum, and the transforms that make them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchcaps
from support import assert_batch_independent, assert_close, assert_differs, assert_gradients_reach, assert_raises
from torchcaps.nn import Dense, DenseCapsules, DynamicRouting, Elementwise, LayerSize, Matrix, Shared, Transform, Votes
from torchcaps.nn.transforms import Rivals
from torchcaps.ops.memory import get_working_memory


class Case(NamedTuple):
    """A transform, sizes that it can have, and its votes by einsum."""

    transform: Callable[..., Any]
    size: LayerSize
    votes: Callable[[Tensor, Tensor], Tensor]


def matrix_votes(poses: Tensor, weight: Tensor) -> Tensor:
    """M_i W_ij, by its definition."""
    P = weight.shape[2]
    matrices = poses.unflatten(2, (P, P))
    return torch.einsum("biac,ijcd->bijad", matrices, weight).flatten(3)


def dense_votes(poses: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ijdk,bik->bijd", weight, poses)


def shared_votes(poses: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("jdk,bik->bijd", weight, poses)


def elementwise_votes(poses: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ijd,bid->bijd", weight, poses)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "dense": (Dense, dense_votes, 6, 5),
    "shared": (Shared, shared_votes, 6, 5),
    "elementwise": (Elementwise, elementwise_votes, 5, 5),
    "matrix": (Matrix, matrix_votes, 9, 9),
}
"""The transform, its votes, K and D that it can have."""
COUNTS = {"odd": (63, 7), "one input": (1, 7), "one output": (63, 1), "one of each": (1, 1)}
BATCH = 3


def bound(kind: str, counts: tuple[int, int] = (63, 7), dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """A transform that knows its sizes, and poses for it."""
    (make, _, K, D), (I, J) = KINDS[kind], counts
    transform = make("normal", 0.5)
    transform.bind(LayerSize(I, K, J, D), 1.0)
    return transform.to(dtype), torch.randn(BATCH, I, K, dtype=dtype)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_votes_are_those_of_einsum(kind: str, counts: str, dtype: torch.dtype) -> None:
    transform, poses = bound(kind, COUNTS[counts], dtype)
    votes = transform(poses)
    wanted = KINDS[kind][1](poses.double(), transform.weight.double())
    I, K, J, D = votes.size
    assert (poses.shape[1], poses.shape[2], COUNTS[counts][1], KINDS[kind][3]) == (I, K, J, D)
    coupling, parents = torch.rand(BATCH, I, J, dtype=dtype), torch.randn(BATCH, J, D, dtype=dtype)

    def is_close(got: Tensor, exact: Tensor) -> None:
        assert got.shape == exact.shape
        assert got.dtype == dtype
        assert_close(got.double() / exact.abs().max(), exact / exact.abs().max(), tolerance(dtype))

    is_close(votes.build(), wanted)
    is_close(votes.weighted_sum(None), wanted.sum(1))
    is_close(votes.weighted_sum(coupling), torch.einsum("bij,bijd->bjd", coupling.double(), wanted))
    is_close(votes.agreement(parents), torch.einsum("bijd,bjd->bij", wanted, parents.double()))
    zeros = votes.zeros()
    assert zeros.shape == (BATCH, I, J)
    assert zeros.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    make, _, K, D = KINDS[kind]
    K = D = {"matrix": 4, "elementwise": 2}.get(kind, 2)
    transform = make()
    transform.bind(LayerSize(3, K, 2, D), 1.0)
    transform.double()
    poses, weight = torch.randn(2, 3, K).double(), transform.weight.detach().clone()
    coupling, parents = torch.rand(2, 3, 2).double(), torch.randn(2, 2, D).double()

    def asked(name: str) -> Callable[..., Tensor]:
        def function(poses: Tensor, weight: Tensor, other: Tensor) -> Tensor:
            votes = torch.func.functional_call(transform, {"weight": weight}, (poses,))
            return votes.build() * other if name == "build" else getattr(votes, name)(other)

        return function

    for name, other in (("weighted_sum", coupling), ("agreement", parents), ("build", torch.ones(()).double())):
        leaves = tuple(leaf.clone().requires_grad_() for leaf in (poses, weight, other))
        assert torch.autograd.gradcheck(asked(name), leaves), name
        assert torch.autograd.gradgradcheck(asked(name), leaves, fast_mode=True), name


@pytest.mark.parametrize("kind", KINDS)
def test_routing_of_ones_own_is_compiled(kind: str) -> None:
    """In one graph, forward and backward."""
    transform, poses = bound(kind)
    poses.requires_grad_()

    def route(poses: Tensor) -> Tensor:
        votes = transform(poses)
        coupling = votes.compete(votes.agreement(votes.weighted_sum(None)))
        return torchcaps.squash(votes.weighted_sum(coupling))

    leaves = [poses, *transform.parameters()]
    wanted = route(poses)
    grads = torch.autograd.grad(wanted.square().sum(), leaves)
    torch._dynamo.reset()
    found = torch.compile(route, fullgraph=True, backend="aot_eager")(poses)
    assert_close(found, wanted, 1e-12)
    for grad, other in zip(torch.autograd.grad(found.square().sum(), leaves), grads, strict=True):
        assert_close(grad, other, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_votes_under_autocast_are_near_those_without(kind: str) -> None:
    transform, poses = bound(kind, dtype=torch.float32)
    votes = transform(poses)
    parents = torch.randn(BATCH, votes.size.out_capsules, votes.size.out_dim)
    with torch.autocast("cpu", torch.bfloat16):
        asked = transform(poses)
        for got, wanted in (
            (asked.weighted_sum(None), votes.weighted_sum(None)),
            (asked.agreement(parents), votes.agreement(parents)),
        ):
            scale = wanted.abs().max().detach()
            assert_close(got.float() / scale, wanted / scale, 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_images_do_not_mix(kind: str) -> None:
    transform, poses = bound(kind)
    for ask in (lambda given: transform(given).weighted_sum(None), lambda given: transform(given).build()):
        assert_batch_independent(ask, poses, 1e-12)


# ---- weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1152, 10), (63, 7), (9, 32), (300, 2)])
@pytest.mark.parametrize("axis", ["outputs", "inputs"])
def test_output_capsules_start_neither_short_nor_saturated(kind: str, sizes: tuple[int, int], axis: Any) -> None:
    (I, J), (K, D) = sizes, {"matrix": (16, 16), "elementwise": (16, 16)}.get(kind, (8, 16))
    poses = torch.randn(16, I, K)
    poses = poses / poses.norm(dim=-1, keepdim=True)
    routing = DynamicRouting(1 if axis == "inputs" else 3, softmax_over=axis)
    layer = DenseCapsules(I, K, J, D, transform=KINDS[kind][0](), routing=routing)
    lengths = layer(poses).poses.norm(dim=-1)
    assert 0.3 < lengths.mean() < 0.97, lengths.mean()
    assert (lengths.std(0) > 1e-3).all()
    with torch.no_grad():
        sums = layer.transform(poses).weighted_sum(None) / {"outputs": J, "inputs": I}[axis]
    assert 0.5 < sums.norm(dim=-1).square().mean().sqrt() < 2, "under uniform coupling, of length near one"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_start_as_they_are_told_to(kind: str) -> None:
    make, _, K, D = KINDS[kind]
    size = LayerSize(200, K, 30, D)

    def deviation(*options: Any) -> float:
        transform = make(*options)
        transform.bind(size, 0.3)
        return transform.weight.std().item()

    assert deviation("normal", 0.2) == pytest.approx(0.2, rel=0.1)
    assert deviation("truncated-normal", 0.1) == pytest.approx(0.0880, rel=0.1)
    assert deviation("fan-in") == pytest.approx(math.sqrt(2 / (200 * K)), rel=0.1)
    products = {"elementwise": 1, "matrix": math.isqrt(K)}.get(kind, K)
    assert deviation() == pytest.approx(0.3 * math.sqrt(K / products), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_what_they_are(kind: str) -> None:
    transform, poses = bound(kind, dtype=torch.float32)
    wanted = transform(poses).build()
    other, _ = bound(kind, dtype=torch.float32)
    assert_differs(other(poses).build(), wanted)
    other.load_state_dict(transform.state_dict())
    for each in (other, copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert_close(each(poses).build(), wanted, 0)
        assert each.weight.stride() == transform.weight.stride()
    transform(poses).weighted_sum(None).square().sum().backward()
    assert_gradients_reach(transform)


def test_what_a_transform_says_of_itself() -> None:
    transform = Shared("normal", 0.25)
    assert repr(transform) == "Shared()"
    transform.bind(LayerSize(6, 3, 4, 5), 1.0)
    assert repr(transform) == "Shared(weight=(4, 5, 3), weight_init=normal(0.25))"


# ---- what is refused


def test_sizes_that_a_transform_cannot_have() -> None:
    said = "Elementwise: input and output capsules must have as many components as each other, got 3 and 4"
    assert_raises(ValueError, DenseCapsules, 6, 3, 5, 4, transform=Elementwise(), say=said)
    for K, D in ((8, 8), (16, 9), (4, 5)):
        said = "Matrix: the poses of input and output capsules must be square matrices of one size, such as 4×4 = 16 "
        said += f"components, got {K} and {D}"
        assert_raises(ValueError, DenseCapsules, 6, K, 5, D, transform=Matrix(), say=said)


@pytest.mark.parametrize("kind", KINDS)
def test_options_and_poses_that_do_not_fit(kind: str) -> None:
    make, name = KINDS[kind][0], KINDS[kind][0].__name__
    assert_raises(ValueError, make, "x", say=f"{name}: weight_init must be one of balanced, normal, truncated-normal")
    for wrong in (-1.0, math.inf, math.nan):
        assert_raises(ValueError, make, "normal", wrong, say=f"{name}: weight_std must be at least 0 and finite")
    assert_raises(TypeError, make, "normal", "0.1", say=f"{name}: weight_std must be a number")
    transform, poses = bound(kind)
    K = poses.shape[2]
    said = f"{name}: poses must have shape (B, 63, {K}), got {(BATCH, 62, K)}"
    assert_raises(ValueError, transform, poses[:, 1:], say=said)
    assert_raises(TypeError, transform, poses.long(), say=f"{name}: poses must be a floating-point tensor")
    said = f"{name}: this transform belongs to a layer already; make one for each"
    assert_raises(ValueError, DenseCapsules, 6, K, 5, KINDS[kind][3], transform=transform, say=said)


def test_transforms_and_votes_are_abstract() -> None:
    for kind in (Transform, Votes):
        with pytest.raises(TypeError, match="abstract"):
            kind()  # type: ignore[abstract]


# ---- a transform of one's own


class Negated(Transform):
    """The plain poses with another sign: no parameters, and votes that are built."""

    def bind(self, size: LayerSize, std: float) -> None:
        self.size, self.factor = size, std

    def forward(self, poses: Tensor) -> Votes:
        return Built(poses, self.size, self.factor)


class Built(Votes):
    def __init__(self, poses: Tensor, size: LayerSize, factor: float) -> None:
        super().__init__(poses, size)
        self.factor = factor

    def build(self) -> Tensor:
        return -self.factor * self.poses[:, :, None].expand(-1, -1, self.size.out_capsules, -1)

    def weighted_sum(self, coupling: Tensor | None) -> Tensor:
        return self.build().sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling, self.build())

    def agreement(self, parents: Tensor) -> Tensor:
        return torch.einsum("bijd,bjd->bij", self.build(), parents)


def test_a_transform_of_ones_own() -> None:
    layer = DenseCapsules(6, 4, 3, 4, transform=Negated())
    assert not list(layer.parameters())
    poses = torch.randn(2, 6, 4)
    same = Elementwise("normal", 0)
    other = DenseCapsules(6, 4, 3, 4, transform=same)
    with torch.no_grad():
        same.weight.fill_(-layer.transform.factor)
    assert_close(layer(poses).poses, other(poses).poses)


# ---- the competition


def test_all_outputs_compete_unless_there_are_rivals() -> None:
    votes = bound("dense", (5, 4))[0](torch.randn(BATCH, 5, 6).double())
    logits = torch.randn(BATCH, 5, 4).double()
    assert_close(votes.compete(logits), logits.softmax(2))
    assert_close(votes.compete(logits, "inputs"), logits.softmax(1))
    beside = torch.cat([logits, torch.zeros(BATCH, 5, 1)], 2).softmax(2)[..., :4]
    assert_close(votes.compete(logits, leaky=True), beside)


def test_rivals_by_loops() -> None:
    """Two windows of three capsules of a map of four (and none, 0), of which they share two."""
    children = torch.tensor([[1, 2, 3], [2, 3, 0]])
    rivals = Rivals(children, 5)
    logits = 5 * torch.randn(2 * BATCH, 3, 4).double()
    assert rivals.links.tolist() == [1, 1, 2, 2, 0]
    for leaky in (False, True):
        got = rivals.compete(logits, leaky).view(BATCH, 2, 3, 4)
        for b in range(BATCH):
            for capsule in (0, 1, 2, 3):
                places = (children == capsule).nonzero().tolist()
                powers = torch.stack([logits.view(BATCH, 2, 3, 4)[b, window, i] for window, i in places]).exp()
                for (window, i), power in zip(places, powers, strict=True):
                    assert_close(got[b, window, i], power / (powers.sum() + (1 if leaky else 0)), 1e-10)
    huge = rivals.compete(torch.full((2, 3, 4), 1e30), leaky=True)
    assert huge.isfinite().all(), "a softmax, not a quotient of powers"
    assert rivals.compete(torch.full((2, 3, 4), -1e30), leaky=False).isfinite().all()


def test_rivals_gradients_are_those_of_finite_differences() -> None:
    rivals = Rivals(torch.tensor([[1, 2, 3], [2, 3, 0]]), 5)
    logits = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    for leaky in (False, True):
        assert torch.autograd.gradcheck(lambda given, leaky=leaky: rivals.compete(given, leaky), (logits,))


class Largest(TorchDispatchMode):
    """The most numbers that a tensor had that was computed."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("kind", ["shared", "elementwise", "matrix"])  # the fused way of dense votes: tests/ops
def test_votes_are_not_built_where_they_are_asked(kind: str) -> None:
    """Of B·I·J·D numbers, only as many as the working memory holds are there at once."""
    before = get_working_memory()
    torchcaps.set_working_memory(0.25)
    B, I, J, D = 16, 300, 8, 16
    layer = DenseCapsules(I, D, J, D, transform=KINDS[kind][0]())
    poses = torch.randn(B, I, D)
    try:
        with torch.no_grad(), Largest() as asked:
            layer(poses)
        with torch.no_grad(), Largest() as built:
            layer.transform(poses).build()
    finally:
        torchcaps.set_working_memory(before)
    assert built.numbers == B * I * J * D
    assert asked.numbers < B * I * J * D / 1.9, asked.numbers
