"""One training step: forward, loss, backward, the optimizer, and the sums of the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from torchcaps.datasets import Batch
from torchcaps.errors import InputError
from torchcaps.models.output import Losses, is_correct
from torchcaps.parts import build
from torchcaps.training.checkpoint import SUMS
from torchcaps.training.data import balanced_weights
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: Of a network's output and the labels, the mean loss of the images.
Loss = Callable[[Any, Tensor], Tensor]


def forward(
    network: nn.Module, model: nn.Module, batch: Batch, loss: Loss | None, weights: Tensor | None = None
) -> tuple[Float[Tensor, "B J"], Losses]:
    """The scores and the losses of a batch.

    Args:
        network: The network.
        model: The same, as it is set up for its device and precision.
        batch: Images and their classes.
        loss: As for :func:`fit`.
        weights: How much each image counts in the gradient; the losses themselves stay those of the batch.
    """
    images, labels, parts = batch
    if hasattr(network, "decoder_targets"):  # a network of torchcaps
        output = model(images, network.decoder_targets(labels))  # type: ignore[operator]
        output = output if weights is None else weighted(output, weights)
        return output.scores, network.loss(output, images if parts is None else parts, labels)  # type: ignore[operator]
    output = model(images)
    output = output if weights is None else weighted(output, weights)
    scores = output if isinstance(output, Tensor) else output.scores
    total = F.cross_entropy(scores, labels) if loss is None else loss(output, labels)
    return scores, Losses(total, total)


def weighted(output: Any, weights: Float[Tensor, "B"]) -> Any:
    """The same output, in whose gradient each image counts by its weight."""
    if isinstance(output, tuple):
        made: Any = type(output)
        return made(*(None if each is None else weighted(each, weights) for each in output))
    view = output.view_as(output)
    if view.requires_grad:
        view.register_hook(lambda gradient: gradient * weights.reshape(-1, *[1] * (gradient.ndim - 1)))
    return view


class TrainStep:
    """One update of a network's weights by the recipe's optimizer.

    What differs from step to step, the learning rate and the seed, is set on the host; the rest are the same operations
    at each step, of whose results the host waits for none.

    Args:
        fabric: Sets up the network and the optimizer for its device and precision.
        network: The network, in training mode when a step is made.
        recipe: Names the optimizer, the largest gradient, and the weights of the classes.
        seed: The seed of the randomness within a step, such as dropout.
        loss: As for :func:`fit`.
        labels: The class of each training image, for balanced weights of the classes.
    """

    def __init__(
        self,
        fabric: Fabric,
        network: nn.Module,
        recipe: Recipe,
        *,
        seed: int,
        loss: Loss | None = None,
        labels: Tensor | None = None,
    ) -> None:
        self.fabric, self.network, self.loss, self.recipe = fabric, network, loss, recipe
        self.sums = EpochSums(fabric.device)
        self._seed, self._weights = seed * 1_000_003, None
        if recipe.class_weights is not None:
            balanced = recipe.class_weights == "balanced"
            weights = balanced_weights(labels) if balanced else list(recipe.class_weights)
            classes = getattr(network, "num_classes", len(weights))
            if (not balanced and len(weights) != classes) or getattr(network, "objects", 1) > 1:
                raise InputError(
                    f"class_weights must be {classes} numbers, one for each class, of images of one object, got "
                    f"{len(weights)}"
                )
            self._weights = torch.tensor(weights, device=fabric.device)
        network.to(fabric.device)  # before the optimizer looks where its parameters are
        rate: float = recipe.learning_rate
        model: Any = torch.compile(network) if recipe.compile else network
        optimizer = build("optimizer", recipe.optimizer, params=network.parameters(), learning_rate=rate)
        self.model, self.optimizer = fabric.setup(model, optimizer)

    def __call__(self, batch: Batch, step: int, learning_rate: float) -> None:
        """Make a step, before which the run has made ``step`` others."""
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
        weights = None if self._weights is None else self._weights[batch.labels]
        scores, losses = forward(self.network, self.model, batch, self.loss, weights)
        self.fabric.backward(losses.total)
        if self.recipe.max_gradient_norm is not None:
            # what is not finite is said with the loss, or with the weights
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.recipe.max_gradient_norm, error_if_nonfinite=False
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.add(losses, is_correct(scores.detach(), batch.labels).sum(), len(batch.labels))

    def restore(self, network: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Load weights and the optimizer's state of a checkpoint; the optimizer keeps the settings of this device."""
        self.network.load_state_dict(network)
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": optimizer["state"], "param_groups": settings})


class EpochSums:
    """The sums of an epoch so far, kept on a device: only reading them waits for it."""

    def __init__(self, device: torch.device) -> None:
        widest = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.values: Float[Tensor, "4"] = torch.zeros(len(SUMS), dtype=widest, device=device)
        """The `SUMS`; NaN or infinite as soon as a loss was."""
        self.last_loss: Float[Tensor, ""] = self.values[0]
        """The loss of the last step."""

    def add(self, losses: Losses, right: Int64[Tensor, ""], images: int) -> None:
        """Count a step: its mean losses, how many images are correctly classified, and how many images there were."""
        reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
        means = torch.stack([losses.total, losses.classification, reconstruction]).detach().to(self.values.dtype)
        self.values[:3].add_(means * images)
        self.values[3].add_(right)
        self.last_loss = means[0]

    def restore(self, sums: Sequence[float] = (0.0,) * len(SUMS)) -> None:
        """Go on within an epoch whose sums so far are these, or begin one."""
        self.values.copy_(torch.tensor(sums, dtype=self.values.dtype))
