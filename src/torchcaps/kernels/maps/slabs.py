"""Dynamic routing of votes that are convolutions of maps, without storing the votes.

Votes are computed slab by slab (:class:`.windows.Slab`). Inside a slab they are routed in blocks of positions that stay
in the caches. The backward pass computes the votes of a slab again, routes them again, writes the
votes' gradient over the votes, and passes it through the convolution.

With the sums s_r, the output capsules v_r, the coupling c_r and the logits b_r of iteration r of R, the gradient of the
votes is Σ_r c_r ⊗ ∂s_r + Σ_{r<R} ∂b_{r+1} ⊗ v_r. A block of votes is read or written 9 times forward and 13 times
backward with three iterations.

B batch, T input types, J output types, D components of an output capsule, n positions of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.maps.windows import Slab, Window, convolve, cropped
from torchcaps.kernels.memory import block_bytes, piece, slices
from torchcaps.kernels.operation import Forward, Operation
from torchcaps.machine import MIB
from torchcaps.ops.squash import squash_backward, squashed

SLAB_MIB = 2.0
"""MiB of votes in a slab on a CPU."""
LARGE_VOTE_BYTES = 128 * MIB
"""Layers with at least as many votes use slabs of twice the size."""
BLOCK_BYTES = MIB // 2
"""Bytes of votes in a block on a CPU."""


def slabs_of(
    window: Window, maps: Float[Tensor, "B T K *S"], sizes: Sequence[int], out_sizes: Sequence[int]
) -> list[Slab]:
    """Cut the outputs of a layer into slabs, within the working memory; one slab if the votes are few.

    Args:
        window: The kernel.
        maps: Capsules of each type, with the padding of the window.
        sizes: T, J, D.
        out_sizes: Sizes of the output map.
    """
    position = math.prod(sizes) * maps.element_size()
    votes = len(maps) * math.prod(out_sizes) * position
    # the backward pass takes three times a slab
    most = block_bytes(maps.device, SLAB_MIB if votes < LARGE_VOTE_BYTES else 2 * SLAB_MIB, share=4)
    return window.slabs(len(maps), maps.shape[3:], out_sizes, position, most)


class Tensors(NamedTuple):
    """Tensors of dynamic routing on a map."""

    maps: Float[Tensor, "B T K *S"]
    """Capsules of each type, with the padding of the window."""
    kernel: Tensor
    """Kernel of the convolution that computes the votes."""
    vote_bias: Float[Tensor, "O"] | None
    """Bias of the convolution."""
    bias: Float[Tensor, "J D"] | None
    """Added to the sums before they are squashed."""


class Options(NamedTuple):
    """Sizes and options of dynamic routing on a map."""

    sizes: tuple[int, ...]
    """T, J, D."""
    out_sizes: tuple[int, ...]
    """Sizes of the output map."""
    kernel_size: int
    """The window: :class:`torchcaps.kernels.maps.windows.Window`, whose padding the maps have already."""
    stride: int
    cut: int
    up: bool
    groups: int
    """Groups of the convolution."""
    num_iterations: int
    eps: float


class Results(NamedTuple):
    """Output capsules."""

    capsules: Float[Tensor, "B J D *S"]


class Plan:
    """Window and slabs of a call."""

    def __init__(self, tensors: Tensors, options: Options) -> None:
        maps, (T, J, D), self.out_sizes, self.groups = tensors.maps, *options[:2], options.groups
        self.window = Window(options.kernel_size, options.stride, options.cut, options.up)
        self.sizes = len(maps), T, J, D
        self.slabs = slabs_of(self.window, maps, options.sizes, self.out_sizes)

    def seen(self, slab: Slab, maps: Float[Tensor, "B T K *S"]) -> Float[Tensor, "N C *S"]:
        """Return the part of the maps that a slab is computed from, as the convolution takes it."""
        part = slab.inputs(maps)
        return part.flatten(0, 1) if self.groups == 1 else part.flatten(1, 2)

    def votes(self, slab: Slab, seen: Tensor, kernel: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
        """Return the votes of a slab (b, T, J, D, positions), contiguous, and the sizes before outputs were cut off."""
        votes = convolve(seen, kernel, bias, self.window, self.groups)
        whole = tuple(votes.shape[2:])
        if self.window.up:
            votes = cropped(votes, [piece.skip for piece in slab.axes], slab.sizes)
        return votes.contiguous().view(-1, *self.sizes[1:], slab.positions), whole

    def of_convolution(self, slab: Slab, grad: Tensor, whole: tuple[int, ...]) -> Float[Tensor, "N O *S"]:
        """Return the gradient of the convolution's result from that of a slab's votes."""
        _, T, J, D = self.sizes
        grad = grad.view(-1, J * D * (T if self.groups > 1 else 1), *slab.sizes)
        if not self.window.up:
            return grad
        pads = [
            number
            for piece, size, full in zip(reversed(slab.axes), reversed(slab.sizes), reversed(whole), strict=True)
            for number in (piece.skip, full - size - piece.skip)
        ]
        return F.pad(grad, pads)


def forward(tensors: Tensors, options: Options, _wanted: Sequence[bool], _keep: bool) -> Forward:
    """Route slab by slab."""
    (maps, kernel, vote_bias, bias), plan = tensors, Plan(tensors, options)
    B, _, J, D = plan.sizes
    out = maps.new_empty((B, J, D, *plan.out_sizes))
    column = None if bias is None else bias.unsqueeze(2)
    for slab in plan.slabs:
        votes, _ = plan.votes(slab, plan.seen(slab, maps), kernel, vote_bias)
        capsules = votes.new_empty((len(votes), J, D, slab.positions))
        for part, room in blocks(votes):
            routed = rounds(votes[..., part], column, options.num_iterations, options.eps, room)
            capsules[..., part] = routed[-1].capsules
        slab.outputs(out).copy_(capsules.unflatten(3, slab.sizes))
    return Forward((out,))


def backward(
    tensors: Tensors,
    options: Options,
    _results: Sequence[None],
    _kept: None,
    grads: Sequence[Float[Tensor, "B J D *S"]],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors, where they are needed.

    In float32, the gradient of the kernel differs from that with all votes at once by up to 2e-5 of its largest number,
    because the latter is one long sum over all positions. Sums of slabs are closer to float64: 3e-6 beside 1.1e-5 on
    maps of 128×128.
    """
    (maps, kernel, vote_bias, bias), plan = tensors, Plan(tensors, options)
    n, window = len(plan.out_sizes), plan.window
    of_maps = torch.zeros_like(maps) if needs_grad[0] else None
    of_kernel = torch.zeros_like(kernel) if needs_grad[1] else None
    of_vote_bias = None if vote_bias is None else torch.zeros_like(vote_bias)
    of_bias = None if bias is None else torch.zeros_like(bias)
    column = None if bias is None else bias.unsqueeze(2)
    for slab in plan.slabs:
        seen = plan.seen(slab, maps)
        votes, whole = plan.votes(slab, seen, kernel, vote_bias)
        of_capsules = slab.outputs(grads[0]).flatten(3)
        for part, room in blocks(votes):
            block = votes[..., part]
            of_votes, of_sums = rounds_backward(
                block, column, options.num_iterations, options.eps, of_capsules[..., part], room
            )
            block.copy_(of_votes)
            if of_bias is not None:
                of_bias += of_sums
        of_factors = torch.ops.aten.convolution_backward(
            plan.of_convolution(slab, votes, whole), seen, kernel, None if vote_bias is None else [len(vote_bias)],
            [window.stride] * n, [0] * n, [1] * n, window.up, [0] * n, plan.groups,
            [needs_grad[0], needs_grad[1], vote_bias is not None],
        )  # fmt: skip
        del votes
        if of_maps is not None:
            seen_part = slab.inputs(of_maps)
            seen_part += of_factors[0].view(seen_part.shape)
        for total, each in ((of_kernel, of_factors[1]), (of_vote_bias, of_factors[2])):
            if total is not None:
                total += each
    return of_maps, of_kernel, of_vote_bias if needs_grad[2] else None, of_bias if needs_grad[3] else None


