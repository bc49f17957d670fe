"""The calculus of votes: the sums that routing takes over votes, with the votes never built.

A vote û_j|i = W_ij u_i meets the rest of a routing algorithm in two sums only: weighted by a coupling, and multiplied
by a parent. Each is one of four contractions of the same four tensors, and their gradients are contractions again:

| contraction | sum | its gradients |
|---|---|---|
| weighted sum | s_bjd = Σ c_bij W_ijdk u_bik | ∂c: agreement(g, u, W), ∂u: back(c, g, W), ∂W: outer(c, g, u) |
| agreement | a_bij = Σ x_bjd W_ijdk u_bik | ∂x: weighted sum(g, u, W), ∂u: back(g, x, W), ∂W: outer(g, x, u) |
| back | r_bik = Σ c_bij W_ijdk x_bjd | ∂c: agreement(x, g, W), ∂x: weighted sum(c, g, W), ∂W: outer(c, x, g) |
| outer | O_ijdk = Σ c_bij x_bjd u_bik | ∂c: agreement(x, u, g), ∂x: weighted sum(c, u, g), ∂u: back(c, x, g) |

So everything made of them can be differentiated any number of times, and none of it is ever of the votes' size.

Inside, tensors lie in memory with the input capsules innermost: poses (B, K, I), weight (J, D, K, I), coupling
(J, B, I), parents (B, J, D). Then each contraction is, for some outputs j and images b, one matrix product and one
pass over (j, b, K·I) numbers, which are made block by block within :func:`torchcaps.set_working_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.ops.checks import check_one_device, check_tensor
from torchcaps.ops.dynamic_routing.checks import check_route
from torchcaps.ops.dynamic_routing.recompute.blocks import BLOCK, MAX_BATCH_SLICE, slices
from torchcaps.ops.dynamic_routing.reference import compute_votes
from torchcaps.ops.export import is_exporting
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.precision import full_precision, in_full_precision


def weighted_sum(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D ..."],
    coupling: Float[Tensor, "B I J"] | None = None,
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
    dtype, (u, W, c) = _in_memory_order(poses, weight, None if coupling is None else coupling.permute(2, 0, 1))
    with full_precision(poses.device):
        return _of(weight).weighted_sum(c, u, W).to(dtype)


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
    dtype, (u, W, x) = _in_memory_order(poses, weight, parents)
    assert x is not None
    with full_precision(poses.device):
        return _of(weight).agreement(x, u, W).permute(1, 2, 0).to(dtype)


def build_votes(poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."]) -> Float[Tensor, "B I J D"]:
    """The votes themselves, by torch's own operations, of which exported graphs are made.

    Args:
        poses: Input capsules u_i.
        weight: Transformation matrices W_ij; see :func:`weighted_sum`.
    """
    return poses.unsqueeze(2) * weight if weight.ndim == 3 else compute_votes(poses, weight)


def _of(weight: Float[Tensor, "I J D ..."]) -> _Calculus:
    return _DENSE if weight.ndim == 4 else _ELEMENTWISE


def _check_pair(caller: str, poses: Tensor, weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.ndim != 3:
        check_route(poses, weight, caller=caller)
        return
    check_tensor(caller, "weight", weight, ("I", "J", "D"))
    check_tensor(caller, "poses", poses, ("B", weight.shape[0], weight.shape[2]))
    check_one_device(caller, poses=poses, weight=weight)


def _in_memory_order(
    poses: Float[Tensor, "B I K"], weight: Float[Tensor, "I J D ..."], other: Tensor | None
) -> tuple[torch.dtype, tuple[Float[Tensor, "B K I"], Float[Tensor, "J D ..."], Tensor | None]]:
    """The dtype of the result, and poses, weight and a third tensor as the contractions take them."""
    dtype = torch.promote_types(poses.dtype, weight.dtype)
    dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    u, W = poses.to(dtype).transpose(1, 2), weight.to(dtype).movedim(0, -1)
    return dtype, (
        in_full_precision(u),
        in_full_precision(W),
        other if other is None else in_full_precision(other.to(dtype)),
    )


# ---- how a matrix, or a vector, of a pair meets the vectors of parent and child


@runtime_checkable
class _Pairing(Protocol):
    """What is particular to one kind of W; ``block`` and ``coupled`` are (j, b, K, I) and may be written over."""

    def pull(self, x: Float[Tensor, "b j D"], W: Tensor, block: Tensor) -> Tensor:
        """W_ijᵀ x_j, into ``block``: the parents seen from their children."""

    def push(self, coupled: Tensor, W: Tensor) -> Float[Tensor, "j b D"]:
        """Σ_i W_ij (c_ij u_i)."""

    def add_outer(self, total: Tensor, x: Float[Tensor, "b j D"], coupled: Tensor) -> None:
        """Add Σ_b x_j ⊗ (c_ij u_i) to what has W's shape."""

    def weight_shape(self, J: int, D: int, K: int, I: int) -> tuple[int, ...]:
        """W's shape."""

    def push_all(self, u: Float[Tensor, "B K I"], W: Tensor) -> Float[Tensor, "B J D"]:
        """Σ_i W_ij u_i."""

    def pull_all(self, x: Float[Tensor, "B J D"], W: Tensor) -> Float[Tensor, "B K I"]:
        """Σ_j W_ijᵀ x_j."""

    def outer_all(self, x: Float[Tensor, "B J D"], u: Float[Tensor, "B K I"]) -> Tensor:
        """Σ_b x_j ⊗ u_i."""


