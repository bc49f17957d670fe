"""The task ``regression``: numbers for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.tasks.base import Metric
from torchcaps.tasks.columns import ColumnTask

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from torch import Tensor


class Regression(ColumnTask):
    """Task with T numbers per image: float32 (N, T). Whole numbers and a single column (N,) are converted to this form.

    The loss is the mean of ((value − target) / scale)² over images and numbers. The scale of each number is the
    standard deviation of its training targets. The metric is 1 − loss. It differs from R² on the evaluated images,
    which :meth:`row` returns.
    """

    name = "regression"
    output = "number"
    columns = "NumberColumns"
    score_name = "value"
    needs = "finite numbers, (N,) or (N, T)"
    metric = Metric("1 − squared error", "squared error", "variances of the training targets", False, "mse")

    def _fits(self, rows: np.ndarray) -> bool:
        import numpy as np

        return bool(np.isfinite(rows).all())

    def could_be(self, array: np.ndarray) -> bool:
        return array.dtype.kind == "f" and array.ndim in (1, 2)

    def _check_absent(self, names: Sequence[str], where: str) -> None:
        raise InputError(f"{where} has no number {names[0]}, but the network predicts it; add it to the labels")

    def statistics(self, targets: Tensor, num_outputs: int) -> dict[str, list[Any]]:
        rows = targets.double()
        return {"min": rows.amin(0).tolist(), "mean": rows.mean(0).tolist(), "max": rows.amax(0).tolist()}

    def describe(self, names: Sequence[str], target: Any) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(names, target.tolist(), strict=True))

    def buffers(self, num_outputs: int, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Return mean and standard deviation of the training targets, the latter above 0; without targets 0 and 1."""
        import torch

        if targets is None:
            return {"target_mean": torch.zeros(num_outputs), "target_scale": torch.ones(num_outputs)}
        mean, scale = targets.double().mean(0), targets.double().std(0, correction=0)
        values = {"target_mean": mean.float(), "target_scale": scale.float()}
        if not all(each.isfinite().all() for each in values.values()):
            raise InputError(f"mean and spread must be within the range of float32, got {float(scale.max()):.3g}")
        values["target_scale"].clamp_min_(torch.finfo(torch.float32).tiny)
        return values

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        values: Tensor = network.target_mean + network.target_scale * logits
        return values

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        from torchcaps.ops.labels import squared_error

        return squared_error(output.scores, targets, network.target_scale)

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Return the mean squared error of a batch, as of the base class."""
        import torch.nn.functional as F

        return F.mse_loss(scores, targets.to(scores.dtype))

    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return 1 − the mean squared error of an image's numbers, in variances of the training targets."""
        return 1 - ((scores - targets) / network.target_scale).square().mean(1)

    def decoded_capsules(self, scores: Float[Tensor, "B J"], targets: Tensor | None) -> Tensor | None:
        return None

    def answer(self, names: Sequence[str], scores: Sequence[float], classes: Sequence[int]) -> list[str]:
        return [f"{name} {score:.4g}" for name, score in zip(names, scores, strict=True)]

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        return {}
