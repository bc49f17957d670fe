"""Evaluation results for the tasks ``labels`` and ``regression``: a table of the labels or numbers.

:class:`~torchcaps.analysis.Evaluation` holds the results for classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float

from torchcaps.analysis.collector import Answer, ScoreCollector, TaskEvaluation
from torchcaps.analysis.figures import TEXT, draw_legend, find_axes
from torchcaps.analysis.results import Table
from torchcaps.tasks import PRESENT, TaskName, find_task
from torchcaps.tasks.columns import ColumnTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Columns(ABC):
    """Base class of the table and the figure of an evaluation with a column for each output."""

    means: ClassVar[tuple[str, ...]]
    """Columns of the table whose mean is shown."""
    axes: ClassVar[tuple[str, str]]
    """Labels of the x and y axis of the figure."""
    figure_name: ClassVar[str]
    """Name of the figure in a run folder."""

    @abstractmethod
    def row(self, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
        """Return the row of the table for one output."""

    @abstractmethod
    def draw(self, axes: Any, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"], name: str) -> None:
        """Draw one output into the axes of the figure."""


class LabelColumns(Columns):
    """Table and figure of the task ``labels``."""

    means = ("auroc", "average_precision")
    axes = ("false positives", "true positives")
    figure_name = "roc"

    def row(self, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
        """Return images with the label, AUROC, average precision, and precision and recall at a score of 0.5.

        An undefined value is None, such as the AUROC of a label that all images have.
        """
        from sklearn.metrics import average_precision_score, roc_auc_score

        has, predicted = target > PRESENT, score > PRESENT
        both, varies = int((has & predicted).sum()), 0 < has.sum() < len(has)
        return {
            "images": int(has.sum()),
            "auroc": float(roc_auc_score(has, score)) if varies else None,
            "average_precision": float(average_precision_score(has, score)) if has.any() else None,
            "precision": both / int(predicted.sum()) if predicted.any() else None,
            "recall": both / int(has.sum()) if has.any() else None,
        }

    def draw(self, axes: Any, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"], name: str) -> None:
        """Draw the receiver operating characteristic of a label, if only some of the images have it."""
        from sklearn.metrics import roc_curve

        if 0 < target.sum() < len(target):
            axes.plot(*roc_curve(target, score)[:2], label=name)


class NumberColumns(Columns):
    """Table and figure of the task ``regression``."""

    means = ("mae", "rmse")
    axes = ("true", "predicted")
    figure_name = "numbers"

    def row(self, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
        """Return ``mae`` and ``rmse`` in the unit of the number, and ``r2`` on these images; None for a constant."""
        import numpy as np

        error, variance = score.astype(np.float64) - target, float(target.astype(np.float64).var())
        squared = float((error**2).mean())
        return {
            "mae": float(abs(error).mean()),
            "rmse": squared**0.5,
            "r2": 1 - squared / variance if variance > 0 else None,
        }

    def draw(self, axes: Any, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"], name: str) -> None:
        """Draw predictions over targets."""
        axes.plot(target, score, ".", alpha=0.5, label=name)


@dataclass(frozen=True, eq=False)
class TargetEvaluation(TaskEvaluation):
    """Results of a network on a set of images with labels or numbers.

    Args:
        task: Task of the network.
        targets: Zeros and ones, or numbers.
        scores: Scores or numbers that the network predicts.
        loss: Mean loss per image.
        accuracy: Metric of the task: the share of correct labels among all labels of all images; for a regression 1 −
            the mean squared error, in variances of the training targets.
        class_names: Name of each label or number.
        title: Network and images.
        records: Evaluation of one answer for each record; None without records.
    """

    task: TaskName
    targets: Float[np.ndarray, "N J"]
    scores: Float[np.ndarray, "N J"]
    loss: float
    accuracy: float
    class_names: tuple[str, ...]
    title: str = ""
    records: TargetEvaluation | None = None

    @property
    def num_images(self) -> int:
        return len(self.targets)

    @property
    def columns(self) -> Columns:
        """Functions that compute the table and draw the figure."""
        columns: type[Columns] = globals()[cast(ColumnTask, find_task(self.task)).columns]
        return columns()

    @property
    def figure_name(self) -> str:
        return self.columns.figure_name

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each label or number.

        Labels have ``images`` (with the label), ``auroc``, ``average_precision``, and ``precision`` and ``recall`` at a
        score of 0.5. Numbers have ``mae`` and ``rmse`` in their unit, and ``r2`` on these images. An undefined value is
        None, such as the AUROC of a label that all images have.
        """
        columns = zip(self.class_names, self.targets.T, self.scores.T, strict=True)
        return [{"name": name, **self.columns.row(target, score)} for name, target, score in columns]

    def answers(self) -> Iterator[Answer]:
        task = find_task(self.task)
        for target, scores in zip(self.targets, self.scores.tolist(), strict=True):
            answer = " + ".join(task.answer(self.class_names, scores, []))
            yield Answer(task.describe(self.class_names, target), answer, "", [f"{score:.6g}" for score in scores])

    def mean(self, name: str) -> float | None:
        """Return the mean of a column of :attr:`rows` over its defined values."""
        values = [row[name] for row in self.rows if row[name] is not None]
        return float(np.mean(values)) if values else None

    def to_dict(self) -> dict[str, Any]:
        values = {"task": self.task, "num_images": self.num_images, "loss": self.loss, "accuracy": self.accuracy}
        means = {f"mean_{name}": self.mean(name) for name in self.columns.means}
        records = {} if self.records is None else {"records": self.records.to_dict()}
        return values | means | {"targets": self.rows, **records}

    def tables(self) -> Iterable[Table]:
        task = find_task(self.task)
        rows = [[*task.metric.row(self.accuracy)]]
        rows += [[f"Mean {_WORDS[name]}", _shown(self.mean(name), name)] for name in self.columns.means]
        rows.append(["Loss", f"{self.loss:.4f}"])
        names = list(self.rows[0])[1:]
        cells = [[row["name"], *(_shown(row[name], name) for name in names)] for row in self.rows]
        table = Table(cells, (task.output, *(_WORDS[name] for name in names)))
        return [Table(rows, title=self.title), *self.record_tables(), table]

    def figures(self, *, ax: Axes | None = None) -> dict[str, Figure]:
        """Draw the receiver operating characteristic of each label, or predictions over targets of each number.

        Args:
            ax: Axes to draw into; None: a new figure.
        """
        figure, axes = find_axes(ax, 4.5, 4.5, self.title)
        for name, target, score in zip(self.class_names, self.targets.T, self.scores.T, strict=True):
            self.columns.draw(axes, target, score, name)
        across, up = self.columns.axes
        axes.set_xlabel(across, fontsize=TEXT)
        axes.set_ylabel(up, fontsize=TEXT)
        draw_legend(figure, columns=2, ax=ax)
        return {"": figure}


_WORDS = {
    "images": "images",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "precision": "precision",
    "recall": "recall",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
}


def _shown(value: float | None, name: str) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if name == "images" else f"{value:.4g}"


class TaskCollector(ScoreCollector):
    """Collector of the tasks ``labels`` and ``regression``."""

    def result(self, loss: float) -> TargetEvaluation:
        targets, scores, task = torch.cat(self._targets), torch.cat(self._scores), self.model.task
        accuracy = float(self.model.score(scores, targets).cpu().double().mean())
        return TargetEvaluation(task, targets.cpu().numpy(), scores.cpu().numpy(), loss, accuracy, self.class_names)
