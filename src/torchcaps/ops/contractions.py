"""The calculus of votes: the sums that routing takes over votes, with the votes never built.

A vote û_j|i = W_ij u_i meets the rest of a routing algorithm in two sums only: weighted by a coupling, and multiplied
by a parent. Both are parts of one number that is linear in four tensors,

    Σ_bijdk c_bij x_bjd W_ijdk u_bik

and leave one of the four out: the weighted sum s leaves out x, the agreement a leaves out c. So does the gradient of
each with respect to a factor: it leaves that factor out, and has the gradient of the sum in the place of what the sum
left out. There are four such contractions, and everything made of them can be differentiated any number of times.
Nothing is ever of the votes' size.

Inside, tensors lie in memory with the input capsules innermost: poses u (B, K, I), weight W (J, D, K, I), coupling c
(J, B, I), parents x (B, J, D). Then each contraction is, for some outputs j and images b, one matrix product and one
pass over (j, b, K·I) numbers, which are made block by block within :func:`torchcaps.set_working_memory`. Without
coupling, the weighted sum is one matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.ops.memory import block_bytes, max_batch_slice, slices
from torchcaps.ops.operation import operation
from torchcaps.ops.precision import computed_in_full_precision, full_dtype, full_precision
from torchcaps.tracing import needs_torch_operations


@checked
@computed_in_full_precision
def compute_votes(poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"]) -> Float[Tensor, "B I J D"]:
    """Votes û_j|i = W_ij u_i: what input capsule i predicts for output capsule j.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij, fastest laid out in memory as (J, D, K, I), as
            :class:`torchcaps.nn.DenseCapsules` keeps them.

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
    """The sum of votes, weighted by their coupling: s_j = Σ_i c_ij W_ij u_i.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij, fastest laid out in memory as (J, D, K, I), as
            :class:`torchcaps.nn.DenseCapsules` keeps them.
        coupling: c_ij; None is 1 for each pair.

    Returns:
        The sums s_j, in the highest of the precisions (half precision is computed in float32).

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    dtype, u, W, c = _in_full_precision(poses, weight, coupling)
    if c is None:
        sums = torch.tensordot(u.transpose(1, 2), W.movedim(0, -1), ([1, 2], [2, 3]))
    elif needs_torch_operations():
        sums = torch.einsum("bijd,bij->bjd", compute_votes(u, W), c)
    else:
        sums = _contraction(_PARENTS, c.permute(2, 0, 1), None, u.transpose(1, 2), W.movedim(0, -1))
    return sums.to(dtype)


@checked
@computed_in_full_precision
def agreement(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D K"], parents: Float[Tensor, "B J D"]
) -> Float[Tensor, "B I J"]:
    """The scalar product of each vote with its parent: a_ij = ⟨W_ij u_i, x_j⟩.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij, fastest laid out in memory as (J, D, K, I), as
            :class:`torchcaps.nn.DenseCapsules` keeps them.
        parents: Output capsules, or any other vectors x_j.

    Returns:
        The agreement a_ij, in the precision of :func:`weighted_sum`.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829).
    """
    dtype, u, W, x = _in_full_precision(poses, weight, parents)
    if needs_torch_operations():
        pairs = torch.einsum("bijd,bjd->bij", compute_votes(u, W), x)
    else:
        pairs = _contraction(_COUPLING, None, x, u.transpose(1, 2), W.movedim(0, -1)).permute(1, 2, 0)
    return pairs.to(dtype)


def _in_full_precision(poses: Tensor, weight: Tensor, more: Any) -> tuple[torch.dtype, Tensor, Tensor, Any]:
    """The dtype of the result, the highest of all, and the tensors in the dtype that is computed in."""
    given = [poses, weight] if more is None else [poses, weight, more]
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in given))
    u, W, *rest = (each.to(full_dtype(dtype)) for each in given)
    return dtype, u, W, rest[0] if rest else None


# ---- the four contractions, block by block

_COUPLING, _PARENTS, _POSES, _WEIGHT = range(4)  # places of c, x, u and W: which of them a contraction leaves out


def _contract(left_out: int, c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """The contraction of the other three.

    Each block is the poses times their coupling, (j, b, K, I), or the parents as their children see them, W_ijᵀ x_j,
    likewise; then their sum with what is left.
    """
    u, W = (None if each is None else each.contiguous() for each in (u, W))
    found = _new_result(left_out, c, x, u, W)
    with full_precision(found.device):  # a compiled graph calls this inside the caller's autocast
        for j, b, block in _blocks(found if u is None else u, x.shape[1] if W is None else len(W)):
            parents: Any = None if x is None else x[b, j].transpose(0, 1)
            if left_out in (_PARENTS, _WEIGHT):
                torch.mul(c[j, b, None], u[b], out=block)
            else:
                torch.bmm(parents, W[j].flatten(2), out=block.flatten(2))
            if left_out == _COUPLING:
                torch.sum(block.mul_(u[b]), 2, out=found[j, b])
            elif left_out == _POSES:
                found[b] += block.mul_(c[j, b, None]).sum(0)
            elif left_out == _PARENTS:
                found[b, j] = (block.flatten(2) @ W[j].flatten(2).mT).transpose(0, 1)
            else:
                found[j].flatten(2).baddbmm_(parents.mT, block.flatten(2))
    return found


def _new_result(left_out: int, _c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """Where a contraction goes: zeros where it is summed over blocks."""
    if left_out == _COUPLING:
        return u.new_empty(W.shape[0], u.shape[0], u.shape[2])
    if left_out == _PARENTS:
        return u.new_empty(u.shape[0], *W.shape[:2])
    if left_out == _POSES:
        return x.new_zeros(x.shape[0], *W.shape[-2:])
    return u.new_zeros(*x.shape[1:], *u.shape[1:])


def _blocks(u: Float[Tensor, "B K I"], J: int) -> Iterator[tuple[slice, slice, Float[Tensor, "j b K I"]]]:
    """Outputs and images that are worked on together, and the memory for it, the same for all blocks."""
    B, K, I = u.shape
    room = block_bytes(u.device) // (u.element_size() * K * I)  # pairs of an image and an output
    b = max(1, min(B, max_batch_slice(B, u.device), room))
    j = max(1, min(J, room // b))
    memory = u.new_empty(j * b, K, I)
    for batch in slices(B, b):
        for outputs in slices(J, j):
            size = outputs.stop - outputs.start, batch.stop - batch.start
            yield outputs, batch, memory[: math.prod(size)].unflatten(0, size)


# ---- their gradients, and how torch calls them


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  the signature that PyTorch calls
    ctx.left_out, *factors = inputs
    ctx.save_for_backward(*factors)


def _backward(ctx: Any, grad: Tensor) -> Any:
    """The contractions that leave out a factor each, with the gradient in the place of what the sum left out."""
    factors = list(ctx.saved_tensors)
    factors[ctx.left_out] = grad
    wanted = enumerate(ctx.needs_input_grad[1:])
    return None, *(_without(n, factors) if want else None for n, want in wanted)


def _without(left_out: int, factors: Sequence[Tensor | None]) -> Tensor:
    found: Tensor = _contraction(left_out, *(None if n == left_out else each for n, each in enumerate(factors)))
    return found


_contraction = operation(
    "contract",
    "(int left_out, Tensor? coupling, Tensor? parents, Tensor? poses, Tensor? weight) -> Tensor",
    forward=_contract,
    fake=_new_result,
    backward=_backward,
    save=_save,
)
