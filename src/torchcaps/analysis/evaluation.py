"""Evaluate a network on a set of images: accuracy, loss, confusion matrix, a table of the classes.

With P objects in an image, the network predicts the P classes with the highest scores. An image is correct only if
these are exactly its P classes. The confusion matrix and the table of the classes count objects. An object whose class
is predicted counts as correct. A missed object is paired with a wrongly predicted class: the first missed label with
the wrong class of the highest score, and so on. So a row sums to the images that contain the class, and a column to the
images for which it is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchcaps.analysis.certainty import (
    MAP_WORDS,
    NOT_MEASURED,
    OVER_WORDS,
    Certainty,
    CoverageOver,
    calibration_error,
)
from torchcaps.analysis.collector import NEEDS_CLASSES, Answer, ScoreCollector, TaskEvaluation, collector_of
from torchcaps.analysis.confusion import figure_confusion, kappas
from torchcaps.analysis.inference import (
    BATCH,
    check_images,
    check_labels,
    class_labels,
    inference,
    join_names,
    to_pixels,
)
from torchcaps.analysis.maps import figure_map
from torchcaps.analysis.results import MAX_CLASSES, MAX_SHOWN, Scored, Styled, Table, percent
from torchcaps.checks import check, checked
from torchcaps.datasets import BatchLoader, ImageSet
from torchcaps.datasets.splits import PLACE
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.ops.labels import match_labels
from torchcaps.tasks import Task, find_task, task_of
from torchcaps.words import counted, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Precision = Literal["32", "bf16"]
"""float32, or bfloat16 where autocast takes it."""


@dataclass(frozen=True, eq=False)
class Evaluation(Scored, TaskEvaluation):
    """Results of a network on a set of images with classes.

    Args:
        labels: Class of each image, or classes of its P objects.
        scores: Class scores of each image: lengths ‖v_j‖ or activations of capsules, or a CNN's probabilities.
        loss: Mean loss per image, by the network's own loss.
        class_names: Name of each class.
        title: Network and images.
        places: Row and column of each pixel of a scene; None for other images.
        records: Evaluation of one answer for each record; None without records.
        certainty: Probabilities and sets of classes, measured on validation images; None: not measured.
        coverage: Share of the images whose set of classes shall hold the true class; None: no sets.
        over: Images that the coverage holds for.
    """

    labels: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]
    scores: Float[np.ndarray, "N J"]
    loss: float
    class_names: tuple[str, ...]
    title: str = ""
    places: Int[np.ndarray, "N 2"] | None = None
    records: Evaluation | None = None
    certainty: Certainty | None = None
    coverage: float | None = None
    over: CoverageOver = "all"
    figure_name: ClassVar[str] = "confusion"
    """Name of the figure in a run folder."""
    power: ClassVar[int] = 0
    """Weight |i − j|^power of a confusion of the classes i and j in :attr:`kappa`; 0: all confusions count the same."""

    @property
    def warning(self) -> str | None:
        """Name the classes that are never predicted although some images have them; None if there are none."""
        predicted, present = self.confusion.sum(0), self.confusion.sum(1)
        never = [name for j, name in enumerate(self.class_names) if present[j] and not predicted[j]]
        if not never or self.objects > 1:
            return None
        advice = "try --class-weights balanced, more steps, or more images of these classes"
        return f"never predicted for {counted(self.num_images, 'test image')}: {', '.join(never)}; {advice}"

    @property
    def num_images(self) -> int:
        return len(self.labels)

    @property
    def objects(self) -> int:
        """Number of objects in an image (P)."""
        return 1 if self.labels.ndim == 1 else self.labels.shape[1]

    @property
    def task(self) -> Task:
        """Task of the network."""
        return find_task(None, self.objects)

    @cached_property
    def predictions(self) -> Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]:
        """Predicted class of each image, or with P objects the P classes with the highest scores."""
        predicted: np.ndarray = self.task.predict_classes(self.scores)
        return predicted

    @cached_property
    def right(self) -> Bool[np.ndarray, "N"]:
        """True for images whose class is predicted, or exactly the classes of all their objects."""
        scores, labels = torch.from_numpy(self.scores), torch.from_numpy(self.labels)
        return self.task.score(scores, labels).bool().numpy()

    @cached_property
    def confusion(self) -> Int[np.ndarray, "J J"]:
        """Number of objects of one class (row) that were predicted as another (column); see the top of this file.

        With one object in an image, it counts images.
        """
        true, predicted = (torch.from_numpy(each) for each in (self.labels, self.predictions))
        if self.objects > 1:
            true = true.gather(1, match_labels(predicted, true))
        classes = len(self.class_names)
        return (true * classes + predicted).flatten().bincount(minlength=classes**2).view(classes, classes).numpy()

    @property
    def num_correct(self) -> int:
        """Number of correctly classified images."""
        return int(self.right.sum())

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, 0..1."""
        return self.num_correct / self.num_images

    @property
    def error(self) -> float:
        """Share of wrongly classified images, 0..1."""
        return (self.num_images - self.num_correct) / self.num_images

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have images, 0..1: each class counts the same."""
        images = self.confusion.sum(1)
        return float((self.confusion.diagonal() / images.clip(1))[images > 0].mean())

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa, the agreement beyond chance: 1 at best, 0 for chance. None for several objects, or undefined.

            1 − Σ_ij w_ij O_ij / Σ_ij w_ij E_ij

        O is the confusion matrix, E the one of independent labels and predictions with the same sums.

        Source: Cohen 1968, "Weighted kappa"; scikit-learn's ``cohen_kappa_score`` has the same definition.
        """
        value = float(kappas(self.confusion, self.power))
        return value if self.objects == 1 and math.isfinite(value) else None

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error, 0..1; None if an image has several objects.

            Σ_b |correct_b − Σ scores_b| / N

        over 15 bins b of the highest score, where correct_b is the number of correct images in the bin. The highest
        score is taken as the probability of its class, although lengths are not trained to be probabilities.

        Source: Guo, Pleiss, Sun, Weinberger 2017 (arXiv:1706.04599), equation 3.
        """
        if self.objects > 1:
            return None
        answered = np.take_along_axis(self.scores, self.predictions[:, None], 1)[:, 0]
        return calibration_error(answered, self.right)

    @property
    def calibration_error_after(self) -> float | None:
        """Calibration error of the probabilities of :attr:`certainty`; None without them."""
        if self.certainty is None or self.objects > 1:
            return None
        return calibration_error(self.certainty.probabilities(self.scores, self.predictions), self.right)

    @cached_property
    def sets(self) -> Bool[np.ndarray, "N J"] | None:
        """True for the classes in the set of each image; None without a coverage."""
        if self.certainty is None or self.coverage is None:
            return None
        return self.certainty.sets(self.scores, self.coverage, self.over)

    def with_certainty(self, certainty: Certainty | None, coverage: float | None, over: CoverageOver) -> Self:
        if coverage is not None and self.objects > 1:
            raise InputError(f"--coverage {NEEDS_CLASSES}")
        if coverage is not None and certainty is None:
            raise InputError(NOT_MEASURED)
        return replace(self, certainty=certainty, coverage=coverage, over=over)

    def answers(self) -> Iterator[Answer]:
        for n, scores in enumerate(self.scores):
            truth, answer = (join_names(self.class_names, each[n]) for each in (self.labels, self.predictions))
            held = "" if self.sets is None else join_names(self.class_names, np.flatnonzero(self.sets[n]))
            yield Answer(truth, answer, held, [f"{score:.4f}" for score in scores])

    @property
    def object_accuracy(self) -> float:
        """Share of objects whose class is predicted, 0..1; equal to the accuracy with one object in an image."""
        return int(self.confusion.trace()) / int(self.confusion.sum())

    @property
    def per_class(self) -> list[dict[str, Any]]:
        """Return ``name``, ``images``, ``precision``, ``recall`` and ``f1`` of each class; None for an undefined value.

        Precision is TP / (TP + FP), recall is TP / (TP + FN), and F1 is their harmonic mean, 2·TP / (2·TP + FP + FN).
        TP counts images with the class for which it is predicted, FP images without it for which it is predicted, and
        FN images with it for which it is not predicted.
        """

        def share(part: int, whole: int) -> float | None:
            return float(part / whole) if whole else None

        correct, images, predicted = self.confusion.diagonal(), self.confusion.sum(1), self.confusion.sum(0)
        return [
            {
                "name": name,
                "images": int(images[j]),
                "precision": share(correct[j], predicted[j]),
                "recall": share(correct[j], images[j]),
                "f1": share(2 * correct[j], images[j] + predicted[j]) if images[j] else None,
            }
            for j, name in enumerate(self.class_names)
        ]

    def to_dict(self) -> dict[str, Any]:
        names = ("num_images", "num_correct", "accuracy", "balanced_accuracy", "error", "kappa", "calibration_error")
        records = {} if self.records is None else {"records": self.records.to_dict()}
        return {name: getattr(self, name) for name in (*names, "objects", "object_accuracy")} | {
            "loss": self.loss if math.isfinite(self.loss) else None,
            "class_names": list(self.class_names),
            "per_class": self.per_class,
            "confusion": self.confusion.tolist(),
            **records,
            **self._certain(),
        }

    def _certain(self) -> dict[str, Any]:
        """Return the numbers for JSON that need validation images."""
        numbers: dict[str, Any] = {}
        if self.certainty is not None and self.objects == 1:
            numbers = {"calibration_error_after": self.calibration_error_after, "calibration_map": self.certainty.map}
        if self.sets is not None:
            held = np.take_along_axis(self.sets, self.labels[:, None], 1)[:, 0]
            numbers |= {"coverage": self.coverage, "coverage_over": self.over, "covered": float(held.mean())}
            numbers["mean_set_size"] = float(self.sets.sum(1).mean())
            numbers["covered_per_class"] = [
                float(held[self.labels == j].mean()) if (self.labels == j).any() else None
                for j in range(len(self.class_names))
            ]
        return numbers

    def tables(self) -> list[Table]:
        right, images, scores = self.num_correct, self.num_images, self.per_class
        rows = [
            ["Accuracy", f"{percent(self.accuracy)}  ({right:,} of {images:,} right)"],
            ["Balanced", f"{percent(self.balanced_accuracy)}  (mean recall)"],
            ["Error", f"{percent(self.error)}  ({images - right:,} wrong)"],
            ["Loss", f"{self.loss:.4f}"],
        ]
        if self.kappa is not None:
            rows.append(["Kappa", f"{self.kappa:.4f}  (0 by chance)"])
        certain = self._certain()
        if self.calibration_error is not None:
            rows.append(["ECE", f"{percent(self.calibration_error)}  (expected calibration error of the scores)"])
        if certain:
            words = f"of probabilities by {MAP_WORDS[certain['calibration_map']]}, fitted on validation images"
            rows.append(["ECE after", f"{percent(self.calibration_error_after)}  ({words})"])
        if self.sets is not None:
            words = f"{percent(self.coverage)} chosen, over {OVER_WORDS[self.over]}"
            rows.append(["Covered", f"{percent(certain['covered'])}  (sets that hold the true class; {words})"])
            rows.append(["Set size", f"{certain['mean_set_size']:.2f}  (mean number of {plural(self.task.output)})"])
        if self.objects > 1:
            right_objects, objects = int(self.confusion.trace()), int(self.confusion.sum())
            words = f"{right_objects:,} of {objects:,} found, {self.objects} per image"
            rows.insert(3, ["Objects", f"{percent(self.object_accuracy)}  ({words})"])
        title, confusion = "", self._confusion
        if len(scores) > MAX_CLASSES:
            scores = sorted(scores, key=lambda score: 1.0 if score["f1"] is None else score["f1"])[:MAX_SHOWN]
            title = f"The {len(scores)} worst of {len(self.class_names)} {plural(self.task.output)} (--json has all)"
            confusion = self._most_confused
        per_class = [
            [each["name"], f"{each['images']:,}", *map(percent, (each["precision"], each["recall"], each["f1"]))]
            for each in scores
        ]
        columns = (self.task.output, "images", "precision", "recall", "F1")
        first = [Table(rows, title=self.title), *self.record_tables()]
        return [*first, Table(per_class, columns, title), *confusion()]

    def figures(self, *, ax: Axes | None = None) -> dict[str, Figure]:
        """Draw the confusion matrix, and the pixels of a scene as a map, too.

        Args:
            ax: Axes to draw into; None: a new figure.
        """
        wrong = f"{self.num_images - self.num_correct:,} of {counted(self.num_images, 'image')} wrong"
        title = f"{self.title}\n" * bool(self.title) + wrong
        figure = figure_confusion(self.confusion, self.class_names, self.task.output, title, ax=ax)
        if self.places is None or ax is not None:
            return {"": figure}
        return {
            "": figure,
            "-map": figure_map(self.labels, self.predictions, self.places, self.class_names, self.title),
        }

    def _confusion(self) -> list[Table]:
        names = list(self.class_names)
        short = max(map(len, names)) <= 3  # else numbers of the classes head the columns
        rows: list[list[str | Styled]] = []
        for i, name in enumerate(names if short else [f"{i} {name}" for i, name in enumerate(names)]):
            styles = ["bold green" if i == j else "bold red" for j in range(len(names))]
            counts = zip(self.confusion[i].tolist(), styles, strict=True)
            rows.append([name, *(Styled(str(n), style) if n else Styled("·", "dim") for n, style in counts)])
        counted = "Confusion" if self.objects == 1 else "Confusion (objects)"
        columns = ("true", *(names if short else map(str, range(len(names)))))
        return [Table(rows, columns, f"{counted}: true {plural(self.task.output)} down, predicted ones across")]

    def _most_confused(self) -> list[Table]:
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        most = wrong.argsort(axis=None, kind="stable")[::-1][:MAX_SHOWN].tolist()
        places, names = [divmod(place, len(wrong)) for place in most], self.class_names
        rows = [[names[i], names[j], f"{int(wrong[i, j]):,}"] for i, j in places if wrong[i, j]]
        columns = ("true", "predicted", "images" if self.objects == 1 else "objects")
        return [Table(rows, columns, "Most frequent confusions (--json has all)", 2)] if rows else []

    def __str__(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % of {counted(self.num_images, 'image')} right "
            f"({self.num_images - self.num_correct} "
            f"wrong, error {100 * self.error:.2f} %), mean loss {self.loss:.4g}"
        )


class TaskCollector(ScoreCollector):
    """Collector of the task ``classes``."""

    def result(self, loss: float) -> Evaluation:
        labels, scores = torch.cat(self._targets), torch.cat(self._scores)
        factors = self.image_set.factors
        places = torch.stack([factors[name] for name in PLACE], 1).numpy() if factors.keys() >= set(PLACE) else None
        return Evaluation(labels.cpu().numpy(), scores.cpu().numpy(), loss, self.class_names, places=places)


@checked
def evaluate(
    model: Network,
    image_set: ImageSet,
    *,
    batch_size: int = BATCH,
    class_names: Sequence[str] | None = None,
    colours: Sequence[str] | None = None,
    precision: Precision = "32",
) -> TaskEvaluation:
    """Evaluate a network on a set of images. Nothing is random.

    Returns an :class:`Evaluation`; a :class:`TargetEvaluation` for the tasks ``labels`` and ``regression``; or a
    :class:`PixelEvaluation` for the task ``pixels``, whose images may be larger than the network's input: then
    :func:`torchcaps.ops.sliding.sliding_windows` computes the scores.

    If the images are windows of records, ``records`` of the result has one answer for each record, by the mean of the
    scores of its windows.

    For the loss, the decoder is masked by the labels only if the network's source does so at inference too
    (``decoder_mask="label"``), otherwise by the highest score. Scores do not depend on the mask.

    Args:
        model: The network.
        image_set: Images and their targets; with parts if the network reconstructs several objects. Neither they nor
            the network have names of classes, so class j is output j; ``Run.part`` and ``Run.dataset`` return other
            data with the classes in the order of a run, matched by name.
        batch_size: Images in a batch, with masks at most 8; changes only speed and memory.
        class_names: Name of each class; None: its number.
        colours: Colour of each class in figures of masks, such as ``Run.images.colours``; None: the usual ones.
        precision: ``"32"``, or ``"bf16"``: the network under bfloat16 autocast, its loss in float32.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import evaluate
        >>> from torchcaps.datasets import load_dataset
        >>> evaluation = evaluate(create_model("compact"), load_dataset("digits").test)
        >>> evaluation.accuracy < 0.5, evaluation.confusion.shape  # the network is untrained
        (True, (10, 10))
    """
    check("precision", precision, Precision)
    names, device = tuple(class_labels(class_names, model.num_classes)), next(model.parameters()).device
    check_labels(model, image_set.labels, len(image_set))
    task, losses = task_of(model), list[Tensor]()
    collector = collector_of(task)(model, names, image_set, colours)
    with inference(model):
        size = min(batch_size, collector.max_batch)
        for batch in BatchLoader(image_set, size, shuffle=False, device=device).batches(0):
            check_images(batch.images, model)
            images, targets = to_pixels(model, batch.images), batch.labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                output = task.infer(model, images, model.decoder_targets(targets))
            drawn = images
            if model.objects > 1 and model.decoder is not None:
                if batch.parts is None:
                    raise InputError(
                        f"the network reconstructs each of {model.objects} objects separately, so its images need "
                        "parts (each object alone on the same canvas), but these images have none"
                    )
                drawn = to_pixels(model, batch.parts)
            losses.append(model.loss(output, drawn, targets).total * len(targets))
            collector.add(output, targets, images)
    loss = float(torch.stack(losses).cpu().double().sum()) / len(image_set)
    result: Any = collector.result(loss)
    records = collector.of_records(loss)
    return result if records is None else replace(result, records=records)
