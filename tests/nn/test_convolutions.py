"""The stem's convolutions, and the normalisation that knows one image at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import assert_batch_independent, assert_close, assert_gradients_reach, assert_raises
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.models import CapsNetConfig, CNNConfig
from torchcaps.nn import ChannelNorm, ConvStem


def test_each_location_has_mean_0_and_deviation_1_over_its_channels() -> None:
    maps = torch.randn(2, 16, 3, 4) * 5 + 7
    normalised = ChannelNorm(16)(maps)
    assert normalised.shape == maps.shape
    assert_close(normalised.mean(1), 0.0, 1e-5)
    assert_close(normalised.var(1, correction=0), 1.0, 1e-3)


def test_each_channel_has_its_own_scale_and_shift() -> None:
    norm = ChannelNorm(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 10.0, 20.0]))
    maps = torch.randn(2, 3, 4, 5)
    alone = F.layer_norm(maps.permute(0, 2, 3, 1), (3,)).permute(0, 3, 1, 2)
    assert_close(norm(maps), alone * norm.weight.view(3, 1, 1) + norm.bias.view(3, 1, 1), 1e-5)


def test_maps_of_equal_channels_are_finite_and_learn() -> None:
    maps = torch.zeros(2, 4, 3, 3, requires_grad=True)
    norm = ChannelNorm(4)
    norm(maps).square().sum().backward()
    assert maps.grad is not None
    assert maps.grad.isfinite().all()


def test_what_it_refuses() -> None:
    norm = ChannelNorm(4)
    assert_raises(ValueError, norm, torch.randn(2, 3, 5, 5), say="ChannelNorm: input must have shape (B, 4, H, W)")
    assert_raises(TypeError, norm, torch.ones(2, 4, 5, 5, dtype=torch.int64), say="must be a floating-point tensor")


@pytest.mark.parametrize("norm", [True, False])
def test_a_stem_in_training_does_not_mix_images(norm: bool) -> None:
    stem = ConvStem(2, (4, 6), (1, 2), norm=norm).train()
    images = torch.rand(3, 2, 12, 13)
    assert stem(images).shape == (3, 6, 4, 5)
    assert (stem(images) >= 0).all()
    assert_batch_independent(stem, images)
    stem(images).square().sum().backward()
    assert_gradients_reach(stem)


def test_each_convolution_of_a_stem_has_its_stride() -> None:
    for given, wanted in ((None, [1, 1, 1]), ((1, 3, 2), [1, 3, 2])):
        convs = [layer for layer in ConvStem(1, (4, 4, 4), given) if isinstance(layer, nn.Conv2d)]
        assert [conv.stride[0] for conv in convs] == wanted


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_smallest_image_that_a_network_with_a_stem_takes(stride: int) -> None:
    overrides = {"stem_channels": (4, 4), "stem_strides": (1, stride), "conv_kernel": 3, "primary_kernel": 3}
    overrides |= {"conv_channels": 4, "primary_types": 1, "decoder": False}
    smallest = 3 + 3 + (5 - 1) * stride - 1  # 5 into the convolutions
    assert create_model("sabour2017", (1, smallest, smallest), 3, **overrides).primary_grid == (1, 1, 1)
    said = f"for a stem of 2, a 3×3 convolution followed by a 3×3 one; the smallest size that fits is {smallest}×"
    assert_raises(InputError, create_model, "sabour2017", (1, smallest - 1, smallest), 3, **overrides, say=said)


def test_values_that_do_not_fit() -> None:
    for config in (CapsNetConfig, CNNConfig):
        assert_raises(InputError, config, stem_channels=(8, 0), say="stem_channels must be at least 1, got 0")
        assert_raises(InputError, config, stem_strides=(0,), say="stem_strides must be at least 1, got 0")
        said = "stem_strides must be 2 numbers, one for each of stem_channels, got 1"
        assert_raises(InputError, config, stem_channels=(4, 8), stem_strides=(2,), say=said)
        assert_raises(InputError, config, conv_dropout=1.0, say="conv_dropout must be below 1, got 1.0")


@pytest.mark.parametrize(("init", "std"), [("glorot", (2 / (9 * (8 + 512))) ** 0.5), ("truncated-normal", 0.05 * 0.88)])
def test_a_stem_starts_as_the_first_convolution_does(init: str, std: float) -> None:
    torch.manual_seed(0)
    model = create_model("sabour2017", stem_channels=(8, 512), stem_strides=(1, 1), conv_init=init)
    assert model.stem[2].weight.std().item() == pytest.approx(std, rel=0.1)
