"""Primary capsules against index formulas."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_close, assert_differs, assert_finite, assert_gradients_reach, assert_raises
from torchcaps import squash
from torchcaps.errors import InputError
from torchcaps.nn import PrimaryCapsules

T, K, H, W = 3, 2, 4, 5  # types, components, and the odd grid of maps below
SIZES = {"primary_types": T, "primary_dim": K}


def transparent(**options: Any) -> PrimaryCapsules:
    """A layer whose convolution lets its T·K channels through, so that the map that is grouped is known."""
    layer = PrimaryCapsules(T * K, **SIZES, primary_kernel=1, primary_stride=1, **options)
    with torch.no_grad():
        for c, conv in enumerate(layer.convs):
            conv.weight.zero_()
            if conv.bias is not None:
                conv.bias.zero_()
            for out in range(conv.out_channels):
                conv.weight[out, c * conv.out_channels + out] = 1
    return layer


@pytest.fixture
def maps() -> Tensor:
    return torch.randn(2, T * K, H, W)


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
        poses[:, i, k] = maps.flatten(1)[:, i * K + k]
    return poses


CASES = {
    "one convolution": ({}, lambda maps: by_channels(maps, lambda t, k: t * K + k)),
    "separate convolutions": ({"primary_separate_convs": True}, lambda maps: by_channels(maps, lambda t, k: k * T + t)),
    "raster": ({"grouping": "raster"}, by_raster),
    "raster of separate convolutions": ({"grouping": "raster", "primary_separate_convs": True}, by_raster),
}


def test_grouping_by_index_formula(maps: Tensor) -> None:
    results = []
    for options, grouped in CASES.values():
        for activation in ("none", "relu"):
            layer = transparent(primary_activation=activation, **options)
            poses = grouped(maps.relu() if activation == "relu" else maps)
            found = layer(maps).poses
            assert_close(found, squash(poses))
            assert found.transpose(1, 2).is_contiguous(), "laid out for fast routing"
            assert_close(layer(maps.contiguous(memory_format=torch.channels_last)).poses, squash(poses))
        assert layer(maps).grid == (None if "grouping" in options else (T, H, W)), "raster capsules have no one place"
        results.append(found)
    for first, second in itertools.combinations(results[:3], 2):
        assert_differs(first, second)


def test_padding_is_a_frame_of_zeros() -> None:
    for (case, _), output, padding in itertools.product(CASES.values(), ("squash", "routed"), (1, 2)):
        options: dict[str, Any] = {"primary_kernel": 3, "primary_stride": 2, "primary_output": output, **case}
        plain = PrimaryCapsules(3, **SIZES, **options)
        padded = PrimaryCapsules(3, **SIZES, primary_padding=padding, **options)
        padded.load_state_dict(plain.state_dict())
        features = torch.randn(2, 3, 9, 6)
        wanted = plain(nn.functional.pad(features, (padding,) * 4)).poses
        assert_close(padded(features).poses, wanted, 1e-6)
        for conv in padded.convs:  # who listens to separate convolutions has them called one by one
            conv.register_forward_hook(lambda *_: None)
        assert_close(padded(features).poses, wanted, 1e-6)
        assert padded.is_wide((30, 31), 64) == plain.is_wide((30 + 2 * padding, 31 + 2 * padding), 64)


def test_epsilon_and_unit_output(maps: Tensor) -> None:
    grouped = by_channels(maps, lambda t, k: t * K + k)
    assert_close(transparent(squash_eps=0.5)(maps).poses, squash(grouped, eps=0.5))
    for eps in (1e-7, 1.0):
        unit = transparent(primary_output="unit", squash_eps=eps)(maps).poses
        assert_close(unit, grouped / (grouped.square().sum(-1, keepdim=True) + eps).sqrt())


def test_primary_capsules_learn_and_survive_zeros(maps: Tensor) -> None:
    for output, (options, _) in itertools.product(("squash", "unit", "routed"), CASES.values()):
        layer = PrimaryCapsules(T * K, **SIZES, primary_kernel=2, primary_output=output, **options)
        (layer(maps).poses * torch.rand_like(layer(maps).poses)).sum().backward()
        assert_gradients_reach(layer)
        zeros = torch.zeros_like(maps, requires_grad=True)
        poses = transparent(primary_output=output, **options)(zeros).poses
        poses.sum().backward()
        assert_finite([poses, zeros.grad])
    for options in ({}, {"primary_depthwise": True}, {"primary_norm": "batch"}):
        options |= {"primary_activation": "relu", "primary_output": "linear", "primary_kernel": 2}
        poses = PrimaryCapsules(T * K, **SIZES, **options)(maps).poses
        assert 0 == poses.min() < poses.max(), "the ReLU comes before capsules are formed"


def test_half_precision_is_normalised_in_float32(maps: Tensor) -> None:
    layer = transparent()
    with torch.autocast("cpu", torch.bfloat16):
        poses = layer(maps).poses
    assert poses.dtype == torch.float32
    assert_close(poses, layer(maps.bfloat16().float()).poses, 1e-6)
    for dtype, norm in itertools.product((torch.float16, torch.bfloat16), ("batch", "batch-learned")):
        layer = PrimaryCapsules(T * K, **SIZES, primary_kernel=2, primary_norm=norm, primary_activations=True)
        half = copy.deepcopy(layer).to(dtype)
        for training in (True, False):
            wanted, got = layer.train(training)(maps), half.train(training)(maps.to(dtype))
            assert got.poses.dtype == got.activations.dtype == torch.float32
            assert_close(got.poses, wanted.poses, 0.02)
            assert_close(got.activations, wanted.activations, 0.02)
        for name, value in half.norm.named_buffers():
            assert_close(value.float(), layer.norm.get_buffer(name).float(), 0.02)
        (got.poses.sum() + got.activations.sum()).backward()
        assert_finite(parameter.grad for parameter in half.parameters())


def test_options_and_maps_that_do_not_fit() -> None:
    for options, said in (
        ({"primary_depthwise": True}, "features of primary_types·primary_dim = 256 channels, got 3"),
        ({"primary_padding": 9}, "primary_padding must be below primary_kernel, 9, got 9"),
        ({"grouping": "raster", "primary_activations": True}, 'primary_activations need grouping="channels"'),
    ):
        assert_raises(InputError, PrimaryCapsules, 3, **options, say=said)
    said = "features must be at least as large as the kernel"
    layer = PrimaryCapsules(3, **SIZES, primary_kernel=4, primary_padding=1)
    assert layer(torch.rand(2, 3, 2, 2)).poses.shape == (2, T, K)
    assert_raises(InputError, layer, torch.rand(2, 3, 1, 5), say=said)
