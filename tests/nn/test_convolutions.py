"""Convolutions, the stem's, and the normalisation that knows one image at a time."""

import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import assert_close, assert_differs, assert_finite, assert_raises
from torchcaps.errors import InputError, WrongType
from torchcaps.nn import ChannelNorm, ConvBackbone, Convolution, Decoder, PrimaryCapsules, StackBackbone
from torchcaps.nn.convolutions import conv_stem, draw_layers
from torchcaps.parts import build

SHAPE = {"in_channels": 1, "in_shape": (1, 28, 28), "num_classes": 10}
SIZES = [(3, 7, 5, 2, 1, True), (1, 64, 9, 1, 0, True), (16, 8, 3, 1, 1, False), (6, 4, 1, 3, 0, True)]


def both(sizes: tuple[Any, ...], seed: int = 0) -> tuple[Convolution, nn.Conv2d]:
    """A convolution and PyTorch's, from the same seed."""
    *numbers, bias = sizes
    torch.manual_seed(seed)
    ours = Convolution(*numbers, bias=bias)
    torch.manual_seed(seed)
    return ours, nn.Conv2d(*numbers, bias=bias)


def test_starting_values_are_conv2d_s() -> None:
    for sizes in SIZES:
        ours, theirs = both(sizes)
        after = torch.rand(3)
        both(sizes)
        assert after.equal(torch.rand(3)), "as many random numbers are drawn"
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(ours.state_dict()[name].equal(value) for name, value in theirs.state_dict().items())
        before, held = ours.weight.detach().clone(), list(ours.parameters())
        for init in ("torch", "glorot", "truncated-normal"):
            for each in (ours, theirs):
                torch.manual_seed(1)
                each.reset_parameters() if init == "torch" else draw_layers(each, init, std=0.3)
            assert all(a is b for a, b in zip(ours.parameters(), held, strict=True)), "an optimiser would lose them"
            assert_differs(ours.weight, before)
            assert ours.weight.equal(theirs.weight)
            assert ours.weight.is_contiguous()


def test_a_convolution_is_conv2d_and_its_weights_travel() -> None:
    for sizes, relu in itertools.product(SIZES, (False, True)):
        (ours, theirs), features = both(sizes), torch.randn(3, sizes[0], 13, 12)
        loaded, assigned = (both(sizes, seed=1)[0] for _ in range(2))
        loaded.load_state_dict(theirs.state_dict())
        assert loaded.weight.is_contiguous()
        assigned.load_state_dict(theirs.state_dict(), assign=True)
        wanted = F.relu(theirs(features)) if relu else theirs(features)
        for each in (ours, loaded, assigned, pickle.loads(pickle.dumps(ours))):
            assert_close(each(features, relu=relu), wanted, 1e-5)


def test_each_location_is_normalised_over_its_channels() -> None:
    norm = ChannelNorm(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 10.0, 20.0]))
    maps = torch.randn(2, 3, 4, 5) * 5 + 7
    mean, variance = maps.mean(1, keepdim=True), maps.var(1, correction=0, keepdim=True)
    alone = (maps - mean) / (variance + 1e-5).sqrt()
    assert_close(norm(maps), alone * norm.weight.view(3, 1, 1) + norm.bias.view(3, 1, 1), 1e-4)
    equal = torch.zeros(2, 3, 3, 3, requires_grad=True)
    norm(equal).square().sum().backward()
    assert_finite([equal.grad])
    said = "ChannelNorm: input and weight must be of one dtype, got torch.float64 and torch.float32"
    assert_raises(WrongType, norm, maps.double(), say=said)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(maps.bfloat16()).dtype == torch.bfloat16


def test_a_stem() -> None:
    images = torch.rand(3, 1, 32, 33)
    for norm, dropout in (("none", 0.0), ("channel", 0.3)):
        stem = conv_stem(1, (4, 5, 6), (1, 3, 2), norm, dropout)
        maps = images
        for conv, stride in zip((each for each in stem if isinstance(each, nn.Conv2d)), (1, 3, 2), strict=True):
            maps = F.conv2d(maps, conv.weight, conv.bias, stride)
            if norm == "channel":
                maps = F.layer_norm(maps.movedim(1, -1), maps.shape[1:2]).movedim(-1, 1)
            maps = maps.relu()
        assert_close(stem.eval()(images), maps, 1e-5)
        assert isinstance(stem[-1], nn.Dropout2d) == (dropout > 0)
    assert conv_stem(2, (), (), "channel", 0.3)(images) is images


