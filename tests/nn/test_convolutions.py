"""Convolutions, the stem's, and the normalisation that knows one image at a time."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import (
    assert_batch_independent,
    assert_close,
    assert_differs,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    drawn_for,
    labels_for,
)
from torchcaps import create_model
from torchcaps.errors import InputError, WrongType
from torchcaps.nn import ChannelNorm, ConvBackbone, Convolution, StackBackbone
from torchcaps.nn.convolutions import conv_stem, draw_layers
from torchcaps.ops.convolution import choice, transform
from torchcaps.parts import build

SHAPE = {"in_channels": 1, "in_shape": (1, 28, 28), "num_classes": 10}
SIZES = [(3, 7, 5, 2, 1, True), (1, 64, 9, 1, 0, True), (16, 8, 3, 1, 1, False), (6, 4, 1, 3, 0, True)]


def both(sizes: tuple[Any, ...], seed: int = 0, **more: Any) -> tuple[Convolution, nn.Conv2d]:
    """A convolution and PyTorch's, from the same seed."""
    *numbers, bias = sizes
    torch.manual_seed(seed)
    ours = Convolution(*numbers, bias=bias, **more)
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
            assert ours.weight.equal(theirs.weight), "whatever the order in memory"
            assert ours.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_convolution_is_conv2d() -> None:
    for sizes, relu in itertools.product(SIZES, (False, True)):
        ours, theirs = both(sizes, relu=relu)
        features = torch.randn(3, sizes[0], 13, 12)
        wanted, got = F.relu(theirs(features)) if relu else theirs(features), ours(features)
        assert_close(got, wanted, 1e-5)
        mine, yours = (
            torch.autograd.grad(maps.square().sum(), each.parameters())
            for each, maps in ((ours, got), (theirs, wanted))
        )
        for one, other in zip(mine, yours, strict=True):
            assert_close(one / other.abs().max(), other / other.abs().max(), 1e-5)
    said = "Convolution: input must have shape (B, 6, H, W), got (3, 7, 13, 12): in_channels is 6"
    assert_raises(InputError, ours, torch.randn(3, 7, 13, 12), say=said)


def test_weights_travel() -> None:
    (ours, theirs), features = both(SIZES[0], relu=True), torch.randn(2, 3, 9, 9)
    wanted = F.relu(theirs(features))
    loaded, assigned = (Convolution(3, 7, 5, 2, 1, relu=True) for _ in range(2))
    assert_differs(loaded.weight, ours.weight)
    loaded.load_state_dict(theirs.state_dict())
    assert loaded.weight.is_contiguous(memory_format=torch.channels_last)
    assigned.load_state_dict(theirs.state_dict(), assign=True)
    for each in (loaded, assigned, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_close(each(features), wanted, 1e-5)
        assert each.relu
    theirs.load_state_dict(ours.state_dict())
    assert theirs.weight.equal(ours.weight)


def test_a_relu_in_place_may_follow() -> None:
    stack, features = nn.Sequential(Convolution(1, 64, 5), nn.ReLU(inplace=True)), torch.randn(2, 1, 9, 9)
    stack(features).sum().backward()
    assert_gradients_reach(stack)
    assert_close(stack(features), F.relu(F.conv2d(features, stack[0].weight, stack[0].bias)), 1e-5)


# ---- whole networks

NETWORKS = {
    "sabour2017-multimnist": {"conv_channels": 16, "primary_types": 3, "decoder_hidden": (16, 24)},
    "torch-notebook": {"conv_channels": 24, "primary_types": 4, "decoder_hidden": (16, 24)},
    "cnn-pooled": {"stack_channels": (64, 24, 16, 8)},
}


def test_networks_are_those_of_plain_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    transformed, way = [], {}
    forward = transform.forward
    monkeypatch.setattr(transform, "forward", lambda *args: transformed.append(1) or forward(*args))
    monkeypatch.setattr(choice, "LEAST_GAIN", float("inf"))
    for module in ("torchcaps.ops.convolution", "torchcaps.nn.primary"):
        choose = lambda shape, images, learning: way["narrow" if shape.channels < 16 else "wide"]  # noqa: E731
        monkeypatch.setattr(f"{module}.choose", choose)
    for preset, sizes in NETWORKS.items():
        model = create_model(preset, **sizes).eval()
        images, labels = torch.rand(8, *model.in_shape), labels_for(model, 8)
        found: list[dict[str, Tensor]] = []
        for wide, narrow in (("plain", "plain"), ("transform", "columns")):
            way |= {"wide": wide, "narrow": narrow}
            output = model(images, labels)
            loss = model.loss(output, drawn_for(model, images), labels).total
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                results = {"lengths": output.lengths, "inferred": model(images).lengths, "loss": loss}
            found.append(results | {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)})
            assert len(transformed) >= 2 * (wide == "transform"), "with and without learning"
        for name, plain in found[0].items():
            scale = plain.abs().max().clamp_min(1e-30)
            assert_close(found[1][name] / scale, plain / scale, 2e-5)
        transformed.clear()


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
    images = torch.rand(3, 2, 12, 13)
    for norm in ("none", "channel"):
        stem = conv_stem(2, (4, 6), (1, 2), norm, 0.0).train()
        assert stem(images).shape == (3, 6, 4, 5)
        assert (stem(images) >= 0).all()
        assert_batch_independent(stem, images)
        stem(images).square().sum().backward()
        assert_gradients_reach(stem)
    stem = conv_stem(1, (4, 5, 6), (1, 3, 2), "none", 0.3)
    convs = [layer for layer in stem if isinstance(layer, nn.Conv2d)]
    assert [(conv.in_channels, conv.stride[0]) for conv in convs] == [(1, 1), (4, 3), (5, 2)]
    assert isinstance(stem[-1], nn.Dropout2d)
    assert conv_stem(2, (), (), "channel", 0.3)(images) is images


def test_values_that_do_not_fit() -> None:
    for kind, name in (("backbone", "conv"), ("network", "cnn")):
        given = {"name": name, "stem_channels": (4, 8), "stem_strides": (2,)}
        said = "stem_strides must be 2 numbers, one for each of stem_channels, got 1"
        assert_raises(InputError, build, kind, given, **SHAPE, say=said)
    for options, said in (
        ({"stack_channels": ()}, "stack_channels must be at least one numbers, one for each convolution, got 0"),
        ({"stack_channels": (3, 4)}, "stack_kernels must be 2 numbers, one for each convolution, got 1"),
        ({"stack_strides": (2, 2)}, "stack_strides must be 1 numbers, one for each convolution, got 2"),
    ):
        assert_raises(InputError, StackBackbone, 1, **options, say=said)


def test_backbones_start_as_their_options_say() -> None:
    torch.manual_seed(0)
    for init, std in (("glorot", (2 / (9 * (8 + 512))) ** 0.5), ("truncated-normal", 0.05 * 0.88)):
        backbone = ConvBackbone(1, stem_channels=(8, 512), stem_strides=(1, 1), conv_init=init)
        backbone.init_weights()
        assert backbone.stem[2].weight.std().item() == pytest.approx(std, rel=0.1)
    for init, std in (("he", (2 / (3 * 25)) ** 0.5), ("truncated-normal", 0.05 * 0.88)):
        for norm in ("none", "batch", "batch-after"):
            first = StackBackbone(3, stack_channels=(512,), stack_init=init, stack_norm=norm)[0]
            assert first.weight.std().item() == pytest.approx(std, rel=0.05)
            assert norm == "batch" if first.bias is None else (first.bias == (0 if init == "he" else 0.1)).all()
