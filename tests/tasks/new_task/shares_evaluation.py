"""Evaluation of the task ``shares``: the mean error of each share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from torchcaps.analysis.collector import ScoreCollector, TaskEvaluation
from torchcaps.analysis.figures import find_axes
from torchcaps.analysis.results import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class SharesEvaluation(TaskEvaluation):
    """Errors of the shares of a set of images."""

    errors: np.ndarray
    loss: float
    accuracy: float
    class_names: tuple[str, ...]
    title: str = ""
    figure_name: ClassVar[str] = "shares"

    @property
    def num_images(self) -> int:
        return len(self.errors)

    def to_dict(self) -> dict[str, object]:
        means = dict(zip(self.class_names, self.errors.mean(0).tolist(), strict=True))
        return {"num_images": self.num_images, "accuracy": self.accuracy, "loss": self.loss, "errors": means}

    def tables(self) -> list[Table]:
        rows = [[name, f"{each:.3f}"] for name, each in zip(self.class_names, self.errors.mean(0), strict=True)]
        return [Table(rows, ("share", "mean error"), self.title)]

    def figures(self) -> dict[str, Figure]:
        figure, axes = find_axes(None, 3, 3, self.title)
        axes.bar(self.class_names, self.errors.mean(0))
        return {"": figure}


class TaskCollector(ScoreCollector):
    """Collector of the task ``shares``."""

    def result(self, loss: float) -> SharesEvaluation:
        targets, scores = torch.cat(self._targets), torch.cat(self._scores)
        accuracy = float(self.model.score(scores, targets).mean())
        return SharesEvaluation((scores - targets).abs().cpu().numpy(), loss, accuracy, self.class_names)
