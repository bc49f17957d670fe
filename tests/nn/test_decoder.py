"""The mask and the decoder."""

import copy
import itertools
import math

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


def test_capsules_and_classes_that_do_not_fit() -> None:
    """Other targets: multi_hot in test_losses.py."""
    assert_raises(InputError, mask_capsules, CAPSULES[:, :0], say="capsules must be of at least one class, got none")
    for wrong, got in (([[0, 3], [1, 2]], "0..3"), ([[0, -1], [1, 2]], "-1..2")):
        said = f"separate_capsules: classes must be in 0..2, got {got}"
        assert_raises(InputError, separate_capsules, CAPSULES, torch.tensor(wrong), say=said)


def test_a_decoder_by_products_and_convolutions() -> None:
    cases: list[tuple[tuple[int, ...], list[tuple[int, int, int]]]] = [  # channels, and the shapes of maps and image
        ((), [(2, 5, 3)]),
        ((4,), [(4, 4, 4), (1, 8, 8)]),
        ((6, 4), [(6, 2, 3), (4, 4, 6), (3, 8, 12)]),
        ((5, 4, 3), [(5, 2, 2), (4, 4, 3), (3, 7, 5), (2, 13, 9)]),  # rounded up
    ]
    for hidden, (channels, shapes) in itertools.product(((), (7,), (5, 6, 7)), cases):
        decoder = Decoder(3, 4, shapes[-1], decoder_hidden=hidden, decoder_channels=channels)
        x = capsules = torch.randn(2, 3, 4)
        linears = [layer for layer in decoder.layers if isinstance(layer, nn.Linear)]
        convolutions = [layer for layer in decoder.layers if isinstance(layer, nn.Conv2d)]
        assert [layer.out_features for layer in linears] == [*hidden, math.prod(shapes[0])]
        last = [*linears, *convolutions][-1]
        for layer in linears:
            x = x.flatten(1) @ layer.weight.T + layer.bias
            x = x.sigmoid() if layer is last else x.clamp_min(0)
        x = x.reshape(2, *shapes[0])
        for layer, (out, height, width) in zip(convolutions, shapes[1:], strict=True):
            down, across = (torch.arange(n) * old // n for n, old in zip((height, width), x.shape[2:], strict=True))
            x = F.conv2d(x[:, :, down][..., across], layer.weight, layer.bias, padding=1)
            assert x.shape[1:] == (out, height, width)
            x = x.sigmoid() if layer is last else x.clamp_min(0)
        assert_close(decoder(capsules), x)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # it brings capsules to its own
        images = copy.deepcopy(decoder).to(dtype)(capsules)
        assert images.dtype == dtype
        assert_close(images.float(), x, 0.01)
    said = "decoder_channels need an out_shape (C, H, W), got (5, 3)"
    assert_raises(InputError, Decoder, 3, 4, (5, 3), decoder_channels=(4,), say=said)