class _Dense:
    """A matrix for each pair, (J, D, K, I): each contraction is a matrix product for each output."""

    def pull(self, x: Tensor, W: Tensor, block: Tensor) -> Tensor:
        torch.bmm(x.transpose(0, 1), W.flatten(2), out=block.flatten(2))
        return block

    def push(self, coupled: Tensor, W: Tensor) -> Tensor:
        return coupled.flatten(2) @ W.flatten(2).mT

    def add_outer(self, total: Tensor, x: Tensor, coupled: Tensor) -> None:
        total.flatten(2).baddbmm_(x.permute(1, 2, 0), coupled.flatten(2))

    def weight_shape(self, J: int, D: int, K: int, I: int) -> tuple[int, ...]:
        return J, D, K, I

    def push_all(self, u: Tensor, W: Tensor) -> Tensor:
        return (u.flatten(1) @ W.flatten(2).flatten(0, 1).t()).unflatten(1, W.shape[:2])

    def pull_all(self, x: Tensor, W: Tensor) -> Tensor:
        return (x.flatten(1) @ W.flatten(2).flatten(0, 1)).unflatten(1, W.shape[2:])

    def outer_all(self, x: Tensor, u: Tensor) -> Tensor:
        return (x.flatten(1).t() @ u.flatten(1)).view(*x.shape[1:], *u.shape[1:])


