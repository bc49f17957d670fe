"""Squash functions, which keep the length of a capsule below one, and a safe norm."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ops.precision import in_full_precision
from torchcaps.ranges import Epsilon


@checked
def squash(x: Float[Tensor, "..."], dim: int = -1, eps: Epsilon = 1e-7) -> Float[Tensor, "..."]:
    """Shrink vectors to lengths in [0, 1) and keep their directions: the non-linearity of capsules.

        squash(s) = n / (1 + n) · s / √(n + eps),    n = ‖s‖²

    Short vectors get lengths near zero, long vectors lengths near one. ``squash(0) = 0`` with a finite gradient,
    because of ``eps``. Half precision is computed in float32.

    Args:
        x: Vectors along ``dim``, any shape of at least one axis, any floating dtype. Their squared lengths must be
            finite in the precision of the computation: lengths below 1.8e19 in float32.
        dim: Axis of a vector's components.
        eps: Added under the root.

    Returns:
        Vectors of the same shape and dtype as ``x``.

    Source: Sabour, Frosst, Hinton 2017, equation 1 (arXiv:1710.09829), with ``eps`` added.
    """
    return squashed(_vectors(x, dim), dim, eps).to(x.dtype)


def squashed(s: Float[Tensor, "..."], dim: int, eps: float) -> Float[Tensor, "..."]:
    """:func:`squash` without checks and conversions."""
    squared = (s * s).sum(dim, keepdim=True)  # the gradient of s.square() takes more memory
    return squared / (1 + squared) * torch.rsqrt(squared + eps) * s


def squash_backward(s: Float[Tensor, "..."], gradient: Tensor, dim: int, eps: float) -> Float[Tensor, "..."]:
    """Return the gradient of s from that of squash(s) = h s, which is h g + 2 h' ⟨s, g⟩ s with h as a function of n."""
    n = s.square().sum(dim, keepdim=True)
    q = torch.rsqrt(n + eps)
    h = n * q / (1 + n)
    slope = q / (1 + n).square() - n * q.pow(3) / (2 * (1 + n))
    return h * gradient + 2 * slope * (s * gradient).sum(dim, keepdim=True) * s


@checked
def exponential_squash(x: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """Shrink vectors to lengths in [0, 1), leave short vectors almost unchanged, and keep directions.

        squash(s) = (1 - e^(-‖s‖)) · s / ‖s‖

    Unlike :func:`squash`, a short vector nearly keeps its length. ``squash(0) = 0``, and the derivative at 0 is the
    identity. Nothing is added under the root; values and gradients are exact for vectors of any length. The arguments
    are the same as for :func:`squash`.

    Source: Mazzia, Salvetti, Chiaberge 2021, equation 6 (arXiv:2101.12491); Xi, Bing, Jin 2017 (arXiv:1712.03480).
    """
    s = _vectors(x, dim)
    # divide by the largest component first, so that no square underflows or overflows
    largest = s.detach().abs().amax(dim, keepdim=True) if s.shape[dim] else s.detach().sum(dim, keepdim=True)
    largest = largest.where(largest > 0, 1.0)
    squared = (s / largest).square().sum(dim, keepdim=True)
    length = largest * squared.where(squared > 0, 1.0).sqrt() * (squared > 0)
    short = length < 1e-3
    long = length.where(~short, 1.0)
    factor = torch.where(
        short, 1 - length / 2 * (1 - length / 3 * (1 - length / 4 * (1 - length / 5))), -torch.expm1(-long) / long
    )
    return (factor * s).to(x.dtype)


@checked
def safe_norm(
    x: Float[Tensor, "..."], dim: int = -1, keepdim: bool = False, eps: Epsilon = 1e-7
) -> Float[Tensor, "..."]:
    """Length of vectors, ``√(‖x‖² + eps)``. Its gradient at zero is zero instead of NaN.

    The length of a zero vector is ``√eps``. Arguments are as for :func:`squash`. The result has no axis ``dim``, or an
    axis of size one with ``keepdim``.
    """
    s = _vectors(x, dim)
    return (s.square().sum(dim, keepdim=keepdim) + eps).sqrt().to(x.dtype)


def _vectors(x: Tensor, dim: int) -> Tensor:
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"x of shape {tuple(x.shape)} has no axis {dim}")
    return in_full_precision(x)
