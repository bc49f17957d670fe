"""Losses of capsule networks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.ops.checks import (
    INTEGERS,
    NUMBERS,
    can_look,
    check_choice,
    check_classes,
    check_dense,
    check_floating,
    check_numbers,
    check_one_device,
    check_tensor,
)
from torchcaps.ops.precision import full_dtype, in_full_precision

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")


def margin_loss(
    lengths: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"],
    *,
    m_plus: float = 0.9,
    m_minus: float = 0.1,
    lam: float = 0.5,
    power: int = 2,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Margin loss: a present class wants a long capsule, an absent one a short capsule.

        L = Σ_j  T_j max(0, m_plus − ‖v_j‖)^power + lam (1 − T_j) max(0, ‖v_j‖ − m_minus)^power

    Args:
        lengths: ‖v_j‖, one a class.
        targets: Class indices (B,) or (B, 1), or multi-hot (B, J) with a one for each class that is present. Of a
            single class, J = 1, targets (B, 1) are multi-hot.
        m_plus: Length above which a present class costs nothing.
        m_minus: Length below which an absent class costs nothing.
        lam: Weight of the absent classes.
        power: 2 as in the paper; 1 for the implementations that forgot the square.
        reduction: ``"mean"`` over the batch of the sums over classes, ``"sum"`` of both, or ``"none"``: one value
            an image, shape (B,).

    Raises:
        TypeError: Labels that are not integers, lengths that are not floating-point, or an option that is no number.
        ValueError: Shapes, labels or a device that do not fit ``lengths``, or an unknown ``reduction``.

    Source: Sabour, Frosst, Hinton 2017, equation 4 (arXiv:1710.09829).
    """
    check_choice("margin_loss", "reduction", reduction, REDUCTIONS)
    check_numbers("margin_loss", m_plus=m_plus, m_minus=m_minus, lam=lam, power=power)
    present = multi_hot(lengths, targets, "margin_loss", "lengths")
    lengths = lengths.to(present.dtype)
    loss = (
        present * F.relu(m_plus - lengths).pow(power) + lam * (1 - present) * F.relu(lengths - m_minus).pow(power)
    ).sum(-1)  # (B,)
    return _reduce(loss, reduction)


