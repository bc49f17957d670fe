"""How good a network is on images with several labels each, or with numbers: a table of the labels, or of the numbers.

Where an image has one class, or several objects, :class:`~torchcaps.analysis.Evaluation` says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.figures import TEXT, draw_legend, new_figure
from torchcaps.analysis.results import Result, Table
from torchcaps.tasks import TaskName, find_task
from torchcaps.tasks.base import ColumnTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TargetEvaluation(Result):
    """How good a network is on images with labels or numbers.

    Args:
        task: What the targets are.
        targets: Zeros and ones, or numbers.
        scores: The network's.
        loss: Mean loss of an image.
        accuracy: The task's metric: the share of correct labels, of all labels of all images; for a regression 1 − the
            mean of the squared errors in variances of the training targets.
        class_names: The name of each label, or number.
        title: Of which network, on which images.
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
        """How many images were looked at."""
        return len(self.targets)

    @property
    def error(self) -> float:
        """1 − accuracy."""
        return 1 - self.accuracy

    @property
    def columns(self) -> ColumnTask:
        """The task, which knows the table and the figure of an output."""
        return cast(ColumnTask, find_task(self.task))

    @property
    def figure_name(self) -> str:
        """Name of the figure in a run folder."""
        return self.columns.figure_name

    @property
    def warning(self) -> None:
        """A sentence about what is wrong with the answers; there is none."""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table of labels or numbers, a row for each.

        A label has ``images`` with it, ``auroc`` and ``average_precision`` over all thresholds, ``precision`` and
        ``recall`` at a score of 0.5; a number has ``mae`` and ``rmse`` in its own unit, and ``r2`` on these images.
        What is not defined is None, such as the AUROC of a label that all images have.
        """
        columns = zip(self.class_names, self.targets.T, self.scores.T, strict=True)
        return [{"name": name, **self.columns.row(target, score)} for name, target, score in columns]

    def mean(self, name: str) -> float | None:
        """The mean of a column of :attr:`rows` where it is defined."""
        known = [row[name] for row in self.rows if row[name] is not None]
        return float(np.mean(known)) if known else None

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

    def figures(self) -> dict[str, Figure]:
        """The scores of each number over its targets, or the receiver operating characteristic of each label."""
        figure = new_figure(4.5, 4.5, self.title)
        axes = figure.subplots()
        for name, target, score in zip(self.class_names, self.targets.T, self.scores.T, strict=True):
            self.columns.draw(axes, target, score, name)
        across, up = self.columns.axes
        axes.set_xlabel(across, fontsize=TEXT)
        axes.set_ylabel(up, fontsize=TEXT)
        draw_legend(figure, columns=2)
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
