"""Capsule layers, alone and stacked: dense ones against routing of built votes, those on a map against windows."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routing_cases import TRANSFORMS
from support import assert_close, assert_gradients_reach, assert_raises, assert_same, with_gradients
from torchcaps import InputError, compute_votes, dynamic_routing, squash
from torchcaps.checks import with_article
from torchcaps.errors import WrongType
from torchcaps.nn import (
    BuiltVotes,
    Capsules,
    ConvCapsules,
    Dense,
    DenseCapsules,
    DynamicRouting,
    Routed,
    Routing,
    Votes,
)

COMPETITIONS = ("types", "types-and-positions")


def test_scores_are_activations_or_else_lengths() -> None:
    poses, activations = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]), torch.tensor([[0.1, 0.9]])
    assert_close(Capsules(poses).scores(1e-2), torch.tensor([[5.001, 0.1]]), 1e-5)
    assert Capsules(poses, activations).scores() is activations


# ---- dense capsules


def test_a_dense_layer_is_the_papers_unless_it_says_otherwise() -> None:
    layer, poses = DenseCapsules(6, 3, 4), torch.randn(2, 6, 3)
    (weight,) = layer.parameters()
    assert weight.shape == (4, 16, 3, 6)
    assert layer(poses).poses.equal(layer(Capsules(poses)).poses)
    assert_close(layer(poses).poses, dynamic_routing(compute_votes(poses, layer.transform.matrices), 3).poses)
    assert layer(poses)[1:] == (None, None, None)
    spec = {"name": "dynamic", "num_iterations": 1}
    layer = DenseCapsules(6, 3, 4, 5, num_capsules=9, transform="shared", routing=spec)
    votes = torch.einsum("jdk,bik->bijd", layer.transform.weight, poses)
    assert_close(layer(poses).poses, squash(votes.sum(1) / 9))


def test_weights_start_as_the_routing_wants_them() -> None:
    sizes, dynamic = (50, 8, 10, 16), {"name": "dynamic", "capsule_bias": True}  # I, K, J, D: 64,000 weights
    routings: tuple[tuple[Any, float], ...] = (
        (dynamic | {"softmax_over": "inputs", "num_iterations": 2}, (50 / 16) ** (1 / 4)),
        (dynamic | {"softmax_over": "inputs", "num_iterations": 0}, 1 / math.sqrt(50 * 16)),
        (dynamic, 10 / math.sqrt(50 * 16)),
        ("em", 1.0),
        ("em-code", 1 / 4),
        ("self", 1 / 4),
        ("vb", 1 / (2 * math.sqrt(800))),
    )
    for routing, wanted in routings:
        layer = DenseCapsules(*sizes, routing=routing)
        assert layer.transform.weight.std().item() == pytest.approx(wanted, rel=0.02), routing
    assert_close(DenseCapsules(*sizes, routing=dynamic).routing.bias, 0.1, 0)
    for over, competitors in (("types", 4), ("types-and-positions", 4 * 6)):  # a capsule lies in (5/2)² windows
        layer = ConvCapsules(3, 8, 4, 64, layer_kernel=5, layer_stride=2, compete_over=over)
        wanted = competitors / math.sqrt(3 * 25 * 64)
        assert layer.transform.weight.std().item() == pytest.approx(wanted, rel=0.02), over
    on_map = {"name": "em-code", "on_map": True}
    for routing, *starts in (("em", 0, 0), ("vb", 0, 0), ("em-code", 2, 1), (on_map, 0.5, 0.5)):
        layer = DenseCapsules(*sizes, routing=routing)
        for beta, start in zip((layer.routing.beta_u, layer.routing.beta_a), starts, strict=True):
            assert beta.eq(start).all()


MAP = (3, 4, 2)
"""Types, height and width of a map."""


def test_weights_shared_by_positions_and_places_in_the_votes() -> None:
    places = {
        "none": lambda y, x: {},
        "centres": lambda y, x: {2: (y + 0.5) / 4, 5: (x + 0.5) / 2},
        "tenths": lambda y, x: {2: (y + 1) / 40, 5: (x + 1) / 20},
        "hundredths": lambda y, x: {0: (y - 2) / 100, 1: (x - 1) / 100},
    }
    for transform, coordinates in itertools.product(("dense", "shared", "matrix"), places):
        layer = DenseCapsules(MAP, 9, 5, 9, transform=transform, share_positions=True, coordinates=coordinates).double()
        assert layer.size == (24, 9, 5, 9)
        own = DenseCapsules(3, 9, 5, 9, transform=transform).double()
        own.load_state_dict(layer.state_dict())
        poses = torch.randn(2, 24, 9).double().requires_grad_()
        built = torch.zeros(2, 3, 4, 2, 5, 9).double()
        for y, x in itertools.product(range(4), range(2)):
            place = torch.zeros(9).double()
            for component, value in places[coordinates](y, x).items():
                place[component] = value
            built[:, :, y, x] = own.transform.votes(*own.transform(poses.unflatten(1, MAP)[:, :, y, x])).build() + place
        wanted = DynamicRouting()(BuiltVotes(built.flatten(1, 3)), return_coupling=True)
        got = layer.route(poses, return_coupling=True)
        assert_same(with_gradients(got, {"poses": poses}), with_gradients(wanted, {"poses": poses}), 1e-7)
        assert_close(layer.votes(poses)[0].build(), built.flatten(1, 3), 1e-6)


# ---- stacks


def test_lengths_start_neither_short_nor_saturated() -> None:
    """Whatever the sizes, the axis, the number of iterations, the transform, and the window."""
    axes = ("outputs", "inputs")
    sizes = ((1152, 8, 10, 16), (64, 8, 32, 8), (4, 16, 4, 16), (300, 4, 2, 8))
    cases = list(itertools.product(sizes, ("dense",), axes, (1, 3, 4)))
    cases += itertools.product(((1152, 16, 10, 16), (9, 16, 32, 16)), ("shared", "elementwise", "matrix"), axes, (1, 3))
    for size, transform, axis, iterations in cases:
        poses = nn.functional.normalize(torch.randn(16, *size[:2]), dim=-1)
        routing = DynamicRouting(iterations, softmax_over=axis)  # type: ignore[arg-type]
        lengths = DenseCapsules(*size, transform=transform, routing=routing)(poses).poses.norm(dim=-1)
        assert 0.3 < lengths.mean() < 0.97, (size, transform, lengths.mean())
        assert (lengths.std(0) > 1e-3).all()
    windows = ((3, 1, 12), (3, 2, 12), (5, 2, 15), (2, 3, 9), (3, 1, 6))
    for (kernel, stride, side), over in itertools.product(windows, COMPETITIONS):
        capsules = maps(side, side, batch=4, dim=8)
        capsules = capsules._replace(poses=nn.functional.normalize(capsules.poses, dim=-1))
        layer = ConvCapsules(TYPES, 8, 4, 8, layer_kernel=kernel, layer_stride=stride, compete_over=over)
        lengths = layer(capsules).scores()
        assert 0.35 < lengths.mean() < 0.97, lengths.mean()
        assert lengths.std(0).mean() > 0.02


def test_a_stack_neither_dies_nor_saturates() -> None:
    """As published ones do from their start, which MNIST's accuracy hides."""
    network = nn.Sequential(*(DenseCapsules(*sizes) for sizes in ((32, 8, 16, 8), (16, 8, 8, 8), (8, 8, 4, 16))))
    lengths = network(nn.functional.normalize(torch.randn(16, 32, 8), dim=-1)).scores()
    lengths.sum().backward()
    assert 0.05 < lengths.mean() < 0.95
    assert (lengths.std(0) > 1e-3).all()
    assert all(layer.transform.weight.grad.norm() > 1e-3 for layer in network)


