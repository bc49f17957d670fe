"""Fit a mixture of Gaussians to votes: with a ledger of gradients, as one operation, or with PyTorch's operations.

The equations of each routing are one function, which uses only the sums of :class:`torchcaps.ops.ledger.Sums`. The
kernel makes the votes a block at a time, and again in the backward pass, which applies the ledger to them. Small votes
are kept instead. The plain formula is the same equations with sums of PyTorch's operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.nn.capsules import RoutingRound
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.ops.checkpoint import blocks, in_blocks
from torchcaps.ops.ledger import Ledger, Sums
from torchcaps.ops.memory import get_working_memory, nearly_equal, slices
from torchcaps.ops.operation import Forward, Operation, differentiate
from torchcaps.ops.precision import full_precision
from torchcaps.ops.vote_factors import MAKERS, Maker, VoteFactors
from torchcaps.tracing import autograd_in_operation, is_eager

Gaussians = tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "#B #J #I"]]
"""Poses, logits of the activations, and the logarithm of the coupling of the last fit."""
MAX_BLOCK_MIB = 8
"""MiB of votes for each core in a block. 6 to 12 MiB take the same time, 4 MiB take 1.1 times as long."""
MAX_PLAIN_MIB = 1 / 16
"""MiB of votes up to which PyTorch's operations are fastest, because the ledger needs more calls."""
MAX_KEPT_MIB = 1
"""MiB of votes up to which a call keeps them for its backward pass, because computing them again takes longer."""
MAX_BUFFERS = 4
"""Largest number of buffers of a call, each of the size of a block's votes."""


