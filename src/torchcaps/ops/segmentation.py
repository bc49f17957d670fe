"""Classes of pixels: losses of their scores, and the overlap of two masks.

Masks hold the class of each pixel; :data:`torchcaps.ranges.IGNORED` marks pixels that no loss and no metric counts. S
are the axes of an image: (L,), (H, W) or (D, H, W).

Two classes may have a single score: of class 1. Class 0, the background, then has 1 − length, or a logit of 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ops.precision import in_full_precision
from torchcaps.ranges import IGNORED, Factor, PositiveFactor
from torchcaps.tracing import can_look

SMOOTH = 1e-5
"""Number added above and below the fraction of the Dice loss."""


def pixel_classes(scores: Float[Tensor, "B J *S"]) -> UInt8[Tensor, "B *S"]:
    """Return the class of each pixel: the class with the highest score; of a single score, 1 if it is above 0.5."""
    answers: Tensor = scores[:, 0] > 0.5 if scores.shape[1] == 1 else scores.max(1).indices
    return answers.to(torch.uint8)


def pixel_logits(
    scores: Float[Tensor, "B J *S"], logits: Float[Tensor, "B J *S"] | None = None, scale: float = 1.0
) -> Float[Tensor, "B J *S"]:
    """Return numbers whose softmax is the probability of each class, at least two for each pixel.

    Args:
        scores: Lengths of capsules, 0..1; used without logits.
        logits: Logits of a network without capsules.
        scale: Factor on the lengths.
    """
    if logits is not None:
        logits = in_full_precision(logits)
        return logits if logits.shape[1] > 1 else torch.cat([torch.zeros_like(logits), logits], 1)
    lengths = in_full_precision(scores)
    return scale * (lengths if lengths.shape[1] > 1 else torch.cat([1 - lengths, lengths], 1))


@checked
def dice_loss(
    logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"], *, smooth: PositiveFactor = SMOOTH
) -> Float[Tensor, ""]:
    """Dice loss of the softmax p of logits, the mean over images and classes.

        L = 1 − mean_bj (2 Σ_x p_bjx t_bjx + smooth) / (Σ_x p_bjx + Σ_x t_bjx + smooth)

    Args:
        logits: Logits of at least two classes.
        targets: Class of each pixel; 255: ignored.
        smooth: Number added above and below the fraction.

    Raises:
        InputError: Masks and logits differ in size, or a mask has a class beyond J − 1.

    Source: Milletari, Navab, Ahmadi 2016 (arXiv:1606.04797) without squares, as MONAI's ``DiceLoss(softmax=True,
    to_onehot_y=True)``.
    """
    present = _present("dice_loss", logits, targets)
    shares = in_full_precision(logits).softmax(1) * (targets != IGNORED).unsqueeze(1)
    both = (shares * present).flatten(2).sum(2)
    each = shares.flatten(2).sum(2) + present.flatten(2).sum(2)
    return 1 - ((2 * both + smooth) / (each + smooth)).mean()


@checked
def pixel_cross_entropy(logits: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "B *S"]) -> Float[Tensor, ""]:
    """Cross-entropy of the softmax of logits, the mean over all pixels of the batch that are not ignored.

    Args and errors as for :func:`dice_loss`.
    """
    _present("pixel_cross_entropy", logits, targets[:0])
    _check_classes("pixel_cross_entropy", logits, targets)
    total = F.cross_entropy(in_full_precision(logits), targets.long(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp_min(1)


@checked
def pixel_margin_loss(
    lengths: Float[Tensor, "B J *S"],
    targets: UInt8[Tensor, "B *S"],
    *,
    m_plus: Factor = 0.9,
    m_minus: Factor = 0.1,
    lam: Factor = 0.5,
) -> Float[Tensor, ""]:
    """Margin loss of each pixel, see :func:`torchcaps.margin_loss`: summed over classes, averaged over pixels.

    Args:
        lengths: Length of the capsule of each class; a single one is that of class 1.
        targets: Class of each pixel; 255: ignored.
        m_plus: Length above which the pixel's class has no loss.
        m_minus: Length below which another class has no loss.
        lam: Weight of the other classes.

    Raises:
        InputError: As for :func:`dice_loss`.
    """
    present = _present("pixel_margin_loss", lengths, targets).to(lengths.dtype)
    loss = present * F.relu(m_plus - lengths).square() + lam * (1 - present) * F.relu(lengths - m_minus).square()
    counted = targets != IGNORED
    return (loss.sum(1) * counted).sum() / counted.sum().clamp_min(1)


def _present(caller: str, scores: Float[Tensor, "B J *S"], targets: UInt8[Tensor, "b *S"]) -> Bool[Tensor, "b J *S"]:
    """Return True at the class of each pixel that is not ignored; of a single score, at class 1."""
    if targets.shape[1:] != scores.shape[2:] or len(targets) not in (0, len(scores)):
        raise InputError(
            f"{caller}: there must be a class for each pixel of the scores {tuple(scores.shape)}, (batch, classes, "
            f"height, width), got masks {tuple(targets.shape)}"
        )
    _check_classes(caller, scores, targets)
    first, last = (0, scores.shape[1]) if scores.shape[1] > 1 else (1, 2)
    classes = torch.arange(first, last, device=targets.device, dtype=torch.uint8)
    return targets.unsqueeze(1) == classes.view(-1, *[1] * (targets.ndim - 1))


def _check_classes(caller: str, scores: Tensor, targets: Tensor) -> None:
    classes = max(scores.shape[1], 2)
    if targets.numel() and can_look(targets) and ((targets >= classes) & (targets != IGNORED)).any():
        highest = int(targets[targets != IGNORED].max())
        raise InputError(f"{caller}: masks must be in 0..{classes - 1}, or {IGNORED} (ignored), got {highest}")


def confusions(
    answers: UInt8[Tensor, "B *S"], targets: UInt8[Tensor, "B *S"], num_classes: int
) -> Int64[Tensor, "B J J"]:
    """Return for each image the number of pixels of one class (row) with an answer (column); without ignored pixels."""
    count, cells = len(targets), num_classes**2
    where = targets.flatten(1).long() * num_classes + answers.flatten(1)
    where = where + cells * torch.arange(count, device=where.device)[:, None]
    where = where.masked_fill(targets.flatten(1) == IGNORED, count * cells).flatten()
    counts = torch.zeros(count * cells + 1, dtype=torch.int64, device=where.device)
    counts.scatter_add_(0, where, torch.ones(1, dtype=torch.int64, device=where.device).expand_as(where))
    return counts[:-1].view(count, num_classes, num_classes)


@checked
def foreground_ari(pred: UInt8[Tensor, "B H W"], masks: UInt8[Tensor, "B H W"]) -> Float[Tensor, "B"]:
    """Return the adjusted Rand index of the foreground pixels of each image: 1 if slots are objects, 0 by chance.

    It compares all pairs of pixels of objects: whether both lie in one object, and whether both have one slot.

    Args:
        pred: Slot of each pixel.
        masks: Object of each pixel. 0: background, 255: unknown; neither counts.

    Returns:
        A number of at most 1 for each image, float64; NaN if no pixel counts.

    Source: Hubert, Arabie 1985, "Comparing partitions", as scikit-learn's ``adjusted_rand_score``.
    """
    if pred.numel() == 0:
        return torch.full((len(pred),), torch.nan, dtype=torch.float64)
    number = 1 + max(int(pred.max()), int(masks.masked_fill(masks == IGNORED, 0).max()))
    counts = confusions(pred, masks, number)[:, 1:].cpu().double()  # objects, slots
    pixels, same = counts.sum((1, 2)), counts.square().sum((1, 2))
    in_object, in_slot = counts.sum(2).square().sum(1), counts.sum(1).square().sum(1)
    both, neither = same - pixels, pixels.square() - in_object - in_slot + same
    split, merged = in_object - same, in_slot - same
    ari = (
        2
        * (both * neither - split * merged)
        / ((both + split) * (split + neither) + (both + merged) * (merged + neither))
    )
    return ari.where((split + merged) > 0, 1.0).where(pixels > 0, torch.nan).to(pred.device)


def dice_of(confusion: Int64[Tensor, "B J J"]) -> Float[Tensor, "B J"]:
    """Return the Dice score 2·TP / (2·TP + FP + FN) of each class of each image; NaN if neither mask has the class."""
    hits = confusion.diagonal(dim1=1, dim2=2).float()
    return 2 * hits / (confusion.sum(1) + confusion.sum(2))


def mean_dice(confusion: Int64[Tensor, "B J J"]) -> Float[Tensor, "B"]:
    """Return the mean Dice score of each image over its classes except the background, class 0.

    A class that neither mask has does not count. If both masks are background everywhere, it is 1.
    """
    dice = dice_of(confusion)[:, 1:].nanmean(1)
    return dice.masked_fill(dice.isnan(), 1.0)
