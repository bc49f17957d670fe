"""Losses against values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import assert_close, assert_differs, assert_finite, assert_raises
from torchcaps.errors import InputError, WrongType
from torchcaps.nn import mask_capsules
from torchcaps.ops.losses import (
    margin_loss,
    multi_hot,
    normalised_cross_entropy,
    reconstruction_loss,
    score_cross_entropy,
    spread_loss,
)
from torchcaps.ops.squash import safe_norm

LENGTHS = torch.tensor([[0.8, 0.2, 0.1], [0.05, 0.5, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])
# image 0, class 0: present 0.9−0.8 = 0.1; absent 0.2−0.1 = 0.1 and 0
# image 1, class 1: present 0.9−0.5 = 0.4; absent 0 (0.05 < 0.1) and 1.0−0.1 = 0.9
SQUARED = [0.01 + 0.5 * 0.01, 0.16 + 0.5 * 0.81]
PLAIN = [0.1 + 0.5 * 0.1, 0.4 + 0.5 * 0.9]


def test_margin_loss_by_hand() -> None:
    assert_close(margin_loss(LENGTHS, LABELS, reduction="none"), SQUARED, 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS), sum(SQUARED) / 2, 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS, reduction="sum"), sum(SQUARED), 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS, power=1, reduction="none"), PLAIN, 1e-12)
    # m+ = 0.7: 0 and 0.2;  m− = 0.3: (0, 0) and (0.2 of class 1? no: present) 0.7;  lam = 2
    other = margin_loss(LENGTHS, LABELS, m_plus=0.7, m_minus=0.3, lam=2.0, reduction="none")
    assert_close(other, [0.0, 0.04 + 2 * 0.49], 1e-12)


def test_labels_are_one_hot_rows() -> None:
    rows = torch.tensor([[1, 0, 0], [0, 1, 0]])
    for targets in (rows, rows.bool(), rows.double(), rows.to(torch.uint8)):
        assert_close(margin_loss(LENGTHS, targets), margin_loss(LENGTHS, LABELS), 1e-12)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert_close(margin_loss(LENGTHS, LABELS.to(dtype)), margin_loss(LENGTHS, LABELS), 1e-12)


def test_several_classes_and_none() -> None:
    rows = torch.tensor([[1, 1, 0], [0, 0, 0]])
    # image 0: 0.01 + (0.9−0.2)² + 0;  image 1: all absent: 0 + 0.5·0.4² + 0.5·0.9²
    assert_close(margin_loss(LENGTHS, rows, reduction="none"), [0.01 + 0.49, 0.5 * 0.16 + 0.5 * 0.81], 1e-12)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_margin_loss_gradient(power: int) -> None:
    lengths = LENGTHS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: margin_loss(x, LABELS, power=power, m_minus=0.11), (lengths,))


def test_half_precision_lengths_give_a_float32_loss() -> None:
    lengths = LENGTHS.to(torch.bfloat16)
    for loss in (margin_loss, normalised_cross_entropy):
        assert loss(lengths, LABELS).dtype == torch.float32
        assert_close(loss(lengths, LABELS), loss(lengths.float(), LABELS), 0)


def test_normalised_cross_entropy_by_hand() -> None:
    # shares of the classes that are there: 0.8 of 1.1 and 0.5 of 1.55
    wanted = [-math.log(0.8 / 1.1), -math.log(0.5 / 1.55)]
    assert_close(normalised_cross_entropy(LENGTHS, LABELS, reduction="none"), wanted, 1e-12)
    assert_close(normalised_cross_entropy(LENGTHS, LABELS), sum(wanted) / 2, 1e-12)
    rows = torch.tensor([[1, 1, 0], [0, 1, 0]])
    two = -math.log(0.8 / 1.1) - math.log(0.2 / 1.1)
    assert_close(normalised_cross_entropy(LENGTHS, rows, reduction="none"), [two, wanted[1]], 1e-12)
    assert_differs(normalised_cross_entropy(LENGTHS, LABELS), -LENGTHS.log_softmax(-1)[[0, 1], LABELS].mean())


def test_normalised_cross_entropy_is_clipped() -> None:
    lengths = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert_close(normalised_cross_entropy(lengths, torch.tensor([0])), -math.log(1e-7), 1e-12)
    assert_close(normalised_cross_entropy(lengths, torch.tensor([1])), -math.log(1 - 1e-7), 1e-12)
    assert_close(normalised_cross_entropy(lengths, torch.tensor([0]), clip=0.25), -math.log(0.25), 1e-12)
    zeros = torch.zeros(1, 2, requires_grad=True)
    normalised_cross_entropy(zeros, torch.tensor([0])).backward()
    assert_finite([zeros.grad])


def test_spread_loss_and_score_cross_entropy_by_hand() -> None:
    # image 0, class 0: 0.9−(0.8−0.2) = 0.3, 0.9−(0.8−0.1) = 0.2;  image 1, class 1: 0.9−0.45 = 0.45, 0.9+0.5 = 1.4
    wanted = [0.09 + 0.04, 0.45**2 + 1.4**2]
    assert_close(spread_loss(LENGTHS, LABELS, reduction="none"), wanted, 1e-12)
    assert_close(spread_loss(LENGTHS, LABELS, margin=torch.tensor(0.9, dtype=torch.float64)), sum(wanted) / 2, 1e-12)
    both = torch.tensor([[1, 1, 0]])  # a_t is 0.5: 0.9 − (0.5 − 0.1)
    assert_close(spread_loss(LENGTHS[:1], both), 0.25, 1e-12)
    logs = (2 * LENGTHS).log_softmax(1)
    assert_close(score_cross_entropy(LENGTHS, LABELS, scale=2.0), -(logs[0, 0] + logs[1, 1]).item() / 2, 1e-12)


def test_reconstruction_loss_by_hand() -> None:
    images = torch.zeros(2, 1, 2, 2)
    decoded = torch.tensor([[[[1.0, 0.0], [0.0, 0.5]]], [[[0.0, 0.0], [0.0, 0.5]]]])
    # squares: 1.25 and 0.25 an image
    assert_close(reconstruction_loss(decoded, images), (1.25 + 0.25) / 2)
    assert_close(reconstruction_loss(decoded, images, reduction="mean"), 1.5 / 8)
    assert reconstruction_loss(decoded.bfloat16(), images).dtype == torch.float32
    assert reconstruction_loss(decoded.double(), images.double()).dtype == torch.float64
    torch.autograd.gradcheck(reconstruction_loss, (decoded.double().requires_grad_(), images.double()))


def test_lengths_softmax_loss_and_mask_by_hand() -> None:
    """One image, two classes: from class capsules to lengths, coupling, loss and what the decoder sees."""
    capsules = torch.tensor([[[0.6, 0.0, 0.8], [0.3, 0.4, 0.0]]])  # (B=1, J=2, D=3)
    # lengths: √(0.36 + 0.64) = 1,  √(0.09 + 0.16) = 0.5
    lengths = safe_norm(capsules)
    assert_close(lengths, [[1.0, 0.5]], 1e-6)
    # softmax of the logits (0, ln 3): 1/(1+3), 3/(1+3)
    logits = torch.tensor([0.0, math.log(3)])
    assert_close(logits.softmax(0), [0.25, 0.75])
    # class 1 is there: (0.9 − 0.5)² + 0.5 (1 − 0.1)² = 0.16 + 0.405
    label = torch.tensor([1])
    assert_close(margin_loss(lengths, label), 0.565, 1e-6)
    # the longest capsule is 0: prediction wrong; the decoder is given the label's capsule in training
    assert lengths.argmax(-1).item() == 0
    assert_close(mask_capsules(capsules, label), [[[0.0, 0.0, 0.0], [0.3, 0.4, 0.0]]])
    assert_close(mask_capsules(capsules), [[[0.6, 0.0, 0.8], [0.0, 0.0, 0.0]]])


LOSSES = [margin_loss, normalised_cross_entropy, spread_loss, score_cross_entropy]


@pytest.mark.parametrize("loss", [*LOSSES, multi_hot])
def test_bad_targets(loss: Callable[..., Tensor]) -> None:
    name = loss.__name__
    for labels in ([0, 3], [-1, 0]):
        assert_raises(InputError, loss, LENGTHS, torch.tensor(labels), say=f"{name}: labels must be in 0..2, got")
    for shape in ((3,), (2, 2), (2, 3, 1), ()):
        targets = torch.zeros(shape, dtype=torch.int64)
        said = f"{name}: targets must have shape (2,) or (2, 1) or (2, 3), got {shape}"
        assert_raises(InputError, loss, LENGTHS, targets, say=said)
    for dtype in (torch.float32, torch.bool):
        assert_raises(InputError, loss, LENGTHS, torch.zeros(2, dtype=dtype), say=f"{name}: targets must")
    for value in (2.0, -1.0, math.nan):
        assert_raises(InputError, loss, LENGTHS, torch.full((2, 3), value), say="multi-hot targets must lie in 0..1")
    for lengths, kind, said in (
        (torch.ones(2, 3, dtype=torch.int64), WrongType, "must be a floating-point tensor"),
        (torch.ones(2, 3, 1), InputError, "must have shape (B, J), got (2, 3, 1)"),
    ):
        assert_raises(kind, loss, lengths, LABELS, say=said)


def test_bad_options_and_shapes() -> None:
    for loss in LOSSES:
        said = "reduction must be one of mean, sum, none, got"
        assert_raises(InputError, loss, LENGTHS, LABELS, reduction="average", say=said)
    for loss, option, value in (
        (margin_loss, "m_plus", -0.1),
        (normalised_cross_entropy, "clip", 0.5),
        (spread_loss, "margin", torch.ones(2)),
        (score_cross_entropy, "scale", -1.0),
    ):
        assert_raises(InputError, loss, LENGTHS, LABELS, **{option: value}, say=f"{loss.__name__}: {option} must")
    images = torch.zeros(2, 1, 2, 2)
    said = "one of sum_per_image, mean, got"
    assert_raises(InputError, reconstruction_loss, images, images, reduction="sum", say=said)
    for one, other in ((images, images[:1]), (images, images[..., :1]), (torch.ones(2), torch.ones(2))):
        assert_raises(InputError, reconstruction_loss, one, other, say="reconstruction_loss: ")
