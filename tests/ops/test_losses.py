"""Losses against values worked by hand."""

import math

import pytest
import torch

from support import assert_close, assert_finite, assert_raises
from torchcaps.errors import InputError
from torchcaps.ops.losses import (
    margin_loss,
    multi_hot,
    normalised_cross_entropy,
    reconstruction_loss,
    score_cross_entropy,
    spread_loss,
)

LENGTHS = torch.tensor([[0.8, 0.2, 0.1], [0.05, 0.5, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])
LOSSES = [margin_loss, normalised_cross_entropy, spread_loss, score_cross_entropy]


def test_margin_loss_by_hand() -> None:
    # image 0, class 0: present 0.9−0.8 = 0.1; absent 0.2−0.1 = 0.1 and 0
    # image 1, class 1: present 0.9−0.5 = 0.4; absent 0 (0.05 < 0.1) and 1.0−0.1 = 0.9
    squared, plain = [0.01 + 0.5 * 0.01, 0.16 + 0.5 * 0.81], [0.1 + 0.5 * 0.1, 0.4 + 0.5 * 0.9]
    assert_close(margin_loss(LENGTHS, LABELS, reduction="none"), squared, 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS), sum(squared) / 2, 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS, reduction="sum"), sum(squared), 1e-12)
    assert_close(margin_loss(LENGTHS, LABELS, power=1, reduction="none"), plain, 1e-12)
    # m+ = 0.7: 0 and 0.2;  m− = 0.3: (0, 0) and (0.2 of class 1? no: present) 0.7;  lam = 2
    other = margin_loss(LENGTHS, LABELS, m_plus=0.7, m_minus=0.3, lam=2.0, reduction="none")
    assert_close(other, [0.0, 0.04 + 2 * 0.49], 1e-12)
    several = torch.tensor([[1, 1, 0], [0, 0, 0]])
    # image 0: 0.01 + (0.9−0.2)² + 0;  image 1: all absent: 0 + 0.5·0.4² + 0.5·0.9²
    assert_close(margin_loss(LENGTHS, several, reduction="none"), [0.01 + 0.49, 0.5 * 0.16 + 0.5 * 0.81], 1e-12)


def test_normalised_cross_entropy_by_hand() -> None:
    # shares of the classes that are there: 0.8 of 1.1 and 0.5 of 1.55
    wanted = [-math.log(0.8 / 1.1), -math.log(0.5 / 1.55)]
    assert_close(normalised_cross_entropy(LENGTHS, LABELS, reduction="none"), wanted, 1e-12)
    assert_close(normalised_cross_entropy(LENGTHS, LABELS), sum(wanted) / 2, 1e-12)
    two = -math.log(0.8 / 1.1) - math.log(0.2 / 1.1)
    several = torch.tensor([[1, 1, 0], [0, 1, 0]])
    assert_close(normalised_cross_entropy(LENGTHS, several, reduction="none"), [two, wanted[1]], 1e-12)
    lengths = torch.tensor([[0.0, 1.0]], dtype=torch.float64)  # clipped
    assert_close(normalised_cross_entropy(lengths, torch.tensor([0])), -math.log(1e-7), 1e-12)
    assert_close(normalised_cross_entropy(lengths, torch.tensor([1])), -math.log(1 - 1e-7), 1e-12)
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


def test_half_precision_is_computed_in_float32() -> None:
    half = LENGTHS.to(torch.bfloat16)
    for loss in LOSSES:
        assert loss(half, LABELS).dtype == torch.float32
        assert_close(loss(half, LABELS), loss(half.float(), LABELS), 0)
    assert reconstruction_loss(half, half).dtype == torch.float32


def test_targets_are_labels_columns_of_them_or_rows_of_zeros_and_ones() -> None:
    rows = torch.tensor([[1, 0, 0], [0, 1, 0]])
    for loss in (*LOSSES, multi_hot):
        wanted = loss(LENGTHS, LABELS)
        for targets in (rows, rows.bool(), rows.double(), rows.to(torch.uint8)):
            assert_close(loss(LENGTHS, targets), wanted, 1e-12)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            for targets in (LABELS.to(dtype), LABELS.to(dtype)[:, None]):
                assert_close(loss(LENGTHS, targets), wanted, 1e-12)
    # of a single class a column is multi-hot: there, and not there
    assert_close(multi_hot(torch.full((2, 1), 0.5), torch.tensor([[1], [0]])), [[1.0], [0.0]], 0)
    assert_close(multi_hot(torch.full((2, 1), 0.5), torch.tensor([0, 0])), 1.0, 0)
    assert margin_loss(torch.rand(0, 3), torch.rand(0, 3), reduction="none").shape == (0,)


def test_targets_and_numbers_that_do_not_fit() -> None:
    images, integers = torch.zeros(2, 1, 2, 2), torch.int64
    bad = [torch.tensor(labels) for labels in ([0, 3], [-1, 0], [[0], [3]])]
    bad += [torch.zeros(shape, dtype=integers) for shape in ((3,), (2, 2), (2, 3, 1), ())]
    bad += [torch.zeros(2), torch.zeros(2).bool(), torch.zeros(2, 1)]
    bad += [torch.full((2, 3), value) for value in (2.0, -1.0, math.nan)]
    for loss in (*LOSSES, multi_hot):
        for targets in bad:
            with pytest.raises(InputError, match=r"(targets|labels) must"):
                loss(LENGTHS, targets)
    assert_raises(InputError, spread_loss, LENGTHS, LABELS, margin=torch.ones(2), say="margin must")
    assert_raises(InputError, reconstruction_loss, torch.rand(3), torch.rand(3), say="(B, ...), got (3,)")
    for other in (images[:1], images[..., :1]):
        assert_raises(InputError, reconstruction_loss, images, other, say="reconstruction_loss: ")


def test_under_vmap() -> None:
    lengths, labels = torch.rand(3, 2, 4), torch.randint(4, (3, 2))
    for loss in LOSSES:
        wanted = torch.stack([loss(*each) for each in zip(lengths, labels, strict=True)])
        assert_close(torch.vmap(loss)(lengths, labels), wanted, 1e-6)
