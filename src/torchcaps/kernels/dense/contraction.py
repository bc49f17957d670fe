"""Four contractions, block by block, for sums over votes that are never built.

The two sums of :mod:`torchcaps.ops.contractions` follow from one number that is linear in four tensors:

    Σ_bijdk c_bij x_bjd W_ijdk u_bik

The weighted sum s leaves out x, and the agreement a leaves out c. The gradient of a sum with respect to a factor leaves
out that factor. It contains the gradient of the sum instead of the tensor that the sum left out. So there are four
contractions.

Factors lie in memory with the input capsules innermost: poses u (B, K, I), weight W (J, D, K, I), coupling c (J, B, I),
parents x (B, J, D). For some outputs j and images b, a contraction is then one matrix product and one pass over
(j, b, K·I) numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.dense.layer import MAX_BLOCK_MIB, max_batch_slice
from torchcaps.kernels.memory import block_bytes, slices
from torchcaps.kernels.operation import Forward, Operation
from torchcaps.ops.precision import full_precision

COUPLING, PARENTS, POSES, WEIGHT = range(4)  # indices of c, x, u and W, to name the tensor that is left out


class Factors(NamedTuple):
    """The four factors; None for the one that is left out."""

    coupling: Float[Tensor, "J B I"] | None
    parents: Float[Tensor, "B J D"] | None
    poses: Float[Tensor, "B K I"] | None
    weight: Float[Tensor, "J D K I"] | None


class Contraction(NamedTuple):
    """Which contraction."""

    left_out: int
    """Index of the factor that is left out: the coupling or the parents."""


class Contracted(NamedTuple):
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
            if left_out in (PARENTS, WEIGHT):
                torch.mul(c[j, b, None], u[b], out=block)
            else:
                torch.bmm(parents, W[j].flatten(2), out=block.flatten(2))
            if left_out == COUPLING:
                torch.sum(block.mul_(u[b]), 2, out=result[j, b])
            elif left_out == POSES:
                result[b] += block.mul_(c[j, b, None]).sum(0)
            elif left_out == PARENTS:
                result[b, j] = (block.flatten(2) @ W[j].flatten(2).mT).transpose(0, 1)
            else:
                result[j].flatten(2).baddbmm_(parents.mT, block.flatten(2))
    return result


def _new_result(left_out: int, _c: Any, x: Any, u: Any, W: Any) -> Tensor:
    """Allocate the result of a contraction: zeros if it is summed over blocks, otherwise empty."""
    if left_out == COUPLING:
        return u.new_empty(W.shape[0], u.shape[0], u.shape[2])
    if left_out == PARENTS:
        return u.new_empty(u.shape[0], *W.shape[:2])
    if left_out == POSES:
        return x.new_zeros(x.shape[0], *W.shape[-2:])
    return u.new_zeros(*x.shape[1:], *u.shape[1:])


def _blocks(u: Float[Tensor, "B K I"], J: int) -> Iterator[tuple[slice, slice, Float[Tensor, "j b K I"]]]:
    """Yield blocks of outputs and images, with a work buffer that all blocks share."""
    B, K, I = u.shape
    room = block_bytes(u.device, MAX_BLOCK_MIB) // (u.element_size() * K * I)  # pairs of an image and an output
    b = max(1, min(B, max_batch_slice(B, u.device), room))
    j = max(1, min(J, room // b))
    memory = u.new_empty(j * b, K, I)
    for batch in slices(B, b):
        for outputs in slices(J, j):
            size = outputs.stop - outputs.start, batch.stop - batch.start
            yield outputs, batch, memory[: math.prod(size)].unflatten(0, size)


# ---- the operation


def _forward(tensors: Factors, options: Contraction, _wanted: Sequence[bool], _keep: bool) -> Forward:
    return Forward((_contract(options.left_out, *tensors),))


def _backward(
    tensors: Factors,
    options: Contraction,
    _results: Sequence[None],
    _kept: None,
    grads: Sequence[Tensor],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradient of each factor: the contraction without it, with the gradient of the result in its place."""
    factors: list[Tensor | None] = list(tensors)
    factors[options.left_out] = grads[0]
    return [
        _contract(n, *(None if n == m else each for m, each in enumerate(factors))) if want else None
        for n, want in enumerate(needs_grad)
    ]


def _plain(tensors: Factors, options: Contraction) -> Contracted:
    """Contract all pairs at once, with PyTorch's operations."""
    c, x, u, W = tensors
    assert u is not None
    assert W is not None
    if options.left_out == COUPLING:
        assert x is not None
        return Contracted(((x.transpose(0, 1) @ W.flatten(2)).unflatten(2, W.shape[2:]) * u).sum(2))
    assert c is not None
    return Contracted(((c.unsqueeze(2) * u).flatten(2) @ W.flatten(2).mT).transpose(0, 1))


contraction = Operation(
    "contract",
    Factors,
    Contraction,
    Contracted,
    forward=_forward,
    backward=_backward,
    plain=_plain,
    fake=lambda tensors, options: Contracted(_new_result(options.left_out, *tensors)),
    plain_bytes=lambda tensors, _: _pair_bytes(tensors),
)


def _pair_bytes(tensors: Factors) -> int:
    """Return the bytes of the products of all pairs."""
    _, _, u, W = tensors
    return 0 if u is None or W is None else len(W) * u.nbytes
