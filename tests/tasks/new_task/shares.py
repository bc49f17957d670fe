"""The task ``shares``: shares of J kinds in an image, which add up to 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.tasks.base import Metric, Task, advice, as_array, form_words

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Shares(Task):
    """Task with the shares of J kinds in each image: float32 (N, J), 0..1, with the sum 1."""

    name, form = "shares", ("Float32", "N J")
    output, min_outputs = "share", 2
    needs = "rows of shares from 0 to 1 with the sum 1, (N, J)"
    metric = Metric("overlap", "distance", "share of the image in the wrong kind")
    analyses = frozenset({"reconstruct"})
    evaluation = "torchcaps.analysis.shares"

    def has_form(self, targets: Tensor) -> bool:
        return targets.is_floating_point() and self.could_be(targets.cpu().numpy())

    def could_be(self, array: np.ndarray) -> bool:
        if array.dtype.kind not in "iuf" or array.ndim != 2 or 0 in array.shape:
            return False
        return bool((array >= 0).all() and (abs(array.sum(1) - 1) < 1e-4).all())

    def convert_targets(
        self,
        targets: Any,
        num_outputs: int | None = None,
        where: str = "labels",
        class_names: Sequence[str] | None = None,
    ) -> Tensor:
        import torch

        array = as_array(targets, where)
        if not self.could_be(array) or num_outputs not in (None, array.shape[1]):
            raise InputError(f"{where} must be {self.needs}, got {form_words(array)}{advice(array, self)}")
        return torch.from_numpy(array).float()

    def names(self, targets: Any, where: str = "labels", *, complete: bool = True) -> tuple[str, ...]:
        return tuple(map(str, range(self.convert_targets(targets, None, where).shape[1])))

    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        return {"mean": targets.mean(0).tolist()}

    def describe(self, names: Sequence[str], target: Any) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in zip(names, target.tolist(), strict=True))

    def activate(self, logits: Tensor, network: Any) -> Tensor:
        return logits.softmax(-1)

    def loss(self, output: Any, targets: Tensor, network: Any) -> Tensor:
        return (output.scores - targets).square().sum(1).mean()

    def score(self, scores: Tensor, targets: Tensor, network: Any = None) -> Tensor:
        return 1 - (scores - targets).abs().sum(1) / 2

    def decoded_capsules(self, scores: Tensor, targets: Tensor | None) -> Tensor | None:
        return scores if targets is None else targets

    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        return [f"{name} {share:.2f}" for name, share in zip(names, scores, strict=True)]
