"""How good a network is on images with several labels each, or with numbers: a table of the labels, or of the numbers.

Where an image has one class, or several objects, :class:`~torchcaps.analysis.Evaluation` says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from torchcaps.analysis.figures import SMALL, TEXT, new_figure
from torchcaps.analysis.results import Result, Table, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRESENT = 0.5
"""A label is given where its score is above this, as in :meth:`torchcaps.models.Network.right`."""


@dataclass(frozen=True, eq=False)
class TargetEvaluation(Result):
    """How good a network is on images with labels or numbers.

    Args:
        task: What the targets are.
        targets: Zeros and ones, or numbers.
        scores: The network's.
        loss: Mean loss of an image.
        accuracy: Of labels the share that is right, of all labels of all images; of a regression R², 1 − the mean over
            the numbers of their squared errors in variances of the training targets.
        class_names: The name of each label, or number.
        title: Of which network, on which images.
    """

    task: Literal["labels", "regression"]
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
    def rows(self) -> list[dict[str, Any]]:
        """What is known of each label or number, by names.

        A label has ``images`` with it, ``auroc`` and ``average_precision`` over all thresholds, ``precision`` and
        ``recall`` at a score of 0.5; a number has ``mae`` and ``rmse`` in its own unit, and ``r2`` on these images.
        What is not defined is None, such as the AUROC of a label that all images have.
        """
        of = _label_row if self.task == "labels" else _number_row
        columns = zip(self.class_names, self.targets.T, self.scores.T, strict=True)
        return [{"name": name, **of(target, score)} for name, target, score in columns]

    def mean(self, name: str) -> float | None:
        """The mean of a column of :attr:`rows` where it is defined."""
        known = [row[name] for row in self.rows if row[name] is not None]
        return float(np.mean(known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        values = {"task": self.task, "num_images": self.num_images, "loss": self.loss, "accuracy": self.accuracy}
        means = {f"mean_{name}": self.mean(name) for name in _MEANS[self.task]}
        return values | means | {"targets": self.rows}

    def tables(self) -> Iterable[Table]:
        rows = [["R²" if self.task == "regression" else "Labels right", percent(self.accuracy)]]
        rows += [[f"Mean {_WORDS[name]}", _shown(self.mean(name), name)] for name in _MEANS[self.task]]
        rows.append(["Loss", f"{self.loss:.4f}"])
        names = list(self.rows[0])[1:]
        cells = [[row["name"], *(_shown(row[name], name) for name in names)] for row in self.rows]
        return [Table(rows, title=self.title), Table(cells, (self.task, *(_WORDS[name] for name in names)))]

    def figures(self) -> dict[str, Figure]:
        """The scores of each number over its targets, or the receiver operating characteristic of each label."""
        from sklearn.metrics import roc_curve

        figure = new_figure(4.5, 4.5, self.title)
        axes = figure.subplots()
        for name, target, score in zip(self.class_names, self.targets.T, self.scores.T, strict=True):
            if self.task == "regression":
                axes.plot(target, score, ".", alpha=0.5, label=name)
            elif 0 < target.sum() < len(target):
                axes.plot(*roc_curve(target, score)[:2], label=name)
        words = ("true", "predicted") if self.task == "regression" else ("false positives", "true positives")
        axes.set_xlabel(words[0], fontsize=TEXT)
        axes.set_ylabel(words[1], fontsize=TEXT)
        axes.legend(fontsize=SMALL)
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
_MEANS = {"labels": ("auroc", "average_precision"), "regression": ("mae", "rmse")}


def _label_row(target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    there, given = target > PRESENT, score > PRESENT
    both, several = int((there & given).sum()), 0 < there.sum() < len(there)
    return {
        "images": int(there.sum()),
        "auroc": float(roc_auc_score(there, score)) if several else None,
        "average_precision": float(average_precision_score(there, score)) if there.any() else None,
        "precision": both / int(given.sum()) if given.any() else None,
        "recall": both / int(there.sum()) if there.any() else None,
    }


def _number_row(target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
    off, variance = score.astype(np.float64) - target, float(target.astype(np.float64).var())
    squared = float((off**2).mean())
    return {
        "mae": float(abs(off).mean()),
        "rmse": squared**0.5,
        "r2": 1 - squared / variance if variance > 0 else None,
    }


def _shown(value: float | None, name: str) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if name == "images" else f"{value:.4g}"