def normalised_cross_entropy(
    lengths: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"],
    *,
    clip: float = 1e-7,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Categorical cross-entropy of the lengths divided by their sum.

        L = −Σ_j T_j log clip(‖v_j‖ / Σ_k ‖v_k‖, clip, 1 − clip)

    Args:
        lengths: ‖v_j‖, one a class, not negative.
        targets: As for :func:`margin_loss`.
        clip: Smallest probability, in (0, 0.5).
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``.

    Raises:
        TypeError: Labels that are not integers, lengths that are not floating-point, or an option that is no number.
        ValueError: Shapes, labels or a device that do not fit ``lengths``, ``clip`` out of its range, or an unknown
            ``reduction``.

    Source: what Keras's ``categorical_crossentropy`` does to outputs that are no probabilities.
    """
    check_choice("normalised_cross_entropy", "reduction", reduction, REDUCTIONS)
    check_numbers("normalised_cross_entropy", clip=clip)
    if not 0 < clip < 0.5:
        raise ValueError(f"normalised_cross_entropy: clip must be above 0 and below 0.5, got {clip}")
    present = multi_hot(lengths, targets, "normalised_cross_entropy", "lengths")
    lengths = lengths.to(present.dtype)
    share = lengths / lengths.sum(-1, keepdim=True).clamp_min(torch.finfo(lengths.dtype).tiny)
    loss = -(present * share.clamp(clip, 1 - clip).log()).sum(-1)
    return _reduce(loss, reduction)


def spread_loss(
    scores: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"],
    *,
    margin: float | Float[Tensor, ""] = 0.9,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Spread loss: the class that is present wants to be more active than each other one by a margin.

        L = Σ_{j≠t} max(0, margin − (a_t − a_j))²

    Args:
        scores: a_j, one a class; activations in 0..1, as a rule.
        targets: The class t, as for :func:`margin_loss`; of several classes that are present, a_t is the mean.
        margin: By which a_t should be above the others, 0..1; the source lets it grow from 0.2 to 0.9.
        reduction: ``"mean"`` over the batch of the sums over classes, ``"sum"`` of both, or ``"none"``: one value
            an image, shape (B,).

    Raises:
        TypeError: Labels that are not integers, scores that are not floating-point, or a margin that is no number.
        ValueError: Shapes, labels or a device that do not fit ``scores``, or an unknown ``reduction``.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", equation 3 (ICLR 2018).
    """
    check_choice("spread_loss", "reduction", reduction, REDUCTIONS)
    _check_number("spread_loss", "margin", margin)
    present = multi_hot(scores, targets, "spread_loss")
    scores = scores.to(present.dtype)
    target = (present * scores).sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp_min(1)
    return _reduce(((1 - present) * F.relu(margin - (target - scores)).square()).sum(1), reduction)


def score_cross_entropy(
    scores: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"],
    *,
    scale: float | Float[Tensor, ""] = 1.0,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Cross-entropy of the softmax of the scores, times a scale, which may be learned.

        L = −Σ_j T_j log softmax_j(scale · a_j)

    Args:
        scores: a_j, lengths or activations, one a class.
        targets: As for :func:`margin_loss`.
        scale: Factor on the scores.
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``.

    Raises:
        TypeError: Labels that are not integers, scores that are not floating-point, or a scale that is no number.
        ValueError: Shapes, labels or a device that do not fit ``scores``, or an unknown ``reduction``.

    Source: with a scale of 1 the loss of De Sousa Ribeiro et al. 2020 (arXiv:1905.11455), whose logits are activations.
    """
    check_choice("score_cross_entropy", "reduction", reduction, REDUCTIONS)
    _check_number("score_cross_entropy", "scale", scale)
    present = multi_hot(scores, targets, "score_cross_entropy")
    return _reduce(-(present * (scale * scores.to(present.dtype)).log_softmax(1)).sum(1), reduction)


def reconstruction_loss(
    reconstruction: Float[Tensor, "B ..."],
    images: Float[Tensor, "B ..."],
    *,
    reduction: Literal["sum_per_image", "mean"] = "sum_per_image",
) -> Float[Tensor, ""]:
    """Squared error between the decoder's images and the input.

    Args:
        reconstruction: Decoded images, pixels 0..1, any shape of two axes or more with the batch first.
        images: The images to compare with, the same shape. Half precision is computed in float32.
        reduction: ``"sum_per_image"``: the sum over an image's pixels, averaged over the batch, as in the paper;
            ``"mean"``: the mean over all pixels, 784 times less on MNIST.

    Raises:
        TypeError: Images that are not floating-point.
        ValueError: The shapes or devices differ, there is no axis beside the batch, or an unknown ``reduction``.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 (arXiv:1710.09829).
    """
    check_choice("reconstruction_loss", "reduction", reduction, ("sum_per_image", "mean"))
    for name, pixels in (("reconstruction", reconstruction), ("images", images)):
        check_floating("reconstruction_loss", name, pixels)
        if pixels.ndim < 2:
            raise ValueError(f"reconstruction_loss: {name} must have shape (B, ...), got {tuple(pixels.shape)}")
    check_one_device("reconstruction_loss", reconstruction=reconstruction, images=images)
    if reconstruction.shape != images.shape:
        raise ValueError(
            f"reconstruction_loss: reconstruction has shape {tuple(reconstruction.shape)}, "
            f"images {tuple(images.shape)}; they must be equal"
        )
    squared = (in_full_precision(reconstruction) - in_full_precision(images)).square()
    return squared.mean() if reduction == "mean" else squared.flatten(1).sum(1).mean()


def multi_hot(
    scores: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"],
    caller: str = "multi_hot",
    name: str = "scores",
) -> Float[Tensor, "B J"]:
    """Targets as one row of zeros and ones an image, from labels or from rows that are multi-hot already.

    Args:
        scores: Give the shape (B, J), J at least 1, and the dtype (float32 for half precision).
        targets: As for :func:`margin_loss`, labels in [0, J); rows may be integers, booleans or floats in [0, 1].
        caller: The function to name in an error.
        name: What it calls its scores.

    Raises:
        TypeError: Labels that are not integers, or scores that are not floating-point.
        ValueError: Shapes, labels or values that do not fit, or another device; values on a GPU are not looked at.
    """
    check_tensor(caller, name, scores, ("B", "J"))
    check_dense(caller, "targets", targets, NUMBERS)
    check_one_device(caller, **{name: scores, "targets": targets})
    batch, classes = scores.shape
    if classes == 0:
        raise ValueError(f"{caller}: {name} must have at least one class, got shape {tuple(scores.shape)}")
    dtype = full_dtype(scores.dtype)
    if targets.shape == (batch, classes):
        present = targets.to(dtype)
        if can_look(present) and not (present.min() >= 0 and present.max() <= 1):
            raise ValueError(
                f"{caller}: multi-hot targets must lie in 0..1, got {present.min().item()}..{present.max().item()}"
            )
        return present
    if targets.shape not in ((batch,), (batch, 1)):
        raise ValueError(
            f"{caller}: targets must be labels of shape ({batch},) or multi-hot of shape ({batch}, {classes}), "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype not in INTEGERS:
        raise TypeError(f"{caller}: targets of shape (B,) must be integer labels, got {targets.dtype}")
    labels = targets.reshape(batch)
    check_classes(caller, "labels", labels, classes)  # on a GPU one_hot's own assertion catches it
    return F.one_hot(labels.long(), classes).to(dtype)


def _check_number(caller: str, name: str, value: float | Float[Tensor, ""]) -> None:
    """Raise unless a value is a number, or a tensor of one, which may be learned."""
    if isinstance(value, Tensor):
        check_tensor(caller, name, value, ())
    else:
        check_numbers(caller, **{name: value})


def _reduce(loss: Float[Tensor, "B"], reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
