"""Evaluation results for the tasks ``labels`` and ``regression``: a table of the labels or numbers.

:class:`~torchcaps.analysis.Evaluation` holds the results for classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.figures import TEXT, draw_legend, find_axes
from torchcaps.analysis.results import Result, Table
from torchcaps.tasks import TaskName, find_task
from torchcaps.tasks.columns import ColumnTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TargetEvaluation(Result):
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
    """

    task: TaskName
    targets: Float[np.ndarray, "N J"]
    scores: Float[np.ndarray, "N J"]
    loss: float
    accuracy: float
    class_names: tuple[str, ...]
    title: str = ""
    balanced_accuracy: None = None

    @property
    def num_images(self) -> int:
        """Number of images."""
        return len(self.targets)

    @property
    def error(self) -> float:
        """1 − accuracy."""
        return 1 - self.accuracy

    @property
    def columns(self) -> ColumnTask:
        """The task, which computes the table and draws the figure."""
        return cast(ColumnTask, find_task(self.task))

    @property
    def figure_name(self) -> str:
        """Name of the figure in a run folder."""
        return self.columns.figure_name

    @property
    def warning(self) -> None:
        """None, as no warning exists for these tasks."""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each label or number.

        Labels have ``images`` (with the label), ``auroc``, ``average_precision``, and ``precision`` and ``recall`` at a
        score of 0.5. Numbers have ``mae`` and ``rmse`` in their unit, and ``r2`` on these images. An undefined value is
        None, such as the AUROC of a label that all images have.
        """
        columns = zip(self.class_names, self.targets.T, self.scores.T, strict=True)
        return [{"name": name, **self.columns.row(target, score)} for name, target, score in columns]

    def mean(self, name: str) -> float | None:
        """Return the mean of a column of :attr:`rows` over its defined values."""
        values = [row[name] for row in self.rows if row[name] is not None]
        return float(np.mean(values)) if values else None

    def to_dict(self) -> dict[str, Any]:
        values = {"task": self.task, "num_images": self.num_images, "loss": self.loss, "accuracy": self.accuracy}
        means = {f"mean_{name}": self.mean(name) for name in self.columns.means}
        return values | means | {"targets": self.rows}

    def tables(self) -> Iterable[Table]:
        metric = self.columns.metric
        rows = [[*metric.row(self.accuracy)]]
        rows += [[f"Mean {_WORDS[name]}", _shown(self.mean(name), name)] for name in self.columns.means]
        rows.append(["Loss", f"{self.loss:.4f}"])
        names = list(self.rows[0])[1:]
        cells = [[row["name"], *(_shown(row[name], name) for name in names)] for row in self.rows]
        return [Table(rows, title=self.title), Table(cells, (self.columns.output, *(_WORDS[name] for name in names)))]

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
