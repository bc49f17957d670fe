"""A learning rate for a network and its data: a test of many, each for a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcaps.analysis.results import Result, Table
from torchcaps.training.loop import Trainer

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch import nn

    from torchcaps.training.data import RunData
    from torchcaps.training.recipe import Recipe

LEAST, MOST, STEPS = 1e-6, 1.0, 100
"""The rates that are tried, and how many of them."""
SMOOTHING = 0.9
"""The share of the loss so far in the smoothed one."""
TOO_MUCH = 4.0
"""The test ends where the smoothed loss is so many times its least."""


@dataclass(frozen=True, eq=False)
class LearningRates(Result):
    """The losses of a network whose learning rate rises from step to step.

    Args:
        rates: The rate of each step.
        losses: The loss after it, smoothed.
    """

    rates: list[float]
    losses: list[float]

    @property
    def suggestion(self) -> float:
        """A tenth of the rate of the least loss, where the loss still falls steadily."""
        return self.rates[self.losses.index(min(self.losses))] / 10

    def tables(self) -> Iterable[Table]:
        every = max(len(self.rates) // 12, 1)
        pairs = list(zip(self.rates, self.losses, strict=True))[::every]
        rows = [[f"{rate:.1e}", f"{loss:.4f}"] for rate, loss in pairs]
        return [Table(rows, ("rate", "loss")), Table([["Suggested", f"--learning-rate {self.suggestion:.1e}"]])]


def find_learning_rate(fabric: Fabric, network: nn.Module, data: RunData, recipe: Recipe, seed: int) -> LearningRates:
    """Train a network for 100 steps, each at a higher rate, until its loss explodes.

    Of the recipe, the learning rate and the schedule are not used. Its batches and the seed are those of a run.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3 (arXiv:1506.01186).
    """
    plain = recipe.replace({"schedule": "constant", "patience": None, "stop_at": None, "compile": False})
    trainer = Trainer(fabric, network, data, plain, seed=seed)
    trainer.network.train()
    tried = torch.logspace(math.log10(LEAST), math.log10(MOST), STEPS).tolist()
    batches = (batch for epoch in itertools.count() for batch in data.train.batches(epoch))
    rates, losses, mean = list[float](), list[float](), 0.0
    for step, (rate, batch) in enumerate(zip(tried, batches, strict=False), 1):
        trainer.recipe = plain.replace({"learning_rate": rate})
        trainer.step(batch)
        mean = SMOOTHING * mean + (1 - SMOOTHING) * float(trainer.sums.last_loss)
        smoothed = mean / (1 - SMOOTHING**step)
        if not math.isfinite(smoothed) or (losses and smoothed > TOO_MUCH * min(losses)):
            break
        rates.append(rate)
        losses.append(smoothed)
    return LearningRates(rates, losses)
