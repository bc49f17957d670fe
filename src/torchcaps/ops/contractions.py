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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.checks import check_one_device, check_tensor, is_exporting
from torchcaps.ops.dynamic_routing.checks import check_route
from torchcaps.ops.dynamic_routing.recompute.layer import BLOCK, MAX_BATCH_SLICE, slices
from torchcaps.ops.dynamic_routing.reference import compute_votes
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import full_dtype, full_precision


def weighted_sum(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."], coupling: Float[Tensor, "B I J"] | None = None
) -> Float[Tensor, "B J D"]:
    """The sum of votes, weighted by their coupling: s_j = Σ_i c_ij W_ij u_i.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij (I, J, D, K), fastest laid out in memory as (J, D, K, I), as
            :class:`torchcaps.nn.DenseCapsules` keeps them; or vectors w_ij (I, J, D), D = K, which stand for diagonal
            matrices: votes w_ij∘u_i.
        coupling: c_ij; None is 1 for each pair.

    Returns:
        The sums s_j, in the highest of the precisions (half precision is computed in float32). They can be
        differentiated any number of times.

    Raises:
        TypeError: A tensor that is not floating-point.
        ValueError: Shapes that do not fit each other.

    Source: Sabour, Frosst, Hinton 2017, equation 2 (arXiv:1710.09829).
    """
    _check_pair("weighted_sum", poses, weight)
    if coupling is not None:
        check_tensor("weighted_sum", "coupling", coupling, (*poses.shape[:2], weight.shape[1]))
        check_one_device("weighted_sum", poses=poses, coupling=coupling)
    if is_exporting():
        votes = build_votes(poses, weight)
        return votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling.to(votes.dtype), votes)
    dtype, u, W, c = _in_memory_order(poses, weight, None if coupling is None else coupling.permute(2, 0, 1))
    with full_precision(poses.device):
        return _contract(_PARENTS, weight.ndim == 4, (c, None, u, W)).to(dtype)


def agreement(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."], parents: Float[Tensor, "B J D"]
) -> Float[Tensor, "B I J"]:
    """The scalar product of each vote with its parent: a_ij = ⟨W_ij u_i, x_j⟩.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij; see :func:`weighted_sum`.
        parents: Output capsules, or any other vectors x_j.

    Returns:
        The agreement a_ij, in the highest of the precisions (half precision is computed in float32). It can be
        differentiated any number of times.

    Raises:
        TypeError: A tensor that is not floating-point.
        ValueError: Shapes that do not fit each other.

    Source: Sabour, Frosst, Hinton 2017, section 2 (arXiv:1710.09829).
    """
    _check_pair("agreement", poses, weight)
    check_tensor("agreement", "parents", parents, (poses.shape[0], *weight.shape[1:3]))
    check_one_device("agreement", poses=poses, parents=parents)
    if is_exporting():
        votes = build_votes(poses, weight)
        return torch.einsum("bijd,bjd->bij", votes, parents.to(votes.dtype))
    dtype, u, W, x = _in_memory_order(poses, weight, parents)
    with full_precision(poses.device):
        return _contract(_COUPLING, weight.ndim == 4, (None, x, u, W)).permute(1, 2, 0).to(dtype)


