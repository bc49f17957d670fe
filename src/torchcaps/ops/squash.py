"""The length of a capsule, and the non-linearity that keeps it below one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.checks import check_axis, check_floating, check_numbers
from torchcaps.ops.precision import in_full_precision


def squash(x: Float[Tensor, "..."], dim: int = -1, eps: float = 1e-7) -> Float[Tensor, "..."]:
    """Shrink vectors to lengths in [0, 1) and keep their directions: the capsule's non-linearity.

        squash(s) = n / (1 + n) · s / √(n + eps),    n = ‖s‖²

    Short vectors go to almost zero, long ones to almost one. ``squash(0) = 0`` with a finite gradient, which the
    formula with ‖s‖ in place of the root does not have. Half precision is computed in float32.

    Args:
        x: Vectors along ``dim``, any shape of at least one axis, any floating dtype. Their squared lengths must be
            finite in the precision computed in: lengths below 1.8e19 in float32.
        dim: The axis that holds a vector's components.
        eps: Added under the root; positive.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or ``dim`` no integer.
        ValueError: ``eps`` is not positive, or ``x`` has no axis ``dim``.

    Source: Sabour, Frosst, Hinton 2017, equation 1 (arXiv:1710.09829), with ``eps`` added.
    """
    _check("squash", x, dim, eps)
    s = in_full_precision(x)
    squared = s.square().sum(dim, keepdim=True)
    return (squared / (1 + squared) * torch.rsqrt(squared + eps) * s).to(x.dtype)


def safe_norm(x: Float[Tensor, "..."], dim: int = -1, keepdim: bool = False, eps: float = 1e-7) -> Float[Tensor, "..."]:
    """Length of vectors, ``√(‖x‖² + eps)``, whose gradient at zero is zero instead of NaN.

    Args:
        x: Vectors along ``dim``, any shape of at least one axis, any floating dtype. Half precision is computed in
            float32.
        dim: The axis that holds a vector's components.
        keepdim: Keep ``dim`` with size one.
        eps: Added under the root; positive. A zero vector has length ``√eps``.

    Returns:
        Lengths, in the dtype of ``x``, without ``dim`` unless ``keepdim``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or ``dim`` no integer.
        ValueError: ``eps`` is not positive, or ``x`` has no axis ``dim``.
    """
    _check("safe_norm", x, dim, eps)
    s = in_full_precision(x)
    return (s.square().sum(dim, keepdim=keepdim) + eps).sqrt().to(x.dtype)


def _check(function: str, x: Tensor, dim: int, eps: float) -> None:
    check_floating(function, "x", x)
    check_numbers(function, eps=eps)
    if not eps > 0:
        raise ValueError(f"{function}: eps must be positive, got {eps}")
    check_axis(function, "x", x, dim)
