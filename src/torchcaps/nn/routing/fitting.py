"""Fit a mixture of Gaussians to votes: with a ledger of gradients, as one operation, or with PyTorch's operations.

The equations of each routing are one function, which uses only the sums of :class:`torchcaps.ops.ledger.Sums`. Eager
code makes the votes a block at a time, and again in the backward pass, which applies the ledger to them. Small votes
are kept instead. ``torch.compile`` sees one operation that does the same. Second derivatives, ``torch.func``, exported
graphs and layers with very few votes use the same equations with sums of PyTorch's operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.machine import MIB
from torchcaps.nn.capsules import RoutingRound
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.ops.checkpoint import blocks, in_blocks
from torchcaps.ops.ledger import Ledger, Sums
from torchcaps.ops.memory import get_working_memory, nearly_equal, slices
from torchcaps.ops.operation import operation
from torchcaps.ops.precision import full_precision
from torchcaps.ops.tickets import Tickets
from torchcaps.ops.vote_factors import MAKERS, Kind, Maker, VoteFactors
from torchcaps.tracing import (
    autograd_in_operation,
    has_saved_tensor_hooks,
    is_eager,
    is_recording_operations,
    needs_torch_operations,
)

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


class Options(NamedTuple):
    """Arguments of :func:`fit_mixture` besides tensors."""

    equations: str
    num_iterations: int
    settings: tuple[float, ...]
    kind: Kind
    on_map: int = 0
    """Number of capsules on a map whose positions compete, plus one outside the map; 0 without that competition."""
    keep_coupling: bool = False


class _Call:
    """Tensors of a call, their blocks, and the fit of some rows.

    ``tensors`` are differentiated: activations (B, I), two learned tensors, poses, weight and bias.
    """

    def __init__(self, tensors: Sequence[Any], number: Tensor | None, children: Tensor | None, options: Options):
        self.tensors, self.number, self.options = tensors, number, options
        self.factors = VoteFactors(options.kind, *tensors[3:])
        self.competition = None if children is None else MapCompetition(children, options.on_map)

    def maker(self, wanted: Sequence[bool] = (False,) * 3) -> Maker:
        return MAKERS[self.options.kind](self.factors, tuple(wanted))  # type: ignore[arg-type]  # three

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
        given = MixtureInputs(votes, active.unsqueeze(1), self.competition, number)
        equations, num_iterations, settings, *_ = self.options
        poses, logits, log_coupling = FITS[equations](given, first, second, num_iterations, *settings)
        B, J, _, I = votes.shape
        coupling = log_coupling.exp().expand(B, J, I) if self.options.keep_coupling else logits.new_empty(B, 0, 0)
        return poses, logits, coupling.contiguous()

    def plain(self) -> tuple[Tensor, ...]:
        """Return the results with PyTorch's operations, which can be differentiated any number of times."""

        def work(rows: slice) -> tuple[Tensor, ...]:
            active, *learned = self.tensors[:3]
            return self.fit(rows, Sums(self.factors.of_rows(rows).build()), (active[rows], *learned))

        poses = self.factors.poses
        rows = poses.shape[0]  # no len(), which would fix the batch size of an exported graph
        return in_blocks(work, blocks(rows, self.row_bytes, poses.device, self.multiple))


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


def _forward(*given: Any, kept: list[_Part] | None = None, wanted: Sequence[bool] | None = None) -> tuple[Tensor, ...]:
    """Return poses, logits and coupling. If ``kept`` is a list, add the fits to it for the backward pass.

    ``wanted`` marks the differentiated tensors that need a gradient; if it is None, no votes are kept.
    """
    call = _call_of(given)
    keeps_votes = wanted is not None and call.keeps_votes
    with full_precision(call.factors.poses.device), torch.no_grad(), autograd_in_operation():
        maker, found = call.maker(wanted[3:] if wanted is not None and keeps_votes else (False,) * 3), []
        for rows in call.blocks():
            part = _fit_block(call, maker, rows, differentiated=kept is not None)
            found.append([each.detach() for each in part.results])
            if kept is not None:
                kept.append(part if keeps_votes else part.without_votes())
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


