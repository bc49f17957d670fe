"""Convolutions, the stem's, and the normalisation that knows one image at a time."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import (
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_gradients_reach,
    assert_raises,
    drawn_for,
    labels_for,
)
from torchcaps import create_model
from torchcaps.errors import InputError, WrongType
from torchcaps.nn import ChannelNorm, ConvBackbone, Convolution, StackBackbone
from torchcaps.nn.convolutions import conv_stem, draw_layers
from torchcaps.ops.convolution import Shape, choice, transform
from torchcaps.parts import build, describe

SHAPE = {"in_channels": 1, "in_shape": (1, 28, 28), "num_classes": 10}
SIZES = [(3, 7, 5, 2, 1, True), (1, 64, 9, 1, 0, True), (16, 8, 3, 1, 1, False), (6, 4, 1, 3, 0, True)]


def both(sizes: tuple[Any, ...], seed: int = 0, **more: Any) -> tuple[Convolution, nn.Conv2d]:
    """A convolution and PyTorch's, from the same seed."""
    *numbers, bias = sizes
    torch.manual_seed(seed)
    ours = Convolution(*numbers, bias=bias, **more)
    torch.manual_seed(seed)
    return ours, nn.Conv2d(*numbers, bias=bias)


@pytest.mark.parametrize("sizes", SIZES)
def test_starting_values_and_state_are_conv2d_s(sizes: tuple[Any, ...]) -> None:
    ours, theirs = both(sizes)
    after = torch.rand(3)
    both(sizes)
    assert after.equal(torch.rand(3)), "as many random numbers are drawn"
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert ours.state_dict()[name].equal(value), name
    assert ours.weight.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(ours, nn.Conv2d)


def test_drawn_anew_the_parameters_stay_the_same_objects() -> None:
    ours, theirs = both(SIZES[0])
    before, held = ours.weight.detach().clone(), list(ours.parameters())
    for each in (ours, theirs):
        torch.manual_seed(1)
        each.reset_parameters()
    assert all(a is b for a, b in zip(ours.parameters(), held, strict=True)), "an optimiser would lose them"
    assert_differs(ours.weight, before)
    assert ours.weight.equal(theirs.weight)
    assert ours.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("init", ["glorot", "truncated-normal"])
def test_a_draw_is_the_same_whatever_the_order_in_memory(init: Any) -> None:
    ours, theirs = both(SIZES[0])
    for each in (ours, theirs):
        torch.manual_seed(2)
        draw_layers(each, init, std=0.3)
        assert each.weight.requires_grad
    assert ours.weight.equal(theirs.weight)
    assert ours.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_is_conv2d(sizes: tuple[Any, ...], relu: bool) -> None:
    ours, theirs = both(sizes, relu=relu)
    features = torch.randn(3, sizes[0], 13, 12)
    wanted = F.relu(theirs(features)) if relu else theirs(features)
    got = ours(features)
    assert_close(got, wanted, 1e-5)
    for each, maps in ((ours, got), (theirs, wanted)):
        grads = torch.autograd.grad(maps.square().sum(), each.parameters())
        for parameter, grad in zip(each.parameters(), grads, strict=True):
            parameter.grad = grad
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert_close(mine.grad / yours.grad.abs().max(), yours.grad / yours.grad.abs().max(), 1e-5)
    said = f"Convolution: input must have shape (B, {sizes[0]}, H, W), got (3, {sizes[0] + 1}, 13, 12)"
    said += f": in_channels is {sizes[0]}"
    assert_raises(InputError, ours, torch.randn(3, sizes[0] + 1, 13, 12), say=said)


