"""Votes that are built, as the algorithms of mixtures take them: (B, I, J, D), in memory (B, J, D, I).

Their gradients come in the same memory order. Both functions can be differentiated any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.memory import combine, contiguous


def dense_votes(
    poses: Float[Tensor, "B I K"], matrices: Float[Tensor, "I K N"], out_capsules: int
) -> Float[Tensor, "B I J D"]:
    """W_ij u_i, of matrices whose columns are the components of all J output capsules, N = J·D."""
    return _DenseVotes.apply(poses, matrices, out_capsules)


def matrix_votes(poses: Float[Tensor, "B I P P"], weight: Float[Tensor, "I J P P"]) -> Float[Tensor, "B I J D"]:
    """M_i W_ij, read row by row, D = P².

    Each product of matrices is P products of a component of the pose and one of the weight, over all input capsules at
    once.
    """
    return _MatrixVotes.apply(poses, weight)


class _DenseVotes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, matrices: Tensor, out_capsules: int) -> Tensor:
        ctx.save_for_backward(poses, matrices)
        products = combine(torch.bmm, poses.transpose(0, 1), matrices, (len(matrices), len(poses), matrices.shape[2]))
        return contiguous(products.permute(1, 2, 0)).unflatten(1, (out_capsules, -1)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        poses, matrices = ctx.saved_tensors
        each = contiguous(gradient.transpose(0, 1)).flatten(2)  # (I, B, N); a product would copy it I times otherwise
        for_poses = for_matrices = None
        if ctx.needs_input_grad[0]:
            for_poses = (each @ matrices.transpose(1, 2)).transpose(0, 1)
        if ctx.needs_input_grad[1]:
            for_matrices = combine(torch.bmm, poses.permute(1, 2, 0), each, matrices.shape)
        return for_poses, for_matrices, None


class _MatrixVotes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(poses, weight)
        M = poses.permute(0, 2, 3, 1).contiguous()[:, None, :, None]  # (B, 1, p, 1, r, I)
        W = weight.permute(1, 3, 2, 0).contiguous()[None, :, None]  # (1, J, 1, q, r, I)
        votes = combine(torch.mul, M[..., 0, :], W[..., 0, :])  # (B, J, p, q, I)
        for r in range(1, weight.shape[2]):
            votes.addcmul_(M[..., r, :], W[..., r, :])
        return votes.flatten(2, 3).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        poses, weight = ctx.saved_tensors
        (B, I, P, _), J = poses.shape, weight.shape[1]
        each = contiguous(gradient.unflatten(3, (P, P)).permute(1, 0, 3, 2, 4)).view(I, B * P, J * P)
        for_poses = for_weight = None
        if ctx.needs_input_grad[0]:
            back = each @ weight.transpose(2, 3).reshape(I, J * P, P)
            for_poses = back.unflatten(1, (B, P)).transpose(0, 1)
        if ctx.needs_input_grad[1]:
            rows = poses.transpose(0, 1).reshape(I, B * P, P)
            for_weight = (rows.transpose(1, 2) @ each).unflatten(2, (J, P)).transpose(1, 2)
        return for_poses, for_weight
