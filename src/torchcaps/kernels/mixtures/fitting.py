"""Fit a mixture of Gaussians to votes that are made a block at a time, with a ledger of their gradients.

The equations of each routing are one function in :mod:`torchcaps.nn.routing`, which uses only the sums of
:class:`~torchcaps.kernels.mixtures.ledger.Sums`. The kernel makes the votes of a block again in the backward pass, and
applies the ledger to them. Small votes are kept instead. The plain formula is the same equations with sums of PyTorch's
operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.memory import block_bytes, blocks, cut, in_blocks
from torchcaps.kernels.mixtures.ledger import Ledger, Sums
from torchcaps.kernels.mixtures.makers import MAKERS, Maker, VoteFactors
from torchcaps.kernels.operation import Forward, Operation, differentiate
from torchcaps.machine import MIB
from torchcaps.ops.precision import full_precision
from torchcaps.tracing import autograd_in_operation, is_eager, is_recording_operations

MAX_BLOCK_MIB = 8
"""MiB of votes for each core in a block. 6 to 12 MiB take the same time, 4 MiB take 1.1 times as long."""
MAX_PLAIN_MIB = 1 / 16
"""MiB of votes up to which PyTorch's operations are fastest, because the ledger needs more calls."""
MAX_KEPT_MIB = 1
"""MiB of votes up to which a call keeps them for its backward pass, because computing them again takes longer."""
MAX_BUFFERS = 4
"""Largest number of buffers of a call, each of the size of a block's votes."""


class Tensors(NamedTuple):
    """Tensors of a fit. The last two are never differentiated."""

    activations: Float[Tensor, "B I"]
    first: Tensor
    """Learned tensor of the equations, as the second."""
    second: Tensor
    poses: Tensor
    """Poses, weight and bias: :class:`torchcaps.kernels.mixtures.makers.VoteFactors`."""
    weight: Tensor | None
    bias: Tensor | None
    number: Float[Tensor, "B 1"] | None
    """Number of input capsules of each row that are present; None for all."""
    children: Tensor | None
    """Index on the map of each input capsule of each window, if positions of a map compete."""


class Options(NamedTuple):
    """Equations of a fit, their numbers, and the form of its tensors."""

    equations: str
    num_iterations: int
    settings: tuple[float, ...]
    kind: str
    """Formula of the votes, a :data:`torchcaps.kernels.mixtures.makers.Kind`."""
    on_map: int = 0
    """Number of capsules on a map whose positions compete, plus one outside the map; 0 without that competition."""
    keep_coupling: bool = False


class Results(NamedTuple):
    """Poses, logits of the activations, and the coupling, empty unless it is kept."""

    poses: Float[Tensor, "B J D"]
    logits: Float[Tensor, "B J"]
    coupling: Float[Tensor, "B J I"]


Fit = Callable[[Sums, Sequence[Tensor], Tensor | None, Tensor | None, Options], tuple[Tensor, Tensor, Tensor]]
"""Function of the sums over votes, of (activations, first, second), number, children and options, that applies the
equations. It returns poses (B, J, D), logits (B, J) and the logarithm of the coupling (#B, #J, #I)."""


