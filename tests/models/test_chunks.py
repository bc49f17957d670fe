"""Convolutions where nothing is learned: the same results, some images at a time."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcaps
from support import assert_close
from torchcaps import create_model
from torchcaps.machine import MIB
from torchcaps.models import CapsNet
from torchcaps.models.chunks import map_chunks
from torchcaps.nn import Capsules, PrimaryCapsules


def network(**overrides: Any) -> CapsNet:
    return create_model("sabour2017", **{"conv_channels": 16, "primary_types": 2, "decoder": False} | overrides)


def test_chunks_are_nearly_equal_and_as_large_as_is_best() -> None:
    for active, (images, memory, (largest, wide), chunks) in itertools.product(
        (False, True),
        (
            (7, 512, (MIB, False), [3, 2, 2]),
            (6, 512, (MIB, False), [3, 3]),
            (9, 512, (MIB // 2 + 1, False), [5, 4]),
            (3, 512, (MIB, False), [3]),
            (3, 2, (MIB, False), [2, 1]),
            (9, 16, (MIB // 2, True), [5, 4]),
            (300, 512, (MIB, True), [100, 100, 100]),
            (2, 512, (500 * MIB, True), [1, 1]),
            (0, 512, (MIB, False), [0]),
        ),
    ):
        torchcaps.set_working_memory(memory)
        seen = []

        def function(part: Tensor, seen: list[int] = seen, active: bool = active) -> Capsules:
            seen.append(len(part))
            poses = part.flatten(2).mul(2).contiguous().transpose(1, 2)  # (B, I, K), kept as (B, K, I)
            return Capsules(poses, part[:, 0, 0] if active else None, grid=(1, 2, 2))

        given = torch.rand(images, 3, 2, 2)
        poses, activations, grid, _ = map_chunks(function, given, largest, wide)
        assert seen == chunks
        assert poses.equal(2 * given.flatten(2).transpose(1, 2))
        assert poses.transpose(1, 2).is_contiguous()
        assert grid == (1, 2, 2)
        assert activations.equal(given[:, 0, 0]) if active else activations is None


def test_images_go_through_the_convolutions_in_parts() -> None:
    assert [PrimaryCapsules(256).is_wide((20, 20), batch) for batch in (128, 1)] == [True, False]
    assert not PrimaryCapsules(4, primary_types=2, primary_kernel=3).is_wide((20, 20), 128)
    calls: list[int] = []
    images = torch.rand(7, 1, 28, 28)
    model = network(stem_channels=(40, 8), stem_strides=(1, 2), conv_kernel=3, primary_kernel=3)
    model.primary_capsules.register_forward_hook(lambda _module, given, _capsules: calls.append(len(given[0])))
    whole = model.primary(images).poses
    torchcaps.set_working_memory(3.5 * 40 * 26 * 26 * 4 / MIB)  # the largest maps, the stem's, of 3.5 images
    with torch.no_grad():
        assert_close(model.primary(images).poses, whole)
        with torch.autocast("cpu", torch.bfloat16):
            model.primary(images)
    model(images)
    assert calls == [7, 3, 2, 2, 7, 7]  # maps of bfloat16 are half as large; all at once where something is learned
    active = network(primary_activations=True, routing="em").eval()  # which routes the activations of all parts
    whole = active(images).scores
    with torch.inference_mode():
        assert_close(active(images).scores, whole)


@pytest.mark.slow
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
