"""The mask and the decoder."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import assert_close, assert_raises
from torchcaps.errors import InputError
from torchcaps.nn import Decoder, mask_capsules, separate_capsules

CAPSULES = torch.tensor([[[0.3, 0.4], [0.0, 0.6], [0.1, 0.0]], [[0.0, 0.1], [0.2, 0.0], [0.0, -0.9]]])


def test_mask() -> None:
    for targets, kept in (
        (None, [[0, 1, 0], [0, 0, 1]]),  # lengths 0.5, 0.6, 0.1 and 0.1, 0.2, 0.9
        (torch.tensor([0, 1]), [[1, 0, 0], [0, 1, 0]]),
        (torch.tensor([[0], [1]]), [[1, 0, 0], [0, 1, 0]]),
        (torch.tensor([[1, 1, 0], [0, 0, 0]]), [[1, 1, 0], [0, 0, 0]]),
        (torch.tensor([[True, False, False], [False, True, True]]), [[1, 0, 0], [0, 1, 1]]),
    ):
        wanted = torch.tensor(kept)[..., None].float()
        capsules = CAPSULES.clone().requires_grad_()
        masked = mask_capsules(capsules, targets)
        masked.sum().backward()
        assert_close(masked, CAPSULES * wanted, 0)
        assert_close(capsules.grad, wanted.expand(2, 3, 2)), "a gradient flows through the kept capsules only"
        assert mask_capsules(CAPSULES.bfloat16(), targets).dtype == torch.bfloat16
    assert mask_capsules(torch.rand(0, 3, 5)).shape == (0, 3, 5)
    short = torch.zeros(1, 3, 4)  # added to 1e-7, the squares of both lengths would be the same number
    short[0, 2, 1], short[0, 1, 0] = 2e-8, 1e-8
    assert mask_capsules(short).nonzero().tolist() == [[0, 2, 1]]
    stacked, labels = torch.rand(3, 2, 4, 5), torch.randint(4, (3, 2))
    wanted = torch.stack([mask_capsules(*each) for each in zip(stacked, labels, strict=True)])
    assert_close(torch.vmap(mask_capsules)(stacked, labels), wanted, 0)


def test_each_object_stands_alone() -> None:
    capsules, classes = torch.rand(3, 4, 5), torch.tensor([[0, 3], [2, 1], [1, 0]])
    alone = separate_capsules(capsules, classes)
    assert alone.shape == (3, 2, 4, 5)
    for p in range(2):
        assert_close(alone[:, p], mask_capsules(capsules, classes[:, p]), 0)
    assert separate_capsules(capsules.half(), classes.int()).dtype == torch.float16


def test_capsules_and_targets_that_do_not_fit() -> None:
    for targets, said in (
        ([0, 3], "labels must be in 0..2, got 0..3"),
        ([0], "targets must have shape (2,) or (2, 1)"),
    ):
        assert_raises(InputError, mask_capsules, CAPSULES, torch.tensor(targets), say=f"mask_capsules: {said}")
    assert_raises(InputError, mask_capsules, CAPSULES[:, :0], say="capsules must be of at least one class, got none")
    for wrong, got in (([[0, 3], [1, 2]], "0..3"), ([[0, -1], [1, 2]], "-1..2")):
        said = f"separate_capsules: classes must be in 0..2, got {got}"
        assert_raises(InputError, separate_capsules, CAPSULES, torch.tensor(wrong), say=said)


def test_decoder_by_matrix_products() -> None:
    for hidden in ((), (7,), (5, 6, 7)):
        decoder, capsules = Decoder(3, 4, (2, 5, 3), decoder_hidden=hidden), torch.randn(2, 3, 4)
        x = capsules.reshape(2, 12)
        linears = [layer for layer in decoder.layers if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in linears] == [*hidden, 30]
        for layer in linears[:-1]:
            x = (x @ layer.weight.T + layer.bias).clamp_min(0)
        wanted = (x @ linears[-1].weight.T + linears[-1].bias).sigmoid().reshape(2, 2, 5, 3)
        assert_close(decoder(capsules), wanted)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # it brings capsules to its own
        images = copy.deepcopy(decoder).to(dtype)(capsules)
        assert images.dtype == dtype
        assert_close(images.float(), wanted, 0.01)
    assert Decoder(10, 16, (1, 28, 28)).decoder_hidden == (512, 1024), "the paper's"


def test_convolutions_draw_the_image() -> None:
    cases: list[tuple[tuple[int, ...], tuple[int, int, int], list[tuple[int, int, int]]]] = [
        ((4,), (1, 8, 8), [(4, 4, 4)]),
        ((6, 4), (3, 8, 12), [(6, 2, 3), (4, 4, 6)]),
        ((5, 4, 3), (2, 13, 9), [(5, 2, 2), (4, 4, 3), (3, 7, 5)]),  # rounded up
    ]
    for channels, shape, maps in cases:
        decoder = Decoder(3, 4, shape, decoder_hidden=(7,), decoder_channels=channels)
        capsules = torch.randn(2, 3, 4)
        x = capsules.flatten(1)
        for layer in (layer for layer in decoder.layers if isinstance(layer, nn.Linear)):
            x = (x @ layer.weight.T + layer.bias).clamp_min(0)
        x = x.reshape(2, *maps[0])
        convolutions = [layer for layer in decoder.layers if isinstance(layer, nn.Conv2d)]
        for layer, (out, height, width) in zip(convolutions, [*maps[1:], shape], strict=True):
            down, across = (torch.arange(n) * old // n for n, old in zip((height, width), x.shape[2:], strict=True))
            x = F.conv2d(x[:, :, down][..., across], layer.weight, layer.bias, padding=1)
            assert x.shape[1:] == (out, height, width)
            x = x.sigmoid() if layer is convolutions[-1] else x.clamp_min(0)
        assert_close(decoder(capsules), x)
    said = "decoder_channels need an out_shape (C, H, W), got (5, 3)"
    assert_raises(InputError, Decoder, 3, 4, (5, 3), decoder_channels=(4,), say=said)


def test_decoder_starts_as_the_option_says() -> None:
    for init, std in (("glorot", (2 / (160 + 512)) ** 0.5), ("truncated-normal", 0.088)):
        first = Decoder(10, 16, (1, 28, 28), decoder_init=init).layers[0]
        assert first.weight.std().item() == pytest.approx(std, rel=0.05)
        assert_close(first.bias, 0.1 if init == "truncated-normal" else 0.0)
