"""Votes that are asked against votes that are built by einsum, the transforms that make them, and who competes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcaps
from support import Largest, assert_close, assert_raises
from torchcaps import InputError
from torchcaps.nn import BuiltVotes, DenseCapsules, LayerSize, Votes
from torchcaps.nn.votes.columns import ColumnVotes
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.nn.votes.positions import MapVotes, PlacedVotes
from torchcaps.ops.precision import full_dtype
from torchcaps.parts import PARTS, build

FACTORS = 1 + torch.rand(7, 6, generator=torch.Generator().manual_seed(0)).double()
"""Of ``factored`` matrices of seven output capsules at most."""


def matrix_votes(poses: Tensor, weight: Tensor) -> Tensor:
    """M_i W_ij, by its definition."""
    P = weight.shape[2]
    return torch.einsum("biac,ijcd->bijad", poses.unflatten(2, (P, P)), weight).flatten(3)


def shared_votes(poses: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("jdk,bik->bijd", weight, poses)


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "dense": (lambda poses, weight: torch.einsum("ijdk,bik->bijd", weight, poses), 6, 5),
    "shared": (shared_votes, 6, 5),
    "factored": (lambda poses, weight: shared_votes(poses, FACTORS[:, None] * weight), 6, 5),
    "common": (lambda poses, weight: torch.einsum("dk,bik->bid", weight, poses).unsqueeze(2), 6, 5),
    "elementwise": (lambda poses, weight: torch.einsum("ijd,bid->bijd", weight, poses), 5, 5),
    "matrix": (matrix_votes, 9, 9),
}
"""Its votes, K and D that it can have; identity has no weight."""
BATCH = 4


def bound(kind: str, I: int = 63, J: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """A transform that knows its sizes, and poses for it."""
    _, K, D = KINDS.get(kind, (None, 5, 5))
    options = {"weight_init": "normal", "weight_std": 0.5} if kind in KINDS else {}
    transform = build("transform", {"name": kind, **options})
    transform.bind(LayerSize(I, K, J, D), 1.0)
    if kind == "factored":
        transform.scale.data = FACTORS[:J]
    return transform.to(dtype), torch.randn(BATCH, I, K, dtype=dtype)


def make_votes(kind: str, dtype: torch.dtype = torch.float64, I: int = 63, J: int = 7) -> tuple[Votes, Tensor]:
    """Votes, and the same by their definition in float64."""
    if kind == "built":
        votes = torch.randn(BATCH, I, J, 5, dtype=dtype)
        return BuiltVotes(votes), votes.double()
    if kind == "map":  # four positions, the weights of which are the same
        types, poses = I // 4 or 1, torch.randn(BATCH, 4 * (I // 4 or 1), 6, dtype=dtype)
        transform, _ = bound("dense", types, J, dtype)
        by_position = poses.unflatten(1, (types, 4)).transpose(1, 2).flatten(0, 1)
        wanted = torch.einsum("ijdk,bipk->bipjd", transform.matrices.double(), poses.double().unflatten(1, (types, 4)))
        return MapVotes(transform.votes(*transform(by_position)), poses, 4), wanted.flatten(1, 2)
    if kind == "placed":
        (votes, wanted), places = make_votes("shared", dtype, I, J), torch.randn(I, 5, dtype=dtype)
        return PlacedVotes(votes, places), wanted + places.double()[:, None]
    transform, poses = bound(kind, I, J, dtype)
    if kind == "identity":
        return transform.votes(*transform(poses)), poses.double()[:, :, None].expand(-1, -1, J, -1)
    wanted = KINDS[kind][0](poses.double(), transform.matrices.double())[:, :, :J]
    return transform.votes(*transform(poses)), wanted.expand(-1, -1, J, -1)


def test_votes_are_those_of_einsum() -> None:
    kinds, dtypes = (*KINDS, "identity", "built", "map", "placed"), {torch.float64: 1e-12, torch.float32: 2e-5}
    assert set(PARTS["transform"]) < set(kinds), "add it"
    for kind, (dtype, tol), (I, J) in itertools.product(
        kinds, (dtypes | {torch.bfloat16: 2e-2}).items(), ((63, 7), (1, 7), (63, 1), (1, 1))
    ):
        votes, wanted = make_votes(kind, dtype, I, J)
        assert votes.size == (wanted.shape[1], votes.poses.shape[2], *wanted.shape[2:])
        coupling, parents = torch.rand(wanted.shape[:3]).to(dtype), torch.randn(BATCH, *wanted.shape[2:]).to(dtype)
        exact, c, x = wanted.detach(), coupling, parents
        for got, right in (
            (votes.build(), exact),
            (votes.weighted_sum(None), exact.sum(1)),
            (votes.weighted_sum(c), torch.einsum("bij,bijd->bjd", c.double(), exact)),
            (votes.agreement(x), torch.einsum("bijd,bjd->bij", exact, x.double())),
        ):
            assert got.shape == right.shape
            assert got.dtype == full_dtype(dtype)
            assert_close(got.double() / right.abs().max(), right / right.abs().max(), tol)
        assert votes.dtype == dtype
        assert votes.zeros().equal(torch.zeros(c.shape, dtype=full_dtype(dtype)))


@pytest.mark.parametrize("kind", [*KINDS, "identity", "built", "map", "placed", "columns"])
def test_what_does_not_fit_the_votes_is_refused(kind: str) -> None:
    """Shapes that PyTorch would broadcast, on other votes as well as in functions of votes."""
    if kind == "columns":
        votes: Any = ColumnVotes(torch.randn(2, 8, 7, 5, 2), lambda: torch.ones(BATCH, 8, 3), 3, torch.float32)
    else:
        votes, _ = make_votes(kind, torch.float32, 8)
    I, _, J, D = votes.size
    links, ends = torch.rand(BATCH, I, J), torch.rand(BATCH, J, D)
    mask, active, betas = torch.ones(BATCH, I, dtype=torch.bool), torch.rand(BATCH, I), (torch.zeros(J), torch.zeros(J))
    calls: list[tuple[Callable[..., Any], Tensor]] = [
        (votes.weighted_sum, links),
        (votes.agreement, ends),
        (votes.compete, links),
        (votes.log_compete, links),
        (votes.masked, mask),
        (lambda prior: torchcaps.dynamic_routing(votes, prior=prior), links),
        (lambda bias: torchcaps.dynamic_routing(votes, bias=bias), ends[0]),
        (lambda mask: torchcaps.dynamic_routing(mask=mask, votes=votes), mask),
        (lambda bias: torchcaps.self_attention_routing(votes, bias=bias), links[0]),
        (lambda logits: torchcaps.self_routing(votes, active, logits), links),
        (lambda weight: torchcaps.inverted_attention_routing(votes, norm_weight=weight), ends[0, 0]),
    ]
    for function in (torchcaps.em_routing, torchcaps.em_routing_code, torchcaps.vb_routing):
        calls.append((lambda active, f=function: f(votes, active, *betas), active))
        calls.append((lambda beta, f=function: f(votes, active, beta, beta), betas[0]))
    for call, fitting in calls:
        call(fitting)
        for axis in range(fitting.ndim):
            with pytest.raises(InputError, match="must have"):
                call(fitting.narrow(axis, 0, 1))
        with pytest.raises(InputError, match="must be on one device"):
            call(fitting.to("meta"))


@pytest.mark.parametrize("kind", ["dense", "matrix"])
def test_built_votes_have_the_derivatives_of_finite_differences(kind: str) -> None:
    """Those of the sums are held equal to theirs in test_routing.py."""
    transform = build("transform", kind)
    transform.bind(LayerSize(3, 4, 2, 4), 1.0)

    def votes(poses: Tensor, weight: Tensor) -> Tensor:
        return transform.votes(*torch.func.functional_call(transform, {"weight": weight}, (poses,))).build()

    leaves = torch.randn(2, 3, 4).double().requires_grad_(), transform.weight.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(votes, leaves)
    assert torch.autograd.gradgradcheck(votes, leaves, fast_mode=True)


# ---- weights


def test_weights_start_as_they_are_told_to() -> None:
    for kind, (_, K, D) in KINDS.items():
        K, D = (60, 50) if kind in ("common", "factored") else (K, D)  # of a single small matrix the deviation varies
        products = {"elementwise": 1, "matrix": math.isqrt(K)}.get(kind, K)
        for options, wanted in (
            ({"weight_init": "normal", "weight_std": 0.2}, 0.2),
            ({"weight_init": "truncated-normal"}, 0.0880),  # a normal cut at two deviations keeps 0.880 of one
            ({"weight_init": "fan-in"}, math.sqrt(2 / (200 * K))),
            ({}, 0.3 * math.sqrt(K / products)),
        ):
            transform = build("transform", {"name": kind} | options)
            transform.bind(LayerSize(200, K, 30, D), 0.3)
            assert transform.weight.std().item() == pytest.approx(wanted, rel=0.1)
            assert "truncated-normal" not in options.values() or transform.weight.abs().max() <= 0.2
            assert transform.weight.is_contiguous()
            if kind in ("dense", "elementwise", "matrix"):
                assert transform.weight.shape[-1] == 200, "input capsules innermost, for the sums"
            with torch.no_grad():
                transform.matrices.fill_(3)
            assert (transform.weight == 3).all(), "matrices are a view that can be written to"


def test_votes_are_not_built_where_they_are_asked() -> None:
    """Of B·I·J·D numbers, only as many as the working memory holds are there at once; dense ones: the fused path's."""
    B, I, J, D = 16, 300, 8, 16
    torchcaps.set_working_memory(0.25)
    for kind in ("shared", "matrix", "identity"):
        layer, poses = DenseCapsules(I, D, J, D, transform=kind), torch.randn(B, I, D)
        with torch.no_grad(), Largest() as asked:
            layer(poses)
        assert 0 < asked.numbers < B * I * J * D / 1.9


