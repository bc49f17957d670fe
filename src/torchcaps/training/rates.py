"""Learning-rate range test: one step at each of many rising learning rates."""

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

MIN_RATE, MAX_RATE, STEPS = 1e-6, 1.0, 100
"""Lowest and highest learning rate, and the number of steps between them."""
SMOOTHING = 0.9
"""Weight of the previous losses in the exponential moving average."""
STOP_AT_LOSS_RATIO = 4.0
"""The test stops if the smoothed loss is this many times its minimum."""


UNUSED_SETTINGS = (
    *("epochs", "learning_rate", "schedule", "decay", "decay_steps", "min_learning_rate"),
    *("select", "patience", "stop_at", "precise_norm", "compile", "logger", "checkpoint_minutes"),
)
"""Settings of a run that the test of learning rates does not use."""


@dataclass(frozen=True, eq=False)
class LearningRates(Result):
    """Losses at rising learning rates.

    Args:
        rates: Learning rate of each step.
        losses: Smoothed loss after each step.
    """

    rates: list[float]
    losses: list[float]

    @property
    def suggestion(self) -> float:
        """A tenth of the learning rate with the lowest loss, because there the loss still falls steadily."""
        return self.rates[self.losses.index(min(self.losses))] / 10

    def tables(self) -> Iterable[Table]:
        every = max(len(self.rates) // 12, 1)
        pairs = list(zip(self.rates, self.losses, strict=True))[::every]
        rows = [[f"{rate:.1e}", f"{loss:.4f}"] for rate, loss in pairs]
        return [Table(rows, ("rate", "loss")), Table([["Suggested", f"--learning-rate {self.suggestion:.1e}"]])]


def find_learning_rate(fabric: Fabric, network: nn.Module, data: RunData, recipe: Recipe, seed: int) -> LearningRates:
    """Train a network for up to 100 steps at rising learning rates, until the loss explodes.

    Batches and random seed are the same as in a run with this recipe. The recipe's learning rate and schedule are
    not used.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3 (arXiv:1506.01186).
    """
    plain = recipe.replace({"schedule": "constant", "patience": None, "stop_at": None, "compile": False})
    trainer = Trainer(fabric, network, data, plain, seed=seed)
    trainer.network.train()
    tried = torch.logspace(math.log10(MIN_RATE), math.log10(MAX_RATE), STEPS).tolist()
    batches = (batch for epoch in itertools.count() for batch in data.train.batches(epoch))
    rates, losses, mean = list[float](), list[float](), 0.0
    for step, (rate, batch) in enumerate(zip(tried, batches, strict=False), 1):
        trainer.recipe = plain.replace({"learning_rate": rate})
        trainer.step(batch)
        mean = SMOOTHING * mean + (1 - SMOOTHING) * float(trainer.sums.last_loss)
        smoothed = mean / (1 - SMOOTHING**step)
        if not math.isfinite(smoothed) or (losses and smoothed > STOP_AT_LOSS_RATIO * min(losses)):
            break
        rates.append(rate)
        losses.append(smoothed)
    return LearningRates(rates, losses)
