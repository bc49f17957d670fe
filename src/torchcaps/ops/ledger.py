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

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.ops.memory import Buffers

Pairs = Float[Tensor, "B #J I"]
"""One number for each output and input capsule; (B, 1, I) if all outputs share it."""


class Sums:
    """The three sums over votes with PyTorch's operations, which can be differentiated any number of times.

    Args:
        votes: Votes V with the input capsules last.
    """

    def __init__(self, votes: Float[Tensor, "B J D I"]) -> None:
        self.votes, self.shape = votes, votes.shape

    def mean(self, shares: Pairs) -> Float[Tensor, "B J D"]:
        """Return Σ_i r_ij V_ij."""
        return (self.votes @ shares.unsqueeze(3)).squeeze(3)

    def scatter(
        self, shares: Pairs, mean: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"] | None = None
    ) -> Float[Tensor, "B J D"]:
        """Return Σ_i r_ij (V_ij - x_j)².

        Args:
            shares: Shares r_ij.
            mean: Mean with the same shares.
            centre: Centre x_j. None: the mean, for shares that sum to one or are all zero.
        """
        deviations = self.votes - (mean if centre is None else centre).unsqueeze(3)
        return (deviations.square() @ shares.unsqueeze(3)).squeeze(3)

    def distance(self, precision: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"]) -> Float[Tensor, "B J I"]:
        """Return Σ_h λ_jh (V_ijh - x_jh)²."""
        deviations = self.votes - centre.unsqueeze(3)
        return (precision.unsqueeze(2) @ deviations.square()).squeeze(2)


class Ledger(Sums):
    """The three sums over a block of votes, with a ledger of their gradients with respect to the votes.

    Args:
        votes: Votes V, contiguous. :meth:`release` drops them after the forward pass; :meth:`hold` restores them.
        buffers: Work buffers of the size of the votes.
        differentiated: True if the sums need gradients.
    """

    def __init__(self, votes: Float[Tensor, "B J D I"], buffers: Buffers, *, differentiated: bool) -> None:
        self.shape, self.differentiated = votes.shape, differentiated
        self._noted: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.hold(votes, buffers)

    def hold(self, votes: Float[Tensor, "B J D I"], buffers: Buffers) -> None:
        """Set the votes; votes that are made again have the same numbers."""
        self.votes, self._flat, self._buffers = votes, votes.flatten(0, 1), buffers
        self._centre: Tensor | None = None

    def release(self) -> None:
        """Drop the votes and the buffers."""
        del self.votes, self._flat, self._buffers, self._centre

    def mean(self, shares: Pairs) -> Float[Tensor, "B J D"]:
        if self.differentiated:
            return _Mean.apply(self, shares)
        return self.over_inputs(shares, self._flat)

    def scatter(
        self, shares: Pairs, mean: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"] | None = None
    ) -> Float[Tensor, "B J D"]:
        about = mean.detach() if centre is None else centre  # the gradient with respect to the mean is zero
        if self.differentiated:
            return _Scatter.apply(self, shares, mean.detach(), about)
        return self.over_inputs(shares, self.squares(about))

    def distance(self, precision: Float[Tensor, "B J D"], centre: Float[Tensor, "B J D"]) -> Float[Tensor, "B J I"]:
        if self.differentiated:
            return _Distance.apply(self, precision, centre)
        return self.over_components(precision, self.squares(centre))

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
        numbers = self._flat if numbers is None else numbers
        if summed:
            return torch.bmm(outputs.reshape(B, 1, J * D).contiguous(), numbers.view(B, J * D, I))
        return torch.bmm(outputs.reshape(B * J, 1, D).contiguous(), numbers).view(B, J, I)

    def squares(self, centre: Float[Tensor, "B J D"]) -> Float[Tensor, "BJ D I"]:
        """Return (V - x)² in a buffer, which the next call overwrites."""
        held = self._buffers.take("squares", tuple(self._flat.shape))
        if self._centre is None or self._centre.data_ptr() != centre.data_ptr():
            # without a reduction, mse_loss takes one vectorised pass instead of two for sub and square_
            torch.ops.aten.mse_loss.out(self._flat, centre.reshape(-1, centre.shape[2], 1), 0, out=held)
            self._centre = centre
        return held

    def note(self, pairs: Pairs, alpha: Float[Tensor, "B J D"], beta: Float[Tensor, "B J D"] | None) -> None:
        """Add p_ij (α_jh + β_jh V_ijh) to the gradient of the votes."""
        key = pairs.data_ptr()  # scatter and mean of the same shares share an entry; the ledger keeps pairs alive
        if key in self._noted:
            _, other_alpha, other_beta = self._noted[key]
            alpha, beta = other_alpha + alpha, other_beta if beta is None else other_beta + beta
        self._noted[key] = pairs, alpha, torch.zeros_like(alpha) if beta is None else beta

    def gradient(self) -> Float[Tensor, "B J D I"]:
        """Return the gradient of all sums with respect to the votes, in a buffer."""
        B, J, D, I = self.shape
        pairs, alphas, betas = zip(*self._noted.values(), strict=True)
        rows = torch.cat([each.expand(B, J, I).reshape(B * J, 1, I) for each in pairs], 1)
        alpha, beta = (torch.stack(each, 3).view(B * J, D, -1) for each in (alphas, betas))
        total = torch.bmm(alpha, rows, out=self._buffers.take("gradient", (B * J, D, I)))
        slope = torch.bmm(beta, rows, out=self._buffers.take("squares", (B * J, D, I)))
        return total.addcmul_(slope, self._flat).view(self.shape)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Ledger, shares: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(shares)
        return block.over_inputs(shares)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (shares,), block = ctx.saved_tensors, ctx.block
        block.note(shares, gradient, None)
        return None, block.over_components(gradient, summed=shares.shape[1] == 1)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Ledger, shares: Tensor, mean: Tensor, centre: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(shares, mean, centre)
        return block.over_inputs(shares, block.squares(centre))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (shares, mean, centre), block = ctx.saved_tensors, ctx.block
        twice = 2 * gradient
        block.note(shares, -twice * centre, twice)
        for_shares = block.over_components(gradient, block.squares(centre), summed=shares.shape[1] == 1)
        for_centre = -twice * (mean - centre * shares.sum(2, keepdim=True)) if ctx.needs_input_grad[3] else None
        return None, for_shares, None, for_centre


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Ledger, precision: Tensor, centre: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(precision, centre)
        return block.over_components(precision, block.squares(centre))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (precision, centre), block = ctx.saved_tensors, ctx.block
        twice = 2 * precision
        block.note(gradient, -twice * centre, twice)
        for_precision = block.over_inputs(gradient, block.squares(centre))
        moved = block.over_inputs(gradient) - centre * gradient.sum(2, keepdim=True)
        return None, for_precision, -twice * moved