def test_weights_travel() -> None:
    (ours, theirs), features = both(SIZES[0], relu=True), torch.randn(2, 3, 9, 9)
    other = Convolution(3, 7, 5, 2, 1, relu=True)
    assert_differs(other.weight, ours.weight)
    wanted = F.relu(theirs(features))
    other.load_state_dict(theirs.state_dict())
    assert other.weight.is_contiguous(memory_format=torch.channels_last)
    assigned = Convolution(3, 7, 5, 2, 1, relu=True)
    assigned.load_state_dict(theirs.state_dict(), assign=True)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded = Convolution(3, 7, 5, 2, 1, relu=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    whole = io.BytesIO()
    torch.save(ours, whole)
    whole.seek(0)
    for each in (ours, other, assigned, loaded, copy.deepcopy(ours), torch.load(whole, weights_only=False)):
        assert_close(each(features), wanted, 1e-5)
        assert each.relu
    theirs.load_state_dict(ours.state_dict())
    assert theirs.weight.equal(ours.weight)


def test_who_listens_hears_a_convolution() -> None:
    layer, heard = Convolution(3, 8, 5), []
    layer.register_forward_pre_hook(lambda *_: heard.append("before"))
    layer.register_forward_hook(lambda *_: heard.append("after"))
    layer.register_full_backward_hook(lambda *_: heard.append("backward"))
    layer(torch.randn(2, 3, 9, 9, requires_grad=True)).sum().backward()
    assert heard == ["before", "after", "backward"]


def test_a_relu_in_place_may_follow() -> None:
    torch.manual_seed(0)
    layer, features = nn.Sequential(Convolution(1, 64, 5), nn.ReLU(inplace=True)), torch.randn(2, 1, 9, 9)
    layer(features).sum().backward()
    assert_gradients_reach(layer)
    assert_close(layer(features), F.relu(F.conv2d(features, layer[0].weight, layer[0].bias)), 1e-5)


# ---- whole networks

NETWORKS = {
    "sabour2017": {"conv_channels": 24, "primary_types": 4, "decoder_hidden": (16, 24)},
    "torch-notebook": {"conv_channels": 24, "primary_types": 4, "decoder_hidden": (16, 24)},
    "sabour2017-multimnist": {"conv_channels": 16, "primary_types": 3, "decoder_hidden": (16, 24)},
    "cnn-matched": {"channels": (64, 24), "hidden": (32, 16)},
    "cnn-pooled": {"stack_channels": (64, 24, 16, 8)},
}


@pytest.mark.parametrize("preset", NETWORKS)
def test_networks_are_those_of_plain_convolutions(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = create_model(preset, **NETWORKS[preset]).eval()
    images, labels = torch.rand(8, *model.in_shape), labels_for(model, 8)
    transformed = []
    forward = transform.forward
    monkeypatch.setattr(transform, "forward", lambda *args: transformed.append(1) or forward(*args))
    monkeypatch.setattr(choice, "LEAST_GAIN", float("inf"))

    def run(wide: str, narrow: str) -> dict[str, Tensor]:
        def chosen(shape: Shape, images: int, learning: bool) -> str:
            return narrow if shape.channels < 16 else wide

        for module in ("torchcaps.ops.convolution", "torchcaps.nn.primary"):
            monkeypatch.setattr(f"{module}.choose", chosen)
        model.zero_grad()
        output = model(images, labels)
        loss = model.loss(output, drawn_for(model, images), labels).total
        loss.backward()
        with torch.no_grad():
            alone = model(images).lengths
        found = {"lengths": output.lengths.detach(), "inferred": alone, "loss": loss.detach()}
        return found | {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    wanted = run("plain", "plain")
    assert not transformed
    got = run("transform", "columns")
    assert len(transformed) >= 2, "with and without learning"
    assert got.keys() == wanted.keys()
    for name in wanted:
        scale = wanted[name].abs().max().clamp_min(1e-30)
        assert_close(got[name] / scale, wanted[name] / scale, 2e-5)


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
    assert_raises(InputError, norm, torch.randn(2, 3, 5, 5), say="ChannelNorm: input must have shape (B, 4, H, W)")
    assert_raises(WrongType, norm, torch.ones(2, 4, 5, 5, dtype=torch.int64), say="must be a floating-point tensor")
    said = "ChannelNorm: input and weight must be of one dtype, got torch.float64 and torch.float32"
    assert_raises(WrongType, norm, torch.ones(2, 4, 5, 5).double(), say=said)


@pytest.mark.parametrize("norm", ["none", "channel"])
def test_a_stem_in_training_does_not_mix_images(norm: Any) -> None:
    stem = conv_stem(2, (4, 6), (1, 2), norm, 0.0).train()
    images = torch.rand(3, 2, 12, 13)
    assert stem(images).shape == (3, 6, 4, 5)
    assert (stem(images) >= 0).all()
    assert_batch_independent(stem, images)
    stem(images).square().sum().backward()
    assert_gradients_reach(stem)


def test_each_convolution_of_a_stem_has_its_stride() -> None:
    stem = conv_stem(1, (4, 5, 6), (1, 3, 2), "none", 0.3)
    convs = [layer for layer in stem if isinstance(layer, nn.Conv2d)]
    assert [(conv.in_channels, conv.stride[0]) for conv in convs] == [(1, 1), (4, 3), (5, 2)]
    assert isinstance(stem[-1], nn.Dropout2d)
    images = torch.rand(2, 3, 5, 5)
    assert conv_stem(3, (), (), "channel", 0.3)(images) is images


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_smallest_image_that_a_network_with_a_stem_takes(stride: int) -> None:
    overrides = {"stem_channels": (4, 4), "stem_strides": (1, stride), "conv_kernel": 3, "primary_kernel": 3}
    overrides |= {"conv_channels": 4, "primary_types": 1, "decoder": False}
    smallest = 3 + 3 + (5 - 1) * stride - 1  # 5 into the convolutions
    network = create_model("sabour2017", (1, smallest, smallest), 3, **overrides)
    assert network.primary(torch.rand(2, 1, smallest, smallest)).grid == (1, 1, 1)
    said = f"too small for the network's convolutions; the smallest size that fits is {smallest}×"
    assert_raises(InputError, create_model, "sabour2017", (1, smallest - 1, smallest), 3, **overrides, say=said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stem_channels": (8, 0)}, "stem_channels must be 1 to 65536, got 0"),
        ({"stem_channels": (8,), "stem_strides": (0,)}, "stem_strides must be 1 to 4096, got 0"),
        ({"conv_dropout": 1.0}, "conv_dropout must be at least 0 and below 1, got 1.0"),
        (
            {"stem_channels": (4, 8), "stem_strides": (2,)},
            "stem_strides must be 2 numbers, one for each of stem_channels, got 1",
        ),
    ],
)
def test_values_that_do_not_fit(options: Any, said: str) -> None:
    for kind, name in (("backbone", "conv"), ("network", "cnn")):
        assert_raises(InputError, build, kind, {"name": name, **options}, **SHAPE, say=said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stack_channels": ()}, "stack_channels must be at least one numbers, one for each convolution, got 0"),
        ({"stack_channels": (3, 4)}, "stack_kernels must be 2 numbers, one for each convolution, got 1"),
        ({"stack_strides": (2, 2)}, "stack_strides must be 1 numbers, one for each convolution, got 2"),
    ],
)
def test_lists_of_a_stack_that_do_not_fit(options: Any, said: str) -> None:
    assert_raises(InputError, StackBackbone, 1, **options, say=said)


@pytest.mark.parametrize(("init", "std"), [("glorot", (2 / (9 * (8 + 512))) ** 0.5), ("truncated-normal", 0.05 * 0.88)])
def test_a_stem_starts_as_the_first_convolution_does(init: Any, std: float) -> None:
    torch.manual_seed(0)
    backbone = ConvBackbone(1, stem_channels=(8, 512), stem_strides=(1, 1), conv_init=init)
    backbone.init_weights()
    assert backbone.stem[2].weight.std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize(("init", "std"), [("he", (2 / (3 * 25)) ** 0.5), ("truncated-normal", 0.05 * 0.88)])
@pytest.mark.parametrize("norm", ["none", "batch", "batch-after"])
def test_a_stack_starts_as_its_option_says(init: Any, std: float, norm: Any) -> None:
    torch.manual_seed(0)
    first = StackBackbone(3, stack_channels=(512,), stack_init=init, stack_norm=norm)[0]
    assert first.weight.std().item() == pytest.approx(std, rel=0.05)
    assert norm == "batch" if first.bias is None else (first.bias == (0 if init == "he" else 0.1)).all()


@pytest.mark.parametrize("part", [ConvBackbone(2, stem_channels=[4], stem_strides=[1]), StackBackbone(2)], ids=type)
def test_options_are_attributes(part: nn.Module) -> None:
    tree = describe(part)
    assert describe(build("backbone", tree, in_channels=2)) == tree
