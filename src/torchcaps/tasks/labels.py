"""The task ``labels``: several labels, each of which an image may have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.tasks.base import PRESENT, Metric, probabilities
from torchcaps.tasks.columns import ColumnTask

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor


class Labels(ColumnTask):
    """Task with L labels that an image may have: zeros and ones, float32 (N, L).

    Integers, booleans and a single column (N,) are converted to this form.
    """

    name = "labels"
    output, columns = "label", "LabelColumns"
    needs = "zeros and ones, (N, L), a 1 for each label that an image has"
    metric = Metric("labels right", "error", "% of the labels")

    def _fits(self, rows: np.ndarray) -> bool:
        return bool(((rows == 0) | (rows == 1)).all())

    def could_be(self, array: np.ndarray) -> bool:
        if array.dtype.kind == "b" and array.ndim == 1:
            return True
        return array.dtype.kind in "iufb" and array.ndim == 2 and 0 not in array.shape and self._fits(array)

    def _check_absent(self, names: Sequence[str], where: str) -> None:
        warnings.warn(f"{where} has no label {', '.join(names)}, so its images count as without it", stacklevel=5)

    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        return {"images": (targets > PRESENT).sum(0).tolist()}

    def describe(self, names: Sequence[str], target: Any) -> str:
        return " + ".join(name for name, has in zip(names, target.tolist(), strict=True) if has > PRESENT) or "none"

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        return logits.sigmoid()

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        from torchcaps.ops.labels import sigmoid_cross_entropy
        from torchcaps.ops.losses import multi_hot

        if output.logits is None:
            value: Tensor = network.classification_loss(output.scores, targets)
            return value
        return sigmoid_cross_entropy(output.logits, multi_hot(output.scores, targets))

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Return the sigmoid cross-entropy of a batch, as of the base class."""
        import torch.nn.functional as F

        return F.binary_cross_entropy_with_logits(scores, targets.to(scores.dtype))

    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return the share of correct labels of each image; scores are converted by :func:`probabilities`."""
        return ((probabilities(scores, network) > PRESENT) == (targets > PRESENT)).to(scores.dtype).mean(1)

    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        return (scores > PRESENT).to(scores.dtype) if targets is None else targets

    def chance(self, targets: Tensor, *, balanced: bool = False) -> tuple[float, float] | None:
        """Return the metric of predicting the more frequent value of each label, and its standard error.

        If shares p_j ≥ 1/2 of the N images have these values, the metric is their mean over the L labels. Its standard
        error is √(Σ_j p_j·(1 − p_j) / (N·L)). It is not divided by √L, because labels of an image may depend on each
        other. None if no label varies.
        """
        shares = targets.double().mean(0)
        likelier = shares.maximum(1 - shares)
        variance = float((likelier * (1 - likelier)).mean()) / len(targets)
        return (float(likelier.mean()), variance**0.5) if variance > 0 else None

    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        return [name for name, score in zip(names, scores, strict=True) if score > PRESENT]