def build_votes(poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."]) -> Float[Tensor, "B I J D"]:
    """The votes themselves, by torch's own operations, of which exported graphs are made."""
    return poses.unsqueeze(2) * weight if weight.ndim == 3 else compute_votes(poses, weight)


def _check_pair(caller: str, poses: Tensor, weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.ndim != 3:
        check_route(caller, poses, weight)
        return
    check_tensor(caller, "weight", weight, ("I", "J", "D"))
    check_tensor(caller, "poses", poses, ("B", weight.shape[0], weight.shape[2]))
    check_one_device(caller, poses=poses, weight=weight)


def _in_memory_order(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."], other: Tensor | None
) -> tuple[torch.dtype, Float[Tensor, "B K I"], Float[Tensor, "J D ..."], Tensor | None]:
    """The dtype of the result, and poses, weight and a third tensor as the contractions take them."""
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    working = full_dtype(dtype)
    other = None if other is None else other.to(working)
    return dtype, poses.to(working).transpose(1, 2), weight.to(working).movedim(0, -1), other


# ---- the four contractions, block by block


def _weighted_sum(
    c: Float[Tensor, "J B I"] | None, u: Float[Tensor, "B K I"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "B J D"]:
    """Σ_i W_ij (c_ij u_i)."""
    u, W, matrices = u.contiguous(), W.contiguous(), W.ndim == 4
    if c is None and matrices:
        return (u.flatten(1) @ W.flatten(2).flatten(0, 1).t()).unflatten(1, W.shape[:2])
    if c is None:
        return torch.einsum("bdi,jdi->bjd", u, W)
    sums = u.new_empty(len(u), *W.shape[:2])
    for outputs, batch, block in _blocks(u, len(W)):
        coupled, w = torch.mul(c[outputs, batch, None], u[batch], out=block), W[outputs]
        part = coupled.flatten(2) @ w.flatten(2).mT if matrices else coupled.mul_(w[:, None]).sum(3)
        sums[batch, outputs] = part.transpose(0, 1)
    return sums


def _agreement(
    x: Float[Tensor, "B J D"], u: Float[Tensor, "B K I"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "J B I"]:
    """⟨W_ijᵀ x_j, u_i⟩."""
    u, W = u.contiguous(), W.contiguous()
    agreed = u.new_empty(len(W), len(u), u.shape[2])
    for outputs, batch, block in _blocks(u, len(W)):
        pulled = _pull(x[batch, outputs], W[outputs], block)
        torch.sum(pulled.mul_(u[batch]), 2, out=agreed[outputs, batch])
    return agreed


def _back(
    c: Float[Tensor, "J B I"] | None, x: Float[Tensor, "B J D"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "B K I"]:
    """Σ_j c_ij W_ijᵀ x_j."""
    W = W.contiguous()
    if c is None and W.ndim == 4:
        return (x.flatten(1) @ W.flatten(2).flatten(0, 1)).unflatten(1, W.shape[2:])
    if c is None:
        return torch.einsum("bjd,jdi->bdi", x, W)
    found = x.new_zeros(len(x), *W.shape[-2:])
    for outputs, batch, block in _blocks(found, len(W)):
        pulled = _pull(x[batch, outputs], W[outputs], block)
        found[batch] += pulled.mul_(c[outputs, batch, None]).sum(0)
    return found


def _outer(
    c: Float[Tensor, "J B I"] | None, x: Float[Tensor, "B J D"], u: Float[Tensor, "B K I"], matrices: bool
) -> Float[Tensor, "J D ..."]:
    """Σ_b x_j ⊗ (c_ij u_i); of vectors only the diagonal."""
    u = u.contiguous()
    if c is None and matrices:
        return (x.flatten(1).t() @ u.flatten(1)).view(*x.shape[1:], *u.shape[1:])
    if c is None:
        return torch.einsum("bjd,bdi->jdi", x, u)
    found = u.new_zeros(*x.shape[1:], *(u.shape[1:] if matrices else u.shape[2:]))
    for outputs, batch, block in _blocks(u, x.shape[1]):
        coupled, total = torch.mul(c[outputs, batch, None], u[batch], out=block), found[outputs]
        if matrices:
            total.flatten(2).baddbmm_(x[batch, outputs].permute(1, 2, 0), coupled.flatten(2))
        else:
            total += coupled.mul_(x[batch, outputs].transpose(0, 1)[..., None]).sum(1)
    return found


def _pull(
    x: Float[Tensor, "b j D"], W: Float[Tensor, "j D ..."], block: Float[Tensor, "j b K I"]
) -> Float[Tensor, "j b K I"]:
    """W_ijᵀ x_j, into ``block``: the parents seen from their children."""
    if W.ndim == 3:
        return torch.mul(x.transpose(0, 1)[..., None], W[:, None], out=block)
    torch.bmm(x.transpose(0, 1), W.flatten(2), out=block.flatten(2))
    return block


def _blocks(u: Float[Tensor, "B K I"], J: int) -> Iterator[tuple[slice, slice, Float[Tensor, "j b K I"]]]:
    """Outputs and images that are worked on together, and the memory for it, the same for all blocks."""
    B, K, I = u.shape
    room = int(min(BLOCK, get_working_memory()) * MIB) // (u.element_size() * K * I)  # pairs of an image and an output
    b = max(1, min(B, MAX_BATCH_SLICE, room))
    j = max(1, min(J, room // b))
    memory = u.new_empty(j * b * K * I)
    for batch in slices(B, b):
        for outputs in slices(J, j):
            shape = outputs.stop - outputs.start, batch.stop - batch.start, K, I
            yield outputs, batch, memory[: shape[0] * shape[1] * K * I].view(shape)


def _sum_over(left_out: int, matrices: bool, c: Any, x: Any, u: Any, W: Any) -> Tensor:
    if left_out == _COUPLING:
        return _agreement(x, u, W)
    if left_out == _PARENTS:
        return _weighted_sum(c, u, W)
    return _back(c, x, W) if left_out == _POSES else _outer(c, x, u, matrices)


# ---- their gradients

_COUPLING, _PARENTS, _POSES = range(3)  # places of c, x, u; W's is the last one


class _Contraction(torch.autograd.Function):
    """The contraction of c, x, u, W that leaves out the one at a place, where None stands; a c of None is all ones."""

    @staticmethod
    def forward(left_out: int, matrices: bool, *factors: Any) -> Tensor:
        return _sum_over(left_out, matrices, *factors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradients(ctx, grad, _Contraction.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """A contraction is linear in each factor: the sum of those with one of them replaced by its tangent."""
        parts = []
        for n, tangent in enumerate(tangents[2:]):
            if tangent is not None:
                factors = list(ctx.saved_tensors)
                factors[n] = tangent
                parts.append(_contract(ctx.left_out, ctx.matrices, factors))
        return torch.stack(parts).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        members = [
            _Contraction.apply(*(x if dim is None else x.select(dim, n) for x, dim in zip(given, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        return torch.stack(members), 0


def _contract(
    left_out: int, matrices: bool, factors: Sequence[Tensor | None], function: Callable[..., Tensor] | None = None
) -> Tensor:
    if function is None:
        function = _contract_op if torch.compiler.is_compiling() else _Contraction.apply
    return function(left_out, matrices, *(None if n == left_out else factor for n, factor in enumerate(factors)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  the signature that PyTorch calls
    ctx.left_out, ctx.matrices, *factors = inputs
    ctx.save_for_backward(*factors)


def _gradients(ctx: Any, grad: Tensor, function: Callable[..., Tensor]) -> Any:
    factors = list(ctx.saved_tensors)
    factors[ctx.left_out] = grad
    wanted = enumerate(ctx.needs_input_grad[2:])
    return None, None, *(_contract(n, ctx.matrices, factors, function) if want else None for n, want in wanted)


# ---- torch.compile: one operation that it does not look into


def _contract_once(left_out: int, matrices: bool, *factors: Any) -> Tensor:
    return _sum_over(left_out, matrices, *factors).contiguous()


_contract_op = torch.library.custom_op(
    "torchcaps::contract",
    _contract_once,
    mutates_args=(),
    schema="(int left_out, bool matrices, Tensor? coupling, Tensor? parents, Tensor? poses, Tensor? weight) -> Tensor",
)


@_contract_op.register_fake
def _(left_out: int, matrices: bool, _c: Any, x: Any, u: Any, W: Any) -> Tensor:
    if left_out == _COUPLING:
        return x.new_empty(x.shape[1], x.shape[0], u.shape[2])
    if left_out == _PARENTS:
        return u.new_empty(u.shape[0], *W.shape[:2])
    if left_out == _POSES:
        return x.new_empty(x.shape[0], *W.shape[-2:])
    return x.new_empty(*x.shape[1:], *(u.shape[1:] if matrices else u.shape[2:]))


def _op_gradients(ctx: Any, grad: Tensor) -> Any:
    return _gradients(ctx, grad, _contract_op)


_contract_op.register_autograd(_op_gradients, setup_context=_save)
