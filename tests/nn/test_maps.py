"""Capsules on lines, planes and volumes: votes by convolution, routing and gradients against float64 loops."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import prune

from support import (
    assert_close,
    assert_finite,
    assert_raises,
    assert_same,
    plain_formulas,
    second_derivatives,
    with_gradients,
)
from torchcaps import InputError, dynamic_routing
from torchcaps.kernels.maps import slabs
from torchcaps.kernels.maps.windows import Window
from torchcaps.nn import (
    BuiltVotes,
    Capsules,
    ConvCapsules,
    ConvTypeCapsules,
    DeconvCapsules,
    DynamicRouting,
    PrimaryCapsules,
    Routed,
    Routing,
    Votes,
    join_types,
)
from torchcaps.nn.votes import columns
from torchcaps.parts import PARTS

Array = NDArray[np.float64]
EPS = 1e-7
T, K, J, D = 3, 4, 2, 5


class Case(NamedTuple):
    """A layer of 3 types of 4 components to 2 types of 5, on a map."""

    sizes: tuple[int, ...]
    kernel: int
    stride: int
    padding: Any = "same"
    up: str = ""
    dense: bool = False
    cosine: bool = False
    vote_bias: bool = False


CASES = [
    Case((9,), 3, 1),
    Case((8,), 5, 2),
    Case((9,), 5, 2, dense=True),
    Case((7,), 3, 2, 1, cosine=True),
    Case((4,), 4, 2, up="transposed"),
    Case((5,), 3, 2, up="nearest"),
    Case((5, 4), 3, 1),
    Case((6, 4), 5, 2),
    Case((6, 4), 5, 2, 2),
    Case((5, 7), 5, 2, dense=True, vote_bias=True),
    Case((5, 5), 3, 3, 0),
    Case((4, 5), 1, 1, cosine=True),
    Case((3, 2), 4, 2, up="transposed", vote_bias=True),
    Case((3, 2), 5, 2, up="transposed", dense=True),
    Case((3, 2), 3, 2, 1, up="transposed"),
    Case((2, 3), 3, 2, up="nearest", dense=True),
    Case((3, 4, 2), 3, 1, 1, cosine=True, vote_bias=True, dense=True),
    Case((4, 3, 5), 3, 2),
    Case((2, 3, 2), 2, 2, up="transposed", cosine=True),
]


def make(case: Case) -> ConvCapsules | DeconvCapsules:
    routing = DynamicRouting(3, capsule_bias=True, agreement="cosine" if case.cosine else "product",
                             squash="last" if case.cosine else "each", squash_eps=EPS)  # fmt: skip
    options: Any = {
        "dims": len(case.sizes),
        "layer_kernel": case.kernel,
        "layer_stride": case.stride,
        "layer_padding": case.padding,
        "transform": {"name": "dense" if case.dense else "shared", "weight_init": "normal", "weight_std": 0.2},
        "vote_bias": case.vote_bias,
        "routing": routing,
    }
    torch.manual_seed(0)
    if case.up:
        layer: Any = DeconvCapsules(T, K, J, D, upsampling=case.up, **options)  # type: ignore[arg-type]
    else:
        layer = ConvTypeCapsules(T, K, J, D, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer.double()


def draw_maps(case: Case, images: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(images, T * math.prod(case.sizes), K, generator=generator, dtype=torch.float64)


# ---- the equations once more, with loops over types, positions and the kernel


def out_sizes(case: Case) -> tuple[tuple[int, ...], int]:
    """Sizes of the output, and the zeros before the map, or the outputs cut off before the first."""
    k, s, p = case.kernel, case.stride, case.padding
    if case.up == "transposed":
        sizes = tuple(size * s if p == "same" else (size - 1) * s + k - 2 * p for size in case.sizes)
        return sizes, max(k - s, 0) // 2 if p == "same" else p
    if case.up == "nearest":
        assert p == "same"
        return tuple(size * s for size in case.sizes), (k - 1) // 2
    if p != "same":
        return tuple((size + 2 * p - k) // s + 1 for size in case.sizes), p
    return tuple(-(-size // s) for size in case.sizes), -1  # differs from axis to axis


def looked_at(case: Case, axis: int, at: int, before: int) -> Iterator[tuple[int, int]]:
    """Pairs of an input position and the kernel position that multiplies it, along an axis, for an output."""
    k, s, size = case.kernel, case.stride, case.sizes[axis]
    if case.up == "transposed":
        for place in range(size):
            if 0 <= at + before - s * place < k:
                yield place, at + before - s * place
        return
    if case.up == "nearest":
        for q in range(k):
            if 0 <= at + q - before < size * s:
                yield (at + q - before) // s, q
        return
    if before < 0:
        out = -(-size // s)
        before = max((out - 1) * s + k - size, 0) // 2
    for q in range(k):
        if 0 <= at * s + q - before < size:
            yield at * s + q - before, q


def routed(V: Tensor, bias: Tensor, cosine: bool) -> Tensor:
    """Three iterations over the votes (T, J, D) of a position."""
    b = V.new_zeros(T, J)
    for iteration in range(3):
        c = b.exp() / b.exp().sum(1, keepdim=True)
        x = bias + sum(c[t].unsqueeze(1) * V[t] for t in range(T))
        n = (x * x).sum(1, keepdim=True)
        v = n / (1 + n) * x / (n + EPS).sqrt()
        if iteration < 2 and cosine:
            b = b + torch.stack([(x * V[t]).sum(1) / (x.norm(dim=1) * V[t].norm(dim=1)) for t in range(T)])
        elif iteration < 2:
            b = b + torch.stack([(v * V[t]).sum(1) for t in range(T)])
    return v


def by_loops(case: Case, maps: Tensor, weight: Tensor, bias: Tensor, vote_bias: Tensor | None = None) -> Tensor:
    """The capsules (J·L', D) of one image (T, *S, K); weight (T, J, D, K, *k)."""
    sizes, before = out_sizes(case)
    out = []
    for at in itertools.product(*map(range, sizes)):
        V = weight.new_zeros(T, J, D) if vote_bias is None else vote_bias.expand(T, -1, -1)
        pairs = [list(looked_at(case, axis, place, before)) for axis, place in enumerate(at)]
        for chosen in itertools.product(*pairs):
            place, q = zip(*chosen, strict=True)
            seen, kernel = maps[(slice(None), *place)], weight[(..., *q)]
            V = V + torch.stack([kernel[t] @ seen[t] for t in range(T)])
        out.append(routed(V, bias, case.cosine))
    return torch.stack(out, 1).flatten(0, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_capsules_and_gradients_are_those_of_loops(case: Case) -> None:
    layer, poses = make(case), draw_maps(case)
    leaves = {"poses": poses.clone().requires_grad_(), **dict(layer.named_parameters())}
    weight = layer.transform.matrices.unflatten(-1, (K, *[case.kernel] * len(case.sizes)))
    weight = weight if case.dense else weight.expand(T, *weight.shape)
    by_image = [
        by_loops(case, image.unflatten(0, (T, *case.sizes)), weight, layer.routing.bias, layer.bias)
        for image in leaves["poses"]
    ]
    wanted = with_gradients({"capsules": torch.stack(by_image)}, leaves)
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        layer.to(dtype)
        leaves = {"poses": poses.to(dtype).requires_grad_(), **dict(layer.named_parameters())}
        got = layer(Capsules(leaves["poses"], grid=(T, *case.sizes)))
        assert got.grid == (J, *out_sizes(case)[0]) == layer.out_grid((T, *case.sizes))
        found = {name: each.double() for name, each in with_gradients({"capsules": got.poses}, leaves).items()}
        assert_same(found, wanted, tol)


def test_same_padding_is_tensorflows() -> None:
    """One zero before and two after an even map at kernel 5, stride 2: the loops' formula, by its numbers."""
    layer = make(Case((6, 4), 5, 2))
    assert [layer.window.zeros(size) for size in (4, 6, 5, 7)] == [(1, 2), (1, 2), (2, 2), (2, 2)]
    assert [layer.window.outputs(size) for size in (1, 4, 5)] == [1, 2, 3]


# ---- places as children, on lines and volumes


@pytest.mark.parametrize("sizes", [(7,), (4, 5), (3, 4, 3)], ids=str)
@pytest.mark.parametrize("padding", [0, 1, "same"])
def test_places_of_a_window_are_children_in_any_dimension(sizes: tuple[int, ...], padding: Any) -> None:
    """With the weights of a dense layer over one window."""
    dims = len(sizes)
    layer = ConvCapsules(T, K, J, D, dims=dims, layer_padding=padding, layer_stride=2).double()
    poses = torch.randn(2, T * math.prod(sizes), K, dtype=torch.float64)
    got = layer(Capsules(poses, grid=(T, *sizes)))
    index = layer.window_capsules((T, *sizes))  # from 1; 0 outside
    framed = torch.cat([poses.new_zeros(2, 1, K), poses], 1)[:, index]  # (B, L, I, K)
    votes = torch.einsum("ijdk,blik->blijd", layer.transform.matrices, framed).flatten(0, 1)
    wanted = dynamic_routing(votes).poses.unflatten(0, (2, -1)).transpose(1, 2)
    assert_close(got.poses, wanted.flatten(1, 2), 1e-10)
    centre = tuple(size // 2 for size in got.grid[1:])
    flat = int(np.ravel_multi_index(centre, got.grid[1:]))
    first = [2 * at - layer.window.zeros(size)[0] for at, size in zip(centre, sizes, strict=True)]
    wanted_index = [
        1 + int(np.ravel_multi_index((t, *(f + q for f, q in zip(first, place, strict=True))), (T, *sizes)))
        if all(0 <= f + q < size for f, q, size in zip(first, place, sizes, strict=True))
        else 0
        for t in range(T)
        for place in itertools.product(range(3), repeat=dims)
    ]
    assert index[flat].tolist() == wanted_index


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_primary_capsules_of_lines_planes_and_volumes(dims: int) -> None:
    sizes = (9, 7, 6)[:dims]
    for options in ({}, {"primary_norm": "batch", "primary_activation": "relu"}, {"primary_separate_convs": True},
                    {"primary_activations": True}, {"primary_activation": "relu"}):  # fmt: skip
        primary = PrimaryCapsules(5, dims=dims, primary_types=3, primary_dim=4, primary_kernel=3, **options).double()
        features = torch.randn(2, 5, *sizes, dtype=torch.float64)
        got = primary(features)
        assert got.grid == (3, *((size - 3) // 2 + 1 for size in sizes))
        assert got.poses.shape == (2, math.prod(got.grid), 4)
        if options.get("primary_activation") == "relu":
            assert got.poses.min() == 0
    said = f"features must have shape (B, C, {', '.join('ZHW'[-dims:])}), got"
    assert_raises(InputError, primary, torch.randn(2, 5, *sizes, 4, dtype=torch.float64), say=said)


# ---- every routing


def all_rows(layer: Any, capsules: Capsules) -> dict[str, Tensor]:
    """What the routing gives for the votes of all positions, each row on its own, from built votes."""
    votes, active = layer.votes(capsules)
    built = BuiltVotes(votes.build(), votes.poses).masked(votes.mask)
    found = layer.routing(built, active, return_coupling=True)
    return {name: each for name, each in found._asdict().items() if each is not None}


ROUTINGS: dict[str, Any] = {name: name for name in PARTS["routing"]} | {
    "b2i with queries": {"name": "b2i", "start_from": "queries"},
    "dynamic, over inputs": {"name": "dynamic", "softmax_over": "inputs", "leaky": True},
    "dynamic, leaky": {"name": "dynamic", "leaky": True, "learn_prior": True},
    "dynamic, cosine and last": {"name": "dynamic", "agreement": "cosine", "squash": "last"},
    "dynamic, cosine": {"name": "dynamic", "agreement": "cosine"},
    "dynamic, last": {"name": "dynamic", "squash": "last"},
    "grouped em": {"name": "grouped", "num_groups": 4, "group_routing": "em"},
}


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_votes_of_columns_route_as_built_votes_do(routing: str, dims: int, active: bool) -> None:
    sizes = (6, 3, 2)[:dims]
    for layer in (
        ConvTypeCapsules(4, 4, 3, 4, dims=dims, layer_padding="same", transform="shared",
                     routing=ROUTINGS[routing]),
        DeconvCapsules(4, 4, 3, 4, dims=dims, transform="dense", routing=ROUTINGS[routing]),
    ):  # fmt: skip
        layer.double().eval()
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        poses = torch.randn(2, 4 * math.prod(sizes), 4, dtype=torch.float64).requires_grad_()
        given = torch.rand(2, 4 * math.prod(sizes), dtype=torch.float64) if active else None
        mask = torch.rand(2, 4 * math.prod(sizes)) > 0.3
        leaves = {"poses": poses} | dict(layer.named_parameters())
        for capsules in (Capsules(poses, given, (4, *sizes)), Capsules(poses, given, (4, *sizes), mask)):
            wanted = all_rows(layer, capsules)
            got = {k: v for k, v in layer.route(capsules, return_coupling=True)._asdict().items() if v is not None}
            assert_same(with_gradients(got, leaves), with_gradients(wanted, leaves), 1e-9, routing)


def test_poses_of_a_position_are_means_of_what_it_sees() -> None:
    layer = ConvTypeCapsules(1, 1, 2, 2, dims=1, layer_padding=1, transform="shared")
    mask = torch.tensor([[True, True, False, True]])
    poses = torch.tensor([[[1.0], [2.0], [9.0], [4.0]]])
    votes, active = layer.votes(Capsules(poses, poses[..., 0] / 10, (1, 4)))
    assert votes.poses.flatten().tolist() == [1.5, 4.0, 5.0, 6.5]
    assert_close(active.flatten(), [0.15, 0.4, 0.5, 0.65])
    votes, active = layer.votes(Capsules(poses, poses[..., 0] / 10, (1, 4), mask))
    assert votes.poses.flatten().tolist() == [1.5, 1.5, 3.0, 4.0]
    assert_close(active.flatten(), [0.15, 0.15, 0.3, 0.4])
    assert votes.mask.all()
    alone = torch.tensor([[False, False, False, True]])
    assert layer.votes(Capsules(poses, None, (1, 4), alone))[0].mask.flatten().tolist() == [False, False, True, True]
    up = DeconvCapsules(1, 1, 2, 2, dims=1)
    assert up.votes(Capsules(poses, None, (1, 4)))[0].poses.flatten().tolist() == [
        1.0,
        1.5,
        1.5,
        5.5,
        5.5,
        6.5,
        6.5,
        4.0,
    ]


# ---- skips


def test_types_are_joined() -> None:
    first = Capsules(torch.randn(2, 12, 4), torch.rand(2, 12), (2, 3, 2))
    second = Capsules(torch.randn(2, 18, 4), None, (3, 3, 2), torch.rand(2, 18) > 0.5)
    both = join_types(first, second)
    assert both.grid == (5, 3, 2)
    assert both.poses.equal(torch.cat([first.poses, second.poses], 1))
    assert both.activations.equal(torch.cat([first.activations, second.scores()], 1))
    assert both.mask.equal(torch.cat([torch.ones(2, 12, dtype=torch.bool), second.mask], 1))
    assert join_types(second._replace(mask=None))[1:] == (None, (3, 3, 2), None)


def test_what_does_not_fit_gets_one_sentence() -> None:
    volume, plane = Capsules(torch.randn(1, 8, 4), grid=(1, 2, 2, 2)), Capsules(torch.randn(1, 4, 6), grid=(1, 2, 2))
    for given, said in (
        ((volume, plane), "joined types must have as many components, got 4 and 6; give the layers one capsule_dim"),
        ((plane, plane._replace(grid=(1, 4, 1))), "joined maps must have one size, got 2×2 and 4×1"),
        ((plane, plane._replace(grid=None)), "join_types: capsules must have a grid"),
    ):
        assert_raises(InputError, join_types, *given, say=said)
    layer = ConvTypeCapsules(1, 6, 2, 2, transform="shared")
    said = "ConvTypeCapsules: dims is 2, so the map must have types, height and width, got (1, 2, 2, 2)"
    assert_raises(InputError, layer, volume, say=said)
    assert_raises(InputError, layer, plane, say="height and width of at least 3, got (1, 2, 2)")
    for kind, options, said in (
        (ConvTypeCapsules, {"transform": "identity"}, 'the transform "shared" or "dense", got Identity'),
        (ConvCapsules, {"voters": "types"}, 'there is no option voters any more: the layer "conv-types" has votes of'),
        (ConvCapsules, {"dims": 4}, "dims must be 1 to 3, got 4"),
        (ConvCapsules, {"layer_padding": "full"}, "layer_padding must be"),
        (DeconvCapsules, {"layer_kernel": 1}, "layer_kernel must be at least layer_stride, 2, or some outputs get no"),
        (DeconvCapsules, {"layer_padding": 4}, "layer_padding must be below layer_kernel, 4, got 4"),
    ):
        assert_raises(InputError, kind, 1, 4, 2, 4, **options, say=said)


# ---- large maps: votes of a slab at a time


@pytest.fixture
def tiny_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the maps of these tests along every axis, and slabs into blocks."""
    monkeypatch.setattr(slabs, "SLAB_MIB", 1500 / 2**20)
    monkeypatch.setattr(slabs, "BLOCK_BYTES", 600)


def all_at_once(layer: Any, capsules: Capsules, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients of the plain formula, as graphs take it."""
    with pytest.MonkeyPatch.context() as patch:
        plain_formulas(patch)
        patch.setattr(columns, "is_graph_capture", lambda: True)
        return with_gradients(capsule_tensors(layer(capsules)), leaves)


def capsule_tensors(capsules: Capsules) -> dict[str, Any]:
    return {"poses": capsules.poses, "activations": capsules.activations}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("tiny_slabs")
def test_slabs_give_what_all_votes_at_once_give(case: Case) -> None:
    for dtype, tol in ((torch.float64, 1e-11), (torch.float32, 1e-6)):
        layer, poses = make(case).to(dtype), draw_maps(case, 3).to(dtype).requires_grad_()
        capsules = Capsules(poses, grid=(T, *case.sizes))
        leaves = {"poses": poses, **dict(layer.named_parameters())}
        got = with_gradients(capsule_tensors(layer(capsules)), leaves)
        assert_same(got, all_at_once(layer, capsules, leaves), tol)
        with torch.no_grad():
            assert_close(layer(capsules).poses, got["poses"], tol)


@pytest.mark.slow
@pytest.mark.parametrize("with_poses", [None, "activations", "mask"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.usefixtures("tiny_slabs")
def test_every_routing_gives_the_same_slab_by_slab(
    routing: str, with_poses: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small maps, cut between images and lines; the test above cuts inside lines too.

    Activations and masks are tried on planes only.
    """
    monkeypatch.setattr(slabs, "SLAB_MIB", 3000 / 2**20)  # votes of six positions
    for sizes in ((4, 3),) if with_poses else ((7,), (4, 3), (2, 3, 3)):
        options: Any = {"dims": len(sizes), "routing": ROUTINGS[routing], "vote_bias": True}
        for layer in (
            ConvTypeCapsules(4, 4, 3, 4, layer_stride=2, layer_padding=1, transform="dense", **options),
            DeconvCapsules(4, 4, 3, 4, **options),
        ):
            layer.double().eval()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
            number = 4 * math.prod(sizes)
            poses = torch.randn(2, number, 4, dtype=torch.float64).requires_grad_()
            active = torch.rand(2, number, dtype=torch.float64) if with_poses == "activations" else None
            mask = torch.rand(2, number) > 0.6 if with_poses == "mask" else None
            capsules = Capsules(poses, active, (4, *sizes), mask)
            leaves = {"poses": poses, **dict(layer.named_parameters())}
            got = with_gradients(capsule_tensors(layer(capsules)), leaves)
            assert_same(got, all_at_once(layer, capsules, leaves), 1e-9, (routing, sizes))


def test_a_map_is_cut_by_images_lines_and_the_next_axis() -> None:
    window = Window(3, 1, 0)
    for images, outs, most, wanted in (
        (8, (6, 5), 30 * 2, (4, 1, 1)),
        (8, (6, 5), 10, (8, 3, 1)),
        (2, (6, 5), 4, (2, 6, 2)),
        (1, (4, 6, 5), 10, (1, 4, 3, 1)),
    ):
        found = window.slabs(images, [size + 2 for size in outs], outs, 1, most)
        covered = torch.zeros(images, *outs)
        for slab in found:
            covered[slab.images][(slice(None), *(slice(piece.start, piece.stop) for piece in slab.axes))] += 1
            assert slab.outputs(covered).numel() <= most
            assert [piece.length for piece in slab.axes] == [size + 2 for size in slab.sizes]
        assert covered.eq(1).all()
        starts = [(slab.images.start, *(piece.start for piece in slab.axes)) for slab in found]
        assert tuple(len(set(each)) for each in zip(*starts, strict=True)) == wanted


class Drawn(Routing):
    """Weighs the sums of the votes with random numbers."""

    def forward(self, votes: Votes, activations: Any = None, *, return_coupling: bool = False) -> Routed:
        total = votes.weighted_sum(None)
        return Routed(total * torch.rand_like(total))


@pytest.mark.usefixtures("tiny_slabs")
def test_a_slab_is_computed_again_with_the_same_random_numbers() -> None:
    layer = ConvTypeCapsules(4, 4, 3, 4, transform="shared", routing=Drawn()).double()
    poses = torch.randn(1, 4 * 30, 4, dtype=torch.float64).requires_grad_()
    torch.manual_seed(3)
    out = layer(Capsules(poses, None, (4, 6, 5))).poses.sum()
    torch.manual_seed(99)
    (grad,) = torch.autograd.grad(out, poses)
    assert_close((grad * poses).sum(), out.item(), 1e-10)  # the sum is linear in the poses


@pytest.mark.usefixtures("tiny_slabs")
@pytest.mark.parametrize("routing", ["dynamic", "self", {"name": "dynamic", "agreement": "cosine", "squash": "last"}])
def test_second_derivatives_of_slabs(routing: Any) -> None:
    layer = ConvTypeCapsules(3, 4, 2, 4, layer_padding=1, transform="shared", routing=routing).double()
    poses = torch.randn(1, 3 * 12, 4, dtype=torch.float64).requires_grad_()
    leaves = {"poses": poses, **dict(layer.named_parameters())}
    capsules = Capsules(poses, None, (3, 4, 3))
    got = second_derivatives({"poses": layer(capsules).poses}, leaves)
    with pytest.MonkeyPatch.context() as patch:
        plain_formulas(patch)
        patch.setattr(columns, "is_graph_capture", lambda: True)
        wanted = second_derivatives({"poses": layer(capsules).poses}, leaves)
    assert_same(got, wanted, 1e-9)


class Mixing(DynamicRouting):
    """Subtracts the mean over rows, and says that it looks at several."""

    by_row = False

    def forward(self, votes: Any, activations: Any = None, *, return_coupling: bool = False) -> Any:
        routed = super().forward(votes, activations, return_coupling=return_coupling)
        return routed._replace(poses=routed.poses - routed.poses.mean(0))


@pytest.mark.usefixtures("tiny_slabs")
def test_a_routing_that_mixes_rows_gets_all_of_them() -> None:
    layer = ConvTypeCapsules(3, 4, 2, 4, transform="shared", routing=Mixing())
    seen: list[int] = []
    layer.routing.register_forward_pre_hook(lambda _, given: seen.append(given[0].like.shape[0]))
    layer(Capsules(torch.randn(2, 3 * 42, 4), None, (3, 7, 6)))
    assert seen == [2 * 5 * 4]
    alone = ConvTypeCapsules(3, 4, 2, 4, transform="shared", routing="vb").train()
    assert not alone.routing.by_row
    assert not ConvTypeCapsules(4, 4, 2, 4, transform="shared",
                            routing={"name": "grouped", "group_routing": "vb"}).routing.by_row  # fmt: skip


@pytest.mark.usefixtures("tiny_slabs")
def test_graphs_and_functions_of_torch_func_take_the_plain_formula() -> None:
    layer = ConvTypeCapsules(3, 4, 2, 4, layer_padding=1, transform="shared")
    poses = torch.randn(2, 3 * 30, 4)

    def called(poses: Tensor) -> Tensor:
        return layer(Capsules(poses, None, (3, 6, 5))).poses

    wanted = called(poses)
    assert_close(torch.vmap(lambda one: called(one[None])[0])(poses), wanted, 1e-5)
    _, tangent = torch.func.jvp(called, (poses,), (torch.ones_like(poses),))
    assert tangent.shape == wanted.shape
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    assert_close(compiled(poses), wanted, 1e-5)
    exported = torch.export.export(OnMap(layer, (3, 6, 5)), (poses,))
    assert_close(exported.module()(poses), wanted, 1e-5)


class OnMap(torch.nn.Module):
    def __init__(self, layer: Any, grid: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, poses: Tensor) -> Tensor:
        return self.layer(Capsules(poses, None, self.grid)).poses


def test_pruned_weights_are_used_and_trained() -> None:
    """Pruning computes the weight in a hook of the transform, which has to be called."""
    layer = ConvTypeCapsules(3, 4, 2, 4, transform="shared")
    prune.random_unstructured(layer.transform, "weight", amount=0.5)
    capsules = Capsules(torch.randn(1, 3 * 20, 4), None, (3, 5, 4))
    before = layer(capsules).poses
    before.sum().backward()
    with torch.no_grad():
        layer.transform.weight_orig += 1
    assert not layer(capsules).poses.allclose(before)
    assert layer.transform.weight_orig.grad.count_nonzero() <= layer.transform.weight_mask.sum()


@pytest.mark.usefixtures("tiny_slabs")
def test_a_map_of_zeros_has_finite_gradients() -> None:
    """Even if nothing is added under the root, as in SegCaps."""
    routing = DynamicRouting(3, squash_eps=1e-24)
    layer = ConvTypeCapsules(3, 4, 2, 4, layer_padding=1, transform="shared", routing=routing)
    poses = torch.zeros(1, 3 * 30, 4, requires_grad=True)
    leaves = {"poses": poses, **dict(layer.named_parameters())}
    capsules = Capsules(poses, None, (3, 6, 5))
    got = with_gradients(capsule_tensors(layer(capsules)), leaves)
    assert_finite(got.values())
    assert_same(got, all_at_once(layer, capsules, leaves))
