"""The calculus of votes: the sums that routing takes over votes, with the votes never built.

A vote û_j|i = W_ij u_i meets the rest of a routing algorithm in two sums only: weighted by a coupling, and multiplied
by a parent. Both are parts of one number that is linear in four tensors,

    Σ_bijdk c_bij x_bjd W_ijdk u_bik

and leave one of the four out: the weighted sum s leaves out x, the agreement a leaves out c. So does the gradient of
each with respect to a factor: it leaves that factor out, and has the gradient of the sum in the place of what the sum
left out. There are four such contractions, and everything made of them can be differentiated any number of times. None
of it is ever of the votes' size.

Inside, tensors lie in memory with the input capsules innermost: poses u (B, K, I), weight W (J, D, K, I), coupling c
(J, B, I), parents x (B, J, D). Then each contraction is, for some outputs j and images b, one matrix product and one
pass over (j, b, K·I) numbers, which are made block by block within :func:`torchcaps.set_working_memory`. A weight
(J, D, I) holds a vector for each pair, which scales the components of the pose, instead of a matrix: K is D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.ops.memory import BLOCK, MAX_BATCH_SLICE, get_working_memory, slices
from torchcaps.ops.precision import full_dtype, full_precision
from torchcaps.ops.tracing import is_exporting, one_by_one

Weight = Float[Tensor, "I J D K"] | Float[Tensor, "I J D"]
"""Transformation matrices W_ij (I, J, D, K), fastest laid out in memory as (J, D, K, I), as
:class:`torchcaps.nn.DenseCapsules` keeps them; or vectors w_ij (I, J, D), D = K, which stand for diagonal matrices:
votes w_ij∘u_i."""


@checked
def compute_votes(poses: Float[Tensor, "B I K"], weight: Weight) -> Float[Tensor, "B I J D"]:
    """Votes û_j|i = W_ij u_i: what input capsule i predicts for output capsule j.

    Args:
        poses: Input capsules u_i.
        weight: :data:`Weight`.

    Returns:
        Votes, in the higher of the two precisions.

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    _check_pairs(poses, weight)
    if weight.ndim == 3:
        return poses.unsqueeze(2) * weight
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    with full_precision(poses.device):
        return torch.einsum("ijdk,bik->bijd", weight.to(dtype), poses.to(dtype))


