"""How good a network is on a set of images: accuracy, loss, confusion matrix, a table of the classes.

With P objects in an image, P classes are read off: those of the highest scores. An image is right only if they are
exactly its P classes. The confusion matrix, and with it the table of the classes, counts objects: an object whose class
is among them was given its class; one that was missed was given the class that came in its place (of several missed in
one image, the first label goes with the highest of those scores, and so on). So a row sums to the images with that
class in them, a column to the images that were given it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchcaps.analysis.figures import SMALL, TEXT, TINY, new_figure, shorten
from torchcaps.analysis.inference import BATCH, as_pixels, check_labels, class_labels, classes_of, inference, to_pixels
from torchcaps.analysis.results import MOST_CLASSES, MOST_SHOWN, Scored, Styled, Table, percent
from torchcaps.analysis.targets import TargetEvaluation
from torchcaps.checks import check, checked
from torchcaps.datasets import BatchLoader, ImageSet
from torchcaps.errors import InputError, visible
from torchcaps.models import ModelOutput, Network
from torchcaps.ops.labels import is_correct, match_labels
from torchcaps.tasks import TaskName

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
    """How good a network is on a set of images.

    Args:
        labels: The class of each image, or those of its P objects.
        scores: The class scores of each image: lengths ‖v_j‖ or activations of capsules, or a CNN's probabilities.
        loss: Mean loss of an image, by the network's own loss.
        class_names: The name of each class.
        title: Of which network, on which images.
    """

    labels: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]
    scores: Float[np.ndarray, "N J"]
    loss: float
    class_names: tuple[str, ...]
    title: str = ""
    figure_name: ClassVar[str] = "confusion"
    """Name of the figure in a run folder."""

    @property
    def warning(self) -> str | None:
        """A sentence with the classes that no image of one object was given, although some images are of them."""
        given, there = self.confusion.sum(0), self.confusion.sum(1)
        never = [name for j, name in enumerate(self.class_names) if there[j] and not given[j]]
        if not never or self.objects > 1:
            return None
        advice = "try --class-weights balanced, more steps, or more images of them"
        return f"of {self.num_images:,} test images none was given {', '.join(never)}; {advice}"

    @property
    def num_images(self) -> int:
        """How many images were looked at."""
        return len(self.labels)

    @property
    def objects(self) -> int:
        """P, the objects in an image."""
        return 1 if self.labels.ndim == 1 else self.labels.shape[1]

    @cached_property
    def predictions(self) -> Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]:
        """The class of each image, or, with several objects, those of the highest scores."""
        return classes_of(torch.from_numpy(self.scores), self.objects).numpy()

    @cached_property
    def right(self) -> Bool[np.ndarray, "N"]:
        """Whether each image was given its class, or exactly the classes of all its objects."""
        return is_correct(torch.from_numpy(self.scores), torch.from_numpy(self.labels)).numpy()

    @cached_property
    def confusion(self) -> Int[np.ndarray, "J J"]:
        """How many objects of class (row) were given class (column); see the module's description.

        With one object in an image, these are images.
        """
        true, given = (torch.from_numpy(each) for each in (self.labels, self.predictions))
        if self.objects > 1:
            true = true.gather(1, match_labels(given, true))
        classes = len(self.class_names)
        return (true * classes + given).flatten().bincount(minlength=classes**2).view(classes, classes).numpy()

    @property
    def num_correct(self) -> int:
        """How many images are right."""
        return int(self.right.sum())

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
        if self.objects > 1:
            return None
        score = self.scores.max(1).astype(np.float64)
        bins = (score * BINS).astype(int).clip(0, BINS - 1)
        return float(abs(np.bincount(bins, self.right - score)).sum()) / self.num_images

    @property
    def object_accuracy(self) -> float:
        """Share of the objects that were given their class, 0..1; with one in an image, that of the images."""
        return int(self.confusion.trace()) / int(self.confusion.sum())

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
        """The confusion matrix: true classes down, given ones across.

        What is right (blue, the diagonal) and what is wrong (red) have each their own scale, in percent of the images
        of the true class, so that few errors are seen beside many right ones. Up to 20 classes have the number of
        images in each cell, up to 180 their names at the sides; of more, the axes count the classes.
        """
        import matplotlib
        from matplotlib.colors import ListedColormap

        confusion, classes = self.confusion, len(self.confusion)
        share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        few, right = classes <= MOST_CLASSES, np.eye(classes, dtype=bool)
        cell = min(_NUMBERED if few else _PLAIN, _MOST / classes)
        size = 1.8 + classes * cell
        wrong = self.num_images - self.num_correct
        title = f"{self.title}\n" * bool(self.title) + f"{wrong:,} of {self.num_images:,} images wrong"
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
                axes.text(
                    given, true, str(confusion[true, given]), ha="center", va="center", fontsize=SMALL, color=colour
                )
        if cell >= _NAMED:
            names = [shorten(name, 1.1, SMALL) for name in map(visible, self.class_names)]
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
        return {"": figure}

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


class Collector(ABC):
    """Collects what an evaluation needs of each batch. A task whose scores do not fit into memory has another one."""

    def __init__(self, model: Network, class_names: tuple[str, ...]) -> None:
        self.model, self.class_names = model, class_names
        self._scores: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, output: ModelOutput, targets: Tensor) -> None:
        """Add a batch."""
        self._scores.append(output.scores.float())
        self._targets.append(targets)

    @abstractmethod
    def result(self, loss: float) -> AnyEvaluation:
        """Return the evaluation of all batches; ``loss`` is the mean over the images."""


class ClassCollector(Collector):
    """Collects the scores and labels of the task ``classes``."""

    def result(self, loss: float) -> Evaluation:
        labels, scores = torch.cat(self._targets), torch.cat(self._scores)
        return Evaluation(labels.cpu().numpy(), scores.cpu().numpy(), loss, self.class_names)


class TargetCollector(Collector):
    """Collects the scores and targets of the tasks ``labels`` and ``regression``."""

    def result(self, loss: float) -> TargetEvaluation:
        targets, scores, task = torch.cat(self._targets), torch.cat(self._scores), self.model.task
        accuracy = float(self.model.score(scores, targets).cpu().double().mean())
        return TargetEvaluation(task, targets.cpu().numpy(), scores.cpu().numpy(), loss, accuracy, self.class_names)


AnyEvaluation = Evaluation | TargetEvaluation
COLLECTORS: dict[TaskName, type[Collector]] = {
    "classes": ClassCollector,
    "labels": TargetCollector,
    "regression": TargetCollector,
}
"""The collector of each task."""


@checked
def evaluate(
    model: Network,
    image_set: ImageSet,
    *,
    batch_size: int = BATCH,
    class_names: Sequence[str] | None = None,
    precision: Precision = "32",
) -> AnyEvaluation:
    """Judge a network on a set of images, each counted once. No random number is drawn.

    Returns an :class:`Evaluation`, or a :class:`TargetEvaluation` for the tasks ``labels`` and ``regression``.

    For the loss, the decoder is masked by the labels only where the network's source does so at inference too
    (``decoder_mask="label"``), otherwise by the highest score; scores do not depend on it.

    Args:
        model: The network.
        image_set: Images and their classes; where the network reconstructs several objects, their parts too.
        batch_size: Images at a time; it changes only the speed and the memory needed.
        class_names: The name of each class; its number if None.
        precision: ``"32"``, or ``"bf16"``: the network under bfloat16 autocast, its loss in float32.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import evaluate
        >>> from torchcaps.datasets import load_dataset
        >>> evaluation = evaluate(create_model("compact"), load_dataset("digits").test)
        >>> evaluation.accuracy < 0.5, evaluation.confusion.shape  # nothing is learned yet
        (True, (10, 10))
    """
    check("precision", precision, Precision)
    names, device = tuple(class_labels(class_names, model.num_classes)), next(model.parameters()).device
    check_labels(model, image_set.labels, len(image_set))
    losses, collected = list[Tensor](), COLLECTORS[model.task](model, names)
    with inference(model):
        for batch in BatchLoader(image_set, batch_size, shuffle=False, device=device).batches(0):
            images, wanted = as_pixels(model, batch.images), batch.labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = model(images, model.decoder_targets(wanted))
            drawn = images
            if model.objects > 1 and model.decoder is not None:
                if batch.parts is None:
                    raise InputError(
                        f"the network reconstructs each of {model.objects} objects by itself, so its images need "
                        "parts, each object alone on the same canvas, but these have none"
                    )
                drawn = to_pixels(model, batch.parts)
            losses.append(model.loss(output, drawn, wanted).total * len(wanted))
            collected.add(output, wanted)
    loss = float(torch.stack(losses).cpu().double().sum()) / len(image_set)
    return collected.result(loss)
