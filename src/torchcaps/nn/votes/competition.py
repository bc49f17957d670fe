"""The softmax over the capsules that compete with each other.

In a dense layer the output capsules compete for an input capsule, or the input capsules compete for an output capsule.
In a layer on a map the output capsules of several positions can compete: :class:`MapCompetition`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torchcaps.kernels.operation import gradient_rule

SoftmaxOver = Literal["outputs", "inputs"]
"""The axis on which capsules compete."""


def log_softmax(logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
    """Return the logarithm of the softmax over the output capsules.

    The result lies in memory as (B, J, I), because torch computes it faster in this order.
    """
    return logits.transpose(1, 2).log_softmax(1).transpose(1, 2)


def share_out(
    logits: Float[Tensor, "..."], axis: int, *, leaky: bool = False, sparse: bool = False
) -> Float[Tensor, "..."]:
    """Return the softmax or the sparsemax over an axis; see :meth:`torchcaps.nn.Votes.compete`."""
    if leaky:
        logits = torch.cat([torch.zeros_like(logits.narrow(axis, 0, 1)), logits], axis)
    shares = sparsemax(logits, axis) if sparse else logits.softmax(axis)
    return shares.narrow(axis, 1, shares.shape[axis] - 1) if leaky else shares


def sparsemax(logits: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Return the nearest point of the probability simplex: max(0, z - τ), with τ such that the shares sum to one.

    Source: Martins, Astudillo 2016, "From Softmax to Sparsemax", algorithm 1 (arXiv:1602.02068).
    """
    logits = logits - logits.detach().amax(axis, keepdim=True)
    largest_first = logits.sort(axis, descending=True).values
    sums = largest_first.cumsum(axis)
    number = torch.ones_like(logits).cumsum(axis)  # 1, 2, 3, ... along the axis
    support = (1 + number * largest_first > sums).sum(axis, keepdim=True)
    threshold = (sums.gather(axis, support - 1) - 1) / support
    return (logits - threshold).clamp_min(0)


class MapCompetition:
    """Competition on a map: output capsules of all windows that contain an input capsule compete for it.

    Args:
        children: Index on the map of each input capsule of each window.
        number: Number of capsules on the map (N).
    """

    def __init__(self, children: Int[Tensor, "L I"], number: int) -> None:
        self.children, self.number = children, number

    @property
    def rows_per_image(self) -> int:
        """Number of rows of votes that compete with each other (L)."""
        return len(self.children)

    def sum(self, windows: Float[Tensor, "BL I"]) -> Float[Tensor, "B N"]:
        """Sum the values of the input capsules of all windows for each capsule of the map."""
        values = windows.unflatten(0, (-1, len(self.children))).flatten(1)  # (B, L·I)
        return values.new_zeros(len(values), self.number).index_add(1, self.children.flatten(), values)

    @property
    def links(self) -> Float[Tensor, "N"]:
        """Number of windows that contain each capsule of the map."""
        return self.sum(torch.ones(self.children.shape, device=self.children.device))[0]

    def softmax(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> Float[Tensor, "BL I J"]:
        """Return the softmax over the output types and the positions."""
        powers, _, total = self._powers(logits, leaky)
        return (powers / total[:, self.children].unsqueeze(3)).flatten(0, 1)

    def log_softmax(self, logits: Float[Tensor, "BL I J"]) -> Float[Tensor, "BL I J"]:
        """Return the logarithm of the softmax without a leak."""
        _, above, total = self._powers(logits, leaky=False)
        return (above - total.log()[:, self.children].unsqueeze(3)).flatten(0, 1)

    def log_softmax_once(self, logits: Float[Tensor, "BL J I"]) -> Float[Tensor, "BL J I"]:
        """Return :meth:`log_softmax` with a gradient that keeps only the result and has no second derivative."""
        return _log_softmax(logits, self)

    def of_windows(self, totals: Float[Tensor, "B N"]) -> Float[Tensor, "BL 1 I"]:
        """Return a number of each capsule of the map, for the input capsules of all windows."""
        windows = totals.index_select(1, self.children.flatten())
        return windows.view(-1, 1, self.children.shape[1])

    def _powers(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the exponentials (B, L, I, J), their exponents, and the sums of the exponentials (B, N).

        The exponents are the logits minus their maximum. They keep the memory order of the logits.
        """
        logits = logits.unflatten(0, (-1, len(self.children)))  # (B, L, I, J)
        B = logits.shape[0]
        with torch.no_grad():  # the maximum of an input capsule's logits, which cancels out of the softmax
            largest = logits.new_full((B, self.number), 0.0 if leaky else -math.inf)
            largest.scatter_reduce_(1, self.children.flatten().expand(B, -1), logits.amax(3).flatten(1), "amax")
            largest = largest.clamp_min(torch.finfo(logits.dtype).min)  # -∞ for capsules in no window
        above = logits - largest[:, self.children].unsqueeze(3)
        powers = above.exp()
        total = self.sum(powers.sum(3).flatten(0, 1))
        return powers, above, total + (-largest).exp() if leaky else total


class _LogSoftmax:
    """The logarithm of the softmax c over all competitors of an input capsule: g_logits = g - c Σ g."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, competition: MapCompetition) -> Tensor:
        ctx.competition = competition
        result = competition.log_softmax(logits.mT).mT
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (result,), competition = ctx.saved_tensors, ctx.competition
        total = competition.of_windows(competition.sum(gradient.sum(1)))
        return gradient.addcmul(result.exp(), total, value=-1), None


_log_softmax = gradient_rule(_LogSoftmax)
