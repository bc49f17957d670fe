"""Sums over a block of votes, and a ledger of their gradients.

A mixture of Gaussians uses its votes V_ijh in three sums only, with shares r_ij, centres x_jh and precisions λ_jh:

    mean      m_jh = Σ_i r_ij V_ijh
    scatter   s_jh = Σ_i r_ij (V_ijh - x_jh)²
    distance  d_ij = Σ_h λ_jh (V_ijh - x_jh)²

Each is a product of matrices. Its gradient with respect to the votes has low rank, times 1 or V:

    mean      r_ij · g_m,jh
    scatter   r_ij · 2 g_s,jh (V_ijh - x_jh)
    distance  g_d,ij · 2 λ_jh (V_ijh - x_jh)

So each sum only adds a row p_ij and two columns α_jh and β_jh to the ledger of its block. The backward pass then
computes the gradient of all sums at once:

    g_V,ijh = Σ_n p_n,ij α_n,jh + (Σ_n p_n,ij β_n,jh) V_ijh

The expansion in V loses no precision, because it rounds like V itself. Squares are always computed from V - x.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.kernels.memory import Buffers
from torchcaps.kernels.operation import gradient_rule
from torchcaps.ops.mixtures import share_out

Pairs = Float[Tensor, "B #J I"]
"""One number for each output and input capsule; (B, 1, I) if all outputs share it."""
MIN_EXPONENT = -69.0
"""Shares and gradients below exp(-69) = 1e-30 are far below the rounding of their sums. They are replaced, because a
processor takes a hundred times as long for products with denormal numbers (below 1e-38)."""


@runtime_checkable
class Competition(Protocol):
    """Softmax over output capsules of several rows that compete with each other."""

    def log_softmax(self, logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
        """Return the logarithm of the softmax."""

    def log_softmax_once(self, logits: Float[Tensor, "B J I"]) -> Float[Tensor, "B J I"]:
        """Return the same without second derivatives; the input capsules are last."""


class Sums:
    """The sums over votes with PyTorch's operations, which can be differentiated any number of times.

    Args:
        votes: Votes V with the input capsules last.
    """

    def __init__(self, votes: Float[Tensor, "B J D I"]) -> None:
        self.votes, self.shape = votes, votes.shape
        self._squares: tuple[Tensor, Tensor] | None = None

    def share_out(
        self, log_coupling: Float[Tensor, "#B #J #I"], activations: Float[Tensor, "B 1 I"]
    ) -> tuple[Pairs, Float[Tensor, "B #J"]]:
        """Return the shares and their sums: :func:`torchcaps.ops.mixtures.share_out`."""
        return share_out(log_coupling, activations)

    def log_compete(self, logits: Float[Tensor, "B J I"], competition: Competition) -> Float[Tensor, "B J I"]:
        """Return the logarithm of the softmax over the output capsules of all rows that compete."""
        return competition.log_softmax(logits.mT).mT

    def moments(
        self,
        shares: Pairs,
        previous: Float[Tensor, "B J D"] | None = None,
        momentum: float = 0.0,
        *,
        with_scatter: bool = True,
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J D"]]:
        """Return centres x_j = Σ_i r_ij V_ij, and Σ_i r_ij (V_ij - x_j)².

        Args:
            shares: Shares r_ij. Without ``previous`` they sum to one or are all zero.
            previous: Centres x'_j of the iteration before, if x_j = (1 - momentum) Σ_i r_ij V_ij + momentum x'_j.
            momentum: Share of the previous centres.
            with_scatter: Compute the second sum; otherwise it is zero.
        """
        centre = (self.votes * shares.unsqueeze(2)).sum(3)
        if previous is not None:
            centre = torch.lerp(centre, previous, momentum)
        if not with_scatter:
            return centre, torch.zeros_like(centre)
        return centre, (self._squares_about(centre) * shares.unsqueeze(2)).sum(3)

    def log_densities(
        self, constant: Float[Tensor, "B J"], precision: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"]
    ) -> Float[Tensor, "B J I"]:
        """Return k_j - ½ Σ_h λ_jh (V_ijh - x_jh)², with constants k_j, for example of a normal distribution."""
        distances = (self._squares_about(centre) * precision.unsqueeze(3)).sum(2)
        return torch.sub(constant.unsqueeze(2), distances, alpha=0.5)

    def _squares_about(self, centre: Float[Tensor, "B J D"]) -> Float[Tensor, "B J D I"]:
        """Return (V - x)²; a second call with the same centre returns the same tensor."""
        if self._squares is None or self._squares[0] is not centre:
            self._squares = centre, (self.votes - centre.unsqueeze(3)).square()
        return self._squares[1]


class Ledger(Sums):
    """The sums over a block of votes, with a ledger of their gradients with respect to the votes.

    The autograd graph refers to the block, so the block holds only detached tensors. Otherwise the two would keep each
    other alive, and Python's garbage collector cannot see a cycle through the graph.

    Args:
        votes: Votes V, contiguous. :meth:`release` drops them after each pass; :meth:`hold` restores them.
        buffers: Work buffers of the size of the votes.
    """

    def __init__(self, votes: Float[Tensor, "B J D I"], buffers: Buffers) -> None:
        self.shape = votes.shape
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []
        self.hold(votes, buffers)

    def hold(self, votes: Float[Tensor, "B J D I"], buffers: Buffers) -> None:
        """Set the votes; votes that are made again have the same numbers."""
        self.votes, self._flat, self._buffers = votes, votes.flatten(0, 1), buffers
        self._centre: Tensor | None = None

    def release(self) -> None:
        """Drop the votes, the buffers and the ledger."""
        self._noted.clear()
        del self.votes, self._flat, self._buffers, self._centre

    def share_out(
        self, log_coupling: Float[Tensor, "#B #J #I"], activations: Float[Tensor, "B 1 I"]
    ) -> tuple[Pairs, Float[Tensor, "B #J"]]:
        return _share_out(log_coupling, activations)

    def log_compete(self, logits: Float[Tensor, "B J I"], competition: Competition) -> Float[Tensor, "B J I"]:
        return competition.log_softmax_once(logits)

    def moments(
        self,
        shares: Pairs,
        previous: Float[Tensor, "B J D"] | None = None,
        momentum: float = 0.0,
        *,
        with_scatter: bool = True,
    ) -> tuple[Float[Tensor, "B J D"], Float[Tensor, "B J D"]]:
        return _moments(self, shares, previous, momentum, with_scatter)

    def log_densities(
        self, constant: Float[Tensor, "B J"], precision: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"]
    ) -> Float[Tensor, "B J I"]:
        return _log_densities(self, constant, precision, centre)

    def over_inputs(self, pairs: Pairs, numbers: Float[Tensor, "BJ D I"] | None = None) -> Float[Tensor, "B J D"]:
        """Return Σ_i p_ij n_ijh, where the numbers n are the votes if None."""
        B, J, D, I = self.shape
        numbers = self._flat if numbers is None else numbers
        if pairs.shape[1] == 1:  # one product for an image
            return torch.bmm(pairs.contiguous(), numbers.view(B, J * D, I).transpose(1, 2)).view(B, J, D)
        return torch.bmm(pairs.reshape(B * J, 1, I).contiguous(), numbers.transpose(1, 2)).view(B, J, D)

    def over_components(
        self, outputs: Float[Tensor, "B J D"], numbers: Float[Tensor, "BJ D I"] | None = None, summed: bool = False
    ) -> Pairs:
        """Return Σ_h x_jh n_ijh, where the numbers n are the votes if None; ``summed``: also over all outputs."""
        B, J, D, I = self.shape
        rows, N = (B, J * D) if summed else (B * J, D)
        numbers = (self._flat if numbers is None else numbers).view(rows, N, I)
        return torch.bmm(outputs.reshape(rows, 1, N).contiguous(), numbers).view(B, -1, I)

    def squares(self, centre: Float[Tensor, "B J D"]) -> Float[Tensor, "BJ D I"]:
        """Return (V - x)² in a buffer, which the next call overwrites."""
        held = self._buffers.take("squares", tuple(self._flat.shape))
        if self._centre is None or self._centre.data_ptr() != centre.data_ptr():
            # without a reduction, mse_loss takes one vectorised pass instead of two for sub and square_
            torch.ops.aten.mse_loss.out(self._flat, centre.reshape(-1, centre.shape[2], 1), 0, out=held)
            self._centre = centre.detach()
        return held

    def note(self, pairs: Pairs, alpha: Float[Tensor, "B J D"], beta: Float[Tensor, "B J D"]) -> None:
        """Add p_ij (α_jh + β_jh V_ijh) to the gradient of the votes."""
        self._noted.append((pairs.detach(), alpha, beta))

    def gradient(self) -> Float[Tensor, "B J D I"]:
        """Return the gradient of all sums with respect to the votes, in a buffer."""
        B, J, D, I = self.shape
        pairs, alphas, betas = zip(*self._noted, strict=True)
        rows = torch.cat([each.expand(B, J, I).reshape(B * J, 1, I) for each in pairs], 1)
        alpha, beta = (torch.stack(each, 3).view(B * J, D, -1) for each in (alphas, betas))
        slope = torch.bmm(beta, rows, out=self._buffers.take("squares", (B * J, D, I)))
        return slope.mul_(self._flat).baddbmm_(alpha, rows).view(self.shape)


class _ShareOut:
    """With c = exp(ln c), R_j = Σ_i c_ij a_i and r_ij = c_ij a_i / R_j: g_ln c = r q and g_a = Σ_j c q / R.

    Here q_ij = g_r,ij - Σ_i g_r,ij r_ij + g_R,j R_j. Nothing is divided by an activation, which may be zero.
    """

    @staticmethod
    def forward(ctx: Any, log_coupling: Tensor, activations: Tensor) -> Any:
        shares = log_coupling + torch.where(activations > 0, 0.0, -math.inf)
        largest = shares.amax(2, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0.0)
        shares.sub_(largest).clamp_min_(MIN_EXPONENT).exp_().mul_(activations)
        total = shares.sum(2, keepdim=True)
        divisor = total.where(total > 0, 1.0)
        shares.div_(divisor)
        ctx.save_for_backward(log_coupling, shares, largest, divisor)
        return shares, (largest.exp() * total).squeeze(2)

    @staticmethod
    def backward(ctx: Any, for_shares: Tensor, for_mass: Tensor) -> Any:
        log_coupling, shares, largest, divisor = ctx.saved_tensors
        mass = largest.exp() * divisor
        q = for_shares + (for_mass.unsqueeze(2) * mass - (for_shares * shares).sum(2, keepdim=True))
        for_coupling = (shares * q).sum_to_size(log_coupling.shape) if ctx.needs_input_grad[0] else None
        ratio = (log_coupling - largest).clamp_(MIN_EXPONENT, 80.0).exp_()  # an exponent above 0 has activation 0
        return for_coupling, (ratio * q).div_(divisor).sum(1, keepdim=True)


class _Moments:
    @staticmethod
    def forward(
        ctx: Any, block: Ledger, shares: Tensor, previous: Tensor | None, momentum: float, with_scatter: bool
    ) -> Any:
        mean = block.over_inputs(shares)
        centre = mean if previous is None else torch.lerp(mean, previous, momentum)
        ctx.block, ctx.momentum, ctx.with_scatter = block, momentum, with_scatter
        ctx.save_for_backward(shares, centre, None if previous is None else mean)
        scatter = block.over_inputs(shares, block.squares(centre)) if with_scatter else torch.zeros_like(centre)
        return centre, scatter

    @staticmethod
    def backward(ctx: Any, for_centre: Tensor, for_scatter: Tensor) -> Any:
        (shares, centre, mean), block = ctx.saved_tensors, ctx.block
        twice, for_previous, for_mean = 2 * for_scatter, None, for_centre
        if mean is not None:  # otherwise the centre is the mean, where the scatter has no slope
            for_centre = for_centre - twice * (mean - centre * shares.sum(2, keepdim=True))
            for_previous, for_mean = ctx.momentum * for_centre, (1 - ctx.momentum) * for_centre
        block.note(shares, torch.addcmul(for_mean, twice, centre, value=-1), twice)
        summed = shares.shape[1] == 1
        for_shares = block.over_components(for_mean, summed=summed)
        if ctx.with_scatter:
            for_shares += block.over_components(for_scatter, block.squares(centre), summed=summed)
        return None, for_shares, for_previous, None, None


class _LogDensities:
    @staticmethod
    def forward(ctx: Any, block: Ledger, constant: Tensor, precision: Tensor, centre: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(precision, centre)
        return torch.add(constant.unsqueeze(2), block.over_components(precision, block.squares(centre)), alpha=-0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (precision, centre), block = ctx.saved_tensors, ctx.block
        gradient = torch.hardshrink(gradient, math.exp(MIN_EXPONENT))
        for_constant = gradient.sum(2)
        block.note(gradient, precision * centre, -precision)
        for_precision = block.over_inputs(gradient, block.squares(centre)).mul_(-0.5)
        moved = torch.addcmul(block.over_inputs(gradient), centre, for_constant.unsqueeze(2), value=-1)
        return None, for_constant, for_precision, moved.mul_(precision)


_share_out = gradient_rule(_ShareOut)
_moments = gradient_rule(_Moments)
_log_densities = gradient_rule(_LogDensities)