class _Elementwise:
    """A vector for each pair, (J, D, I), that scales the child's components: K is D."""

    def pull(self, x: Tensor, W: Tensor, block: Tensor) -> Tensor:
        return torch.mul(x.transpose(0, 1)[..., None], W[:, None], out=block)

    def push(self, coupled: Tensor, W: Tensor) -> Tensor:
        return coupled.mul_(W[:, None]).sum(3)

    def add_outer(self, total: Tensor, x: Tensor, coupled: Tensor) -> None:
        total += coupled.mul_(x.transpose(0, 1)[..., None]).sum(1)

    def weight_shape(self, J: int, D: int, K: int, I: int) -> tuple[int, ...]:  # noqa: ARG002
        return J, D, I

    def push_all(self, u: Tensor, W: Tensor) -> Tensor:
        return torch.einsum("bdi,jdi->bjd", u, W)

    def pull_all(self, x: Tensor, W: Tensor) -> Tensor:
        return torch.einsum("bjd,jdi->bdi", x, W)

    def outer_all(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.einsum("bjd,bdi->jdi", x, u)


# ---- the four contractions, block by block


def _weighted_sum(
    pair: _Pairing, c: Float[Tensor, "J B I"] | None, u: Float[Tensor, "B K I"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "B J D"]:
    u, W = u.contiguous(), W.contiguous()
    if c is None:
        return pair.push_all(u, W)
    sums = u.new_empty(len(u), *W.shape[:2])
    for outputs, batch, block in _blocks(u, len(W)):
        coupled = torch.mul(c[outputs, batch, None], u[batch], out=block)
        sums[batch, outputs] = pair.push(coupled, W[outputs]).transpose(0, 1)
    return sums


def _agreement(
    pair: _Pairing, x: Float[Tensor, "B J D"], u: Float[Tensor, "B K I"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "J B I"]:
    u, W = u.contiguous(), W.contiguous()
    agreed = u.new_empty(len(W), len(u), u.shape[2])
    for outputs, batch, block in _blocks(u, len(W)):
        pulled = pair.pull(x[batch, outputs], W[outputs], block)
        torch.sum(pulled.mul_(u[batch]), 2, out=agreed[outputs, batch])
    return agreed


def _back(
    pair: _Pairing, c: Float[Tensor, "J B I"] | None, x: Float[Tensor, "B J D"], W: Float[Tensor, "J D ..."]
) -> Float[Tensor, "B K I"]:
    W = W.contiguous()
    if c is None:
        return pair.pull_all(x, W)
    found = x.new_zeros(len(x), *W.shape[-2:])
    for outputs, batch, block in _blocks(found, len(W)):
        pulled = pair.pull(x[batch, outputs], W[outputs], block)
        found[batch] += pulled.mul_(c[outputs, batch, None]).sum(0)
    return found


def _outer(
    pair: _Pairing, c: Float[Tensor, "J B I"] | None, x: Float[Tensor, "B J D"], u: Float[Tensor, "B K I"]
) -> Float[Tensor, "J D ..."]:
    u = u.contiguous()
    if c is None:
        return pair.outer_all(x, u)
    found = u.new_zeros(pair.weight_shape(*x.shape[1:], *u.shape[1:]))
    for outputs, batch, block in _blocks(u, x.shape[1]):
        coupled = torch.mul(c[outputs, batch, None], u[batch], out=block)
        pair.add_outer(found[outputs], x[batch, outputs], coupled)
    return found


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


# ---- their gradients

_Kernel = Callable[..., Tensor]


def _differentiable(kernel: _Kernel, gradients: Callable[..., tuple[Callable[[], Tensor], ...]]) -> _Kernel:
    """A contraction of three tensors that autograd knows.

    Args:
        kernel: Contracts them; the first may be None where that stands for ones.
        gradients: From the gradient of the result and the three tensors, what makes the gradient of each.
    """

    class Contraction(torch.autograd.Function):
        @staticmethod
        def forward(*factors: Any) -> Tensor:
            return kernel(*factors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            makers = gradients(grad, *ctx.saved_tensors)
            return tuple(make() if want else None for make, want in zip(makers, ctx.needs_input_grad, strict=True))

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
            """A contraction is linear in each factor: the sum of those with one of them replaced by its tangent."""
            factors = ctx.saved_tensors
            parts = [
                Contraction.apply(*factors[:n], tangent, *factors[n + 1 :])
                for n, tangent in enumerate(tangents)
                if tangent is not None
            ]
            return torch.stack(parts).sum(0)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *factors: Any) -> tuple[Tensor, int]:
            members = (
                Contraction.apply(
                    *(f if dim is None else f.select(dim, n) for f, dim in zip(factors, in_dims, strict=True))
                )
                for n in range(info.batch_size)
            )
            return torch.stack(list(members)), 0

    return Contraction.apply


class _Calculus(NamedTuple):
    """The four contractions for one kind of W."""

    weighted_sum: _Kernel
    agreement: _Kernel
    back: _Kernel
    outer: _Kernel


def _calculus(pair: _Pairing) -> _Calculus:
    """The table at the top of this file."""
    four: _Calculus
    four = _Calculus(
        _differentiable(
            partial(_weighted_sum, pair),
            lambda g, c, u, W: (
                lambda: four.agreement(g, u, W),
                lambda: four.back(c, g, W),
                lambda: four.outer(c, g, u),
            ),
        ),
        _differentiable(
            partial(_agreement, pair),
            lambda g, x, u, W: (
                lambda: four.weighted_sum(g, u, W),
                lambda: four.back(g, x, W),
                lambda: four.outer(g, x, u),
            ),
        ),
        _differentiable(
            partial(_back, pair),
            lambda g, c, x, W: (
                lambda: four.agreement(x, g, W),
                lambda: four.weighted_sum(c, g, W),
                lambda: four.outer(c, x, g),
            ),
        ),
        _differentiable(
            partial(_outer, pair),
            lambda g, c, x, u: (
                lambda: four.agreement(x, u, g),
                lambda: four.weighted_sum(c, u, g),
                lambda: four.back(c, x, g),
            ),
        ),
    )
    return four


_DENSE, _ELEMENTWISE = _calculus(_Dense()), _calculus(_Elementwise())
