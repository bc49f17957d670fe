"""The task ``ordinal``: the grade of each image, one of K classes in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.errors import InputError
from torchcaps.ranges import Range
from torchcaps.tasks.base import PRESENT, Metric, Task
from torchcaps.tasks.classes import Classes

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_LEADING_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)")


class Ordinal(Classes):
    """Task with one of K grades per image, from the lowest, 0, to the highest: int64 (N,), as for ``classes``.

    A network has K outputs, as for classes, and output k learns the threshold "grade k or higher". So a grade y has the
    targets 1 for the outputs 0 to y, and 0 above. Output 0 is 1 for every image: it is not used for the answer, but
    gives an image of the lowest grade a capsule that the decoder can draw.

    The outputs 1 to K−1 are estimates of P(grade ≥ k), which must decrease with k. The nearest decreasing sequence is
    their projection P̂, and the score of a grade is P̂(grade ≥ k) − P̂(grade ≥ k+1). Scores sum to 1. The predicted
    grade is the number of thresholds with P̂ above ½, the median of the scores.

    The loss of capsules is the mean of the network's loss for lengths v and targets T and of the same loss for 1 − v
    and 1 − T. So "at least k" and "below k" count the same. The margin loss alone, with λ = ½, would let lengths pass
    ½ where P(grade ≥ k) is only ⅓.

    Source: Cheng, Wang, Pollastri 2008 (arXiv:0704.1028), thresholds with a shared network; projection by pool adjacent
    violators, Ayer and others 1955.
    """

    name = "ordinal"
    output, score_name = "grade", "score"
    output_range = Range(2, 200, whole=True)
    """The projection of the thresholds takes a time in proportion to the cube of their number."""
    needs = "whole numbers from 0, the grade of each image, (N,), or one-hot rows (N, J)"
    metric = Metric("accuracy", "error", "% of the images")
    analyses = Classes.analyses - {"classifier"}
    evaluation = "torchcaps.analysis.grades"

    def with_objects(self, objects: int) -> Task:
        return Task.with_objects(self, objects)

    def in_order(self, names: Sequence[str], where: str) -> tuple[str, ...]:
        """Return the names by the numbers that they begin with.

        Raises:
            InputError: A name begins with no number, or two with the same.
        """
        numbers = {name: _LEADING_NUMBER.match(name) for name in names}
        for name, number in numbers.items():
            if number is None:
                raise InputError(
                    f'{where}: grades are put in order by the number that their names begin with, but "{name}" begins '
                    'with none; name them such as "0 none", "1 mild", or set --task classes'
                )
        values = {name: float(number[1]) for name, number in numbers.items() if number}
        if len(set(values.values())) < len(values):
            raise InputError(f"{where}: two grades begin with the same number: {', '.join(sorted(names))}")
        return tuple(sorted(names, key=values.__getitem__))

    def thresholds(self, output: Any, network: Any) -> Float[Tensor, "B J"]:
        """Return the outputs before the projection: lengths or activations of capsules, or sigmoids of a CNN."""
        from torchcaps.ops.squash import safe_norm

        if output.logits is not None:
            values: Tensor = output.logits.sigmoid()
            return values
        if output.activations is not None:
            return output.activations
        return safe_norm(output.capsules, eps=network.length_eps)

    def activate(self, logits: Float[Tensor, "B J"], network: Any) -> Float[Tensor, "B J"]:
        from torchcaps.ops.labels import grade_scores

        return grade_scores(logits if getattr(network, "has_capsules", False) else logits.sigmoid())

    def loss(self, output: Any, targets: Tensor, network: Any) -> Float[Tensor, ""]:
        from torchcaps.ops.labels import sigmoid_cross_entropy

        rows = self._threshold_rows(output.scores, targets)
        if output.logits is None:
            lengths = self.thresholds(output, network)
            value: Tensor = network.classification_loss(lengths, rows)
            mirrored: Tensor = network.classification_loss(1 - lengths, 1 - rows)
            return (value + mirrored) / 2
        return sigmoid_cross_entropy(output.logits, rows)

    def _module_loss(self, scores: Tensor, targets: Tensor) -> Float[Tensor, ""]:
        """Return the sigmoid cross-entropy of the thresholds of a batch, as of the base class."""
        from torchcaps.ops.labels import sigmoid_cross_entropy

        return sigmoid_cross_entropy(scores, self._threshold_rows(scores, targets))

    def _threshold_rows(self, scores: Float[Tensor, "B J"], targets: Tensor) -> Float[Tensor, "B J"]:
        """Return the targets of the thresholds: the share of an image's grades that is k or higher."""
        from torchcaps.ops.losses import multi_hot

        shares = multi_hot(scores, targets, "ordinal")
        return shares.flip(1).cumsum(1).flip(1).clamp(max=1)

    def score(self, scores: Float[Tensor, "B J"], targets: Tensor, network: Any = None) -> Float[Tensor, "B"]:
        """Return 1 for an image whose grade is predicted, otherwise 0; scores of a user's module are logits."""
        grades = scores if hasattr(network, "decoder_targets") or network is None else self.activate(scores, network)
        true = targets if targets.ndim == 1 else targets.argmax(1)
        return (self.predict_classes(grades) == true).to(scores.dtype)

    def predict_classes(self, scores: Any) -> Any:
        # P̂(grade ≥ k) is 1 − the sum of the scores below k
        return (scores.cumsum(1)[:, :-1] < 1 - PRESENT).sum(1)

    def answer_to_dict(self, answer: Sequence[str]) -> dict[str, Any]:
        return {"grade": "".join(answer)}
