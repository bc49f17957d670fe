"""Losses of pixels: against their formulas in plain loops, goldens of MONAI 1.6.1, and MONAI itself where installed."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support import assert_close
from torchcaps.errors import InputError
from torchcaps.ops.segmentation import (
    confusions,
    dice_loss,
    mean_dice,
    pixel_classes,
    pixel_cross_entropy,
    pixel_logits,
    pixel_margin_loss,
)
from torchcaps.ranges import IGNORED

SIZES = [(5, 4), (3, 4, 5)]


def case(size: tuple[int, ...], classes: int = 3, ignored: bool = True) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(len(size))
    logits = torch.randn(2, classes, *size, generator=random, dtype=torch.float64)
    targets = torch.randint(0, classes, (2, *size), generator=random, dtype=torch.uint8)
    if ignored:
        targets[0, 0] = IGNORED
    return logits, targets


@pytest.mark.parametrize("size", SIZES)
def test_losses_are_their_formulas(size: tuple[int, ...]) -> None:
    logits, targets = case(size)
    shares = logits.softmax(1)
    dice, entropy, margin, counted = [], 0.0, 0.0, 0
    for b in range(2):
        both, whole = np.zeros(3), np.zeros(3)
        for place in itertools.product(*map(range, size)):
            true = int(targets[(b, *place)])
            if true == IGNORED:
                continue
            counted += 1
            entropy -= float(shares[(b, true, *place)].log())
            for j in range(3):
                share, length = float(shares[(b, j, *place)]), float(logits[(b, j, *place)])
                both[j] += share * (j == true)
                whole[j] += share + (j == true)
                margin += max(0, 0.9 - length) ** 2 if j == true else 0.5 * max(0, length - 0.1) ** 2
        dice += list((2 * both + 1e-5) / (whole + 1e-5))
    assert float(dice_loss(logits, targets)) == pytest.approx(1 - np.mean(dice), abs=1e-12)
    assert float(pixel_cross_entropy(logits, targets)) == pytest.approx(entropy / counted, abs=1e-12)
    assert float(pixel_margin_loss(logits, targets)) == pytest.approx(margin / counted, abs=1e-12)


def test_ignored_pixels_have_no_gradient_and_a_batch_of_them_has_no_loss() -> None:
    logits, targets = case((5, 4))
    for loss in (dice_loss, pixel_cross_entropy, pixel_margin_loss):
        values = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(values, targets), values)
        assert (gradient[0, :, 0] == 0).all()
        assert (gradient[1] != 0).any()
        nothing = loss(logits, torch.full_like(targets, IGNORED))
        assert float(nothing) == pytest.approx(0, abs=1e-12)


def test_gradients_are_right() -> None:
    logits, targets = case((3, 2))
    for loss in (dice_loss, pixel_cross_entropy, pixel_margin_loss):
        assert torch.autograd.gradcheck(lambda z, loss=loss: loss(z, targets), logits.clone().requires_grad_())


def test_one_score_is_that_of_the_second_class() -> None:
    lengths, targets = torch.rand(2, 1, 5, 4), (torch.rand(2, 5, 4) > 0.5).to(torch.uint8)
    both = torch.cat([1 - lengths, lengths], 1)
    assert_close(pixel_logits(lengths, scale=10), 10 * both, tol=1e-6)
    assert pixel_classes(lengths).equal(pixel_classes(both))
    logits = torch.randn(2, 1, 5, 4)
    assert_close(pixel_logits(logits, logits).softmax(1)[:, 1], logits[:, 0].sigmoid(), tol=1e-6)
    short, long = lengths.new_full((2, 1, 5, 4), 0.05), lengths.new_full((2, 1, 5, 4), 0.95)
    assert float(pixel_margin_loss(short, torch.zeros_like(targets))) == 0
    assert float(pixel_margin_loss(long, torch.ones_like(targets))) == 0


def test_goldens_of_monai() -> None:
    z = torch.linspace(-2, 2, 2 * 3 * 4 * 5, dtype=torch.float64).sin().mul(3).view(2, 3, 4, 5)
    targets = (torch.arange(40) * 7 % 3).to(torch.uint8).view(2, 4, 5)
    assert float(dice_loss(z, targets)) == pytest.approx(0.7114542314, abs=1e-7)
    assert float(dice_loss(z, targets) + pixel_cross_entropy(z, targets)) == pytest.approx(2.1764115827, abs=1e-7)


@pytest.mark.parametrize("size", SIZES)
def test_losses_equal_those_of_monai(size: tuple[int, ...]) -> None:
    losses = pytest.importorskip("monai.losses")
    logits, targets = case(size, ignored=False)
    logits, options = logits.float(), {"softmax": True, "to_onehot_y": True}
    theirs = [losses.DiceLoss(**options), losses.DiceCELoss(**options)]
    ours = [dice_loss(logits, targets), dice_loss(logits, targets) + pixel_cross_entropy(logits, targets)]
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine) == pytest.approx(float(other(logits, targets[:, None].long())), abs=1e-6)


def test_the_dice_of_an_image_is_that_of_its_classes_after_the_background() -> None:
    truth = torch.tensor([[[0, 0, 1, 1], [0, 2, IGNORED, 1]], [[0] * 4] * 2, [[0] * 4] * 2], dtype=torch.uint8)
    answer = torch.tensor([[[0, 1, 1, 1], [0, 0, 2, 0]], [[0] * 4] * 2, [[0, 0, 0, 3]] * 2], dtype=torch.uint8)
    found = confusions(answer, truth, 4)
    assert found.sum((1, 2)).tolist() == [7, 8, 8]
    assert found[0].tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    # class 1: 2·2 / (3 + 3); class 2: 0, in the mask only; class 3: in neither
    assert mean_dice(found).tolist() == pytest.approx([(2 / 3 + 0) / 2, 1, 0])


WRONG: dict[str, tuple[Any, Any, str]] = {
    "size": (torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 5, dtype=torch.uint8), "a class for each pixel"),
    "class": (torch.zeros(1, 2, 4, 4), torch.full((1, 4, 4), 2, dtype=torch.uint8), "must be in 0..1, or 255"),
    "dtype": (torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4), "must be uint8"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("loss", [dice_loss, pixel_cross_entropy, pixel_margin_loss])
def test_wrong_masks_are_one_sentence(name: str, loss: Any) -> None:
    scores, targets, words = WRONG[name]
    with pytest.raises(InputError, match=words):
        loss(scores, targets)