# ---- what is refused


def test_sizes_that_do_not_fit() -> None:
    equal = "input and output capsules must have the same number of components, got 3 and 4"
    square = "the poses of input and output capsules must be square matrices of one size, such as 4×4 = 16 components"
    for kind, K, D, said in (
        ("elementwise", 3, 4, f"Elementwise: {equal}"),
        ("identity", 3, 4, f"Identity: {equal}"),
        *(("matrix", K, D, f"Matrix: {square}, got {K} and {D}") for K, D in ((8, 8), (16, 9), (4, 5))),
    ):
        assert_raises(InputError, DenseCapsules, 6, K, 5, D, transform=kind, say=said)
    said = "this transform already belongs to a layer; make one for each"
    assert_raises(InputError, DenseCapsules, 6, 6, 5, 5, transform=bound("dense")[0], say=said)
    for sizes in ((0, 2, 2), (2, 0, 2), (2, 2, 0)):
        assert_raises(InputError, BuiltVotes, torch.zeros(1, *sizes), say="at least one capsule and component")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS["transform"])
def test_every_transform_is_in_one_graph(kind: str) -> None:
    """Of ``torch.compile`` and of a strict export."""
    layer, poses = DenseCapsules(6, 4, 3, 4, transform=kind), torch.randn(2, 6, 4)
    expected = layer(poses).poses
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    exported = torch.export.export(layer, (poses,), strict=True).module()
    for graph in (compiled, exported):
        assert_close(graph(poses).poses, expected, 1e-5)