# ---- a routing of one's own


class Certain(Routing):
    """Every vote counts alike; capsules are as certain as the most certain of those that came in, or else a half."""

    def forward(self, votes: Votes, activations: Tensor | None = None, *, return_coupling: bool = False) -> Routed:
        poses = squash(votes.weighted_sum(votes.compete(votes.zeros())))
        certain = votes.poses.new_full((), 0.5) if activations is None else activations.amax(1, keepdim=True)
        return Routed(poses, certain.expand(poses.shape[:2]), None)


def test_what_a_routing_returns_is_looked_at() -> None:
    layer, poses = DenseCapsules(6, 3, 4, 5, routing=Certain()), torch.randn(2, 6, 3)
    right = layer.route(poses)
    for wrong, said in (
        (right.poses, "Certain must return Routed(poses, activations, coupling) of torchcaps.nn, got Tensor"),
        (right._replace(poses=right.poses[:, 1:]), "poses must have shape (B, 4, 5), got (2, 3, 5): out_capsules is 4"),
        (right._replace(activations=right.poses), "activations must have shape (2, 4), got (2, 4, 5)"),
        (right._replace(coupling=0), "coupling must be a floating-point tensor of at least 16 bits, got int"),
    ):
        layer.routing.forward = lambda *_, wrong=wrong, **__: wrong
        assert_raises(InputError, layer, poses, say=said)


