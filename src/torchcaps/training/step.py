"""One training step: scores and losses of a batch, the weights of its images, and the sums over an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torchcaps.datasets import Batch
from torchcaps.errors import InputError
from torchcaps.models.output import Losses
from torchcaps.nn import Capsules
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from torchcaps.training.recipe import Recipe

Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of images, from a network's output and the labels."""
SUMS = ("loss", "classification_loss", "reconstruction_loss", "correct")
"""The sums over the images of an epoch: losses times images, and the correctly classified images."""


def forward(
    network: nn.Module, model: nn.Module, batch: Batch, loss: Loss | None, weights: Tensor | None = None
) -> tuple[Float[Tensor, "B J"], Losses]:
    """The scores and the losses of a batch; ``model`` is the network as it is set up for its device and precision.

    Each image counts in the gradient by its weight; the losses themselves stay those of the batch.
    """
    images, labels, parts = batch[:3]
    is_ours = hasattr(network, "decoder_targets")
    output: Any = model(images, network.decoder_targets(labels)) if is_ours else model(images)  # type: ignore[operator]
    output = output.scores() if isinstance(output, Capsules) else output
    output = output if weights is None else _weighted(output, weights)
    if is_ours:
        return output.scores, network.loss(output, images if parts is None else parts, labels)  # type: ignore[operator]
    scores = output if isinstance(output, Tensor) else output.scores
    total = F.cross_entropy(scores, labels) if loss is None else loss(output, labels)
    return scores, Losses(total, total)


def _weighted(output: Any, weights: Float[Tensor, "B"]) -> Any:
    """The same output, in whose gradient each image counts by its weight."""
    if isinstance(output, tuple):
        made: Any = type(output)
        return made(*(None if each is None else _weighted(each, weights) for each in output))
    view = output.view_as(output)
    if view.requires_grad:
        view.register_hook(lambda gradient: gradient * weights.reshape(-1, *[1] * (gradient.ndim - 1)))
    return view


def class_weights(
    recipe: Recipe, network: nn.Module, labels: Tensor | None, device: torch.device
) -> Float[Tensor, "J"] | None:
    """How much each class counts in the gradient."""
    weights: Any = recipe.class_weights
    if weights is None:
        return None
    task = task_of(network)
    task.require("class_weights")
    if weights == "balanced":
        if (balance := task.class_weights(labels)) is None:
            raise InputError('class_weights="balanced" needs a label for each training image; give numbers instead')
        return balance.to(device)
    classes = getattr(network, "num_classes", len(weights))
    if len(weights) != classes or getattr(network, "objects", 1) > 1:
        raise InputError(
            f"class_weights must be {classes} numbers, one for each class, of images of one object, got {len(weights)}"
        )
    return torch.tensor(weights, device=device)


def image_weights(weights: Float[Tensor, "J"], labels: Tensor) -> Float[Tensor, "B"]:
    """Return the weight of the class of each image; of rows (B, J), as of mixed images, the mean by their shares."""
    if labels.shape[1:] != weights.shape:
        return weights[labels]
    rows = labels.to(weights.dtype)
    return rows @ weights / rows.sum(1).clamp_min(torch.finfo(weights.dtype).tiny)


class EpochSums:
    """The :data:`SUMS` of the running epoch, of this process; NaN or infinite as soon as a loss was."""

    def __init__(self, device: torch.device) -> None:
        widest = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.values: Float[Tensor, "4"] = torch.zeros(len(SUMS), dtype=widest, device=device)
        self.last_loss: Float[Tensor, ""] = self.values[0]
        """The loss of the last batch, a mean over its images."""

    def add(self, losses: Losses, right: Float[Tensor, "B"] | Bool[Tensor, "B"]) -> None:
        """Add a batch: the means of its losses, and how right each of its answers is."""
        reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
        means = torch.stack([losses.total, losses.classification, reconstruction]).detach().to(self.values.dtype)
        self.values[:3].add_(means * len(right))
        self.values[3].add_(right.sum())
        self.last_loss = means[0]