def _gradients(
    grads: Sequence[Tensor], wanted: Sequence[bool], *given: Any, kept: list[_Part] | None = None
) -> list[Tensor | None]:
    """Return the gradients of the tensors marked in ``wanted`` from the gradients of the results."""
    call = _call_of(given)
    active, first, second = call.tensors[:3]
    found = torch.empty_like(active), torch.zeros_like(first), torch.zeros_like(second)
    with full_precision(active.device), torch.no_grad(), autograd_in_operation():
        parts = [kept.pop(0) for _ in list(kept)] if kept else None  # None: fit again
        maker = (parts[0].maker if parts else None) or call.maker(wanted[3:])
        each_part = (_fit_block(call, maker, rows, differentiated=True) for rows in call.blocks())
        if parts:
            each_part = (parts.pop(0) for _ in list(parts))  # frees the graph of one part before the next
        for part in each_part:
            rows = part.rows
            if part.maker is None:
                part.block.hold(maker.make(rows), maker.buffers)
            for_active, *more = _differentiate(part.results, [grad[rows] for grad in grads], part.leaves)
            found[0][rows] = for_active
            for total, each in zip(found[1:], more, strict=True):
                total += each
            maker.add_gradient(rows, part.block.gradient())
            part.block.release()
    every = (*found, *maker.gradients())
    return [grad if want else None for grad, want in zip(every, wanted, strict=True)]


def _call_of(given: Sequence[Any]) -> _Call:
    """Read the arguments of the operation: six differentiated tensors, two more tensors, and separate options."""
    return _Call(given[:6], given[6], given[7], Options(*given[8:]))


class _Eager(torch.autograd.Function):
    """Fit of eager code, which keeps the graph of tensors smaller than the votes for its backward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        ctx.save_for_backward(*given[:8])
        ctx.options, ctx.kept = given[8:], []
        return _forward(*given, kept=None if has_saved_tensor_hooks() else ctx.kept, wanted=ctx.needs_input_grad[:6])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given, wanted = (*ctx.saved_tensors, *ctx.options), ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # the gradients are differentiated again
            return *_plain_gradients(grads, wanted, given), *[None] * (2 + len(ctx.options))
        found = _gradients(grads, wanted, *given, kept=ctx.kept)
        return *found, *[None] * (2 + len(ctx.options))


def _plain_gradients(grads: Sequence[Tensor], wanted: Sequence[bool], given: Sequence[Any]) -> list[Tensor | None]:
    """Return gradients that can be differentiated again."""
    tensors = [each.view_as(each) if want else each for each, want in zip(given[:6], wanted, strict=True)]
    results = _call_of((*tensors, *given[6:])).plain()
    inputs = [each for each, want in zip(tensors, wanted, strict=True) if want]
    found = iter(_differentiate(results, grads, inputs, create_graph=True))
    return [next(found) if want else None for want in wanted]


def _differentiate(
    results: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return the gradients of inputs; zeros for an input without influence on the results.

    They are the gradients of one number, Σ result · grad: ``torch.autograd.grad`` with gradients of the results imports
    SymPy, which takes 35 MiB and 0.4 s.
    """
    pairs = zip(results, grads, strict=True)
    with torch.enable_grad():
        number = torch.stack([(result * grad).sum() for result, grad in pairs if result.requires_grad]).sum()
    return torch.autograd.grad(number, inputs, create_graph=create_graph, allow_unused=True, materialize_grads=True)


# ---- one operation for torch.compile


_parts = Tickets[list[_Part]]()


def _compiled_forward(*given: Any) -> tuple[Tensor, ...]:
    """Return poses, logits, coupling, and a ticket for the fits; the last argument is True if these are needed."""
    kept: list[_Part] | None = [] if given[-1] else None
    return *_forward(*given[:-1], kept=kept), _parts.leave(kept)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ticket = output[3]
    ctx.mark_non_differentiable(ticket)
    ctx.save_for_backward(*inputs[:8], ticket)
    ctx.options = inputs[8:-1]


