"""One training step: its learning rate, forward, loss, backward, the optimizer, and the sums of the epoch.

A step has two parts. ``_prepare`` runs on the host and differs from step to step: it sets the learning rate and the
seed. ``_update`` runs on the device: the same operations at each step, and the host waits for none of their results.

A learning rate is a pure function of the step, so that a resumed run needs no state for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from torchcaps.datasets import Batch
from torchcaps.models import Network
from torchcaps.models.output import Losses, is_correct
from torchcaps.parts import build
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: The sums that a tally keeps over the images of an epoch: losses times images, and the images that are right.
SUMS = ("loss", "classification_loss", "reconstruction_loss", "correct")

#: The one-cycle schedule rises in this share of the steps, from the peak divided by this number.
WARM_UP_SHARE, START_DIVISOR = 0.3, 25.0


class TrainStep:
    """One update of a network's weights by the recipe's optimizer.

    Args:
        fabric: Sets up the network and the optimizer for its device and precision.
        network: The network, in training mode when a step is made.
        recipe: Names the optimizer.
        seed: The seed of the randomness within a step, such as dropout.
    """

    def __init__(self, fabric: Fabric, network: Network, recipe: Recipe, *, seed: int) -> None:
        self.fabric, self.network = fabric, network
        self.tally = Tally(fabric.device)
        self._seed = seed * 1_000_003
        network.to(fabric.device)  # before the optimizer looks where its parameters are
        rate = recipe.learning_rate
        optimizer = build("optimizer", recipe.optimizer, params=network.parameters(), learning_rate=rate)
        self.model, self.optimizer = fabric.setup(network, optimizer)

    def __call__(self, batch: Batch, step: int, learning_rate: float) -> None:
        """Make a step, before which the run has made ``step`` others."""
        self._prepare(step, learning_rate)
        self._update(batch)

    def _prepare(self, step: int, learning_rate: float) -> None:
        """Set the learning rate and the seed, which differ from step to step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # all randomness is a function of the step, so that a checkpoint need not hold any; on CPU and CUDA no other
        # generator than the device's is seeded, to save time
        seeders: dict[str, Callable[[int], object]] = {
            "cpu": torch.default_generator.manual_seed,
            "cuda": torch.cuda.manual_seed,
        }
        seed = seeders.get(self.fabric.device.type, torch.manual_seed)
        seed((self._seed + step) * 1_009 + self.fabric.global_rank)

    def _update(self, batch: Batch) -> None:
        """Forward, loss, backward, optimizer, sums: reads no value from the device."""
        images, labels, parts = batch
        output = self.model(images, self.network.decoder_targets(labels))
        losses = self.network.loss(output, images if parts is None else parts, labels)
        self.fabric.backward(losses.total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add(losses, is_correct(output.scores.detach(), labels).sum(), len(labels))

    def restore(self, network: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Load weights and the optimizer's state of a checkpoint; the optimizer keeps the settings of this device."""
        self.network.load_state_dict(network)
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": optimizer["state"], "param_groups": settings})


def set_up_step(fabric: Fabric, config: TrainConfig, network: Network) -> TrainStep:
    """The step of a run; the network is brought to its device."""
    return TrainStep(fabric, network, config.recipe, seed=config.seed)


class Counted(NamedTuple):
    """The losses of the steps that a tally has counted since it was cleared or restored."""

    last_loss: float
    """Loss of the last step."""
    first_bad: float
    """The first of these steps, from 0, whose loss was NaN or infinite; infinity if there was none."""
    steps: float
    """How many steps there were."""


class Tally:
    """The sums of an epoch so far, kept on a device: only reading them waits for it."""

    def __init__(self, device: torch.device) -> None:
        widest = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._values = torch.zeros(len(SUMS) + len(Counted._fields), dtype=widest, device=device)
        self.sums: Float[Tensor, "4"] = self._values[: len(SUMS)]
        """The `SUMS`, on the device."""
        self._losses = self._values[len(SUMS) :]
        self.clear()

    def add(self, losses: Losses, right: Int64[Tensor, ""], images: int) -> None:
        """Count a step: its mean losses, how many images were given their classes, and how many images there were."""
        reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
        means = torch.stack([losses.total, losses.classification, reconstruction]).detach().to(self._values.dtype)
        last_loss, first_bad, steps = self._losses.unbind()
        self.sums[:3].add_(means * images)
        self.sums[3].add_(right)
        last_loss.copy_(means[0])
        # torch.where would have to bring Python's infinity to the device, and wait for it
        first_bad.copy_(torch.minimum(first_bad, steps.masked_fill(means[0].isfinite(), math.inf)))
        steps.add_(1)

    def clear(self) -> None:
        """Begin an epoch."""
        self._values.zero_()
        self._losses[1].fill_(math.inf)

    def restore(self, sums: list[float]) -> None:
        """Go on within an epoch whose sums so far are these."""
        self.clear()
        self.sums.copy_(torch.tensor(sums, dtype=self.sums.dtype))

    def read(self) -> Counted:
        """Wait for the steps that were made, and return their losses."""
        return Counted(*self._losses.tolist())


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step.

    ``one-cycle`` rises on a cosine from a 25th of the peak to the peak in the first 30 % of all steps and falls on a
    cosine to zero in the rest.

    Args:
        recipe: Names the schedule and its numbers.
        step: Steps done before this one.
        steps_per_epoch: Steps of an epoch.

    Source: Smith, Topin 2018, "Super-convergence" (arXiv:1708.07120), with cosines.
    """
    peak = recipe.learning_rate
    if recipe.schedule == "decay-by-step":
        return max(peak * recipe.decay ** (step / recipe.decay_steps), recipe.min_learning_rate)
    if recipe.schedule == "decay-by-epoch":
        return max(peak * recipe.decay ** (step // steps_per_epoch), recipe.min_learning_rate)
    if recipe.schedule == "one-cycle":
        total = recipe.epochs * steps_per_epoch
        rise = max(1.0, WARM_UP_SHARE * total)
        if step < rise:
            return _cosine(peak / START_DIVISOR, peak, step / rise)
        return _cosine(peak, 0.0, (step - rise) / (total - rise)) if total > rise else peak
    return peak


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
