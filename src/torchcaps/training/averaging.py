"""Moving average of the weights of a network, `Recipe.average_weights`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Moving average w ← decay·w + (1 − decay)·(weights), which starts at the initial weights.

    Args:
        network: Network on its device. Its buffers are not averaged.
        decay: Share of the average that each step keeps.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay, self.weights = decay, [each.detach() for each in network.parameters()]
        self.average = [each.clone() for each in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        for average, weight in zip(self.average, self.weights, strict=True):
            average.lerp_(weight, 1 - self.decay)

    @torch.no_grad()
    def apply(self) -> list[Tensor]:
        """Write the average into the network, and return the trained weights."""
        trained = [each.clone() for each in self.weights]
        self.train_on(self.average)
        return trained

    @contextmanager
    def applied(self) -> Iterator[list[Tensor]]:
        """Give the network its average until the end of the block, and yield the trained weights."""
        trained = self.apply()
        try:
            yield trained
        finally:
            self.train_on(trained)

    @torch.no_grad()
    def train_on(self, trained: Sequence[Tensor]) -> None:
        """Write trained weights into the network."""
        for weight, each in zip(self.weights, trained, strict=True):
            weight.copy_(each)

    def restore(self, trained: Sequence[Tensor]) -> None:
        """Take the weights of the network as the average, and go on training from the trained weights."""
        self.average = [each.clone() for each in self.weights]
        self.train_on(trained)