class MixtureInputs(NamedTuple):
    """Votes and activations of some rows, for the equations of a mixture."""

    votes: Sums
    activations: Float[Tensor, "B 1 I"]
    competition: MapCompetition | None
    """Competition between positions of a map; None if only the output capsules of a row compete."""
    present: Float[Tensor, "B 1"] | None
    """Number of input capsules of each row that are present; None if all are."""
    rounds: list[RoutingRound] | None = None
    """List that receives the intermediate results of each iteration, or None."""

    @property
    def number(self) -> int | Float[Tensor, "B 1"]:
        """Number of input capsules of a row."""
        return self.activations.shape[2] if self.present is None else self.present

    def uniform(self) -> Float[Tensor, "1 1 1"]:
        """Return the logarithm of a coupling of 1/J."""
        return self.activations.new_full((1, 1, 1), -math.log(self.votes.shape[1]))

    def start(self) -> Float[Tensor, "#B 1 #I"]:
        """Return the logarithm of the initial coupling, which is uniform over all capsules that compete."""
        if self.competition is None:
            return self.uniform()
        links = self.competition.links.to(self.activations)[self.competition.children].log()  # (L, I)
        return self.uniform() - links.unsqueeze(1).repeat(self.activations.shape[0] // len(links), 1, 1)

    def log_compete(self, logits: Float[Tensor, "B J I"]) -> Float[Tensor, "B J I"]:
        """Return the logarithm of the coupling: the softmax over the output capsules that compete."""
        if self.competition is None:
            return logits.log_softmax(1)
        return self.votes.log_compete(logits, self.competition)

    def note(
        self,
        logits: Tensor | None,
        log_coupling: Tensor,
        means: Float[Tensor, "B J D"],
        capsules: Float[Tensor, "B J D"],
        log_posterior: Float[Tensor, "B J I"],
        log_prior: Float[Tensor, "B J"],
        active: Float[Tensor, "B J"],
    ) -> None:
        """Add the intermediate results of an iteration to the rounds.

        Args:
            logits: Routing logits (B, J, I); None if they are zero.
            log_coupling: Logarithm of the coupling, broadcast to all rows and outputs.
            means: Means μ_j.
            capsules: Poses of the output capsules.
            log_posterior: Logarithms of the densities, ln N(V_ij), plus ``log_prior``.
            log_prior: Logarithm of the prior probability of each output capsule.
            active: Logits of the activations.
        """
        if self.rounds is not None:
            logits = torch.zeros_like(log_posterior) if logits is None else logits
            coupling = log_coupling.exp().expand_as(log_posterior)
            densities = log_posterior - log_prior.unsqueeze(2)
            self.rounds.append(RoutingRound(logits.mT, coupling.mT, means, capsules, densities.mT, active.sigmoid()))


Fit = Callable[..., Gaussians]
"""``fit(inputs, first, second, num_iterations, *settings)``; ``first`` and ``second`` are learned tensors."""
FITS: dict[str, Fit] = {}
"""Equations of each routing by name."""


def equations(name: str) -> Callable[[Fit], Fit]:
    """Register the equations of a mixture under a name for :func:`fit_mixture`."""

    def register(fit: Fit) -> Fit:
        FITS[name] = fit
        return fit

    return register


class Tensors(NamedTuple):
    """Tensors of a fit. The last two are never differentiated."""

    activations: Float[Tensor, "B I"]
    first: Tensor
    """Learned tensor of the equations, as the second."""
    second: Tensor
    poses: Tensor
    """Poses, weight and bias: :class:`torchcaps.ops.vote_factors.VoteFactors`."""
    weight: Tensor | None
    bias: Tensor | None
    number: Float[Tensor, "B 1"] | None
    """Number of input capsules of each row that are present; None for all."""
    children: Tensor | None
    """Index on the map of each input capsule of each window, if positions of a map compete."""


class Options(NamedTuple):
    """Arguments of :func:`fit_mixture` besides tensors."""

    equations: str
    num_iterations: int
    settings: tuple[float, ...]
    kind: str
    """Formula of the votes, a :data:`torchcaps.ops.vote_factors.Kind`."""
    on_map: int = 0
    """Number of capsules on a map whose positions compete, plus one outside the map; 0 without that competition."""
    keep_coupling: bool = False


class Results(NamedTuple):
    """Poses, logits of the activations, and the coupling, empty unless it is kept."""

    poses: Float[Tensor, "B J D"]
    logits: Float[Tensor, "B J"]
    coupling: Float[Tensor, "B J I"]


class _Call:
    """Tensors of a call, their blocks, and the fit of some rows."""

    def __init__(self, tensors: Tensors, options: Options) -> None:
        self.tensors, self.number, self.options = tensors, tensors.number, options
        self.factors = VoteFactors(options.kind, *tensors[3:6])  # type: ignore[arg-type]  # a kind
        self.competition = None if tensors.children is None else MapCompetition(tensors.children, options.on_map)

    def maker(self, wanted: Sequence[bool] = (False,) * 3) -> Maker:
        return MAKERS[self.factors.kind](self.factors, tuple(wanted))  # type: ignore[arg-type]  # three

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
        return 1 if self.competition is None else self.competition.rows_per_image

    def blocks(self) -> list[slice]:
        """Return the rows of each block: its buffers fit the working memory and, on a CPU, its votes the caches."""
        device = self.factors.poses.device
        room = get_working_memory(device) * MIB / MAX_BUFFERS
        if device.type == "cpu":
            room = min(room, MAX_BLOCK_MIB * MIB * torch.get_num_threads())
        B, most = len(self.factors.poses), max(int(room / max(self.row_bytes, 1)), self.multiple)
        return slices(B, nearly_equal(B, most, self.multiple)) or [slice(0, 0)]

    def fit(self, rows: slice, votes: Sums, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return poses, logits and coupling (B, J, I) of some rows. The coupling is empty unless it is kept."""
        active, first, second = leaves
        number = None if self.number is None else self.number[rows]
        inputs = MixtureInputs(votes, active.unsqueeze(1), self.competition, number)
        equations, num_iterations, settings, *_ = self.options
        poses, logits, log_coupling = FITS[equations](inputs, first, second, num_iterations, *settings)
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


def _fit_block(call: _Call, maker: Maker, rows: slice, *, differentiated: bool) -> _Part:
    """Make the votes of some rows and fit Gaussians to them."""
    active, *learned = call.tensors[:3]
    leaves = [each.detach().requires_grad_(differentiated) for each in (active[rows], *learned)]
    block = Ledger(maker.make(rows), maker.buffers)
    with torch.set_grad_enabled(differentiated):
        return _Part(rows, maker, block, leaves, call.fit(rows, block, leaves))


def _forward(tensors: Tensors, options: Options, wanted: Sequence[bool], keep: bool) -> Forward:
    """Fit all rows, block by block. ``keep``: the graphs of numbers smaller than votes, and small votes."""
    call, kept = _Call(tensors, options), list[_Part]()
    keeps_votes = keep and call.keeps_votes
    with full_precision(call.factors.poses.device), torch.no_grad(), autograd_in_operation():
        maker, results = call.maker(wanted[3:6] if keeps_votes else (False,) * 3), []
        for rows in call.blocks():
            part = _fit_block(call, maker, rows, differentiated=keep)
            results.append([each.detach() for each in part.results])
            if keep:
                kept.append(part if keeps_votes else part.without_votes())
        return Forward(Results(*(torch.cat(each) for each in zip(*results, strict=True))), kept)


def _backward(
    tensors: Tensors,
    options: Options,
    _results: Sequence[None],
    kept: list[_Part] | None,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Differentiate the kept fits, or fit again; the ledger of each block gives the gradient of its votes."""
    call = _Call(tensors, options)
    active, first, second = tensors[:3]
    gradients = torch.empty_like(active), torch.zeros_like(first), torch.zeros_like(second)
    with full_precision(active.device), torch.no_grad(), autograd_in_operation():
        maker = (kept[0].maker if kept else None) or call.maker(wanted[3:6])
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


def _fake(tensors: Tensors, options: Options) -> Results:
    B, I, J, D = _Call(tensors, options).factors.size
    new = tensors.poses.new_empty
    return Results(new(B, J, D), new(B, J), new(B, J, I) if options.keep_coupling else new(B, 0, 0))


_mixture = Operation(
    "mixture",
    Tensors,
    Options,
    Results,
    forward=_forward,
    backward=_backward,
    plain=lambda tensors, options: _Call(tensors, options).plain(),
    fake=_fake,
    # a compiled graph may serve any number of rows
    suits=lambda *call: not is_eager() or _Call(*call).mib > MAX_PLAIN_MIB,
    plain_bytes=lambda *call: int(_Call(*call).mib * MIB),
)


def fit_mixture(
    activations: Float[Tensor, "B I"],
    learned: tuple[Tensor, Tensor],
    factors: VoteFactors,
    number: Float[Tensor, "B 1"] | None,
    competition: MapCompetition | None,
    options: Options,
) -> Results:
    """Fit the Gaussians of all rows. All tensors must have one dtype of full precision.

    Args:
        activations: Activations a_i, zero for masked input capsules.
        learned: The two learned tensors of the equations.
        factors: Tensors from which the votes are computed.
        number: Number of input capsules of each row that are present; None for all.
        competition: Competition between positions of a map; None if only the output capsules of a row compete.
        options: Name of the equations, their settings, and ``keep_coupling``.
    """
    children = None
    if competition is not None:
        children, options = competition.children, options._replace(on_map=competition.number)
    _, poses, weight, bias = factors
    return _mixture(Tensors(activations, *learned, poses, weight, bias, number, children), options)