# ---- capsules on a map

TYPES, IN_DIM = 3, 4  # of the maps below
WINDOWS = [(3, 1, 0), (3, 2, 1), (2, 3, 1), (1, 1, 0), (3, 1, 2)]
"""Kernel, stride, padding."""


def maps(height: int = 6, width: int = 5, batch: int = 2, dim: int = IN_DIM) -> Capsules:
    """Random capsules on a map, as primary capsules give them."""
    return Capsules(torch.randn(batch, TYPES * height * width, dim), grid=(TYPES, height, width))


def layer_on_map(window: tuple[int, int, int], out_dim: int = IN_DIM, **options: Any) -> ConvCapsules:
    named = dict(zip(("layer_kernel", "layer_stride", "layer_padding"), window, strict=True))
    return ConvCapsules(TYPES, IN_DIM, 2, out_dim, **named, **options)


def by_windows(layer: ConvCapsules, of_capsules: Tensor, grid: Any) -> Tensor:
    """What the capsules of a map (B, N, K) have, by windows (B, h, w, types · k · k, K), zeros beyond the edge."""
    k, stride, padding = layer.layer_kernel, layer.layer_stride, layer.layer_padding
    framed = nn.functional.pad(of_capsules.unflatten(1, grid), (0, 0, *(padding,) * 4))  # (B, T, H, W, K)
    windows = framed.unfold(2, k, stride).unfold(3, k, stride)  # (B, T, h, w, K, k, k)
    return windows.permute(0, 2, 3, 1, 5, 6, 4).flatten(3, 5)


def test_each_position_is_a_dense_layer_of_its_window() -> None:
    for window, transform in itertools.product(WINDOWS, TRANSFORMS):
        layer, capsules = layer_on_map(window, transform=transform), maps()
        dense = DenseCapsules(TYPES * window[0] ** 2, IN_DIM, 2, IN_DIM, transform=transform)
        dense.load_state_dict(layer.state_dict())
        poses, activations, grid, _ = layer(capsules)
        windows = by_windows(layer, capsules.poses, capsules.grid)
        assert grid == (2, *windows.shape[1:3]) == layer.out_grid(capsules.grid)
        assert activations is None
        wanted = dense(windows.flatten(0, 2)).poses.unflatten(0, windows.shape[:3])  # (B, h, w, 2, D)
        assert_close(poses.unflatten(1, grid), wanted.movedim(3, 1), 1e-5)


def test_a_capsule_shares_itself_out() -> None:
    """Over the types of each window, or over those of all windows that hold it."""
    capsules, transforms = maps(), ("dense", "shared")
    for window, leaky, over, transform in itertools.product(WINDOWS, (False, True), COMPETITIONS, transforms):
        spec, routing = {"name": transform, "weight_init": "normal"}, DynamicRouting(2, leaky=leaky)
        layer = layer_on_map(window, 6, compete_over=over, transform=spec, routing=routing)
        children = layer.window_capsules(capsules.grid)  # (L, I), from 1
        totals = layer.route(capsules, return_coupling=True).coupling.unflatten(0, (2, -1)).sum(3)
        if over == "types-and-positions":
            of_capsules = torch.zeros(2, math.prod(capsules.grid) + 1)
            of_capsules.index_add_(1, children.flatten(), totals.flatten(1))
            totals = of_capsules[:, children[children > 0].unique()]
        assert (totals < 0.999).all() if leaky else torch.allclose(totals, torch.ones(()), atol=1e-5)
        assert (totals > 0).all()


