"""One training step: scores and losses of a batch, the weights of its images, and the sums over an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from torchcaps.datasets import Batch
from torchcaps.errors import InputError
from torchcaps.models.output import Losses
from torchcaps.nn import Capsules

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
    # such as NumPy's float64, which float32 weights do not take
    images = images.to(next((each.dtype for each in network.parameters() if each.is_floating_point()), images.dtype))
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
    if weights == "balanced":
        if not are_classes(labels):
            raise InputError('class_weights="balanced" needs a label for each training image; give numbers instead')
        return balanced_weights(labels).to(device)
    classes = getattr(network, "num_classes", len(weights))
    if len(weights) != classes or getattr(network, "objects", 1) > 1:
        raise InputError(
            f"class_weights must be {classes} numbers, one for each class, of images of one object, got {len(weights)}"
        )
    return torch.tensor(weights, device=device)


def are_classes(labels: Tensor | None) -> TypeGuard[Tensor]:
    """Whether labels are known, one class for each image."""
    return labels is not None and labels.ndim == 1 and not labels.is_floating_point()


def balanced_weights(labels: Int64[Tensor, "N"]) -> Float[Tensor, "J"]:
    """Weights N / (J · N_j), by which all classes count the same; a class without images has 1.

    Source: King, Zeng 2001, "Logistic regression in rare events data", and scikit-learn's ``class_weight``.
    """
    counts = labels.bincount()
    return torch.where(counts > 0, len(labels) / (len(counts) * counts.clamp_min(1)), 1.0)


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
