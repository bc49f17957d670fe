"""Capsule layers against index formulas, alone and stacked."""

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
from torchcaps import compute_votes, dynamic_routing, margin_loss, safe_norm, squash
from torchcaps.nn import DenseCapsules, DynamicRouting, PrimaryCapsules, Routing

# ---- primary capsules

T, K, H, W = 3, 2, 4, 5  # types, components, and the odd grid of maps below


def transparent(**options: Any) -> PrimaryCapsules:
    """A layer whose convolution lets its T·K channels through, so that the map that is grouped is known."""
    layer = PrimaryCapsules(T * K, T, K, kernel_size=1, stride=1, **options)
    with torch.no_grad():
        for c, conv in enumerate(layer.convs):
            conv.weight.zero_()
            if conv.bias is not None:
                conv.bias.zero_()
            for out in range(conv.out_channels):
                conv.weight[out, c * conv.out_channels + out] = 1
    return layer


@pytest.fixture
def maps(rng: torch.Generator) -> Tensor:
    return torch.randn(2, T * K, H, W, generator=rng)


def by_channels(maps: Tensor, channel: Any) -> Tensor:
    """Capsule i = (type·H + y)·W + x holds component k of its type at (y, x), found in channel(type, k)."""
    poses = torch.zeros(len(maps), T * H * W, K)
    for t, k, y, x in itertools.product(range(T), range(K), range(H), range(W)):
        poses[:, (t * H + y) * W + x, k] = maps[:, channel(t, k), y, x]
    return poses


