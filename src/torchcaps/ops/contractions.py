"""Sums over votes for routing, computed without building the votes.

A routing algorithm uses the votes û_j|i = W_ij u_i in two sums: weighted by a coupling c, and multiplied by a parent x
(an output capsule). Both sums follow from one number that is linear in four tensors:

    Σ_bijdk c_bij x_bjd W_ijdk u_bik

The weighted sum s leaves out x, and the agreement a leaves out c. The gradient of a sum with respect to a factor leaves
out that factor. It contains the gradient of the sum instead of the tensor that the sum left out. So there are four
contractions, all results can be differentiated any number of times, and no tensor has the size of the votes.

Inside, tensors lie in memory with the input capsules innermost: poses u (B, K, I), weight W (J, D, K, I), coupling c
(J, B, I), parents x (B, J, D). For some outputs j and images b, a contraction is then one matrix product and one pass
over (j, b, K·I) numbers. These are computed block by block within :func:`torchcaps.set_working_memory`. Without
coupling, the weighted sum is one matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.ops.memory import block_bytes, max_batch_slice, slices
from torchcaps.ops.operation import Forward, Operation
from torchcaps.ops.precision import computed_in_full_precision, full_dtype, full_precision


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
        tensors = Tensors(c.permute(2, 0, 1), None, u.transpose(1, 2), W.movedim(0, -1))
        sums = _contraction(tensors, Options(_PARENTS)).result
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
    tensors = Tensors(None, x, u.transpose(1, 2), W.movedim(0, -1))
    return _contraction(tensors, Options(_COUPLING)).result.permute(1, 2, 0).to(dtype)


def _in_full_precision(poses: Tensor, weight: Tensor, more: Any) -> tuple[torch.dtype, Tensor, Tensor, Any]:
    """Return the highest dtype, which the result gets, and the tensors in the dtype of the computation."""
    tensors = [poses, weight] if more is None else [poses, weight, more]
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    u, W, *rest = (each.to(full_dtype(dtype)) for each in tensors)
    return dtype, u, W, rest[0] if rest else None


# ---- the four contractions, block by block

_COUPLING, _PARENTS, _POSES, _WEIGHT = range(4)  # indices of c, x, u and W, to name the tensor that is left out


class Tensors(NamedTuple):
    """The four factors; None for the one that is left out."""

    coupling: Float[Tensor, "J B I"] | None
    parents: Float[Tensor, "B J D"] | None
    poses: Float[Tensor, "B K I"] | None
    weight: Float[Tensor, "J D K I"] | None


class Options(NamedTuple):
    """Which contraction."""

    left_out: int
    """Index of the factor that is left out: the coupling or the parents."""


class Results(NamedTuple):
    """The contraction."""

    result: Tensor


def _contract(left_out: int, c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """Contract three of the four tensors.

    A block (j, b, K, I) holds the products of poses and coupling, or W_ijᵀ x_j. It is then summed with the remaining
    tensor.
    """
    u, W = (None if each is None else each.contiguous() for each in (u, W))
    result = _new_result(left_out, c, x, u, W)
    with full_precision(result.device):  # a compiled graph calls this inside the caller's autocast
        for j, b, block in _blocks(result if u is None else u, x.shape[1] if W is None else len(W)):
            parents: Any = None if x is None else x[b, j].transpose(0, 1)
            if left_out in (_PARENTS, _WEIGHT):
                torch.mul(c[j, b, None], u[b], out=block)
            else:
                torch.bmm(parents, W[j].flatten(2), out=block.flatten(2))
            if left_out == _COUPLING:
                torch.sum(block.mul_(u[b]), 2, out=result[j, b])
            elif left_out == _POSES:
                result[b] += block.mul_(c[j, b, None]).sum(0)
            elif left_out == _PARENTS:
                result[b, j] = (block.flatten(2) @ W[j].flatten(2).mT).transpose(0, 1)
            else:
                result[j].flatten(2).baddbmm_(parents.mT, block.flatten(2))
    return result


def _new_result(left_out: int, _c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """Allocate the result of a contraction: zeros if it is summed over blocks, otherwise empty."""
    if left_out == _COUPLING:
        return u.new_empty(W.shape[0], u.shape[0], u.shape[2])
    if left_out == _PARENTS:
        return u.new_empty(u.shape[0], *W.shape[:2])
    if left_out == _POSES:
        return x.new_zeros(x.shape[0], *W.shape[-2:])
    return u.new_zeros(*x.shape[1:], *u.shape[1:])


def _blocks(u: Float[Tensor, "B K I"], J: int) -> Iterator[tuple[slice, slice, Float[Tensor, "j b K I"]]]:
    """Yield blocks of outputs and images, with a work buffer that all blocks share."""
    B, K, I = u.shape
    room = block_bytes(u.device) // (u.element_size() * K * I)  # pairs of an image and an output
    b = max(1, min(B, max_batch_slice(B, u.device), room))
    j = max(1, min(J, room // b))
    memory = u.new_empty(j * b, K, I)
    for batch in slices(B, b):
        for outputs in slices(J, j):
            size = outputs.stop - outputs.start, batch.stop - batch.start
            yield outputs, batch, memory[: math.prod(size)].unflatten(0, size)


# ---- the operation


def _forward(tensors: Tensors, options: Options, _wanted: Sequence[bool], _keep: bool) -> Forward:
    return Forward((_contract(options.left_out, *tensors),))


def _backward(
    tensors: Tensors,
    options: Options,
    _results: Sequence[None],
    _kept: None,
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradient of each factor: the contraction without it, with the gradient of the result in its place."""
    factors: list[Tensor | None] = list(tensors)
    factors[options.left_out] = grads[0]
    return [
        _contract(n, *(None if n == m else each for m, each in enumerate(factors))) if want else None
        for n, want in enumerate(wanted)
    ]


def _plain(tensors: Tensors, options: Options) -> Results:
    """Contract all pairs at once, with PyTorch's operations."""
    c, x, u, W = tensors
    assert u is not None
    assert W is not None
    if options.left_out == _COUPLING:
        assert x is not None
        return Results(((x.transpose(0, 1) @ W.flatten(2)).unflatten(2, W.shape[2:]) * u).sum(2))
    assert c is not None
    return Results(((c.unsqueeze(2) * u).flatten(2) @ W.flatten(2).mT).transpose(0, 1))


_contraction = Operation(
    "contract",
    Tensors,
    Options,
    Results,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    fake=lambda tensors, options: Results(_new_result(options.left_out, *tensors)),
    plain_bytes=lambda tensors, _: _pair_bytes(tensors),
)


def _pair_bytes(tensors: Tensors) -> int:
    """Return the bytes of the products of all pairs."""
    _, _, u, W = tensors
    return 0 if u is None or W is None else len(W) * u.nbytes
