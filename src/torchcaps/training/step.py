"""One training step: forward, loss, backward, Adam, and what it adds to the epoch's sums.

It has two parts. ``prepare`` is the host's and differs from step to step: the learning rate and the seed. ``update`` is
the device's: the same operations on tensors that stay where they are, never waiting for a result. So a step can be
captured; :mod:`torchcaps.training.capture` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from torchcaps.datasets import Batch
from torchcaps.models import Network, Recipe
from torchcaps.models.objects import is_right
from torchcaps.models.output import Losses

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: β₁ and β₂ of Adam's moments. TensorFlow keeps them in float32: 1 − β₂ is 1.3e-5 of itself smaller than 0.001.
BETAS = {"torch": (0.9, 0.999), "tensorflow": (torch.tensor(0.9).item(), torch.tensor(0.999).item())}

#: Steps after which Adam sees no bias in its moments, and which a float32 counts no further: both β^(2^24) are 0.
OLD = 2.0**24


class TrainStep:
    """One update of a network's weights by Adam.

    Args:
        fabric: Says where and in which precision; the network and the optimizer are set up with it.
        network: The network, in training mode when a step is made.
        recipe: Says which Adam.
        seed: Of the randomness within a step, such as dropout.
        capturable: Whether steps will be captured.
    """

    def __init__(
        self, fabric: Fabric, network: Network, recipe: Recipe, *, seed: int, capturable: bool = False
    ) -> None:
        self.fabric, self.network = fabric, network
        self.tally = Tally(fabric.device)
        self._seed = seed * 1_000_003
        fused = fabric.device.type in ("cpu", "cuda")
        self._rate = _rate_tensor(fabric.device) if fused else None
        optimizer = torch.optim.Adam(
            network.parameters(),
            lr=1.0 if self._rate is None else self._rate,
            betas=BETAS[recipe.adam],
            eps=recipe.adam_eps,
            fused=fused,
            capturable=capturable,
        )
        self.model, self.optimizer = fabric.setup(network, optimizer)
        self._correction = BiasCorrection() if recipe.adam == "tensorflow" else None
        if self._correction is not None:
            _leave_moments_uncorrected(self.optimizer, fused)

    def __call__(self, batch: Batch, step: int, learning_rate: float) -> None:
        """Make a step.

        Args:
            batch: Images, labels, and the parts where an image holds several objects.
            step: Steps of the run before this one.
            learning_rate: Adam's.
        """
        self.prepare(step, learning_rate)
        self.update(batch)

    def prepare(self, step: int, learning_rate: float) -> None:
        """Set what differs from step to step."""
        if self._correction is not None:
            learning_rate *= self._correction(step + 1)
        if self._rate is None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        else:
            self._rate.fill_(learning_rate)
        # all randomness is a function of the step: nothing of it needs saving
        seed_device(self.fabric.device, (self._seed + step) * 1_009 + self.fabric.global_rank)

    def update(self, batch: Batch) -> None:
        """Forward, loss, backward, Adam, sums: nothing here reads a value, and no number of Python's changes."""
        images, labels, parts = batch
        output = self.model(images, self.network.decoder_targets(labels))
        losses = self.network.loss(output, images if parts is None else parts, labels)
        self.fabric.backward(losses.total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add(losses, is_right(output.scores.detach(), labels).sum(), len(labels))

    def restore(self, network: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Take up weights and Adam's moments of a checkpoint; the settings of this device stay."""
        self.network.load_state_dict(network)
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": optimizer["state"], "param_groups": settings})
        if self._rate is not None:  # load_state_dict has put a copy in its place
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate


class Counted(NamedTuple):
    """What a tally has counted since it was cleared, in Python's numbers."""

    loss: float
    """Losses times images."""
    classification_loss: float
    """Classification losses times images."""
    reconstruction_loss: float
    """Reconstruction losses times images; 0 without a decoder."""
    correct: float
    """Images that were given their classes."""
    last_loss: float
    """Loss of the last step."""
    first_bad: float
    """The first step, from 0, whose loss was NaN or infinite; infinity if there was none."""
    steps: float
    """How many there were."""


class Tally:
    """What steps add up to, kept on the device: only ``read`` waits for it.

    Args:
        device: Where it is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(len(Counted._fields), dtype=wide_dtype(device), device=device)
        self.clear()

    @property
    def sums(self) -> Float[Tensor, "4"]:
        """The first four of what is counted, on the device."""
        return self._values[:4]

    def add(self, losses: Losses, right: Int64[Tensor, ""], images: int) -> None:
        """Count a step.

        Args:
            losses: Of the batch, means over its images.
            right: Images that were given their classes.
            images: Of the batch.
        """
        reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
        means = torch.stack([losses.total, losses.classification, reconstruction]).detach().to(self._values.dtype)
        last_loss, first_bad, steps = self._values[4:].unbind()
        self._values[:3].add_(means * images)
        self._values[3].add_(right)
        last_loss.copy_(means[0])
        # torch.where would have to bring Python's infinity to the device, and wait for it
        first_bad.copy_(torch.minimum(first_bad, steps.masked_fill(means[0].isfinite(), math.inf)))
        steps.add_(1)

    def clear(self) -> None:
        """Begin anew."""
        self._values.zero_()
        self._values[5].fill_(math.inf)

    def read(self) -> Counted:
        """Wait for the steps that were made, and return what they add up to."""
        return Counted(*self._values.tolist())


class BiasCorrection:
    """√(1 − β₂^t) / (1 − β₁^t): TensorFlow's Adam corrects the bias of both moments by this factor on its rate.

    So its epsilon is added to a root that is not yet corrected: it takes the step
    ``rate · correction · m / (√v + eps)``, where PyTorch's takes ``rate / (1 − β₁^t) · m / (√v / √(1 − β₂^t) + eps)``.
    TensorFlow keeps the powers in float32, each the product of the last one and β; the losses show their rounding.

    Source: Kingma, Ba 2015 (arXiv:1412.6980), end of section 2.
    """

    def __init__(self) -> None:
        self._betas = np.array(BETAS["tensorflow"], np.float32)
        self._step, self._powers = 0, np.ones(2, np.float32)

    def __call__(self, step: int) -> float:
        """The factor of a step.

        Args:
            step: t, from 1.
        """
        if step < self._step:
            self._step, self._powers = 0, np.ones(2, np.float32)
        while self._step < step:
            self._step += 1
            self._powers *= self._betas
        first, second = self._powers.tolist()
        return math.sqrt(1 - second) / (1 - first)


def _leave_moments_uncorrected(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Let Adam's moments start as those of a run so old that it sees no bias in them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(OLD, device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _rate_tensor(device: torch.device) -> Tensor:
    """Where a fused Adam reads its learning rate, at each replay of a captured step, too; CUDA's reads float32 only."""
    return torch.ones((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point numbers of a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that a device's operations draw from, and on CPU and CUDA no other: that takes no time."""
    seeders: dict[str, Callable[[int], object]] = {
        "cpu": torch.default_generator.manual_seed,
        "cuda": torch.cuda.manual_seed,
    }
    seeders.get(device.type, torch.manual_seed)(seed)