def map_operation(plain: Callable[[Tensors, Options], Results]) -> Operation[Tensors, Options, Results]:
    """Return the operation of dynamic routing on a map, whose plain formula routes all positions at once."""

    def fake(tensors: Tensors, options: Options) -> Results:
        _, J, D = options.sizes
        return Results(tensors.maps.new_empty((tensors.maps.shape[0], J, D, *options.out_sizes)))

    def plain_bytes(tensors: Tensors, options: Options) -> int:
        maps = tensors.maps
        return len(maps) * math.prod(options.out_sizes) * math.prod(options.sizes) * maps.element_size()

    return Operation(
        "route_map",
        Tensors,
        Options,
        Results,
        forward=forward,
        backward=backward,
        plain=plain,
        fake=fake,
        plain_bytes=plain_bytes,
    )


def blocks(votes: Float[Tensor, "B T J D L"]) -> list[tuple[slice, Tensor]]:
    """Cut the positions of a slab into blocks that stay in the caches, each with room for as many numbers."""
    length = votes.shape[4]
    each = votes.element_size() * (votes.numel() // length)
    size = length if votes.device.type != "cpu" else piece(length, max(1, BLOCK_BYTES // each))
    room = votes.new_empty((*votes.shape[:4], size))
    last = votes.new_empty((*votes.shape[:4], length % size)) if length % size else room
    parts = slices(length, size)
    return [(part, room if part.stop - part.start == size else last) for part in parts]


# ---- the iterations of a block, forward and backward


class Round(NamedTuple):
    """One iteration of routing."""

    coupling: Float[Tensor, "B T J n"] | None
    """None: uniform coupling, in the first iteration."""
    sums: Float[Tensor, "B J D n"]
    capsules: Float[Tensor, "B J D n"]


def rounds(
    votes: Float[Tensor, "B T J D n"], bias: Float[Tensor, "J D 1"] | None, number: int, eps: float, room: Tensor
) -> list[Round]:
    """Return all iterations of routing. ``room`` is overwritten; it has the shape of the votes."""
    done: list[Round] = []
    logits: Tensor | None = None
    for iteration in range(1, number + 1):
        if logits is None:
            coupling, sums = None, votes.sum(1) / votes.shape[2]
        else:
            coupling = logits.softmax(2)
            sums = torch.mul(votes, coupling.unsqueeze(3), out=room).sum(1)
        if bias is not None:
            sums += bias
        capsules = squashed(sums, 2, eps)
        done.append(Round(coupling, sums, capsules))
        if iteration < number:
            agreement = torch.mul(votes, capsules.unsqueeze(1), out=room).sum(3)
            logits = agreement if logits is None else logits + agreement
    return done


def rounds_backward(
    votes: Float[Tensor, "B T J D n"],
    bias: Float[Tensor, "J D 1"] | None,
    number: int,
    eps: float,
    grad: Float[Tensor, "B J D n"],
    room: Tensor,
) -> tuple[Float[Tensor, "B T J D n"], Float[Tensor, "J D"]]:
    """Return the gradient of the votes and of the bias. ``room`` is overwritten."""
    J, out = votes.shape[2], torch.empty_like(room)
    of_logits: Tensor | None = None
    of_bias = votes.new_zeros(votes.shape[2:4])
    for coupling, sums, capsules in reversed(rounds(votes, bias, number, eps, room)):
        if of_logits is not None:  # the agreement of this iteration
            out.addcmul_(of_logits.unsqueeze(3), capsules.unsqueeze(1))
            grad = torch.mul(votes, of_logits.unsqueeze(3), out=room).sum(1)
        of_sums = squash_backward(sums, grad, 2, eps)
        of_bias += of_sums.sum((0, 3))
        if coupling is None:
            share = (of_sums / J).unsqueeze(1)
            out = out.copy_(share.expand_as(out)) if of_logits is None else out.add_(share)
            continue
        if of_logits is None:
            torch.mul(coupling.unsqueeze(3), of_sums.unsqueeze(1), out=out)
        else:
            out.addcmul_(coupling.unsqueeze(3), of_sums.unsqueeze(1))
        of_coupling = torch.mul(votes, of_sums.unsqueeze(1), out=room).sum(3)
        of_softmax = coupling * (of_coupling - (coupling * of_coupling).sum(2, keepdim=True))
        of_logits = of_softmax if of_logits is None else of_logits + of_softmax
    return out, of_bias