def _operation_gradients(ctx: Any, *grads: Tensor) -> Any:
    wanted = list(ctx.needs_input_grad[:6])
    found = _mixture_backward(*grads[:3], *ctx.saved_tensors, wanted, *ctx.options)
    return *(grad if want else None for grad, want in zip(found, wanted, strict=True)), *[None] * (3 + len(ctx.options))


def _backward(*given: Any) -> tuple[Tensor, ...]:
    """Return all six gradients; an empty tensor for a gradient not in ``wanted``."""
    grads, tensors, ticket, wanted, options = given[:3], given[3:11], given[11], given[12], given[13:]
    found = _gradients(grads, wanted, *tensors, *options, kept=_parts.take(ticket))
    return tuple(grads[0].new_empty(0) if grad is None else grad.contiguous() for grad in found)


def _fake(*given: Any) -> tuple[Tensor, ...]:
    call = _call_of(given[:-1])
    B, I, J, D = call.factors.size
    new = call.factors.poses.new_empty
    return new(B, J, D), new(B, J), new(B, J, I) if call.options.keep_coupling else new(B, 0, 0), new(1)


def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    tensors, wanted = given[3:9], given[12]
    return tuple(given[0].new_empty(each.shape if want else 0) for each, want in zip(tensors, wanted, strict=True))


def _only_once(*_: Any) -> Any:
    raise NotImplementedError(
        "a compiled mixture of Gaussians has first derivatives only; call the layer without torch.compile"
    )


_TENSORS = "Tensor activations, Tensor first, Tensor second, Tensor poses, Tensor? weight, Tensor? bias"
_OTHERS = "Tensor? number, Tensor? children"
_OPTIONS = "str equations, int num_iterations, float[] settings, str kind, int on_map, bool keep_coupling"
_mixture = operation(
    "mixture",
    f"({_TENSORS}, {_OTHERS}, {_OPTIONS}, bool learning) -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_compiled_forward,
    fake=_fake,
    backward=_operation_gradients,
    save=_save,
)
_mixture_backward = operation(
    "mixture_backward",
    f"(Tensor grad_poses, Tensor grad_logits, Tensor grad_coupling, {_TENSORS}, {_OTHERS}, Tensor ticket, "
    f"bool[6] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    backward=_only_once,
)


def fit_mixture(
    activations: Float[Tensor, "B I"],
    learned: tuple[Tensor, Tensor],
    factors: VoteFactors,
    number: Float[Tensor, "B 1"] | None,
    competition: MapCompetition | None,
    options: Options,
) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J"], Float[Tensor, "B J I"] | Float[Tensor, "B 0 0"]]:
    """Fit the Gaussians of all rows. All tensors must have one dtype of full precision.

    Args:
        activations: Activations a_i, zero for masked input capsules.
        learned: The two learned tensors of the equations.
        factors: Tensors from which the votes are computed.
        number: Number of input capsules of each row that are present; None for all.
        competition: Competition between positions of a map; None if only the output capsules of a row compete.
        options: Name of the equations, their settings, and ``keep_coupling``.

    Returns:
        Poses, logits of the activations, and the coupling, empty unless it is kept.
    """
    children = None
    if competition is not None:
        children, options = competition.children, options._replace(on_map=competition.number)
    tensors = activations, *learned, *factors[1:]
    given = *tensors, number, children, *options
    learning = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    if is_recording_operations() and not needs_torch_operations():
        poses, logits, coupling, _ = _mixture(*given, learning)
        return poses, logits, coupling
    call = _call_of(given)
    if not is_eager() or activations.is_meta or call.mib <= MAX_PLAIN_MIB:
        poses, logits, coupling = call.plain()
        return poses, logits, coupling
    if learning:
        return _Eager.apply(*given)
    poses, logits, coupling = _forward(*given)
    return poses, logits, coupling