def by_raster(maps: Tensor) -> Tensor:
    """Capsule i holds the elements i·K ... i·K + K − 1 of the flattened map."""
    poses = torch.zeros(len(maps), T * H * W, K)
    for i, k in itertools.product(range(T * H * W), range(K)):
        element = i * K + k
        poses[:, i, k] = maps[:, element // (H * W), element // W % H, element % W]
    return poses


CASES = {
    "one convolution": ({}, lambda maps: by_channels(maps, lambda t, k: t * K + k)),
    "separate convolutions": ({"separate_convs": True}, lambda maps: by_channels(maps, lambda t, k: k * T + t)),
    "raster": ({"grouping": "raster"}, by_raster),
    "raster of separate convolutions": ({"grouping": "raster", "separate_convs": True}, by_raster),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_grouping_by_index_formula(case: str, activation: Any, maps: Tensor) -> None:
    options, grouped = CASES[case]
    layer = transparent(activation=activation, **options)
    poses = grouped(maps.relu() if activation == "relu" else maps)
    assert_close(layer(maps), squash(poses))
    assert_close(layer(maps.contiguous(memory_format=torch.channels_last)), squash(poses))


def test_groupings_differ(maps: Tensor) -> None:
    results = [transparent(**options)(maps) for options, _ in CASES.values()]
    for first, second in itertools.combinations(results[:3], 2):
        assert_differs(first, second)


def test_separate_convolutions_are_one_with_permuted_weights(rng: torch.Generator) -> None:
    features = torch.randn(2, 3, 9, 11, generator=rng)
    apart = PrimaryCapsules(3, T, K, kernel_size=3, separate_convs=True)
    one = PrimaryCapsules(3, T, K, kernel_size=3)
    assert len(apart.convs) == K
    with torch.no_grad():
        for k, conv in enumerate(apart.convs):
            one.convs[0].weight[k::K] = conv.weight  # channel t·K + k of the one is channel t of convolution k
            one.convs[0].bias[k::K] = conv.bias
    assert_close(apart(features), one(features), 1e-5)


def test_kernel_and_stride_set_the_number_of_capsules() -> None:
    features = torch.rand(2, 3, 13, 10)
    for kernel, stride in ((3, 2), (5, 1), (4, 3)):
        rows, columns = ((size - kernel) // stride + 1 for size in (13, 10))
        assert PrimaryCapsules(3, 2, 8, kernel_size=kernel, stride=stride)(features).shape == (2, 2 * rows * columns, 8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("output", ["squash", "routed"])
@pytest.mark.parametrize("padding", [1, 3])
def test_padding_is_a_frame_of_zeros(case: str, output: Any, padding: int, rng: torch.Generator) -> None:
    options: dict[str, Any] = {"kernel_size": 3, "stride": 2, "output": output, **CASES[case][0]}
    plain, padded = PrimaryCapsules(3, T, K, **options), PrimaryCapsules(3, T, K, padding=padding, **options)
    padded.load_state_dict(plain.state_dict())
    features = torch.randn(2, 3, 9, 6, generator=rng)
    framed = nn.functional.pad(features, (padding,) * 4)
    rows, columns = ((size + 2 * padding - 3) // 2 + 1 for size in (9, 6))
    assert padded(features).shape[1] * padded(features).shape[2] == T * K * rows * columns
    assert_close(padded(features), plain(framed), 1e-6)
    heard: list[Tensor] = []  # who listens to separate convolutions has them called one by one
    padded.convs[0].register_forward_hook(lambda _module, _features, maps: heard.append(maps))
    assert_close(padded(features), plain(framed), 1e-6)
    assert heard[0].shape[2:] == (rows, columns)
    assert padded.is_wide((30, 31), 64) == plain.is_wide((30 + 2 * padding, 31 + 2 * padding), 64)


def test_padding_makes_room_for_small_maps() -> None:
    layer = PrimaryCapsules(3, T, K, kernel_size=4, padding=1)
    assert layer(torch.rand(2, 3, 2, 2)).shape == (2, T, K)
    said = "H and W of at least 2, the kernel's size less 2 of padding, got (2, 3, 1, 5)"
    assert_raises(ValueError, layer, torch.rand(2, 3, 1, 5), say=said)
    layer = PrimaryCapsules(3, T, K, kernel_size=4, padding=4)
    said = "H and W of at least 1, the kernel's size less 8 of padding, got (2, 3, 0, 5)"
    assert_raises(ValueError, layer, torch.rand(2, 3, 0, 5), say=said)


def test_epsilon_of_the_squash(maps: Tensor) -> None:
    wanted = squash(by_channels(maps, lambda t, k: t * K + k), eps=0.5)
    assert_close(transparent(eps=0.5)(maps), wanted)
    assert_differs(transparent()(maps), wanted)


def test_unit_output_has_length_one(maps: Tensor) -> None:
    poses = transparent(output="unit")(maps)
    wanted = by_channels(maps, lambda t, k: t * K + k)
    assert_close(poses.norm(dim=-1), 1.0, 1e-4)
    assert_close(poses, wanted / (wanted.square().sum(-1, keepdim=True) + 1e-7).sqrt())
    half = transparent(output="unit", eps=1.0)(maps)
    assert_close(half, wanted / (wanted.square().sum(-1, keepdim=True) + 1).sqrt())


def test_routed_output_is_one_routing_pass(maps: Tensor) -> None:
    layer = transparent(output="routed")
    assert layer.convs[0].bias is None
    assert_close(layer.bias, 0.1)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(T * K).view(T, K) / 10)
    # the authors' code: a location's votes compete by a softmax of zeros over the types, and get a bias for each type
    grouped = by_channels(maps, lambda t, k: t * K + k)
    bias = layer.bias[torch.arange(T * H * W) // (H * W)]
    assert_close(layer(maps), squash(grouped / T + bias))
    votes = grouped.view(2, T, H * W, K).permute(0, 2, 1, 3).reshape(2 * H * W, 1, T, K)
    routed = dynamic_routing(votes, 1, bias=layer.bias).view(2, H * W, T, K).permute(0, 2, 1, 3).reshape(2, -1, K)
    assert_close(layer(maps), routed)


@pytest.mark.parametrize("output", ["squash", "unit", "routed"])
@pytest.mark.parametrize("case", CASES)
def test_primary_capsules_learn_and_survive_zeros(case: str, output: Any, maps: Tensor) -> None:
    layer = PrimaryCapsules(T * K, T, K, kernel_size=2, output=output, **CASES[case][0])
    (layer(maps) * torch.rand_like(layer(maps))).sum().backward()
    assert_gradients_reach(layer)
    assert_batch_independent(layer, maps)
    zeros = torch.zeros_like(maps, requires_grad=True)
    poses = transparent(output=output, **CASES[case][0])(zeros)
    poses.sum().backward()
    assert_finite([poses, zeros.grad])


def test_memory_is_laid_out_for_fast_routing(maps: Tensor) -> None:
    for options, _ in CASES.values():
        assert transparent(**options)(maps).transpose(1, 2).is_contiguous()


def test_primary_capsules_are_float32_under_autocast(maps: Tensor) -> None:
    layer = transparent()
    with torch.autocast("cpu", torch.bfloat16):
        poses = layer(maps)
    assert poses.dtype == torch.float32
    assert_close(poses, layer(maps.bfloat16().float()), 1e-6)


def test_primary_options_that_do_not_exist() -> None:
    for name, known in (
        ("activation", "none, relu"),
        ("grouping", "channels, raster"),
        ("output", "squash, unit, routed"),
    ):
        assert_raises(ValueError, PrimaryCapsules, 3, **{name: "x"}, say=f"{name} must be one of {known}, got 'x'")


@pytest.mark.parametrize("options", [{}, {"separate_convs": True}, {"grouping": "raster"}, {"output": "routed"}])
def test_maps_that_do_not_fit(options: Any) -> None:
    layer = PrimaryCapsules(3, T, K, kernel_size=4, **options)
    said = "PrimaryCapsules: features must have shape (B, 3, H, W)"
    for shape in ((2, 5, 9, 9), (3, 9, 9), (2, 3, 9), (1, 2, 3, 9, 9)):
        assert_raises(ValueError, layer, torch.rand(shape), say=f"{said}, got {shape}")
    for shape in ((2, 3, 3, 9), (2, 3, 9, 3), (2, 3, 0, 0)):
        wanted = f"{said} with H and W of at least 4, the kernel's size, got {shape}"
        assert_raises(ValueError, layer, torch.rand(shape), say=wanted)
    said = "PrimaryCapsules: features must be a floating-point tensor, got "
    assert_raises(TypeError, layer, torch.ones(2, 3, 9, 9, dtype=torch.uint8), say=said + "torch.uint8")
    assert_raises(TypeError, layer, [1.0], say=said + "list")
    assert layer(torch.rand(2, 3, 4, 5)).shape[0] == 2


# ---- dense capsules


def test_dense_capsules_are_routing_with_a_weight() -> None:
    poses = torch.randn(2, 6, 3)
    for options in ({}, {"bias": True}, {"bias": True, "learn_prior": True}):
        layer = DenseCapsules(6, 3, 4, 5, routing=DynamicRouting(2, softmax_over="inputs", leaky=True), **options)
        if layer.prior is not None:
            assert_close(layer.prior, 0.0)
            nn.init.normal_(layer.prior)
        wanted = dynamic_routing(
            compute_votes(poses, layer.weight),
            2,
            softmax_over="inputs",
            leaky=True,
            bias=layer.bias,
            prior=layer.prior,
            return_coupling=True,
        )
        assert_close(layer(poses), wanted[0], 1e-5)
        capsules, coupling = layer.forward_with_coupling(poses)
        assert_close(capsules, wanted[0], 1e-5)
        assert_close(coupling, wanted[1], 1e-5)
        layer(poses).square().sum().backward()
        assert_gradients_reach(layer)


def test_default_routing_is_the_papers() -> None:
    layer = DenseCapsules(6, 3, 4, 5)
    assert (layer.routing.num_iterations, layer.routing.softmax_over) == (3, "outputs")
    _, coupling = layer.forward_with_coupling(torch.randn(2, 6, 3))
    assert_sums_to_one(coupling, "outputs")


def deviation(layer: DenseCapsules) -> float:
    return layer.weight.std().item()


def test_initial_weights() -> None:
    sizes = (50, 8, 10, 16)  # I, K, J, D: 64,000 weights
    assert deviation(DenseCapsules(*sizes, weight_init="normal", weight_std=0.3)) == pytest.approx(0.3, rel=0.02)
    assert deviation(DenseCapsules(*sizes, weight_init="fan-in")) == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    cut = DenseCapsules(*sizes, weight_init="truncated-normal", weight_std=0.1)
    assert cut.weight.abs().max() <= 0.2
    assert deviation(cut) == pytest.approx(0.0880, rel=0.02)  # a normal cut at two deviations keeps 0.880 of one
    assert_close(DenseCapsules(*sizes, bias=True).bias, 0.1)
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
    before = layer.weight.detach().clone()
    torch.manual_seed(1)
    layer.reset_parameters()
    assert_differs(layer.weight, before)
    torch.manual_seed(1)
    assert_close(DenseCapsules(6, 3, 4, 5).weight, layer.weight, 0)


def test_weight_keeps_its_memory_layout() -> None:
    layer = DenseCapsules(6, 3, 4, 5)
    poses = torch.randn(2, 6, 3)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), DenseCapsules(6, 3, 4, 5)]
    others[2].load_state_dict(layer.state_dict())
    for other in others:
        assert other.weight.shape == (6, 4, 5, 3)
        assert other.weight.permute(1, 2, 3, 0).is_contiguous()
        assert_close(other(poses), layer(poses), 0)
    assert layer.double().weight.permute(1, 2, 3, 0).is_contiguous()


def test_bad_sizes_and_options() -> None:
    for place, name in enumerate(("in_capsules", "in_dim", "out_capsules", "out_dim")):
        sizes = [2, 2, 2, 2]
        sizes[place] = 0
        assert_raises(ValueError, DenseCapsules, *sizes, say=f"{name} must be at least 1, got 0")
    for name in ("num_types", "dim", "kernel_size", "stride"):
        assert_raises(ValueError, PrimaryCapsules, 3, **{name: 0}, say=f"{name} must be at least 1, got 0")
    assert_raises(ValueError, DenseCapsules, 2, 2, 2, 2, weight_init="x", say="weight_init must be one of balanced")
    assert_raises(
        ValueError, DenseCapsules(6, 3, 4, 5), torch.ones(2, 5, 3), say="poses must have shape (B, 6, 3), got"
    )


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


@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("depth", STACKS)
def test_stacks_train_from_their_default_initialisation(depth: str, axis: Any) -> None:
    network = stack(STACKS[depth], axis)
    poses, labels = problem()
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    losses = []
    for _ in range(50):
        loss = margin_loss(safe_norm(network(poses)), labels)
        optimizer.zero_grad()
        loss.backward()
        assert_gradients_reach(network)
        optimizer.step()
        losses.append(loss.item())
    assert_finite([torch.tensor(losses)])
    assert losses[-1] < 0.6 * losses[0], losses
    accuracy = (network(poses).norm(dim=-1).argmax(-1) == labels).float().mean()
    assert accuracy > 0.9, accuracy
    for layer in network:  # no output capsule is dead: each one's length depends on the image
        poses = layer(poses)
        assert (poses.norm(dim=-1).std(0) > 1e-3).all()


@pytest.mark.parametrize(("axis", "trains"), [("outputs", True), ("inputs", False)])
def test_a_stack_of_three_fed_with_short_poses(axis: Any, trains: bool) -> None:
    """What DenseCapsules says of itself; if short poses come to train over inputs, too, it must say so."""
    assert "of length 0.2, over outputs they trained, over inputs they stayed" in inspect.cleandoc(
        DenseCapsules.__doc__ or ""
    ).replace("\n", " ")
    network = stack(STACKS["three"], axis)
    poses, labels = problem(0.2)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    losses = []
    for _ in range(200):
        loss = margin_loss(safe_norm(network(poses)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] if trains else losses[-1] > 0.99 * losses[0], losses[::20]


@pytest.mark.parametrize("axis", ["outputs", "inputs"])
@pytest.mark.parametrize("sizes", [(1152, 8, 10, 16), (32, 8, 10, 16), (64, 8, 32, 8), (4, 16, 4, 16), (300, 4, 2, 8)])
@pytest.mark.parametrize("num_iterations", [1, 2, 3, 4])
def test_lengths_start_neither_short_nor_saturated(sizes: tuple[int, ...], axis: Any, num_iterations: int) -> None:
    I, K, *_ = sizes
    poses = torch.randn(16, I, K)
    poses = poses / poses.norm(dim=-1, keepdim=True)
    layer = DenseCapsules(*sizes, routing=DynamicRouting(num_iterations, softmax_over=axis))
    lengths = layer(poses).norm(dim=-1)
    assert 0.35 < lengths.mean() < 0.97, lengths.mean()
    assert (lengths.std(0) > 1e-3).all()


# ---- a routing of one's own


class MeanRouting(Routing):
    """Every vote counts alike."""

    def forward(self, poses, weight, bias=None, prior=None, return_coupling=False):
        votes = compute_votes(poses, weight)
        coupling = torch.full(votes.shape[:3], 1 / votes.shape[2]) if return_coupling else None
        return squash(votes.sum(1) / votes.shape[2] + (0 if bias is None else bias)), coupling


def test_a_routing_of_ones_own() -> None:
    poses = torch.randn(2, 6, 3)
    own = DenseCapsules(6, 3, 4, 5, routing=MeanRouting(), bias=True)
    one = DenseCapsules(6, 3, 4, 5, routing=DynamicRouting(1), bias=True)
    one.load_state_dict(own.state_dict())
    assert_close(own(poses), one(poses))
    assert_close(own.forward_with_coupling(poses)[1], one.forward_with_coupling(poses)[1])
    own(poses).sum().backward()
    assert_gradients_reach(own)