def test_values_that_do_not_fit() -> None:
    for kind, name in (("backbone", "conv"), ("network", "cnn")):
        given = {"name": name, "stem_channels": (4, 8), "stem_strides": (2,)}
        said = "stem_strides must be 2 numbers, one for each of stem_channels, got 1"
        assert_raises(InputError, build, kind, given, **SHAPE, say=said)
    given = {"name": "conv", "stem_channels": (4, 8), "stem_strides": (2, 1), "stem_strides_across": (2,)}
    said = "stem_strides_across must be 2 numbers, one for each of stem_channels, got 1"
    assert_raises(InputError, build, "backbone", given, **SHAPE, say=said)
    for options, said in (
        ({"stack_channels": ()}, "stack_channels must be at least one number, one for each convolution, got 0"),
        ({"stack_channels": (3, 4)}, "stack_kernels must be 2 numbers, one for each convolution, got 1"),
        ({"stack_strides": (2, 2)}, "stack_strides must be 1 number, one for each convolution, got 2"),
        ({"stack_strides_across": (2, 2)}, "stack_strides_across must be 1 number, one for each convolution, got 2"),
    ):
        assert_raises(InputError, StackBackbone, 1, **options, say=said)


def test_strides_along_each_side() -> None:
    images = torch.rand(2, 1, 20, 50)
    stem = {"stem_channels": (4, 4), "stem_strides": (1, 2), "conv_channels": 6, "conv_kernel": 3}
    both, across = ConvBackbone(1, **stem), ConvBackbone(1, **stem, stem_strides_across=(3, 2))  # type: ignore[arg-type]
    across.load_state_dict(both.state_dict())
    x = images
    for n, strides in ((0, (1, 3)), (2, (2, 2))):
        x = F.conv2d(x, both.stem[n].weight, both.stem[n].bias, strides).relu()  # type: ignore[index,union-attr]
    assert_close(across(images), F.conv2d(x, both.conv.weight, both.conv.bias).relu())
    stack = {"stack_channels": (4, 5), "stack_kernels": (3, 3), "stack_strides": (1, 2)}
    assert StackBackbone(1, **stack, stack_strides_across=(4, 2))(images).shape == (2, 5, 8, 5)  # type: ignore[arg-type]


CUT = 0.8796
"""Of its deviation, a normal distribution keeps so much if it is cut at two deviations."""


def glorot(fan: int) -> float:
    return (2 / fan) ** 0.5


def test_weights_start_as_the_options_say() -> None:
    for init, bias, stds in (
        ("glorot", 0.0, (glorot(9 * (8 + 512)), glorot(9 * (64 + 256)), glorot(160 + 512))),
        ("truncated-normal", 0.1, (0.05 * CUT, 0.1 * CUT, 0.1 * CUT)),
    ):
        backbone = ConvBackbone(1, stem_channels=(8, 512), stem_strides=(1, 1), conv_init=init)
        primary = PrimaryCapsules(64, primary_kernel=3, conv_init=init)
        for each in (backbone, primary):
            each.init_weights()
        decoder = Decoder(10, 16, (1, 28, 28), decoder_init=init)
        for layer, std in zip((backbone.stem[2], primary.convs[0], decoder.layers[0]), stds, strict=True):
            assert layer.weight.std().item() == pytest.approx(std, rel=0.1)
            assert_close(layer.bias, bias)
    assert_close(PrimaryCapsules(64, primary_output="routed").bias, 0.1)
    primary = PrimaryCapsules(64, primary_kernel=3, primary_activations=True, primary_init="matrix-capsules")
    primary.init_weights()
    for conv, std, bias in ((primary.convs[0], 0.5, 0.0), (primary.activity[0], 3.0, -1.0)):
        assert conv.weight.std().item() == pytest.approx(std * CUT, rel=0.05)
        assert_close(conv.bias, bias)
    for (init, std, bias), norm in itertools.product(
        (("he", glorot(3 * 25), 0.0), ("truncated-normal", 0.05 * CUT, 0.1)), ("none", "batch", "batch-after")
    ):
        first = StackBackbone(3, stack_channels=(512,), stack_init=init, stack_norm=norm)[0]
        assert first.weight.std().item() == pytest.approx(std, rel=0.05)
        assert norm == "batch" if first.bias is None else (first.bias == bias).all()
