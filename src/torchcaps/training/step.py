"""Parts of a training step: scores, losses, weights of images, and sums over an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from torchcaps.datasets import Batch
from torchcaps.errors import InputError
from torchcaps.models.output import Losses
from torchcaps.nn import Capsules
from torchcaps.ranges import IGNORED
from torchcaps.tasks.base import scores_of
from torchcaps.training.devices import over_processes

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from torchcaps.tasks import Task
    from torchcaps.training.recipe import Recipe

Loss = Callable[[Any, Tensor], Tensor]
"""A function of a network's output and the labels that returns the mean loss."""
SUMS = ("loss", "classification_loss", "reconstruction_loss", "correct")
"""Names of the sums over the images of an epoch: losses times images, and correctly classified images."""


def forward(
    network: nn.Module, model: Callable[..., Any], batch: Batch, loss: Loss, weights: Tensor | None = None
) -> tuple[Float[Tensor, "B J"], Losses]:
    """Return the scores and losses of a batch.

    Args:
        network: The network.
        model: The network wrapped for its device and precision, or a function that calls it.
        batch: Images and labels.
        loss: Loss of a module that is no network of torchcaps; from ``Task.loss_of_module``.
        weights: Weight of each image or pixel in the gradient. The returned losses are not weighted.
    """
    images, labels, parts = batch[:3]
    # images may have another dtype than the weights, such as NumPy's float64
    images = images.to(next((each.dtype for each in network.parameters() if each.is_floating_point()), images.dtype))
    is_ours = hasattr(network, "decoder_targets")
    with _several_numbers():
        output: Any = model(images, network.decoder_targets(labels)) if is_ours else model(images)  # type: ignore[operator]
    output = output.scores() if isinstance(output, Capsules) else output
    output = output if weights is None else _weighted(output, weights)
    if is_ours:
        return output.scores, network.loss(output, images if parts is None else parts, labels)  # type: ignore[operator]
    total = loss(output, labels)
    return scores_of(output), Losses(total, total)


@contextmanager
def _several_numbers() -> Iterator[None]:
    """Raise InputError where torch refuses batch normalisation of one image and one place of a map."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InputError(
            "batch normalisation needs several numbers of each channel; set batch_size (--batch-size) to 2 or more"
        ) from None


def _weighted(output: Any, weights: Float[Tensor, "B ..."]) -> Any:
    """Return the output unchanged, but with the gradient of each image, or of each pixel, multiplied by its weight.

    Weights of pixels (B, 1, H, W) change no gradient that has another size of the image.
    """
    if isinstance(output, tuple):
        kind: Any = type(output)
        return kind(*(None if each is None else _weighted(each, weights) for each in output))
    view = output.view_as(output)
    if view.requires_grad and weights.shape[2:] in ((), view.shape[2:]):
        view.register_hook(lambda gradient: gradient * with_axes(weights, gradient.ndim))
    return view


def with_axes(weights: Float[Tensor, "B ..."], ndim: int) -> Float[Tensor, "B ..."]:
    """Return weights of images with further axes of length 1; weights of pixels have their axes already."""
    return weights.reshape(*weights.shape, *[1] * (ndim - weights.ndim))


def class_weights(
    recipe: Recipe, network: nn.Module, task: Task, labels: Tensor | None, device: torch.device
) -> Float[Tensor, "J"] | None:
    """Return the weight of each class in the gradient; None if all classes count the same.

    Raises:
        InputError: The images do not have one class each, or the number of weights is not the number of classes.
    """
    weights: Any = recipe.class_weights
    if weights is None:
        return None
    if task.objects > 1 or task.class_counts(torch.zeros(1, dtype=torch.int64)) is None:
        words = f"{task.objects} objects in an image" if task.objects > 1 else f"the task {task.name}"
        raise InputError(
            f"class_weights (--class-weights) needs images of one class each, but this network was made for {words}"
        )
    if weights == "balanced":
        counts = None if labels is None else task.class_counts(labels)
        if counts is None:
            raise InputError('class_weights="balanced" needs one class for each image; set one number for each class')
        return balanced_weights(counts).to(device)
    classes = getattr(network, "num_classes", len(weights))
    if len(weights) != classes:
        raise InputError(f"class_weights must be {classes} numbers, one for each class, got {len(weights)}")
    return torch.tensor(weights, device=device)


def balanced_weights(counts: Int64[Tensor, "J"]) -> Float[Tensor, "J"]:
    """Return weights N / (J · N_j), which give all classes the same influence; 1 for a class without images or pixels.

    They are large for small classes: 500 for one of two classes that has a thousandth of the pixels.

    Source: King, Zeng 2001, "Logistic regression in rare events data", and scikit-learn's ``class_weight``.
    """
    return (counts.sum() / (len(counts) * counts.clamp_min(1))).masked_fill(counts == 0, 1.0)


def weights_of(weights: Float[Tensor, "J"], labels: Tensor) -> Tensor:
    """Return the weight of each image (B,), or of each pixel (B, 1, H, W), by the weights of the classes.

    For labels (B, J) with shares of classes, it is the weighted sum of the shares. Ignored pixels have the weight 0.
    """
    if labels.ndim == 2:
        return labels.to(weights) @ weights
    if labels.ndim == 1:
        return weights[labels]
    return F.pad(weights, (0, IGNORED + 1 - len(weights)))[labels.long()].unsqueeze(1)


class Recalls:
    """Recall of each class: correctly classified images of the class, divided by all its images.

    Args:
        like: A tensor with the dtype and device of the counts.
    """

    def __init__(self, like: Tensor) -> None:
        self.counts: Float[Tensor, "2 J"] = like.new_zeros(2, 0)
        """Correct images and all images of each class."""

    def add(self, labels: Tensor, right: Float[Tensor, "B"], num_classes: int) -> None:
        """Add a batch. Ignore labels without one class for each image."""
        if labels.ndim == 1 and not labels.is_floating_point():
            self.counts = F.pad(self.counts, (0, num_classes - self.counts.shape[1]))
            self.counts.index_add_(1, labels.long(), torch.stack([right, torch.ones_like(right)]))

    def mean(self, fabric: Fabric) -> float | None:
        """Return the mean recall of the classes with images, over all processes; None if no class has images."""
        width = torch.tensor(self.counts.shape[1], device=self.counts.device)
        widest = int(over_processes(fabric, width, "max"))
        counts = over_processes(fabric, F.pad(self.counts, (0, widest - self.counts.shape[1])), "sum")
        present = counts[:, counts[1] > 0]
        return float((present[0] / present[1]).mean()) if present.numel() else None


class EpochSums:
    """The :data:`SUMS` of this process and the current epoch. They are not finite once a loss was not finite."""

    def __init__(self, device: torch.device) -> None:
        widest = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.values: Float[Tensor, "4"] = torch.zeros(len(SUMS), dtype=widest, device=device)
        self.last_loss: Float[Tensor, ""] = self.values[0]
        """Mean loss of the last batch."""

    def add(self, losses: Losses, right: Float[Tensor, "B"] | Bool[Tensor, "B"]) -> None:
        """Add the mean losses of a batch and the score (0..1) of each image."""
        reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
        means = torch.stack([losses.total, losses.classification, reconstruction]).detach().to(self.values.dtype)
        self.values[:3].add_(means * len(right))
        self.values[3].add_(right.sum())
        self.last_loss = means[0]
