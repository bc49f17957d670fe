"""Sums over votes for routing, computed without building the votes.

A routing algorithm uses the votes û_j|i = W_ij u_i in two sums: weighted by a coupling c, and multiplied by a parent x
(an output capsule). Both can be differentiated any number of times. The kernel, :mod:`torchcaps.kernels.dense`, has no
tensor of the size of the votes. Without coupling, the weighted sum is one matrix product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.kernels.dense import COUPLING, PARENTS, Contraction, Factors, contraction
from torchcaps.ops.precision import computed_in_full_precision, full_dtype


@checked
@computed_in_full_precision
def compute_votes(poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> Float[Tensor, "B I J D"]:
    """Votes û_j|i = W_ij u_i, the predictions of input capsule i for output capsule j.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij; fastest if they lie in memory as (J, D, K, I), as in
            :class:`torchcaps.nn.DenseCapsules`.

    Returns:
        Votes, in the higher of the two precisions.

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    dtype, u, W, _ = _in_full_precision(poses, weight, None)
    return torch.einsum("ijdk,bik->bijd", W, u).to(dtype)


@checked
@computed_in_full_precision
def weighted_sum(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"], coupling: Float[Tensor, "B I J"] | None = None
) -> Float[Tensor, "B J D"]:
    """Sum of votes, weighted by their coupling: s_j = Σ_i c_ij W_ij u_i.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij; fastest if they lie in memory as (J, D, K, I), as in
            :class:`torchcaps.nn.DenseCapsules`.
        coupling: Coupling c_ij. None: 1 for each pair.

    Returns:
        Sums s_j, in the highest of the precisions (half precision is computed in float32).

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    dtype, u, W, c = _in_full_precision(poses, weight, coupling)
    if c is None:
        sums = torch.tensordot(u.transpose(1, 2), W.movedim(0, -1), ([1, 2], [2, 3]))
    else:
        factors = Factors(c.permute(2, 0, 1), None, u.transpose(1, 2), W.movedim(0, -1))
        sums = contraction(factors, Contraction(PARENTS)).result
    return sums.to(dtype)


@checked
@computed_in_full_precision
def agreement(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"], parents: Float[Tensor, "B J D"]
) -> Float[Tensor, "B I J"]:
    """Scalar product of each vote with its parent: a_ij = ⟨W_ij u_i, x_j⟩.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij; fastest if they lie in memory as (J, D, K, I), as in
            :class:`torchcaps.nn.DenseCapsules`.
        parents: Output capsules, or any other vectors x_j.

    Returns:
        Agreement a_ij, in the precision of :func:`weighted_sum`.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829).
    """
    dtype, u, W, x = _in_full_precision(poses, weight, parents)
    factors = Factors(None, x, u.transpose(1, 2), W.movedim(0, -1))
    return contraction(factors, Contraction(COUPLING)).result.permute(1, 2, 0).to(dtype)


def _in_full_precision(poses: Tensor, weight: Tensor, more: Any) -> tuple[torch.dtype, Tensor, Tensor, Any]:
    """Return the highest dtype, which the result gets, and the tensors in the dtype of the computation."""
    tensors = [poses, weight] if more is None else [poses, weight, more]
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    u, W, *rest = (each.to(full_dtype(dtype)) for each in tensors)
    return dtype, u, W, rest[0] if rest else None
