"""Which capsules compete for an input capsule, and the softmax over them.

In a dense layer these are the output capsules, or the input capsules of an output capsule. In a layer on a map they can
also be the output capsules at all positions whose windows hold the input capsule: :class:`MapCompetition`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

SoftmaxOver = Literal["outputs", "inputs"]
"""The axis on which capsules compete."""


def log_softmax(logits: Float[Tensor, "B I J"]) -> Float[Tensor, "B I J"]:
    """The logarithm of the softmax over the output capsules; in memory as (B, J, I), where torch computes it faster."""
    return logits.transpose(1, 2).log_softmax(1).transpose(1, 2)


class MapCompetition:
    """The competition on a map: output capsules at all positions whose windows hold an input capsule compete for it.

    Args:
        children: The capsule of the map that each input capsule of each window is.
        number: Capsules on the map, N.
    """

    def __init__(self, children: Int[Tensor, "L I"], number: int) -> None:
        self.children, self.number = children, number

    @property
    def rows_per_image(self) -> int:
        """L: so many rows of votes compete with each other."""
        return len(self.children)

    def sum(self, windows: Float[Tensor, "BL I"]) -> Float[Tensor, "B N"]:
        """What the input capsules of the windows have, summed for each capsule of the map."""
        given = windows.unflatten(0, (-1, len(self.children))).flatten(1)  # (B, L·I)
        return given.new_zeros(len(given), self.number).index_add(1, self.children.flatten(), given)

    @property
    def links(self) -> Float[Tensor, "N"]:
        """How many windows hold each capsule of the map."""
        return self.sum(torch.ones(self.children.shape, device=self.children.device))[0]

    def softmax(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> Float[Tensor, "BL I J"]:
        """The softmax over the output types and the positions."""
        powers, _, total = self._powers(logits, leaky)
        return (powers / total[:, self.children].unsqueeze(3)).flatten(0, 1)

    def log_softmax(self, logits: Float[Tensor, "BL I J"]) -> Float[Tensor, "BL I J"]:
        """Its logarithm, without a leak."""
        _, above, total = self._powers(logits, leaky=False)
        return (above - total.log()[:, self.children].unsqueeze(3)).flatten(0, 1)

    def _powers(self, logits: Float[Tensor, "BL I J"], leaky: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The exponentials of logits (B, L, I, J), what they are of, and their sums (B, N).

        Logits keep their order of memory.
        """
        given = logits.unflatten(0, (-1, len(self.children)))  # (B, L, I, J)
        B = given.shape[0]
        with torch.no_grad():  # the largest of a child's logits, which cancels out
            largest = given.new_full((B, self.number), 0.0 if leaky else -math.inf)
            largest.scatter_reduce_(1, self.children.flatten().expand(B, -1), given.amax(3).flatten(1), "amax")
            largest = largest.clamp_min(torch.finfo(given.dtype).min)  # of capsules in no window
        above = given - largest[:, self.children].unsqueeze(3)
        powers = above.exp()
        total = self.sum(powers.sum(3).flatten(0, 1))
        return powers, above, total + (-largest).exp() if leaky else total