def test_activations_come_from_the_window_and_go_onto_the_map() -> None:
    capsules = maps()
    activations = torch.rand(2, capsules.poses.shape[1])
    layer = layer_on_map((3, 2, 1), 6, routing=Certain())
    poses, got, grid, _ = layer(capsules._replace(activations=activations))
    assert grid == (2, 3, 3)
    assert got.shape == poses.shape[:2]
    largest = by_windows(layer, activations[..., None], capsules.grid).amax((3, 4))
    assert_close(got.view(2, 2, 3, 3), largest.unsqueeze(1).expand(-1, 2, -1, -1))
    assert_close(layer(capsules).activations, 0.5)


def test_poses_are_normalised_by_type_and_component() -> None:
    plain, layer = layer_on_map((2, 1, 0)), layer_on_map((2, 1, 0), pose_norm=True)
    layer.load_state_dict(plain.state_dict(), strict=False)
    capsules = maps(batch=8)
    before, after = (each(capsules).poses.unflatten(1, (2, -1)) for each in (plain, layer))  # (B, T, L, D)
    mean, std = before.mean((0, 2), keepdim=True), before.var((0, 2), correction=0, keepdim=True).add(1e-5).sqrt()
    assert_close(after, (before - mean) / std, 1e-4)
    layer(capsules).poses.square().mul(torch.rand(8, 1, IN_DIM)).sum().backward()
    assert_gradients_reach(layer)


# ---- what does not fit


def test_sizes_parts_and_options_that_do_not_fit() -> None:
    for kind in (DenseCapsules, ConvCapsules):
        for name, part in (("transform", DynamicRouting()), ("routing", Dense())):
            what = f"{kind.__name__}: {name} must be a {name.capitalize()}, got {with_article(type(part).__name__)}"
            assert_raises(WrongType, kind, 2, 2, 2, 2, **{name: part}, say=what)
    assert_raises(InputError, ConvCapsules, 2, 2, 2, 2, layer_padding=3, say="layer_padding must be ")
    said = "share_positions and coordinates need capsules on a map: types, height and width"
    for options in ({"share_positions": True}, {"coordinates": "tenths"}):
        assert_raises(InputError, DenseCapsules, 6, 4, 2, 4, **options, say=said)
    for dim, coordinates, said in (
        (5, "centres", "needs poses that are matrices"),
        (1, "hundredths", "coordinates need at least 2 comp"),
    ):
        assert_raises(InputError, DenseCapsules, MAP, 4, 2, dim, coordinates=coordinates, say=said)


def test_a_transform_that_does_not_return_tensors() -> None:
    class Whole(Dense):
        def forward(self, poses: Any) -> Any:
            return self.votes(*super().forward(poses))

    said = "Whole.forward must return a tuple of tensors, the arguments of Whole.votes, got DenseVotes"
    assert_raises(InputError, DenseCapsules(3, 4, 2, 4, transform=Whole()), torch.rand(2, 3, 4), say=said)


def test_capsules_that_do_not_fit() -> None:
    on_map = layer_on_map((4, 1, 1), 6)
    assert_raises(WrongType, on_map, torch.rand(2, 9, 4), say="capsules must be a Capsules, got a tensor")
    for capsules, said in (
        (Capsules(torch.rand(2, 9, 4)), "capsules must have a grid; primary"),
        (maps(1, 5), "the map must have 3 types, and height and width of at least 2, got (3, 1, 5)"),
        (Capsules(torch.rand(2, 4 * 30, 4), grid=(4, 6, 5)), "got (4, 6, 5): in_types is 3, got 4"),
        (maps()._replace(grid=(3, 5, 5)), "the grid needs poses of 75 capsules, got 90"),
    ):
        assert_raises(InputError, on_map, capsules, say=said)
    assert on_map(maps(2, 2)).grid == (2, 1, 1)
