"""How good a network is on a set of images: accuracy, loss, confusion matrix, a table of the classes.

All of it follows from two sums, the confusion counts and the loss, which can be taken over any share of the images
and added: over batches, and over processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.inference import as_pixels, check_image_shape, class_labels, inference
from torchcaps.datasets import BatchLoader, ImageSet
from torchcaps.errors import InputError
from torchcaps.models import Model

Precision = Literal["32", "bf16"]


class ClassScore(TypedDict):
    """How good a network is on one class; what is not defined is None."""

    name: str
    images: int
    """How many images are of this class."""
    precision: float | None
    """Share of the images given this class that are of it; None where none was given it."""
    recall: float | None
    """Share of the images of this class that were given it; None without images."""
    f1: float | None
    """Harmonic mean of the two, 2·TP / (2·TP + FP + FN); None without images."""


@dataclass(frozen=True, eq=False)
class EvaluationSums:
    """What evaluating some images adds up to. The sums of a set's shares add to those of the set.

    Args:
        confusion: How many images of class (row) were given class (column).
        loss: The sum of the images' losses.

    Raises:
        InputError: ``confusion`` is not square.
    """

    confusion: Int[np.ndarray, "J J"]
    loss: float

    def __post_init__(self) -> None:
        if self.confusion.ndim != 2 or self.confusion.shape[0] != self.confusion.shape[1]:
            raise InputError(f"confusion must have shape (J, J), got {self.confusion.shape}")

    @property
    def num_images(self) -> int:
        """Images counted."""
        return int(self.confusion.sum())

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        if self.confusion.shape != other.confusion.shape:
            raise InputError(
                f"evaluations of {len(self.confusion)} and of {len(other.confusion)} classes cannot be added; "
                "both must be of the same network"
            )
        return EvaluationSums(self.confusion + other.confusion, self.loss + other.loss)

    def to_tensor(self) -> Float[Tensor, "n"]:
        """The J·J counts and the loss in one float64 vector on the CPU, to be summed over processes at once."""
        return torch.tensor([*self.confusion.ravel().tolist(), self.loss], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, vector: Float[Tensor, "n"]) -> EvaluationSums:
        """The inverse of :meth:`to_tensor`.

        Raises:
            InputError: The vector's length is not J·J + 1.
        """
        classes = math.isqrt(max(vector.numel() - 1, 0))
        if vector.shape != (classes * classes + 1,):
            raise InputError(f"a vector of sums has shape (J·J + 1,), got {tuple(vector.shape)}")
        numbers = vector.cpu().double().numpy()
        return cls(numbers[:-1].round().astype(np.int64).reshape(classes, classes), float(numbers[-1]))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a network is on a set of images.

    Args:
        confusion: How many images of class (row) were given class (column).
        loss: Mean loss of an image, by the network's own loss.
        class_names: The name of each class.
        predictions: The class given to each image; None where only sums are known.
        lengths: The scores ‖v_j‖ of each image; None where only sums are known.

    Raises:
        InputError: There is no image, or not one name for each class.
    """

    confusion: Int[np.ndarray, "J J"]
    loss: float
    class_names: tuple[str, ...]
    predictions: Int[np.ndarray, "N"] | None = None
    lengths: Float[np.ndarray, "N J"] | None = None

    def __post_init__(self) -> None:
        class_labels(self.class_names, len(self.confusion))
        if self.num_images == 0:
            raise InputError("there must be at least one image to evaluate on, got none")

    @classmethod
    def from_sums(cls, sums: EvaluationSums, class_names: Sequence[str] | None = None) -> Evaluation:
        """The evaluation that sums stand for.

        Args:
            sums: Over all images, each counted once.
            class_names: The name of each class; its number if None.

        Raises:
            InputError: There is no image, or not one name for each class.
        """
        return cls(
            sums.confusion, sums.loss / max(sums.num_images, 1), tuple(class_labels(class_names, len(sums.confusion)))
        )

    @property
    def num_images(self) -> int:
        """How many images were looked at."""
        return int(self.confusion.sum())

    @property
    def num_correct(self) -> int:
        """How many of them were given their class."""
        return int(self.confusion.trace())

    @property
    def accuracy(self) -> float:
        """Share of the images that were given their class, 0..1."""
        return self.num_correct / self.num_images

    @property
    def error(self) -> float:
        """Share of the images that were given another class, 0..1."""
        return (self.num_images - self.num_correct) / self.num_images

    @property
    def per_class(self) -> list[ClassScore]:
        """Images, precision, recall and F1 of each class."""
        correct, images, given = self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0)
        return [
            ClassScore(
                name=name,
                images=int(images[j]),
                precision=_share(correct[j], given[j]),
                recall=_share(correct[j], images[j]),
                f1=_share(2 * correct[j], images[j] + given[j]) if images[j] else None,
            )
            for j, name in enumerate(self.class_names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All but the single predictions, as JSON takes it; what is not defined or not finite is None."""
        return {
            "num_images": self.num_images,
            "num_correct": self.num_correct,
            "accuracy": self.accuracy,
            "error": self.error,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "class_names": list(self.class_names),
            "per_class": [dict(score) for score in self.per_class],
            "confusion": self.confusion.tolist(),
        }

    def __str__(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % of {self.num_images:,} images right ({self.num_images - self.num_correct} "
            f"wrong, error {100 * self.error:.2f} %), mean loss {self.loss:.4g}"
        )


def evaluate(
    model: Model,
    image_set: ImageSet,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    class_names: Sequence[str] | None = None,
    precision: Precision = "32",
) -> Evaluation:
    """Judge a network on a set of images, each counted once.

    The network is in evaluation mode meanwhile, and afterwards as it was. No random number is drawn.

    Args:
        model: The network.
        image_set: Images and their classes.
        batch_size: Images at a time; it changes only the speed and the memory needed.
        device: Moves the network there first; None leaves it where it is.
        class_names: The name of each class; its number if None.
        precision: ``"32"``, or ``"bf16"``: the network under bfloat16 autocast, its loss in float32.

    Returns:
        Accuracy, error, mean loss, confusion matrix, a table of the classes, and each image's class and lengths. For
        the loss, the decoder is masked by the labels only where the network's source does so at inference too
        (``decoder_mask="label"``), otherwise by the longest capsule; lengths do not depend on it.

    Raises:
        InputError: Images or labels that the network was not built for, not one name for each class, or an option
            out of its range.

    Example:
        >>> evaluate(model, load_dataset("digits").test).accuracy
    """
    names = tuple(class_labels(class_names, model.num_classes))
    check_image_shape(model, image_set.images.shape)
    highest = int(image_set.labels.max())
    if highest >= model.num_classes:
        raise InputError(
            f"a label is {highest}, but the network has {model.num_classes} classes, 0 to {model.num_classes - 1}"
        )
    if device is not None:
        model.to(device)
    loader = BatchLoader(image_set, batch_size, shuffle=False, device=next(model.parameters()).device)
    sums, lengths = _judge(model, loader.batches(0), precision)
    predictions = lengths.argmax(-1).numpy()
    return Evaluation(sums.confusion, sums.loss / sums.num_images, names, predictions, lengths.numpy())


def evaluation_sums(
    model: Model, batches: Iterable[tuple[Shaped[Tensor, "B C H W"], Int[Tensor, "B"]]], *, precision: Precision = "32"
) -> EvaluationSums:
    """Evaluate a share of the images, e.g. one process's: ``Evaluation.from_sums(share_1 + share_2)``.

    Args:
        model: The network; in evaluation mode meanwhile, and afterwards as it was.
        batches: Images (uint8 of 0..255 or floating-point of 0..1) and labels; a batch may be empty.
        precision: See :func:`evaluate`.

    Returns:
        Sums that can be added.

    Raises:
        InputError: Images that the network was not built for, or an unknown precision.
        ValueError: Labels out of range.
    """
    return _judge(model, batches, precision)[0]


def _judge(
    model: Model, batches: Iterable[tuple[Tensor, Tensor]], precision: str
) -> tuple[EvaluationSums, Float[Tensor, "N J"]]:
    """Sums over the batches, and the lengths of their images, on the CPU."""
    if precision not in ("32", "bf16"):
        raise InputError(f'precision must be "32" or "bf16", got {precision!r}')
    device = next(model.parameters()).device
    classes = model.num_classes
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    losses, lengths = [], [torch.empty(0, classes)]
    with inference(model):
        for images, labels in batches:
            if len(labels) == 0:  # a share of a small last batch; the mean of nothing would be NaN
                continue
            images, labels = as_pixels(model, images), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(images, model.decoder_targets(labels))
            losses.append(model.loss(output, images, labels).total * len(labels))
            counts += torch.bincount(labels * classes + output.lengths.argmax(-1), minlength=classes * classes)
            lengths.append(output.lengths.float().cpu())
    loss = float(torch.stack(losses).cpu().double().sum()) if losses else 0.0
    return EvaluationSums(counts.view(classes, classes).cpu().numpy(), loss), torch.cat(lengths)


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
