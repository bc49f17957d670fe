"""Votes as the routing algorithms ask for them, and votes that stand in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.machine import MIB
from torchcaps.ops.checks import is_exporting
from torchcaps.ops.memory import get_working_memory

BLOCK = 2 * MIB
"""Bytes of the votes that a core works on at a time, for its caches; all that is made of them takes many times more."""
TENSORS_PER_VOTE = 16
"""Tensors of the votes' size that an algorithm with three iterations keeps for its gradient."""


@runtime_checkable
class VoteSums(Protocol):
    """What the algorithms ask of votes that are never built: :class:`torchcaps.nn.Votes`, or :class:`BuiltVotes`."""

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """Σ_i c_ij û_j|i; without coupling, the plain sum."""

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """⟨û_j|i, x_j⟩."""

    def compete(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """The softmax over the output capsules that compete."""


class BuiltVotes:
    """Votes (B, I, J, D) that stand in a tensor."""

    def __init__(self, votes: Float[Tensor, "B I J D"]) -> None:
        self.votes = votes

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | None) -> Float[Tensor, "B J D"]:
        """See :class:`VoteSums`."""
        return self.votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling, self.votes)

    def agreement(self, parents: Float[Tensor, "B J D"]) -> Float[Tensor, "B I J"]:
        """See :class:`VoteSums`."""
        return torch.einsum("bijd,bjd->bij", self.votes, parents)

    def compete(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """See :class:`VoteSums`."""
        return logits.softmax(2)


def log_softmax_over_outputs(logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
    """The logarithm of the softmax over the output capsules; in memory as (B, J, I), where torch computes it faster."""
    return logits.transpose(1, 2).log_softmax(1).transpose(1, 2)


def is_traced() -> bool:
    """Whether torch makes a graph of the work: to export, to compile, or under its transforms."""
    return is_exporting() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


Work = Callable[..., tuple[Tensor, ...]]
"""From tensors of some images, and tensors that all images share, to tensors of these images."""


def in_blocks(
    work: Work, each: Sequence[Tensor], shared: Sequence[Tensor], numbers: int, multiple: int = 1
) -> tuple[Tensor, ...]:
    """``work(*each, *shared)``, some images at a time, so that no more votes than theirs are in memory.

    The backward pass works on the same images again. Where all fit into one block, and where torch makes a graph of
    the work (to export, to compile, under its transforms), it is done at once, and differentiated as often as wanted.

    Args:
        work: Treats each image alone.
        each: Tensors whose first axis is the images.
        shared: Tensors of all images.
        numbers: How many votes' components one image has.
        multiple: A block has a multiple of so many rows of the first axis.
    """
    if is_traced():
        return work(*each, *shared)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*each, *shared))
    room = int(get_working_memory() * MIB / (TENSORS_PER_VOTE if learns else 1))
    if each[0].device.type == "cpu":
        room = min(room, BLOCK * torch.get_num_threads())
    block = max(1, room // (numbers * each[0].element_size() * multiple)) * multiple
    if block >= len(each[0]):
        return work(*each, *shared)
    return _Blocks.apply(work, len(each), block, *each, *shared)


class _Blocks(torch.autograd.Function):
    """``work`` block by block, forward and backward; see :func:`in_blocks`."""

    @staticmethod
    def forward(ctx: Any, work: Work, num_each: int, block: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.work, ctx.num_each, ctx.block = work, num_each, block
        ctx.save_for_backward(*tensors)
        each, shared = tensors[:num_each], tensors[num_each:]
        parts = [work(*some, *shared) for some in zip(*(tensor.split(block) for tensor in each), strict=True)]
        return tuple(torch.cat(results) for results in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        each, shared = ctx.saved_tensors[: ctx.num_each], ctx.saved_tensors[ctx.num_each :]
        wanted = ctx.needs_input_grad[3:]
        totals = [
            None if not needed else torch.empty_like(tensor) if n < ctx.num_each else torch.zeros_like(tensor)
            for n, (tensor, needed) in enumerate(zip((*each, *shared), wanted, strict=True))
        ]
        for start in range(0, len(each[0]), ctx.block):
            rows = slice(start, start + ctx.block)
            leaves = [
                tensor.detach().requires_grad_(needed)
                for tensor, needed in zip((*(tensor[rows] for tensor in each), *shared), wanted, strict=True)
            ]
            with torch.enable_grad():
                results = ctx.work(*leaves)
            seen = [(result, g[rows]) for result, g in zip(results, gradients, strict=True) if result.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in seen],
                    [leaf for leaf in leaves if leaf.requires_grad],
                    [gradient for _, gradient in seen],
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            for n, total in enumerate(totals):
                if total is not None:
                    if n < ctx.num_each:
                        total[rows] = next(found)
                    else:
                        total += next(found)
        return None, None, None, *totals