# ---- the competition


def test_the_competition_on_a_map_by_loops() -> None:
    """Two windows of three capsules of a map of four (and none, 0), of which they share two."""
    children = torch.tensor([[1, 2, 3], [2, 3, 0]])
    competition = MapCompetition(children, 5)
    votes = BuiltVotes(torch.randn(2 * BATCH, 3, 4, 2).double())
    votes.competition = competition
    logits = 5 * torch.randn(2 * BATCH, 3, 4).double()
    assert_close(votes.compete(logits, "inputs"), logits.softmax(1), 1e-12)
    assert_close(votes.log_compete(logits).exp(), votes.compete(logits), 1e-12)
    for leaky in (False, True):
        got = votes.compete(logits, leaky=leaky).view(BATCH, 2, 3, 4)
        for b, capsule in itertools.product(range(BATCH), (0, 1, 2, 3)):
            places = (children == capsule).nonzero().tolist()
            powers = torch.stack([logits.view(BATCH, 2, 3, 4)[b, window, i] for window, i in places]).exp()
            for (window, i), power in zip(places, powers, strict=True):
                assert_close(got[b, window, i], power / (powers.sum() + leaky), 1e-10)
        for huge in (1e30, -1e30):
            shares = votes.compete(torch.full((2 * BATCH, 3, 4), huge), leaky=leaky)
            assert shares.isfinite().all(), "no quotient of powers"
        few = torch.randn(4, 3, 2).double().requires_grad_()
        assert torch.autograd.gradcheck(lambda given, leaky=leaky: competition.softmax(given, leaky), (few,))
    assert torch.autograd.gradcheck(competition.log_softmax, (few,))
    far = torch.tensor([0.0, -500.0]).expand(2, 3, 2)
    assert_close(competition.log_softmax(far)[0, 0], [0.0, -500.0]), "exact even of couplings that are zero"


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_sparse_shares_are_the_nearest_point_of_the_simplex(softmax_over: Any, leaky: bool, columns: bool) -> None:
    """Found by bisection of the threshold; some shares are zero, and masked capsules have none."""
    mask = torch.rand(BATCH, 6) > 0.3
    votes: Votes = BuiltVotes(torch.randn(BATCH, 6, 5, 2).double())
    if columns:
        votes = ColumnVotes(torch.randn(2, 6, 5, 2, 2).double(), lambda: torch.ones(BATCH, 6, 3), 3, torch.float64)
    axis, logits = 2 if softmax_over == "outputs" else 1, torch.randn(BATCH, 6, 5).double()
    for some, present in ((votes, torch.ones(BATCH, 6, dtype=torch.bool)), (votes.masked(mask), mask)):
        shares = some.compete(logits, softmax_over, leaky=leaky, sparse=True)
        seen = logits.where(present.unsqueeze(2), -1e9 if axis == 1 else 0.0)
        seen = torch.cat([torch.zeros_like(seen.narrow(axis, 0, 1)), seen], axis) if leaky else seen
        low, high = seen.amax(axis, keepdim=True) - 1, seen.amax(axis, keepdim=True)
        for _ in range(60):
            middle = (low + high) / 2
            too_many = (seen - middle).clamp_min(0).sum(axis, keepdim=True) > 1
            low, high = middle.where(too_many, low), high.where(too_many, middle)
        exact = (seen - low).clamp_min(0)
        exact = exact.narrow(axis, 1, logits.shape[axis]) if leaky else exact
        assert_close(shares, exact.where(present.unsqueeze(2), 0), 1e-9)
        assert shares.eq(0).any()
        few = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, some=some: some.compete(x, softmax_over, leaky=leaky, sparse=True), few
        )
    nothing = votes.masked(torch.zeros(BATCH, 6, dtype=torch.bool)).compete(logits, softmax_over, sparse=True)
    assert nothing.eq(0).all()


def test_sparse_shares_over_positions_are_refused() -> None:
    votes = BuiltVotes(torch.randn(2, 3, 4, 2))
    votes.competition = MapCompetition(torch.tensor([[1, 2, 3], [2, 3, 0]]), 5)
    assert_raises(InputError, votes.compete, votes.zeros(), sparse=True, say='needs a layer with compete_over="types"')


class Ring(BuiltVotes):
    """Votes that refer to themselves."""

    def __init__(self, votes: Tensor) -> None:
        super().__init__(votes)
        self.itself, self.held = self, [{"self": self}]


def test_votes_may_refer_to_themselves() -> None:
    votes = torch.randn(2, 3, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        got = torchcaps.dynamic_routing(Ring(votes)).poses
    assert got.equal(torchcaps.dynamic_routing(votes).poses)