class Call:
    """Tensors of a call, their blocks, and the fit of some rows."""

    def __init__(self, fit: Fit, tensors: Tensors, options: Options) -> None:
        self._fit, self.tensors, self.options = fit, tensors, options
        self.factors = VoteFactors(options.kind, *tensors[3:6])  # type: ignore[arg-type]  # a kind

    def maker(self, needs_grad: Sequence[bool] = (False,) * 3) -> Maker:
        return MAKERS[self.factors.kind](self.factors, tuple(needs_grad))  # type: ignore[arg-type]  # three

    @property
    def row_bytes(self) -> int:
        return math.prod(self.factors.size[1:]) * self.factors.poses.element_size()

    @property
    def mib(self) -> float:
        """The votes of all rows, in MiB."""
        return len(self.factors.poses) * self.row_bytes / MIB

    @property
    def keeps_votes(self) -> bool:
        """Return True if the backward pass reuses the votes of the forward pass: they fit in one small block."""
        return self.mib <= MAX_KEPT_MIB and len(self.blocks()) == 1

    @property
    def multiple(self) -> int:
        """Number of rows that compete with each other and stay in one block."""
        return 1 if self.tensors.children is None else len(self.tensors.children)

    def blocks(self) -> list[slice]:
        """Return the rows of each block: its buffers fit the working memory and, on a CPU, its votes the caches."""
        poses = self.factors.poses
        limit = block_bytes(poses.device, MAX_BLOCK_MIB * torch.get_num_threads(), MAX_BUFFERS)
        return cut(len(poses), self.row_bytes, limit, self.multiple)

    def fit(self, rows: slice, votes: Sums, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return poses, logits and coupling (B, J, I) of some rows. The coupling is empty unless it is kept."""
        number, children = self.tensors[6:]
        number = None if number is None else number[rows]
        poses, logits, log_coupling = self._fit(votes, leaves, number, children, self.options)
        B, J, _, I = votes.shape
        coupling = log_coupling.exp().expand(B, J, I) if self.options.keep_coupling else logits.new_empty(B, 0, 0)
        return poses, logits, coupling.contiguous()

    def plain(self) -> Results:
        """Return the results with PyTorch's operations, which can be differentiated any number of times."""

        def work(rows: slice) -> tuple[Tensor, ...]:
            active, *learned = self.tensors[:3]
            return self.fit(rows, Sums(self.factors.of_rows(rows).build()), (active[rows], *learned))

        poses = self.factors.poses
        rows = poses.shape[0]  # no len(), which would fix the batch size of an exported graph
        return Results(*in_blocks(work, blocks(rows, self.row_bytes, poses.device, self.multiple)))


class _Part(NamedTuple):
    """Fit of some rows, with an autograd graph of all tensors smaller than the votes."""

    rows: slice
    maker: Maker | None
    """It holds the memory of the votes; None if they are to be made again."""
    block: Ledger
    leaves: list[Tensor]
    results: tuple[Tensor, ...]

    def without_votes(self) -> _Part:
        """Release the votes and the tensors that they were computed from."""
        self.block.release()
        return self._replace(maker=None)


def _fit_block(call: Call, maker: Maker, rows: slice, *, differentiated: bool) -> _Part:
    """Make the votes of some rows and fit Gaussians to them."""
    active, *learned = call.tensors[:3]
    leaves = [each.detach().requires_grad_(differentiated) for each in (active[rows], *learned)]
    block = Ledger(maker.make(rows), maker.buffers)
    with torch.set_grad_enabled(differentiated):
        return _Part(rows, maker, block, leaves, call.fit(rows, block, leaves))


def forward(fit: Fit, tensors: Tensors, options: Options, needs_grad: Sequence[bool], keep: bool) -> Forward:
    """Fit all rows, block by block. ``keep``: the graphs of numbers smaller than votes, and small votes."""
    call, kept = Call(fit, tensors, options), list[_Part]()
    keeps_votes = keep and call.keeps_votes
    with full_precision(call.factors.poses.device), torch.no_grad(), autograd_in_operation():
        maker, results = call.maker(needs_grad[3:6] if keeps_votes else (False,) * 3), []
        for rows in call.blocks():
            part = _fit_block(call, maker, rows, differentiated=keep)
            results.append([each.detach() for each in part.results])
            if keep:
                kept.append(part if keeps_votes else part.without_votes())
        return Forward(Results(*(torch.cat(each) for each in zip(*results, strict=True))), kept)


def backward(
    fit: Fit,
    tensors: Tensors,
    options: Options,
    _results: Sequence[None],
    kept: list[_Part] | None,
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Differentiate the kept fits, or fit again; the ledger of each block gives the gradient of its votes."""
    call = Call(fit, tensors, options)
    active, first, second = tensors[:3]
    gradients = torch.empty_like(active), torch.zeros_like(first), torch.zeros_like(second)
    with full_precision(active.device), torch.no_grad(), autograd_in_operation():
        maker = (kept[0].maker if kept else None) or call.maker(needs_grad[3:6])
        each_part = (_fit_block(call, maker, rows, differentiated=True) for rows in call.blocks())
        if kept:
            each_part = (kept.pop(0) for _ in list(kept))  # frees the graph of one part before the next
        for part in each_part:
            rows = part.rows
            if part.maker is None:
                part.block.hold(maker.make(rows), maker.buffers)
            grads_of_rows = [None if grad is None else grad[rows] for grad in grads]
            for_active, *more = differentiate(part.results, grads_of_rows, part.leaves)
            gradients[0][rows] = for_active
            for total, each in zip(gradients[1:], more, strict=True):
                total += each
            maker.add_gradient(rows, part.block.gradient())
            part.block.release()
    return *gradients, *maker.gradients(), None, None


def mixture_operation(fit: Fit) -> Operation[Tensors, Options, Results]:
    """Return the operation that fits mixtures of Gaussians by equations, such as those of EM."""

    def fake(tensors: Tensors, options: Options) -> Results:
        B, I, J, D = Call(fit, tensors, options).factors.size
        new = tensors.poses.new_empty
        return Results(new(B, J, D), new(B, J), new(B, J, I) if options.keep_coupling else new(B, 0, 0))

    return Operation(
        "mixture",
        Tensors,
        Options,
        Results,
        forward=functools.partial(forward, fit),
        backward=functools.partial(backward, fit),
        plain=lambda *call: Call(fit, *call).plain(),
        fake=fake,
        # a compiled graph may serve any number of rows; a mode that counts operations does not see those on buffers
        suits=lambda *call: is_recording_operations() or (is_eager() and Call(fit, *call).mib > MAX_PLAIN_MIB),
        plain_bytes=lambda *call: int(Call(fit, *call).mib * MIB),
    )
