"""Losses of capsule networks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ops.labels import one_hot
from torchcaps.ops.precision import full_dtype, in_full_precision
from torchcaps.ranges import Factor, PositiveFactor
from torchcaps.tracing import can_look

Reduction = Literal["mean", "sum", "none"]
"""Mean over the batch of the sums over classes; sum over both; or one value for each image, shape (B,)."""
ClassTargets = Int[Tensor, "B"] | Int[Tensor, "B 1"] | Shaped[Tensor, "B J"]
"""Class indices (B,) or (B, 1), or multi-hot (B, J) with a one for each class that is present.

With a single class, J = 1, targets (B, 1) are multi-hot.
"""
MIN_PROBABILITY = 1e-7
"""Keras's lower limit of a probability before its logarithm."""


@checked
def margin_loss(
    lengths: Float[Tensor, "B J"],
    targets: ClassTargets,
    *,
    m_plus: Factor = 0.9,
    m_minus: Factor = 0.1,
    lam: Factor = 0.5,
    power: PositiveFactor = 2,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Margin loss: a penalty for short capsules of present classes and for long capsules of absent classes.

        L = Σ_j  T_j max(0, m_plus − ‖v_j‖)^power + lam (1 − T_j) max(0, ‖v_j‖ − m_minus)^power

    Args:
        lengths: Lengths ‖v_j‖, one for each class.
        targets: Labels or multi-hot rows, :data:`ClassTargets`.
        m_plus: Length above which a present class has no loss.
        m_minus: Length below which an absent class has no loss.
        lam: Weight λ of the absent classes, the option ``margin_lambda`` of networks.
        power: Exponent; 2 as in the paper, 1 as in implementations without the square.
        reduction: :data:`Reduction`; ``"mean"`` as in the paper.

    Source: Sabour, Frosst, Hinton 2017, equation 4 (arXiv:1710.09829).
    """
    present = multi_hot(lengths, targets, "margin_loss")
    lengths = lengths.to(present.dtype)
    loss = present * F.relu(m_plus - lengths).pow(power) + lam * (1 - present) * F.relu(lengths - m_minus).pow(power)
    return _reduce(loss.sum(-1), reduction)


@checked
def normalised_cross_entropy(
    lengths: Float[Tensor, "B J"], targets: ClassTargets, *, reduction: Reduction = "mean"
) -> Float[Tensor, "..."]:
    """Categorical cross-entropy of the lengths divided by their sum.

        L = −Σ_j T_j log clip(‖v_j‖ / Σ_k ‖v_k‖, 1e-7, 1 − 1e-7)

    Args:
        lengths: Lengths ‖v_j‖, one for each class, not negative.
        targets: Labels or multi-hot rows, :data:`ClassTargets`.
        reduction: :data:`Reduction`.

    Source: Keras's ``categorical_crossentropy`` on outputs that do not sum to one.
    """
    present = multi_hot(lengths, targets, "normalised_cross_entropy")
    lengths = lengths.to(present.dtype)
    share = lengths / lengths.sum(-1, keepdim=True).clamp_min(torch.finfo(lengths.dtype).tiny)
    return _reduce(-(present * share.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY).log()).sum(-1), reduction)


@checked
def spread_loss(
    scores: Float[Tensor, "B J"],
    targets: ClassTargets,
    *,
    margin: Factor | Float[Tensor, ""] = 0.9,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Spread loss: a penalty for each absent class whose score is not below the present class's by a margin.

        L = Σ_{j≠t} max(0, margin − (a_t − a_j))²

    Args:
        scores: Scores a_j, one for each class; usually activations in 0..1.
        targets: Labels t or multi-hot rows, :data:`ClassTargets`. With several present classes, a_t is their mean.
        margin: Margin between a_t and each other score, 0..1; in the source it grows from 0.2 to 0.9.
        reduction: :data:`Reduction`.

    Source: Hinton, Sabour, Frosst 2018, "Matrix capsules with EM routing", equation 3 (ICLR 2018).
    """
    present = multi_hot(scores, targets, "spread_loss")
    scores = scores.to(present.dtype)
    target = (present * scores).sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp_min(1)
    return _reduce(((1 - present) * F.relu(margin - (target - scores)).square()).sum(1), reduction)


@checked
def score_cross_entropy(
    scores: Float[Tensor, "B J"],
    targets: ClassTargets,
    *,
    scale: Factor | Float[Tensor, ""] = 1.0,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Cross-entropy of the softmax of the scores, times a scale, which may be learned.

        L = −Σ_j T_j log softmax_j(scale · a_j)

    Args:
        scores: Scores a_j, lengths or activations, one for each class.
        targets: Labels or multi-hot rows, :data:`ClassTargets`.
        scale: Factor on the scores.
        reduction: :data:`Reduction`.

    Source: with a scale of 1 the loss of De Sousa Ribeiro et al. 2020 (arXiv:1905.11455), with activations as logits.
    """
    present = multi_hot(scores, targets, "score_cross_entropy")
    return _reduce(-(present * (scale * scores.to(present.dtype)).log_softmax(1)).sum(1), reduction)


@checked
def reconstruction_loss(
    reconstruction: Float[Tensor, "B *pixels"],
    images: Float[Tensor, "B *pixels"],
    *,
    reduction: Literal["sum_per_image", "mean"] = "sum_per_image",
) -> Float[Tensor, ""]:
    """Squared error between the decoder's images and the input.

    Args:
        reconstruction: Decoded images, pixels 0..1, any shape of two axes or more with the batch first.
        images: Images to compare with, of the same shape. Half precision is computed in float32.
        reduction: ``"sum_per_image"``: the sum over an image's pixels, averaged over the batch, as in the paper;
            ``"mean"``: the mean over all pixels, 784 times less on MNIST.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 (arXiv:1710.09829).
    """
    if reconstruction.shape != images.shape or images.ndim < 2:
        raise InputError(
            f"reconstruction_loss: reconstruction and images must have one shape (B, ...), "
            f"got {tuple(reconstruction.shape)} and {tuple(images.shape)}"
        )
    squared = (in_full_precision(reconstruction) - in_full_precision(images)).square()
    return squared.mean() if reduction == "mean" else squared.flatten(1).sum(1).mean()


@checked
def multi_hot(scores: Float[Tensor, "B J"], targets: ClassTargets, caller: str = "multi_hot") -> Float[Tensor, "B J"]:
    """Convert labels to one multi-hot row for each image; rows that are multi-hot already keep their values.

    Args:
        scores: Tensor with the shape (B, J) and the dtype of the result (float32 for half precision).
        targets: Labels in 0..J-1, or rows of integers, booleans or floats in [0, 1]; :data:`ClassTargets`.
        caller: Name of the calling function in an error message.

    Raises:
        InputError: Labels or values out of range. Values on a GPU are not checked.
    """
    dtype = full_dtype(scores.dtype)
    if targets.shape == scores.shape:
        present = targets.to(dtype)
        if can_look(present) and not (present.min() >= 0 and present.max() <= 1):
            raise InputError(
                f"{caller}: multi-hot targets must lie in 0..1, got {present.min().item()}..{present.max().item()}"
            )
        return present
    labels = targets.flatten()  # without len(), because an exported graph would keep it as a constant
    return one_hot(labels, scores.shape[1], f"{caller}: labels").to(dtype)


def _reduce(loss: Float[Tensor, "B"], reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
