"""How good a network is on a set of images: accuracy, loss, confusion matrix, a table of the classes.

All of it follows from sums, the confusion counts and the loss, which can be taken over any share of the images and
added: over batches, and over processes.

With P objects in an image, P classes are read off: those of the highest scores. An image is right only if they are
exactly its P classes. The confusion matrix, and with it the table of the classes, counts objects: an object whose class
is among them was given its class; one that was missed was given the class that came in its place (of several missed in
one image, the first label goes with the highest of those scores, and so on). So a row sums to the images with that
class in them, a column to the images that were given it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.figures import SMALL, TEXT, TINY, new_figure, shorten
from torchcaps.analysis.inference import (
    as_pixels,
    check_labels,
    class_labels,
    classes_of,
    inference,
    to_pixels,
)
from torchcaps.analysis.results import MOST_CLASSES, MOST_SHOWN, Scored, Styled, Table, percent
from torchcaps.checks import check
from torchcaps.datasets import Batch, BatchLoader, ImageSet
from torchcaps.errors import InputError, visible
from torchcaps.models import Network
from torchcaps.models.output import is_correct, order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

Precision = Literal["32", "bf16"]
"""float32, or bfloat16 where autocast takes it."""

# Inches: a cell with a number in it, without, the least one that a name fits beside, and all cells together at most.
_NUMBERED, _PLAIN, _NAMED, _MOST = 0.42, 0.15, 0.1, 18.0


class ClassScore(TypedDict):
    """How good a network is on one class; what is not defined is None."""

    name: str
    images: int
    """How many images are of this class, or have an object of it."""
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
        confusion: As for :class:`Evaluation`.
        loss: The sum of the images' losses.
        objects: As for :class:`Evaluation`.
        right: As for :class:`Evaluation`.
    """

    confusion: Int[np.ndarray, "J J"]
    loss: float
    objects: int = 1
    right: int | None = None

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        right = None if self.right is None or other.right is None else self.right + other.right
        return EvaluationSums(self.confusion + other.confusion, self.loss + other.loss, self.objects, right)


