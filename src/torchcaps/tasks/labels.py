"""The task ``labels``: which of several labels each image has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchcaps.tasks.base import ColumnTask, Metric, TaskName

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor

    from torchcaps.tasks.base import Row

PRESENT = 0.5
"""An image is given a label if its score is above this: half way between the margins of the margin loss."""


class Labels(ColumnTask):
    """Which of L labels an image has: zeros and ones, float32 (N, L).

    Integers, True and False, and a single column (N,) are converted to it.
    """

    name: ClassVar[TaskName] = "labels"
    outputs, output, answer_key = "labels", "label", "labels"
    needs = "zeros and ones, (N, L), whether each image has each label"
    metric = Metric("labels right", "error", "% of the labels")
    means = ("auroc", "average_precision")
    axes = ("false positives", "true positives")
    figure_name = "roc"

    def _fits(self, rows: np.ndarray) -> bool:
        return bool(((rows == 0) | (rows == 1)).all())

    def guess(self, array: np.ndarray) -> bool:
        if array.dtype.kind == "b" and array.ndim == 1:
            return True
        return array.dtype.kind in "iufb" and array.ndim == 2 and 0 not in array.shape and self._fits(array)

    def statistics(self, targets: Tensor, num_outputs: int) -> list[Row]:
        return [(n,) for n in (targets > PRESENT).sum(0).tolist()]

    def describe(self, names: Sequence[str], target: Any) -> str:
        return " + ".join(name for name, has in zip(names, target.tolist(), strict=True) if has > PRESENT) or "none"

    def limits(self, num_outputs: int) -> str:
        return (
            f"It knows its {self.count(num_outputs)} only and says nothing of what else an image shows. Scores are not "
            "calibrated probabilities."
        )

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        return logits.sigmoid()

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        from torchcaps.ops.labels import sigmoid_cross_entropy
        from torchcaps.ops.losses import multi_hot

        if output.logits is None:
            value: Tensor = network.classification_loss(output.scores, targets)
            return value
        return sigmoid_cross_entropy(output.logits, multi_hot(output.scores, targets))

    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the share of an image's labels that are right."""
        return ((scores > PRESENT) == (targets > PRESENT)).to(scores.dtype).mean(1)

    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        return (scores > PRESENT).to(scores.dtype) if targets is None else targets

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        """Give every image the likelier value of each label.

        With the shares p_j ≥ 1/2 of these values among N images, the metric is their mean over the L labels, with a
        standard error of √(Σ_j p_j·(1 − p_j) / (N·L)); the labels of an image may depend on each other, so their
        errors are not averaged out. None if no label varies.
        """
        shares = targets.double().mean(0)
        likelier = shares.maximum(1 - shares)
        variance = float((likelier * (1 - likelier)).mean()) / len(targets)
        return (float(likelier.mean()), variance**0.5) if variance > 0 else None

    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        return [name for name, score in zip(names, scores, strict=True) if score > PRESENT]

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        return {"labels": answer}

    def row(self, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"]) -> dict[str, Any]:
        """Return the images with a label, AUROC and average precision over all thresholds, precision and recall at 0.5.

        What is not defined is None, such as the AUROC of a label that all images have.
        """
        from sklearn.metrics import average_precision_score, roc_auc_score

        has, given = target > PRESENT, score > PRESENT
        both, varies = int((has & given).sum()), 0 < has.sum() < len(has)
        return {
            "images": int(has.sum()),
            "auroc": float(roc_auc_score(has, score)) if varies else None,
            "average_precision": float(average_precision_score(has, score)) if has.any() else None,
            "precision": both / int(given.sum()) if given.any() else None,
            "recall": both / int(has.sum()) if has.any() else None,
        }

    def draw(self, axes: Any, target: Float[np.ndarray, "N"], score: Float[np.ndarray, "N"], name: str) -> None:
        """Draw the receiver operating characteristic of a label that some images have and some have not."""
        from sklearn.metrics import roc_curve

        if 0 < target.sum() < len(target):
            axes.plot(*roc_curve(target, score)[:2], label=name)
