"""Losses of capsule networks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.ops.precision import full_dtype, in_full_precision

Reduction = Literal["mean", "sum", "none"]


def margin_loss(
    lengths: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"],
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
        targets: Class indices (B,), or multi-hot (B, J) with a one for each class that is present.
        m_plus: Length above which a present class costs nothing.
        m_minus: Length below which an absent class costs nothing.
        lam: Weight of the absent classes.
        power: 2 as in the paper; 1 for the implementations that forgot the square.
        reduction: ``"mean"`` over the batch of the sums over classes, ``"sum"`` of both, or ``"none"``: one value
            an image, shape (B,).

    Raises:
        TypeError: Labels that are not integers, or lengths that are not floating-point.
        ValueError: Shapes or labels that do not fit ``lengths``, or an unknown ``reduction``.

    Source: Sabour, Frosst, Hinton 2017, equation 4 (arXiv:1710.09829).
    """
    present = multi_hot(lengths, targets, "margin_loss")
    lengths = lengths.to(present.dtype)
    loss = (
        present * F.relu(m_plus - lengths).pow(power) + lam * (1 - present) * F.relu(lengths - m_minus).pow(power)
    ).sum(-1)  # (B,)
    return _reduce(loss, reduction, "margin_loss")


def normalised_cross_entropy(
    lengths: Float[Tensor, "B J"],
    targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"],
    *,
    clip: float = 1e-7,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Categorical cross-entropy of the lengths divided by their sum.

        L = −Σ_j T_j log clip(‖v_j‖ / Σ_k ‖v_k‖, clip, 1 − clip)

    Args:
        lengths: ‖v_j‖, one a class, not negative.
        targets: Class indices (B,) or multi-hot (B, J).
        clip: Smallest probability, in (0, 0.5).
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``.

    Raises:
        TypeError: Labels that are not integers, or lengths that are not floating-point.
        ValueError: Shapes or labels that do not fit ``lengths``, or an unknown ``reduction``.

    Source: what Keras's ``categorical_crossentropy`` does to outputs that are no probabilities.
    """
    present = multi_hot(lengths, targets, "normalised_cross_entropy")
    lengths = lengths.to(present.dtype)
    share = lengths / lengths.sum(-1, keepdim=True).clamp_min(torch.finfo(lengths.dtype).tiny)
    loss = -(present * share.clamp(clip, 1 - clip).log()).sum(-1)
    return _reduce(loss, reduction, "normalised_cross_entropy")


def reconstruction_loss(
    reconstruction: Float[Tensor, "B ..."],
    images: Float[Tensor, "B ..."],
    *,
    reduction: Literal["sum_per_image", "mean"] = "sum_per_image",
) -> Float[Tensor, ""]:
    """Squared error between the decoder's images and the input.

    Args:
        reconstruction: Decoded images, pixels 0..1, any shape with the batch first.
        images: The images to compare with, the same shape. Half precision is computed in float32.
        reduction: ``"sum_per_image"``: the sum over an image's pixels, averaged over the batch, as in the paper;
            ``"mean"``: the mean over all pixels, 784 times less on MNIST.

    Raises:
        ValueError: The shapes differ, or an unknown ``reduction``.

    Source: Sabour, Frosst, Hinton 2017, section 4.1 (arXiv:1710.09829).
    """
    if reconstruction.shape != images.shape:
        raise ValueError(
            f"reconstruction_loss: reconstruction has shape {tuple(reconstruction.shape)}, "
            f"images {tuple(images.shape)}; they must be equal"
        )
    squared = (in_full_precision(reconstruction) - in_full_precision(images)).square()
    if reduction == "sum_per_image":
        return squared.flatten(1).sum(1).mean()
    if reduction == "mean":
        return squared.mean()
    raise ValueError(f'reconstruction_loss: reduction must be "sum_per_image" or "mean", got {reduction!r}')


def multi_hot(
    lengths: Float[Tensor, "B J"], targets: Int[Tensor, "B"] | Shaped[Tensor, "B J"], caller: str = "multi_hot"
) -> Float[Tensor, "B J"]:
    """Targets as one row of zeros and ones an image, from labels or from rows that are multi-hot already.

    Args:
        lengths: Gives the shape (B, J) and, if floating-point, the dtype (float32 for half precision).
        targets: Class indices (B,) in [0, J), or multi-hot (B, J), any dtype, with values in [0, 1].
        caller: The function to name in an error.

    Raises:
        TypeError: Labels (B,) that are not integers, or lengths that are not floating-point.
        ValueError: Shapes, labels or values that do not fit; values on a GPU are not looked at.
    """
    if not lengths.is_floating_point():
        raise TypeError(f"{caller}: lengths must be a floating-point tensor, got {lengths.dtype}")
    if lengths.ndim != 2:
        raise ValueError(f"{caller}: lengths must have shape (B, J), got {tuple(lengths.shape)}")
    batch, classes = lengths.shape
    dtype = full_dtype(lengths.dtype)
    # a look at values waits for the device, so it is taken on the CPU only; in an exported graph there are none yet
    look = targets.device.type == "cpu" and batch > 0 and not torch.compiler.is_exporting()
    if targets.shape == (batch, classes):
        present = targets.to(dtype)
        if look and not (present.min() >= 0 and present.max() <= 1):
            raise ValueError(
                f"{caller}: multi-hot targets must lie in 0..1, got {present.min().item()}..{present.max().item()}"
            )
        return present
    if targets.shape != (batch,):
        raise ValueError(
            f"{caller}: targets must be labels of shape ({batch},) or multi-hot of shape ({batch}, {classes}), "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise TypeError(f"{caller}: targets of shape (B,) must be integer labels, got {targets.dtype}")
    if look and (targets.min() < 0 or targets.max() >= classes):  # on a GPU one_hot's own assertion catches it
        raise ValueError(
            f"{caller}: labels must be in 0..{classes - 1}, got {int(targets.min())}..{int(targets.max())}"
        )
    return F.one_hot(targets.long(), classes).to(dtype)


def _reduce(loss: Float[Tensor, "B"], reduction: str, caller: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss
    raise ValueError(f'{caller}: reduction must be "mean", "sum" or "none", got {reduction!r}')