@checked
def weighted_sum(
    poses: Float[Tensor, "B I K"], weight: Weight, coupling: Float[Tensor, "B I J"] | None = None
) -> Float[Tensor, "B J D"]:
    """The sum of votes, weighted by their coupling: s_j = Σ_i c_ij W_ij u_i.

    Args:
        poses: Input capsules u_i.
        weight: :data:`Weight`.
        coupling: c_ij; None is 1 for each pair.

    Returns:
        The sums s_j, in the highest of the precisions (half precision is computed in float32).

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    if is_exporting():
        votes = compute_votes(poses, weight)
        return votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling.to(votes.dtype), votes)
    return _in_full_precision(_PARENTS, None if coupling is None else coupling.permute(2, 0, 1), None, poses, weight)


@checked
def agreement(poses: Float[Tensor, "B I K"], weight: Weight, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
    """The scalar product of each vote with its parent: a_ij = ⟨W_ij u_i, x_j⟩.

    Args:
        poses: Input capsules u_i.
        weight: :data:`Weight`.
        parents: Output capsules, or any other vectors x_j.

    Returns:
        The agreement a_ij, in the precision of :func:`weighted_sum`.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829).
    """
    if is_exporting():
        votes = compute_votes(poses, weight)
        return torch.einsum("bijd,bjd->bij", votes, parents.to(votes.dtype))
    return _in_full_precision(_COUPLING, None, parents, poses, weight).permute(1, 2, 0)


def _in_full_precision(left_out: int, c: Tensor | None, x: Tensor | None, poses: Tensor, weight: Tensor) -> Tensor:
    """A contraction of poses and weight as the layers have them; its result in the highest of the dtypes."""
    _check_pairs(poses, weight)
    given = (c, x, poses.transpose(1, 2), weight.movedim(0, -1))
    dtype = functools.reduce(torch.promote_types, (factor.dtype for factor in given if factor is not None))
    factors = [None if factor is None else factor.to(full_dtype(dtype)) for factor in given]
    function = _contract_op if torch.compiler.is_compiling() else _Contraction.apply
    with full_precision(poses.device):
        return function(left_out, weight.ndim == 4, *factors).to(dtype)


def _check_pairs(poses: Tensor, weight: Tensor) -> None:
    K, D = poses.shape[2], weight.shape[2]
    if weight.ndim == 3 and K != D:
        raise InputError(f"weight of vectors must have as many components as poses, {K}, got {D}")


# ---- the four contractions, block by block

_COUPLING, _PARENTS, _POSES, _WEIGHT = range(4)  # places of c, x, u and W: which of them a contraction leaves out
_OF_ONES = {
    _PARENTS: (([1, 2], [2, 3]), "bdi,jdi->bjd"),
    _POSES: (([1, 2], [0, 1]), "bjd,jdi->bdi"),
    _WEIGHT: (([0], [0]), "bjd,bdi->jdi"),
}
"""The products for a coupling of ones: the axes of the two factors that matrices sum over, and the sum for vectors."""


def _sum_over(left_out: int, matrices: bool, c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """The contraction of the other three; a c of None, unless it is left out, is all ones.

    Each block is the poses times their coupling, (j, b, K, I), or the parents as their children see them, W_ijᵀ x_j,
    likewise; then their sum with what is left. Of vectors, the outer product is its diagonal only.
    """
    u, W = (None if each is None else each.contiguous() for each in (u, W))
    if c is None and left_out != _COUPLING:
        (left, right), (axes, equation) = (each for each in (x, u, W) if each is not None), _OF_ONES[left_out]
        return torch.tensordot(left, right, axes) if matrices else torch.einsum(equation, left, right)
    found = _new_result(left_out, matrices, c, x, u, W)
    for j, b, block in _blocks(found if u is None else u, x.shape[1] if W is None else len(W)):
        parents: Any = None if x is None else x[b, j].transpose(0, 1)
        if left_out in (_PARENTS, _WEIGHT):
            torch.mul(c[j, b, None], u[b], out=block)
        elif matrices:
            torch.bmm(parents, W[j].flatten(2), out=block.flatten(2))
        else:
            torch.mul(parents[..., None], W[j, None], out=block)
        if left_out == _COUPLING:
            torch.sum(block.mul_(u[b]), 2, out=found[j, b])
        elif left_out == _POSES:
            found[b] += block.mul_(c[j, b, None]).sum(0)
        elif left_out == _PARENTS:
            sums = block.flatten(2) @ W[j].flatten(2).mT if matrices else block.mul_(W[j, None]).sum(3)
            found[b, j] = sums.transpose(0, 1)
        elif matrices:
            found[j].flatten(2).baddbmm_(parents.mT, block.flatten(2))
        else:
            found[j] += block.mul_(parents[..., None]).sum(1)
    return found


def _new_result(left_out: int, matrices: bool, _c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """Where a contraction goes: zeros where it is summed over blocks."""
    if left_out == _COUPLING:
        return u.new_empty(W.shape[0], u.shape[0], u.shape[2])
    if left_out == _PARENTS:
        return u.new_empty(u.shape[0], *W.shape[:2])
    if left_out == _POSES:
        return x.new_zeros(x.shape[0], *W.shape[-2:])
    return u.new_zeros(*x.shape[1:], *(u.shape[1:] if matrices else u.shape[2:]))


def _blocks(u: Float[Tensor, "B K I"], J: int) -> Iterator[tuple[slice, slice, Float[Tensor, "j b K I"]]]:
    """Outputs and images that are worked on together, and the memory for it, the same for all blocks."""
    B, K, I = u.shape
    room = int(min(BLOCK, get_working_memory()) * MIB) // (u.element_size() * K * I)  # pairs of an image and an output
    b = max(1, min(B, MAX_BATCH_SLICE, room))
    j = max(1, min(J, room // b))
    memory = u.new_empty(j * b, K, I)
    for batch in slices(B, b):
        for outputs in slices(J, j):
            size = outputs.stop - outputs.start, batch.stop - batch.start
            yield outputs, batch, memory[: math.prod(size)].unflatten(0, size)


# ---- their gradients, and how torch calls them


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  the signature that PyTorch calls
    ctx.left_out, ctx.matrices, *factors = inputs
    ctx.save_for_backward(*factors)
    ctx.save_for_forward(*factors)


class _Contraction(torch.autograd.Function):
    """The contraction of c, x, u, W that leaves out the one at a place, where None stands."""

    forward = staticmethod(_sum_over)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradients(_Contraction.apply, ctx, grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """A contraction is linear in each factor: the sum of those with one of them replaced by its tangent."""
        given = ctx.saved_tensors
        moved = [
            _contract(_Contraction.apply, ctx.left_out, ctx.matrices, [*given[:n], tangent, *given[n + 1 :]])
            for n, tangent in enumerate(tangents[2:])
            if tangent is not None
        ]
        return torch.stack(moved).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
        return one_by_one(_Contraction.apply, info, in_dims, given)


_contract_op = torch.library.custom_op(  # to torch.compile one operation, which it does not look into
    "torchcaps::contract",
    lambda *given: _sum_over(*given).contiguous(),
    mutates_args=(),
    schema="(int left_out, bool matrices, Tensor? coupling, Tensor? parents, Tensor? poses, Tensor? weight) -> Tensor",
)
_contract_op.register_fake(_new_result)
_contract_op.register_autograd(lambda ctx, grad: _gradients(_contract_op, ctx, grad), setup_context=_save)


def _contract(
    function: Callable[..., Tensor], left_out: int, matrices: bool, factors: Sequence[Tensor | None]
) -> Tensor:
    return function(left_out, matrices, *(None if n == left_out else factor for n, factor in enumerate(factors)))


def _gradients(function: Callable[..., Tensor], ctx: Any, grad: Tensor) -> Any:
    factors = list(ctx.saved_tensors)
    factors[ctx.left_out] = grad
    wanted = enumerate(ctx.needs_input_grad[2:])
    return None, None, *(_contract(function, n, ctx.matrices, factors) if want else None for n, want in wanted)
