"""Convolutions where nothing is learned: the same results, in parts or as one product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchcaps
from support import assert_close
from torchcaps import create_model
from torchcaps.models import CapsNet
from torchcaps.nn import PrimaryCapsules
from torchcaps.nn.inference import convolve_few, suits_few
from torchcaps.ops.memory import get_working_memory


@pytest.fixture(autouse=True)
def working_memory() -> Iterator[None]:
    before = get_working_memory()
    yield
    torchcaps.set_working_memory(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the convolutions got."""
    seen: list[int] = []
    whole = CapsNet._poses

    def noted(self: CapsNet, images: Tensor) -> Tensor:
        seen.append(len(images))
        return whole(self, images)

    monkeypatch.setattr(CapsNet, "_poses", noted)
    return seen


def network(**overrides: object) -> CapsNet:
    model = create_model("sabour2017", **{"conv_channels": 16, "primary_types": 2, "decoder": False} | overrides)
    assert isinstance(model, CapsNet)
    return model


def test_images_go_through_the_convolutions_in_parts(calls: list[int]) -> None:
    model, images = network(), torch.rand(7, 1, 28, 28)
    whole = model.primary_poses(images)
    torchcaps.set_working_memory(3.5 * 16 * 20 * 20 * 4 / 2**20)  # maps of three images and a half
    with torch.no_grad():
        parts = model.primary_poses(images)
        assert_close(parts, whole)
        assert parts.transpose(1, 2).is_contiguous() == whole.transpose(1, 2).is_contiguous()
        with torch.autocast("cpu", torch.bfloat16):
            model.primary_poses(images)
    assert calls == [7, 3, 3, 1, 7]  # maps of bfloat16 are half as large
    torchcaps.set_working_memory(1e-3)
    with torch.inference_mode():
        assert_close(model.primary_poses(images), whole)
    assert calls[5:] == [1] * 7


def test_not_where_something_is_learned(calls: list[int]) -> None:
    torchcaps.set_working_memory(1e-3)
    model = network()
    model(torch.rand(5, 1, 28, 28))
    assert calls == [5]


def test_the_largest_map_of_a_stem_counts(calls: list[int]) -> None:
    model = network(stem_channels=(40, 8), stem_strides=(1, 2), conv_kernel=3, primary_kernel=3)
    torchcaps.set_working_memory(2 * 40 * 26 * 26 * 4 / 2**20)
    with torch.no_grad():
        model.primary_poses(torch.rand(5, 1, 28, 28))
    assert calls == [2, 2, 1]


def test_compiled_and_exported_networks_take_any_batch() -> None:
    torchcaps.set_working_memory(0.05)
    model, images = network().eval(), torch.rand(5, 1, 28, 28)
    with torch.no_grad():
        wanted = model(images).lengths
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(model, (images[:3],), dynamic_shapes={"images": {0: batch}})
        assert_close(program.module()(images).lengths, wanted, 1e-5)
        for count in (1, 5):
            compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
            assert_close(compiled(images[:count]).lengths, wanted[:count], 1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(9, 2, (20, 20)), (3, 1, (5, 7)), (4, 3, (4, 11))])
def test_a_convolution_as_one_product(bias: bool, kernel: int, stride: int, size: tuple[int, int]) -> None:
    conv = nn.Conv2d(3, 8, kernel, stride, bias=bias)
    features = torch.randn(2, 3, *size).to(memory_format=torch.channels_last)
    got, wanted = convolve_few(features, conv), conv(features)
    assert got.shape == wanted.shape
    assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_who_listens_to_a_convolution_hears_it(separate: bool) -> None:
    layer, heard = PrimaryCapsules(32, 32, separate_convs=separate), []
    features = torch.randn(1, 32, 9, 9)
    with torch.no_grad():
        wanted = layer(features)
        for conv in layer.convs:
            conv.register_forward_hook(lambda *_: heard.append(1))
        assert_close(layer(features), wanted, 1e-5)
    assert len(heard) == len(layer.convs)


def test_only_for_few_locations_and_a_large_weight() -> None:
    layer = PrimaryCapsules(256)
    conv = layer.convs[0]
    assert isinstance(conv, nn.Conv2d)
    one, two = torch.randn(1, 256, 20, 20), torch.randn(2, 256, 20, 20)
    assert not suits_few(one, conv), "it is learned"
    with torch.no_grad():
        assert suits_few(one, conv)
        assert not suits_few(two, conv)
        assert not suits_few(one.double(), conv)
        assert not suits_few(one.to("meta"), conv)
        with torch.autocast("cpu", torch.bfloat16):
            assert not suits_few(one, conv)
        alone = layer(one)
        assert_close(alone, layer(torch.cat([one, one]))[:1], 1e-5)
    assert_close(alone, layer(one), 1e-5)