@dataclass(frozen=True, eq=False)
class Evaluation(Scored):
    """How good a network is on a set of images.

    Args:
        confusion: How many objects of class (row) were given class (column); see the module's description. With one
            object in an image, these are images.
        loss: Mean loss of an image, by the network's own loss.
        class_names: The name of each class.
        predictions: The class given to each image, or, with several objects, the classes of the highest scores, the
            highest first; None where only sums are known.
        scores: The class scores of each image: lengths ‖v_j‖ or activations of capsules, or a CNN's probabilities; None
            where only sums are known.
        objects: P, the objects in an image.
        right: With several objects, how many images were given exactly their classes; with one, None.
        title: Of which network, on which images.

    Raises:
        InputError: There is no image, or not one name for each class.
    """

    confusion: Int[np.ndarray, "J J"]
    loss: float
    class_names: tuple[str, ...]
    predictions: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"] | None = None
    scores: Float[np.ndarray, "N J"] | None = None
    objects: int = 1
    right: int | None = None
    title: str = ""

    def __post_init__(self) -> None:
        class_labels(self.class_names, len(self.confusion))
        if self.num_images == 0:
            raise InputError("there must be at least one image to evaluate on, got none")

    @classmethod
    def from_sums(cls, sums: EvaluationSums, class_names: Sequence[str] | None = None) -> Evaluation:
        """The evaluation that sums over all images, each counted once, stand for; errors as for the class."""
        names = tuple(class_labels(class_names, len(sums.confusion)))
        images = int(sums.confusion.sum()) // sums.objects
        return cls(sums.confusion, sums.loss / max(images, 1), names, objects=sums.objects, right=sums.right)

    @property
    def num_images(self) -> int:
        """How many images were looked at."""
        return int(self.confusion.sum()) // self.objects

    @property
    def num_correct(self) -> int:
        """How many of them were given their class, or exactly the classes of all their objects."""
        return int(self.confusion.trace()) if self.right is None else self.right

    @property
    def accuracy(self) -> float:
        """Share of the images that were given their class, or exactly the classes of all their objects, 0..1."""
        return self.num_correct / self.num_images

    @property
    def error(self) -> float:
        """Share of the images that were given another class, 0..1."""
        return (self.num_images - self.num_correct) / self.num_images

    @property
    def object_accuracy(self) -> float:
        """Share of the objects that were given their class, 0..1; with one in an image, that of the images."""
        return int(self.confusion.trace()) / int(self.confusion.sum())

    @property
    def per_class(self) -> list[ClassScore]:
        """Images with the class in them, precision, recall and F1 of each class."""
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
            "objects": self.objects,
            "object_accuracy": self.object_accuracy,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "class_names": list(self.class_names),
            "per_class": [dict(score) for score in self.per_class],
            "confusion": self.confusion.tolist(),
        }

    def tables(self) -> list[Table]:
        """Accuracy, error and loss; a row for each class, or the worst of many; and which are taken for which."""
        right, images, scores = self.num_correct, self.num_images, self.per_class
        rows = [
            ["Accuracy", f"{percent(self.accuracy)}  ({right:,} of {images:,} images right)"],
            ["Error", f"{percent(self.error)}  ({images - right:,} wrong)"],
            ["Loss", f"{self.loss:.4f}"],
        ]
        if self.objects > 1:
            found, objects = int(self.confusion.trace()), int(self.confusion.sum())
            words = f"{found:,} of {objects:,} found, {self.objects} an image"
            rows.insert(2, ["Objects", f"{percent(self.object_accuracy)}  ({words})"])
        title, is_short = "", len(scores) <= MOST_CLASSES
        if not is_short:
            scores = sorted(scores, key=lambda score: 1.0 if score["f1"] is None else score["f1"])[:MOST_SHOWN]
            title = f"The {len(scores)} worst of {len(self.class_names)} classes (--json has all)"
        per_class = [
            [each["name"], f"{each['images']:,}", *map(percent, (each["precision"], each["recall"], each["f1"]))]
            for each in scores
        ]
        found_tables = [Table(rows, title=self.title)]
        found_tables.append(Table(per_class, ("class", "images", "precision", "recall", "F1"), title))
        if is_short:
            found_tables.append(self._confusion())
        elif right < images:
            found_tables.append(self._most_confused())
        return found_tables

    def figures(self) -> dict[str, Figure]:
        """The confusion matrix, see :func:`figure_confusion`."""
        return {"": figure_confusion(self)}

    def _confusion(self) -> Table:
        names, rows = self.class_names, list[list[str | Styled]]()
        short = all(len(name) <= 3 for name in names)
        for i, name in enumerate(names):
            cells: list[str | Styled] = []
            for j, number in enumerate(self.confusion[i].tolist()):
                style = "dim" if number == 0 else "bold green" if i == j else "bold red"
                cells.append(Styled(str(number) if number else "·", style))
            rows.append([name if short else f"{i} {name}", *cells])
        counted = "Confusion" if self.objects == 1 else "Confusion (objects)"
        columns = ("true", *(names if short else map(str, range(len(names)))))
        return Table(rows, columns, f"{counted}: true classes down, predicted ones across")

    def _most_confused(self) -> Table:
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        places = (divmod(place, len(wrong)) for place in wrong.argsort(axis=None, kind="stable")[::-1].tolist())
        names = self.class_names
        rows = [[names[i], names[j], f"{int(wrong[i, j]):,}"] for i, j in itertools.islice(places, MOST_SHOWN)]
        columns = ("true", "predicted", "images" if self.objects == 1 else "objects")
        return Table([row for row in rows if row[2] != "0"], columns, "Most frequent confusions (--json has all)", 2)

    def __str__(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % of {self.num_images:,} images right ({self.num_images - self.num_correct} "
            f"wrong, error {100 * self.error:.2f} %), mean loss {self.loss:.4g}"
        )


def evaluate(
    model: Network,
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
        Accuracy, error, mean loss, confusion matrix, a table of the classes, and each image's class (or classes) and
        scores. For the loss, the decoder is masked by the labels only where the network's source does so at
        inference too (``decoder_mask="label"``), otherwise by the highest score; scores do not depend on it.

    Raises:
        InputError: Images or labels that the network was not built for, several objects in an image without their
            parts where the network reconstructs them, not one name for each class, or an option out of its range.

    Example:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import evaluate
        >>> from torchcaps.datasets import load_dataset
        >>> evaluation = evaluate(create_model("compact"), load_dataset("digits").test)
        >>> evaluation.accuracy < 0.5, evaluation.confusion.shape  # nothing is learned yet
        (True, (10, 10))
    """
    names = class_labels(class_names, model.num_classes)
    check_labels(model, image_set.labels, len(image_set))
    if device is not None:
        model.to(device)
    loader = BatchLoader(image_set, batch_size, shuffle=False, device=next(model.parameters()).device)
    sums, scores = _judge(model, loader.batches(0), precision)
    predictions = classes_of(scores, sums.objects).numpy()
    return replace(Evaluation.from_sums(sums, names), predictions=predictions, scores=scores.numpy())


def evaluation_sums(
    model: Network,
    batches: Iterable[Batch | tuple[Shaped[Tensor, "B C H W"], Int[Tensor, "B"]]],
    *,
    precision: Precision = "32",
) -> EvaluationSums:
    """Evaluate a share of the images, e.g. one process's: ``Evaluation.from_sums(share_1 + share_2)``.

    Args:
        model: As for :func:`evaluate`.
        batches: Images (uint8 of 0..255 or floating-point of 0..1), labels, and the parts where an image has several
            objects; a batch may be empty.
        precision: As for :func:`evaluate`.

    Raises:
        InputError: Images that the network was not built for, several objects in an image without their parts where
            the network reconstructs them, or an unknown precision.
        ValueError: Labels that do not fit.
    """
    return _judge(model, batches, precision)[0]


def _judge(
    model: Network, batches: Iterable[Batch | tuple[Tensor, Tensor]], precision: str
) -> tuple[EvaluationSums, Float[Tensor, "N J"]]:
    """Sums over the batches, and the scores of their images, on the CPU."""
    check("precision", precision, Precision)
    device = next(model.parameters()).device
    classes, objects = model.num_classes, model.objects
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    losses, scores = [], [torch.empty(0, classes)]
    with inference(model):
        for images, labels, *more in batches:
            if len(labels) == 0:  # a share of a small last batch; the mean of nothing would be NaN
                continue
            images, labels = as_pixels(model, images), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(images, model.decoder_targets(labels))
            drawn = images if objects == 1 else _parts(model, images, more)
            losses.append(model.loss(output, drawn, labels).total * len(labels))
            given = classes_of(output.scores, objects)
            counts += _confusion(given, labels, classes)
            right += is_correct(output.scores, labels).sum()
            scores.append(output.scores.float().cpu())
    loss = float(torch.stack(losses).cpu().double().sum()) if losses else 0.0
    confusion = counts.view(classes, classes).cpu().numpy()
    return EvaluationSums(confusion, loss, objects, None if objects == 1 else int(right)), torch.cat(scores)


def _parts(model: Network, images: Float[Tensor, "B C H W"], more: Sequence[Tensor | None]) -> Float[Tensor, "..."]:
    """The objects of images, each alone, where the network's loss looks at them."""
    if model.decoder is None:
        return images
    if not more or more[0] is None:
        raise InputError(
            f"the network reconstructs each of {model.objects} objects by itself, so its images need parts, "
            "each object alone on the same canvas, but these have none"
        )
    return to_pixels(model, more[0])


def _confusion(given: Tensor, labels: Tensor, classes: int) -> Int[Tensor, "n"]:
    """The J·J counts of a batch."""
    if labels.ndim == 2:
        labels = labels.gather(1, order(given, labels))
    return torch.bincount((labels * classes + given).flatten(), minlength=classes * classes)


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def figure_confusion(evaluation: Evaluation, *, title: str | None = None) -> Figure:
    """The confusion matrix: true classes down, given ones across.

    What is right (blue, the diagonal) and what is wrong (red) have each their own scale, in percent of the images of
    the true class, so that few errors are seen beside many right ones. Up to 20 classes have the number of images in
    each cell, up to 180 their names at the sides; of more, the axes count the classes. The figure is 20 inches wide
    at most.

    Args:
        evaluation: From :func:`~torchcaps.analysis.evaluate`.
        title: Above the figure; by default how many images are wrong.
    """
    confusion = evaluation.confusion
    classes = len(confusion)
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    right = np.eye(classes, dtype=bool)
    numbers = classes <= MOST_CLASSES
    cell = min(_NUMBERED if numbers else _PLAIN, _MOST / classes)
    size = 1.8 + classes * cell
    wrong = evaluation.num_images - evaluation.num_correct
    figure = new_figure(size + 1.8, size, title or f"{wrong:,} of {evaluation.num_images:,} images wrong")
    axes = figure.subplots()

    scales = {"right": (right & (confusion.sum(1) > 0), "Blues", 100.0)}
    if worst := float(np.where(right, 0, share).max()):
        scales = {"wrong": (~right & (confusion > 0), "Reds", worst), **scales}  # the last bar is the nearest one
    for name, (cells, colours, highest) in scales.items():
        masked = np.ma.masked_where(~cells, share)  # smoothing would mix a cell with the black of masked ones
        shown = axes.imshow(masked, cmap=_middle_of(colours), vmin=0, vmax=highest, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label(f"{name}, % of the true class", fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
        bar.outline.set_visible(False)
        for true, given in np.argwhere(cells & (confusion > 0)) if numbers else ():
            colour = "white" if share[true, given] > 0.6 * highest else "black"
            axes.text(given, true, str(confusion[true, given]), ha="center", va="center", fontsize=SMALL, color=colour)

    if cell >= _NAMED:
        _name_cells(axes, [shorten(name, 1.1, SMALL) for name in map(visible, evaluation.class_names)], large=numbers)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel("class given", fontsize=TEXT)
    axes.set_ylabel("true class", fontsize=TEXT)
    return figure


def _name_cells(axes: Axes, names: list[str], *, large: bool) -> None:
    """The classes' names at both sides, and a grid around the cells."""
    upright = max(map(len, names)) <= 2 and large
    style: dict[str, Any] = {"fontsize": SMALL if large else TINY, "parse_math": False}  # names are no formulas
    places, edges = range(len(names)), np.arange(len(names) + 1) - 0.5
    axes.set_xticks(places, names, rotation=0 if upright else 90, **style)
    axes.set_yticks(places, names, **style)
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.6)


def _middle_of(colours: str) -> ListedColormap:
    """A colour map of matplotlib without its ends: even few stand out from white, and many from black."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps[colours](np.linspace(0.15, 0.9, 256)))
