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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.figures import SMALL, TEXT, TINY, new_figure, shorten
from torchcaps.analysis.inference import BATCH, as_pixels, check_labels, class_labels, classes_of, inference, to_pixels
from torchcaps.analysis.results import MOST_CLASSES, MOST_SHOWN, Scored, Styled, Table, percent
from torchcaps.analysis.targets import TargetEvaluation
from torchcaps.checks import check
from torchcaps.datasets import Batch, BatchLoader, ImageSet
from torchcaps.errors import InputError, visible
from torchcaps.models import Network
from torchcaps.models.output import is_correct, order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Precision = Literal["32", "bf16"]
"""float32, or bfloat16 where autocast takes it."""

BINS = 15
"""Of scores, 0..1, for the calibration error."""
# Inches: a cell with a number in it, without, the least one that a name fits beside, and all cells together at most.
_NUMBERED, _PLAIN, _NAMED, _MOST = 0.42, 0.15, 0.1, 18.0


@dataclass(frozen=True, eq=False)
class Evaluation(Scored):
    """How good a network is on a set of images. The evaluations of a set's shares add to that of the set.

    Args:
        confusion: How many objects of class (row) were given class (column); see the module's description. With one
            object in an image, these are images.
        total_loss: The sum of the images' losses, by the network's own loss.
        class_names: The name of each class.
        objects: P, the objects in an image.
        right: With several objects, how many images were given exactly their classes; with one, None.
        scores: The class scores of each image: lengths ‖v_j‖ or activations of capsules, or a CNN's probabilities; None
            of a sum.
        title: Of which network, on which images.
        bins: Of the images whose highest score lies in each of 15 equal parts of 0..1: how many, the sum of these
            scores, and how many are right; None where an image has several objects.
    """

    confusion: Int[np.ndarray, "J J"]
    total_loss: float
    class_names: tuple[str, ...]
    objects: int = 1
    right: int | None = None
    scores: Float[np.ndarray, "N J"] | None = None
    title: str = ""
    bins: Float[np.ndarray, "15 3"] | None = None

    def __add__(self, other: Evaluation) -> Evaluation:
        right = None if self.right is None or other.right is None else self.right + other.right
        loss = self.total_loss + other.total_loss
        bins = None if self.bins is None or other.bins is None else self.bins + other.bins
        return Evaluation(self.confusion + other.confusion, loss, self.class_names, self.objects, right, bins=bins)

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
        """Share of the correctly classified images, 0..1."""
        return self.num_correct / self.num_images

    @property
    def error(self) -> float:
        """Share of the wrongly classified images, 0..1."""
        return (self.num_images - self.num_correct) / self.num_images

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the recalls of the classes that there are, 0..1: as if there were as many images of each."""
        images = self.confusion.sum(1)
        return float((self.confusion.diagonal() / images.clip(1))[images > 0].mean())

    @property
    def calibration_error(self) -> float | None:
        """How far scores are from the share that is right, 0..1; None where an image has several objects.

            Σ_b |right_b − Σ scores_b| / N

        over 15 bins b of the highest score, which is taken as the probability of its class. Lengths are not trained to
        be probabilities.

        Source: Guo, Pleiss, Sun, Weinberger 2017 (arXiv:1706.04599), equation 3.
        """
        return None if self.bins is None else float(abs(self.bins[:, 2] - self.bins[:, 1]).sum()) / self.num_images

    @property
    def object_accuracy(self) -> float:
        """Share of the objects that were given their class, 0..1; with one in an image, that of the images."""
        return int(self.confusion.trace()) / int(self.confusion.sum())

    @property
    def loss(self) -> float:
        """Mean loss of an image."""
        return self.total_loss / self.num_images

    @property
    def predictions(self) -> Int[np.ndarray, "N"] | Int[np.ndarray, "N P"] | None:
        """The class of each image, or, with several objects, those of the highest scores; None of a sum."""
        return None if self.scores is None else classes_of(torch.from_numpy(self.scores), self.objects).numpy()

    @property
    def per_class(self) -> list[dict[str, Any]]:
        """Of each class: its ``name``, ``images`` with it, ``precision``, ``recall`` and ``f1``, None where undefined.

        Precision is the share of the images given the class that have it, recall the share of the images with the class
        that were given it, F1 their harmonic mean, 2·TP / (2·TP + FP + FN).
        """

        def share(part: int, whole: int) -> float | None:
            return float(part / whole) if whole else None

        correct, images, given = self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0)
        return [
            {
                "name": name,
                "images": int(images[j]),
                "precision": share(correct[j], given[j]),
                "recall": share(correct[j], images[j]),
                "f1": share(2 * correct[j], images[j] + given[j]) if images[j] else None,
            }
            for j, name in enumerate(self.class_names)
        ]

    def to_dict(self) -> dict[str, Any]:
        names = ("num_images", "num_correct", "accuracy", "balanced_accuracy", "error", "calibration_error", "objects")
        return {name: getattr(self, name) for name in (*names, "object_accuracy")} | {
            "loss": self.loss if math.isfinite(self.loss) else None,
            "class_names": list(self.class_names),
            "per_class": self.per_class,
            "confusion": self.confusion.tolist(),
        }

    def tables(self) -> list[Table]:
        right, images, scores = self.num_correct, self.num_images, self.per_class
        rows = [
            ["Accuracy", f"{percent(self.accuracy)}  ({right:,} of {images:,} images right)"],
            ["Balanced", f"{percent(self.balanced_accuracy)}  (the mean of the recalls)"],
            ["Error", f"{percent(self.error)}  ({images - right:,} wrong)"],
            ["Loss", f"{self.loss:.4f}"],
        ]
        if self.calibration_error is not None:
            off = percent(self.calibration_error)
            rows.append(["ECE", f"{off}  (calibration error: scores against the share that is right)"])
        if self.objects > 1:
            found, objects = int(self.confusion.trace()), int(self.confusion.sum())
            words = f"{found:,} of {objects:,} found, {self.objects} an image"
            rows.insert(3, ["Objects", f"{percent(self.object_accuracy)}  ({words})"])
        title, confusion = "", self._confusion
        if len(scores) > MOST_CLASSES:
            scores = sorted(scores, key=lambda score: 1.0 if score["f1"] is None else score["f1"])[:MOST_SHOWN]
            title = f"The {len(scores)} worst of {len(self.class_names)} classes (--json has all)"
            confusion = self._most_confused
        per_class = [
            [each["name"], f"{each['images']:,}", *map(percent, (each["precision"], each["recall"], each["f1"]))]
            for each in scores
        ]
        columns = ("class", "images", "precision", "recall", "F1")
        return [Table(rows, title=self.title), Table(per_class, columns, title), *confusion()]

    def figures(self) -> dict[str, Figure]:
        return {"": figure_confusion(self)}

    def _confusion(self) -> list[Table]:
        names = list(self.class_names)
        short = max(map(len, names)) <= 3  # else the columns are headed by the numbers of the classes
        rows: list[list[str | Styled]] = []
        for i, name in enumerate(names if short else [f"{i} {name}" for i, name in enumerate(names)]):
            styles = ["bold green" if i == j else "bold red" for j in range(len(names))]
            counts = zip(self.confusion[i].tolist(), styles, strict=True)
            rows.append([name, *(Styled(str(n), style) if n else Styled("·", "dim") for n, style in counts)])
        counted = "Confusion" if self.objects == 1 else "Confusion (objects)"
        columns = ("true", *(names if short else map(str, range(len(names)))))
        return [Table(rows, columns, f"{counted}: true classes down, predicted ones across")]

    def _most_confused(self) -> list[Table]:
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        most = wrong.argsort(axis=None, kind="stable")[::-1][:MOST_SHOWN].tolist()
        places, names = [divmod(place, len(wrong)) for place in most], self.class_names
        rows = [[names[i], names[j], f"{int(wrong[i, j]):,}"] for i, j in places if wrong[i, j]]
        columns = ("true", "predicted", "images" if self.objects == 1 else "objects")
        return [Table(rows, columns, "Most frequent confusions (--json has all)", 2)] if rows else []

    def __str__(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % of {self.num_images:,} images right ({self.num_images - self.num_correct} "
            f"wrong, error {100 * self.error:.2f} %), mean loss {self.loss:.4g}"
        )


def evaluate(
    model: Network,
    image_set: ImageSet,
    *,
    batch_size: int = BATCH,
    class_names: Sequence[str] | None = None,
    precision: Precision = "32",
) -> Evaluation | TargetEvaluation:
    """Judge a network on a set of images, each counted once. No random number is drawn.

    Of the tasks ``labels`` and ``regression`` a :class:`TargetEvaluation` says the result.

    For the loss, the decoder is masked by the labels only where the network's source does so at inference too
    (``decoder_mask="label"``), otherwise by the highest score; scores do not depend on it.

    Args:
        model: The network.
        image_set: Images and their classes; where the network reconstructs several objects, their parts too.
        batch_size: Images at a time; it changes only the speed and the memory needed.
        class_names: The name of each class; its number if None.
        precision: ``"32"``, or ``"bf16"``: the network under bfloat16 autocast, its loss in float32.

    Example:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import evaluate
        >>> from torchcaps.datasets import load_dataset
        >>> evaluation = evaluate(create_model("compact"), load_dataset("digits").test)
        >>> evaluation.accuracy < 0.5, evaluation.confusion.shape  # nothing is learned yet
        (True, (10, 10))
    """
    loader = BatchLoader(image_set, batch_size, shuffle=False, device=next(model.parameters()).device)
    if model.task != "classes":
        return _evaluate_targets(model, loader.batches(0), class_names, precision)
    check_labels(model, image_set.labels, len(image_set))
    return evaluate_batches(model, loader.batches(0), class_names=class_names, precision=precision)


def _evaluate_targets(
    model: Network, batches: Iterable[Batch], class_names: Sequence[str] | None, precision: Precision
) -> TargetEvaluation:
    check("precision", precision, Precision)
    device, task = next(model.parameters()).device, model.task
    assert task != "classes"
    loss, right, scores, targets = 0.0, 0.0, list[Tensor](), list[Tensor]()
    with inference(model):
        for batch in batches:
            images, wanted = as_pixels(model, batch.images), batch.labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(images, model.decoder_targets(wanted))
            loss += float(model.loss(output, images, wanted).total) * len(wanted)
            right += float(model.right(output.scores, wanted).sum())
            scores.append(output.scores.float().cpu())
            targets.append(wanted.cpu())
    found, known = torch.cat(scores).numpy(), torch.cat(targets).numpy()
    names = tuple(class_labels(class_names, model.num_classes))
    return TargetEvaluation(task, known, found, loss / len(known), right / len(known), names)


def evaluate_batches(
    model: Network,
    batches: Iterable[Batch | tuple[Shaped[Tensor, "B C H W"], Int[Tensor, "B"]]],
    *,
    class_names: Sequence[str] | None = None,
    precision: Precision = "32",
) -> Evaluation:
    """Judge a network on a share of the images, e.g. one process's; shares may be empty, and are added.

    A batch is images, labels, and the parts where an image has several objects. The other arguments are those of
    :func:`evaluate`.
    """
    check("precision", precision, Precision)
    device = next(model.parameters()).device
    classes, objects = model.num_classes, model.objects
    names = tuple(class_labels(class_names, classes))
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    losses, scores = list[Tensor](), [torch.empty(0, classes)]
    with inference(model):
        for images, labels, *parts in batches:
            if len(labels) == 0:  # a share of a small last batch; the mean of nothing would be NaN
                continue
            images, labels = as_pixels(model, images), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(images, model.decoder_targets(labels))
            drawn = images
            if objects > 1 and model.decoder is not None:
                if not parts or parts[0] is None:
                    raise InputError(
                        f"the network reconstructs each of {objects} objects by itself, so its images need parts, "
                        "each object alone on the same canvas, but these have none"
                    )
                drawn = to_pixels(model, parts[0])
            losses.append(model.loss(output, drawn, labels).total * len(labels))
            given = classes_of(output.scores, objects)
            true = labels if objects == 1 else labels.gather(1, order(given, labels))
            counts += torch.bincount((true * classes + given).flatten(), minlength=classes * classes)
            correct = is_correct(output.scores, labels)
            right += correct.sum()
            scores.append(output.scores.float().cpu())
            highest = scores[-1].amax(1).double()
            entries = torch.stack([torch.ones_like(highest), highest, correct.cpu().double()], 1)
            bins.index_add_(0, (highest * BINS).long().clamp(0, BINS - 1), entries)
    loss = float(torch.stack(losses).cpu().double().sum()) if losses else 0.0
    confusion = counts.view(classes, classes).cpu().numpy()
    found = None if objects == 1 else int(right)
    sums = bins.numpy() if objects == 1 else None
    return Evaluation(confusion, loss, names, objects, found, torch.cat(scores).numpy(), bins=sums)


def figure_confusion(evaluation: Evaluation) -> Figure:
    """The confusion matrix: true classes down, given ones across.

    What is right (blue, the diagonal) and what is wrong (red) have each their own scale, in percent of the images of
    the true class, so that few errors are seen beside many right ones. Up to 20 classes have the number of images in
    each cell, up to 180 their names at the sides; of more, the axes count the classes. The figure is 20 inches wide
    at most.

    Args:
        evaluation: From :func:`~torchcaps.analysis.evaluate`.
    """
    import matplotlib
    from matplotlib.colors import ListedColormap

    confusion = evaluation.confusion
    classes = len(confusion)
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    few, right = classes <= MOST_CLASSES, np.eye(classes, dtype=bool)
    cell = min(_NUMBERED if few else _PLAIN, _MOST / classes)
    size = 1.8 + classes * cell
    wrong = evaluation.num_images - evaluation.num_correct
    title = f"{evaluation.title}\n" * bool(evaluation.title) + f"{wrong:,} of {evaluation.num_images:,} images wrong"
    figure = new_figure(size + 1.8, size, title)
    axes = figure.subplots()
    scales = (
        ("wrong", ~right & (confusion > 0), "Reds", float(np.where(right, 0, share).max())),
        ("right", right & (confusion.sum(1) > 0), "Blues", 100.0),  # the last bar is the nearest one
    )
    for name, cells, colours, highest in scales:
        if not cells.any():
            continue
        # without the ends of the colour map: even few stand out from white, and many from black
        middle = ListedColormap(matplotlib.colormaps[colours](np.linspace(0.15, 0.9, 256)))
        masked = np.ma.masked_where(~cells, share)  # smoothing would mix a cell with the black of masked ones
        shown = axes.imshow(masked, cmap=middle, vmin=0, vmax=highest, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label(f"{name}, % of the true class", fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
        bar.outline.set_visible(False)
        for true, given in np.argwhere(cells & (confusion > 0)) if few else ():
            colour = "white" if share[true, given] > 0.6 * highest else "black"
            axes.text(given, true, str(confusion[true, given]), ha="center", va="center", fontsize=SMALL, color=colour)
    if cell >= _NAMED:
        names = [shorten(name, 1.1, SMALL) for name in map(visible, evaluation.class_names)]
        upright = few and max(map(len, names)) <= 2
        style: dict[str, Any] = {"fontsize": SMALL if few else TINY, "parse_math": False}  # names are no formulas
        axes.set_xticks(range(classes), names, rotation=0 if upright else 90, **style)
        axes.set_yticks(range(classes), names, **style)
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel("class given", fontsize=TEXT)
    axes.set_ylabel("true class", fontsize=TEXT)
    return figure
