"""Evaluate grades: agreement as quadratic weighted kappa, mean absolute error, and order of the thresholds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.analysis.collector import ScoreCollector
from torchcaps.analysis.confusion import kappas
from torchcaps.analysis.evaluation import Evaluation
from torchcaps.analysis.results import Table, percent
from torchcaps.models import ModelOutput
from torchcaps.tasks import Task, find_task
from torchcaps.tasks.ordinal import Ordinal

BOOTSTRAPS = 1000
"""Number of samples of the images for the interval of kappa."""


@dataclass(frozen=True, eq=False)
class GradeEvaluation(Evaluation):
    """Results of a network on a set of images with grades.

    Args:
        violations: Share of the images, 0..1, whose thresholds do not decrease before their projection.
    """

    violations: float = 0.0
    power: ClassVar[int] = 2

    @property
    def task(self) -> Task:
        return find_task("ordinal")

    @property
    def mean_absolute_error(self) -> float:
        """Mean distance of the predicted grade from the true one, in grades."""
        return float(np.abs(self.predictions - self.labels).mean())

    @cached_property
    def kappa_interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of kappa: percentiles over 1,000 samples of the images; None if kappa is undefined.

        Nothing is random in two calls, because the seed is fixed.
        """
        cells = self.confusion.flatten()
        samples = np.random.default_rng(0).multinomial(cells.sum(), cells / cells.sum(), BOOTSTRAPS)
        values = kappas(samples.reshape(BOOTSTRAPS, *self.confusion.shape), self.power)
        defined = values[np.isfinite(values)]
        return tuple(np.percentile(defined, (2.5, 97.5)).tolist()) if self.kappa is not None else None

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "kappa_interval": self.kappa_interval,
            "mean_absolute_error": self.mean_absolute_error,
            "order_violations": self.violations,
        }

    def tables(self) -> list[Table]:
        first, *others = super().tables()
        words = "quadratic weights"
        if self.kappa_interval is not None:
            words += "; 95 % interval {:.3f}..{:.3f}".format(*self.kappa_interval)
        kappa = "–" if self.kappa is None else f"{self.kappa:.4f}"
        rows = [
            ["Kappa", f"{kappa}  ({words})"],
            ["MAE", f"{self.mean_absolute_error:.4f}  (mean absolute error, in grades)"],
            *[row for row in first.rows if row[0] != "Kappa"],
            ["Violated", f"{percent(self.violations)}  (images whose thresholds were not in order)"],
        ]
        return [first._replace(rows=rows), *others]


@dataclass
class TaskCollector(ScoreCollector):
    """Collector of the task ``ordinal``."""

    _violated: list[Float[Tensor, "B"]] = field(default_factory=list)

    def add(self, output: ModelOutput, targets: Tensor, images: Tensor) -> None:
        super().add(output, targets, images)
        thresholds = Ordinal().thresholds(output, self.model)
        self._violated.append((thresholds[:, 1:].diff(dim=1) > 0).any(1).double())

    def result(self, loss: float) -> GradeEvaluation:
        labels, scores = (torch.cat(each).cpu().numpy() for each in (self._targets, self._scores))
        violations = float(torch.cat(self._violated).mean())
        return GradeEvaluation(labels, scores, loss, self.class_names, violations=violations)
