"""Capsule layers, alone and stacked: dense ones against routing of built votes, those on a map against windows."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import (
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    assert_sums_to_one,
)
from torchcaps import compute_votes, dynamic_routing, margin_loss, squash
from torchcaps.nn import (
    Capsules,
    ConvCapsules,
    Dense,
    DenseCapsules,
    DynamicRouting,
    Elementwise,
    Matrix,
    PrimaryCapsules,
    Routed,
    Routing,
    Shared,
    Votes,
)

# ---- what flows


def test_scores_are_activations_or_else_lengths() -> None:
    poses = torch.tensor([[[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]]])
    assert_close(Capsules(poses).scores(), torch.tensor([[5.0, 0.5, 1e-7**0.5]]), 1e-5)
    assert_close(Capsules(poses).scores(1e-2)[0, 2], 0.1)
    activations = torch.tensor([[0.1, 0.9, 0.5]])
    assert Capsules(poses, activations).scores() is activations
    assert Capsules.of(poses) == Capsules(poses)
    given = Capsules(poses, activations, (3, 1, 1))
    assert Capsules.of(given) is given


# ---- dense capsules


def test_dense_capsules_are_routing_with_a_weight() -> None:
    poses = torch.randn(2, 6, 3)
    for options in ({}, {"bias": True}, {"bias": True, "learn_prior": True}):
        routing = DynamicRouting(2, softmax_over="inputs", leaky=True, **options)
        layer = DenseCapsules(6, 3, 4, 5, routing=routing)
        if routing.prior is not None:
            assert_close(routing.prior, 0.0)
            nn.init.normal_(routing.prior)
        wanted = dynamic_routing(
            compute_votes(poses, layer.transform.weight),
            2,
            softmax_over="inputs",
            leaky=True,
            bias=routing.bias,
            prior=routing.prior,
            return_coupling=True,
        )
        capsules = layer(poses)
        assert_close(capsules.poses, wanted[0], 1e-5)
        assert capsules[1:] == (None, None)
        assert layer(Capsules(poses)).poses.equal(capsules.poses)
        routed = layer.route(poses, return_coupling=True)
        assert_close(routed.poses, wanted[0], 1e-5)
        assert_close(routed.coupling, wanted[1], 1e-5)
        layer(poses).poses.square().sum().backward()
        assert_gradients_reach(layer)


def test_default_routing_and_transform_are_the_papers() -> None:
    layer = DenseCapsules(6, 3, 4, 5)
    assert (layer.routing.num_iterations, layer.routing.softmax_over) == (3, "outputs")
    assert isinstance(layer.transform, Dense)
    assert layer.size == (layer.in_capsules, layer.in_dim, layer.out_capsules, layer.out_dim) == (6, 3, 4, 5)
    assert layer.route(torch.randn(2, 6, 3)).coupling is None
    coupling = layer.route(torch.randn(2, 6, 3), return_coupling=True).coupling
    assert coupling is not None
    assert_sums_to_one(coupling, "outputs")


def deviation(layer: DenseCapsules) -> float:
    return layer.transform.weight.std().item()


def test_initial_weights() -> None:
    sizes = (50, 8, 10, 16)  # I, K, J, D: 64,000 weights
    assert deviation(DenseCapsules(*sizes, transform=Dense("normal", 0.3))) == pytest.approx(0.3, rel=0.02)
    assert deviation(DenseCapsules(*sizes, transform=Dense("fan-in"))) == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    cut = DenseCapsules(*sizes, transform=Dense("truncated-normal", 0.1))
    assert cut.transform.weight.abs().max() <= 0.2
    assert deviation(cut) == pytest.approx(0.0880, rel=0.02)  # a normal cut at two deviations keeps 0.880 of one
    assert_close(DenseCapsules(*sizes, routing=DynamicRouting(bias=True)).routing.bias, 0.1)
    assert deviation(DenseCapsules(*sizes)) == pytest.approx(10 / math.sqrt(50 * 16), rel=0.02)
    for axis, iterations, wanted in (
        ("inputs", 1, math.sqrt(50 / 16)),
        ("inputs", 2, (50 / 16) ** (1 / 4)),
        ("inputs", 3, (50 / 16) ** (1 / 5)),
        ("inputs", 100, (50 / 16) ** (1 / 6)),
        ("outputs", 1, 10 / math.sqrt(50 * 16)),
        ("outputs", 0, 1 / math.sqrt(50 * 16)),
        ("inputs", 0, 1 / math.sqrt(50 * 16)),
    ):
        layer = DenseCapsules(*sizes, routing=DynamicRouting(iterations, softmax_over=axis))
        assert deviation(layer) == pytest.approx(wanted, rel=0.02), (axis, iterations)


def test_reset_draws_anew_and_the_seed_repeats() -> None:
    layer = DenseCapsules(6, 3, 4, 5)
    before = layer.transform.weight.detach().clone()
    torch.manual_seed(1)
    layer.transform.reset_parameters()
    assert_differs(layer.transform.weight, before)
    torch.manual_seed(1)
    assert_close(DenseCapsules(6, 3, 4, 5).transform.weight, layer.transform.weight, 0)


def test_weight_keeps_its_memory_layout() -> None:
    layer = DenseCapsules(6, 3, 4, 5)
    poses = torch.randn(2, 6, 3)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), DenseCapsules(6, 3, 4, 5)]
    others[2].load_state_dict(layer.state_dict())
    for other in others:
        weight = other.transform.weight
        assert weight.shape == (6, 4, 5, 3)
        assert weight.permute(1, 2, 3, 0).is_contiguous()
        assert_close(other(poses).poses, layer(poses).poses, 0)
    assert layer.double().transform.weight.permute(1, 2, 3, 0).is_contiguous()


@pytest.mark.parametrize("kind", [DenseCapsules, ConvCapsules])
def test_bad_sizes_and_parts(kind: Any) -> None:
    names = {DenseCapsules: ("in_capsules", "in_dim", "out_capsules", "out_dim")}.get(
        kind, ("in_types", "in_dim", "out_types", "out_dim")
    )
    said = kind.__name__
    for place, name in enumerate(names):
        sizes = [2, 2, 2, 2]
        sizes[place] = 0
        assert_raises(ValueError, kind, *sizes, say=f"{said}: {name} must be at least 1, got 0")
        sizes[place] = 2.0
        assert_raises(TypeError, kind, *sizes, say=f"{said}: {name} must be an integer")
    for name, wrong in (("transform", DynamicRouting()), ("routing", Dense()), ("routing", DynamicRouting)):
        what = f"{said}: {name} must be a {name.capitalize()} or None, got {type(wrong).__name__}"
        assert_raises(TypeError, kind, 2, 2, 2, 2, **{name: wrong}, say=what)
    routing = DynamicRouting(bias=True)
    kind(2, 2, 2, 2, routing=routing)
    what = "DynamicRouting: a routing with parameters belongs to one layer; make one for each"
    assert_raises(ValueError, kind, 2, 2, 2, 2, routing=routing, say=what)


def test_poses_that_do_not_fit() -> None:
    layer, said = DenseCapsules(6, 3, 4, 5), "DenseCapsules: poses must "
    for call in (layer, layer.route):
        for wrong, why in (
            ((2, 5, 3), "in_capsules is 6, got 5"),
            ((2, 6, 4), "in_dim is 3, got 4"),
            ((2, 5, 4), "in_capsules is 6, got 5, in_dim is 3, got 4"),
        ):
            what = f"{said}have shape (B, 6, 3), got {wrong}: {why}"
            assert_raises(ValueError, call, torch.ones(wrong), say=what)
        assert_raises(ValueError, call, Capsules(torch.ones(6, 3)), say=said + "have shape (B, 6, 3), got (6, 3)")
        assert_raises(TypeError, call, torch.ones(2, 6, 3, dtype=torch.int64), say=said + "be a floating-point tensor")
        assert_raises(TypeError, call, [1.0], say=said + "be a floating-point tensor, got list")


# ---- stacks

STACKS = {"two": [(32, 8), (16, 8), (4, 16)], "three": [(32, 8), (16, 8), (8, 8), (4, 16)]}


def stack(sizes: list[tuple[int, int]], axis: Any) -> nn.Sequential:
    """DenseCapsules from (capsules, components) to the next, as they start by default."""
    return nn.Sequential(
        *(
            DenseCapsules(I, K, J, D, routing=DynamicRouting(softmax_over=axis))
            for (I, K), (J, D) in itertools.pairwise(sizes)
        )
    )


def problem(length: float = 0.7, images: int = 64) -> tuple[Tensor, Tensor]:
    """Capsules of a given length that point, with noise, where their class says."""
    labels = torch.arange(images) % 4
    poses = torch.randn(4, 32, 8)[labels] + torch.randn(images, 32, 8)
    return length * poses / poses.norm(dim=-1, keepdim=True), labels


def learn(network: nn.Module, poses: Tensor, labels: Tensor, steps: int) -> list[float]:
    """The losses of each step of Adam; every parameter is reached in each of them."""
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    losses = []
    for _ in range(steps):
        loss = margin_loss(network(poses).scores(), labels)
        optimizer.zero_grad()
        loss.backward()
        assert_gradients_reach(network)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("depth", STACKS)
def test_stacks_train_from_their_default_initialisation(depth: str, axis: Any) -> None:
    network = stack(STACKS[depth], axis)
    poses, labels = problem()
    losses = learn(network, poses, labels, 50)
    assert_finite([torch.tensor(losses)])
    assert losses[-1] < 0.6 * losses[0], losses
    accuracy = (network(poses).scores().argmax(-1) == labels).float().mean()
    assert accuracy > 0.9, accuracy
    for layer in network:  # no output capsule is dead: each one's length depends on the image
        poses = layer(poses).poses
        assert (poses.norm(dim=-1).std(0) > 1e-3).all()


@pytest.mark.parametrize(("axis", "trains"), [("outputs", True), ("inputs", False)])
def test_a_stack_of_three_fed_with_short_poses(axis: Any, trains: bool) -> None:
    """What DenseCapsules says of itself; if short poses come to train over inputs, too, it must say so."""
    assert "of length 0.2, over outputs they trained, over inputs they stayed" in inspect.cleandoc(
        DenseCapsules.__doc__ or ""
    ).replace("\n", " ")
    poses, labels = problem(0.2)
    losses = learn(stack(STACKS["three"], axis), poses, labels, 200)
    assert losses[-1] < 0.5 * losses[0] if trains else losses[-1] > 0.99 * losses[0], losses[::20]


@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("sizes", [(1152, 8, 10, 16), (32, 8, 10, 16), (64, 8, 32, 8), (4, 16, 4, 16), (300, 4, 2, 8)])
@pytest.mark.parametrize("num_iterations", [1, 2, 3, 4])
def test_lengths_start_neither_short_nor_saturated(sizes: tuple[int, ...], axis: Any, num_iterations: int) -> None:
    I, K, *_ = sizes
    poses = torch.randn(16, I, K)
    poses = poses / poses.norm(dim=-1, keepdim=True)
    layer = DenseCapsules(*sizes, routing=DynamicRouting(num_iterations, softmax_over=axis))
    lengths = layer(poses).poses.norm(dim=-1)
    assert 0.35 < lengths.mean() < 0.97, lengths.mean()
    assert (lengths.std(0) > 1e-3).all()


# ---- a routing of one's own


class MeanRouting(Routing):
    """Every vote counts alike."""

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        coupling = votes.compete(votes.zeros())
        return Routed(squash(votes.weighted_sum(coupling)), coupling=coupling if return_coupling else None)


class Certain(MeanRouting):
    """Capsules that say how certain they are: the largest activation of those that came in, or else a half."""

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        routed = super().forward(votes, activations, return_coupling=return_coupling)
        certain = votes.poses.new_full((), 0.5) if activations is None else activations.amax(1, keepdim=True)
        return routed._replace(activations=certain.expand(routed.poses.shape[:2]))


def test_a_routing_of_ones_own() -> None:
    poses = torch.randn(2, 6, 3)
    own = DenseCapsules(6, 3, 4, 5, routing=MeanRouting())
    one = DenseCapsules(6, 3, 4, 5, routing=DynamicRouting(1))
    one.load_state_dict(own.state_dict())
    assert_close(own(poses).poses, one(poses).poses)
    mine, theirs = (layer.route(poses, return_coupling=True).coupling for layer in (own, one))
    assert mine is not None
    assert theirs is not None
    assert_close(mine, theirs)
    own(poses).poses.sum().backward()
    assert_gradients_reach(own)


def test_activations_go_from_layer_to_layer() -> None:
    first = DenseCapsules(6, 3, 4, 5, routing=Certain())
    second = DenseCapsules(4, 5, 2, 5, routing=Certain())
    poses, activations = torch.randn(2, 6, 3), torch.rand(2, 6)
    assert_close(second(first(poses)).scores(), 0.5)
    assert_close(second(first(Capsules(poses, activations))).scores(), activations.amax(1)[:, None].expand(2, 2))


# ---- capsules on a map

TYPES, IN_DIM = 3, 4  # of the maps below


def maps(height: int = 6, width: int = 5, batch: int = 2, dim: int = IN_DIM) -> Capsules:
    """Random capsules on a map, as primary capsules give them."""
    return Capsules(torch.randn(batch, TYPES * height * width, dim), grid=(TYPES, height, width))


def by_windows(layer: ConvCapsules, capsules: Capsules, batch: int) -> list[list[Tensor]]:
    """The poses (types · k · k, K) of each window of an image, zeros beyond the edge, by index."""
    assert capsules.grid is not None
    types, height, width = capsules.grid
    k, stride, padding = layer.kernel_size, layer.stride, layer.padding
    windows = []
    for top in range(-padding, height + padding - k + 1, stride):
        windows.append([])
        for left in range(-padding, width + padding - k + 1, stride):
            window = torch.zeros(types * k * k, capsules.poses.shape[2])
            for t, y, x in itertools.product(range(types), range(k), range(k)):
                if 0 <= top + y < height and 0 <= left + x < width:
                    capsule = (t * height + top + y) * width + left + x
                    window[(t * k + y) * k + x] = capsules.poses[batch, capsule]
            windows[-1].append(window)
    return windows


WINDOWS = [(3, 1, 0), (3, 2, 1), (2, 3, 1), (1, 1, 0), (3, 1, 2)]
"""Kernel, stride, padding."""


@pytest.mark.parametrize("transform", [Dense, Shared, Elementwise, Matrix])
@pytest.mark.parametrize("window", WINDOWS)
def test_each_position_is_a_dense_layer_of_its_window(window: tuple[int, int, int], transform: Any) -> None:
    kernel, stride, padding = window
    layer = ConvCapsules(
        TYPES, IN_DIM, 2, IN_DIM, kernel_size=kernel, stride=stride, padding=padding, transform=transform()
    )
    dense = DenseCapsules(TYPES * kernel**2, IN_DIM, 2, IN_DIM, transform=transform())
    dense.load_state_dict(layer.state_dict())
    capsules = maps()
    poses, activations, grid = layer(capsules)
    rows = by_windows(layer, capsules, 1)
    assert grid == (2, len(rows), len(rows[0]))
    assert activations is None
    assert poses.shape == (2, 2 * len(rows) * len(rows[0]), IN_DIM)
    for y, row in enumerate(rows):
        for x, each in enumerate(row):
            wanted = dense(each[None]).poses[0]
            for t in range(2):  # capsule (type · H + y) · W + x
                assert_close(poses[1, (t * len(rows) + y) * len(row) + x], wanted[t], 1e-5)


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
def test_a_kernel_of_the_whole_map_is_a_dense_layer(compete_over: Any) -> None:
    capsules = maps(4, 4)
    layer = ConvCapsules(TYPES, IN_DIM, 5, 7, kernel_size=4, compete_over=compete_over)
    dense = DenseCapsules(TYPES * 16, IN_DIM, 5, 7)
    dense.load_state_dict(layer.state_dict())
    got, wanted = layer.route(capsules, return_coupling=True), dense.route(capsules, return_coupling=True)
    assert_close(got.poses, wanted.poses, 1e-5)
    assert got.coupling is not None
    assert wanted.coupling is not None
    assert_close(got.coupling, wanted.coupling, 1e-5)
    assert layer(capsules).grid == (5, 1, 1)


@pytest.mark.parametrize("transform", [Dense, Shared])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_capsule_shares_itself_out(window: tuple[int, int, int], leaky: bool, transform: Any) -> None:
    """Over the types of each window, or over those of all windows that hold it."""
    kernel, stride, padding = window
    capsules = maps()
    for compete_over in ("types", "types-and-positions"):
        layer = ConvCapsules(
            TYPES,
            IN_DIM,
            2,
            6,
            kernel_size=kernel,
            stride=stride,
            padding=padding,
            compete_over=compete_over,
            routing=DynamicRouting(2, leaky=leaky),
            transform=transform("normal", 0.1),
        )
        coupling = layer.route(capsules, return_coupling=True).coupling
        assert coupling is not None
        assert capsules.grid is not None
        children = layer.window_capsules(capsules.grid)  # (L, I), from 1
        totals = coupling.unflatten(0, (2, -1)).sum(3)  # of each window's capsules
        if compete_over == "types-and-positions":
            of_capsules = torch.zeros(2, math.prod(capsules.grid) + 1)
            of_capsules.index_add_(1, children.flatten(), totals.flatten(1))
            totals = of_capsules[:, children[children > 0].unique()]
        assert (totals < 0.999).all() if leaky else torch.allclose(totals, torch.ones(()), atol=1e-5)
        assert (totals > 0).all()


@pytest.mark.parametrize("compete_over", ["types", "types-and-positions"])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 1, 12), (3, 2, 12), (5, 2, 15), (2, 3, 9), (3, 1, 6)])
def test_capsules_on_a_map_start_neither_short_nor_saturated(
    kernel: int, stride: int, size: int, compete_over: Any
) -> None:
    capsules = maps(size, size, batch=4, dim=8)
    capsules = capsules._replace(poses=capsules.poses / capsules.poses.norm(dim=-1, keepdim=True))
    layer = ConvCapsules(TYPES, 8, 4, 8, kernel_size=kernel, stride=stride, compete_over=compete_over)
    lengths = layer(capsules).scores()
    assert 0.35 < lengths.mean() < 0.97, lengths.mean()
    assert lengths.std(0).mean() > 0.02


def test_rivals_decide_alike_in_any_image() -> None:
    """Coupling over positions, and its gradient, by a softmax written out for one capsule after the other."""
    capsules = maps(4, 3)
    layer = ConvCapsules(
        TYPES, IN_DIM, 2, 6, kernel_size=2, compete_over="types-and-positions", routing=DynamicRouting(2)
    ).double()
    poses = capsules.poses.double().requires_grad_()
    got = layer.route(capsules._replace(poses=poses), return_coupling=True)
    assert capsules.grid is not None
    children = layer.window_capsules(capsules.grid)
    votes, _ = layer.votes(capsules._replace(poses=poses))
    built = votes.build()  # (B·L, I, J, D)

    def coupling(logits: Tensor) -> Tensor:
        powers = logits.unflatten(0, (2, -1)).exp()  # (B, L, I, J)
        same = (children[:, :, None, None] == children).double()  # (L, I, L, I)
        total = torch.einsum("limn,bmnj->bli", same, powers)
        return (powers / total[..., None]).flatten(0, 1)

    logits = torch.zeros(built.shape[:3]).double()
    first = squash(torch.einsum("nij,nijd->njd", coupling(logits), built))
    second = coupling(torch.einsum("nijd,njd->nij", built, first))
    wanted = squash(torch.einsum("nij,nijd->njd", second, built))
    assert got.coupling is not None
    assert_close(got.coupling, second, 1e-8)
    assert_close(got.poses, wanted, 1e-8)
    leaves = (poses, layer.transform.weight)
    cotangent = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(got.poses, leaves, cotangent), torch.autograd.grad(wanted, leaves, cotangent), strict=True
    ):
        assert_close(mine, theirs, 1e-8)


def test_activations_come_from_the_window_and_go_onto_the_map() -> None:
    capsules = maps()
    activations = torch.rand(2, capsules.poses.shape[1])
    layer = ConvCapsules(TYPES, IN_DIM, 2, 6, stride=2, padding=1, routing=Certain())
    poses, got, grid = layer(capsules._replace(activations=activations))
    assert got is not None
    assert grid == (2, 3, 3)
    assert got.shape == poses.shape[:2]
    windows = by_windows(layer, Capsules(activations[..., None], grid=capsules.grid), 1)
    wanted = torch.tensor([[float(window.max()) for window in row] for row in windows])
    assert_close(got[1].view(2, 3, 3), wanted.expand(2, 3, 3))
    assert_close(layer(capsules).activations, 0.5)


def test_primary_conv_conv_dense() -> None:
    """A network of four capsule layers: shapes, gradients, and images that do not mix."""
    primary = PrimaryCapsules(4, TYPES, IN_DIM, kernel_size=3, stride=1, output="unit")
    layers = [
        ConvCapsules(TYPES, IN_DIM, 4, 6, compete_over="types-and-positions", routing=DynamicRouting(2, bias=True)),
        ConvCapsules(4, 6, 2, 9, stride=2, padding=1, transform=Shared()),
        DenseCapsules(2 * 2 * 3, 9, 5, 9, transform=Matrix()),
    ]
    network = nn.Sequential(primary, *layers)
    features = torch.randn(3, 4, 7, 9)
    grids = [layer(features).grid for layer in (nn.Sequential(*network[:n]) for n in (1, 2, 3))]
    assert grids == [(3, 5, 7), (4, 3, 5), (2, 2, 3)]
    capsules = network(features)
    assert capsules.poses.shape == (3, 5, 9)
    assert capsules.grid is None
    assert capsules.poses.norm(dim=-1).min() > 0.01
    capsules.poses.square().sum().backward()
    assert_gradients_reach(network)
    assert_batch_independent(lambda batch: network(batch).poses, features)


def test_maps_that_do_not_fit() -> None:
    layer, said = ConvCapsules(TYPES, IN_DIM, 2, 6, kernel_size=4, padding=1), "ConvCapsules: "
    assert_raises(TypeError, layer, torch.rand(2, 9, 4), say=said + "capsules must be Capsules with a grid, got Tensor")
    assert_raises(ValueError, layer, Capsules(torch.rand(2, 9, 4)), say=said + "capsules must stand on a map")
    must = said + "the map must have 3 types, and height and width of at least 2, got "
    assert_raises(ValueError, layer, maps(1, 5), say=must + "(3, 1, 5)")
    others = Capsules(torch.rand(2, 4 * 30, 4), grid=(4, 6, 5))
    assert_raises(ValueError, layer, others, say=must + "(4, 6, 5): in_types is 3, got 4")
    shapes = "poses must have shape (B, 90, 4), got (2, 90, 5): in_dim is 4, got 5"
    assert_raises(ValueError, layer, maps(dim=5), say=said + shapes)
    wrong = maps()._replace(grid=(3, 5, 5))
    assert_raises(ValueError, layer, wrong, say=said + "poses must have shape (B, 75, 4), got (2, 90, 4)")
    assert layer(maps(2, 2)).grid == (2, 1, 1)


def test_options_of_a_layer_on_a_map() -> None:
    said = "ConvCapsules: "
    for name in ("kernel_size", "stride"):
        assert_raises(ValueError, ConvCapsules, 2, 2, 2, 2, **{name: 0}, say=f"{said}{name} must be at least 1, got 0")
    assert_raises(ValueError, ConvCapsules, 2, 2, 2, 2, padding=-1, say=said + "padding must be at least 0, got -1")
    assert_raises(
        ValueError, ConvCapsules, 2, 2, 2, 2, padding=3, say=said + "padding must be below kernel_size, 3, got 3"
    )
    known = "compete_over must be one of types, types-and-positions, got 'all'"
    assert_raises(ValueError, ConvCapsules, 2, 2, 2, 2, compete_over="all", say=said + known)
    assert_raises(
        ValueError, ConvCapsules, 2, 8, 2, 8, transform=Matrix(), say="Matrix: the poses of input and output capsules"
    )
    shown = repr(ConvCapsules(3, 4, 2, 6, padding=1))
    assert "3×4 → 2×6, kernel_size=3, stride=1, padding=1, norm=False, compete_over='types'" in shown
