"""Predictions of a network, and the thresholds that flag an answer as unsure. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from jaxtyping import Float, Int

from torchcaps.analysis.results import Scored
from torchcaps.errors import WrongType
from torchcaps.ranges import INDEX, Range
from torchcaps.tasks import Task, find_task

CALIBRATED_SHARE = 0.99
"""Share of the validation images that pass each threshold of a calibration."""
FINITE = Range(-1e38, 1e38)
MIN_RUNNER_UP_RATIO = 0.9
"""An answer is unsure if the score of the runner-up is at least this share of the score of the predicted class."""
ScoreName = Literal["length", "activation", "probability", "score", "value", "share"]
"""Kind of the scores of a network."""
Decoded = Float[np.ndarray, "N C H W"] | Float[np.ndarray, "N P C H W"]
"""Decoded images, pixels 0..1; with several objects in an image, one for each object."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds below or above which an answer is flagged as unsure (99 % of validation images pass).

    `torchcaps.analysis.calibrate` measures them. The defaults are for a network without a calibration: half of the
    largest possible length, and no threshold of the error.
    """

    score: float = 0.5
    """Smallest score of the predicted class; with several objects, of the class with the lowest score among them."""
    error: float | None = None
    """Largest Σ(x - r)² over the pixels, 0..1, of an image x and its reconstruction r; None: no threshold."""
    images: int = 0
    """Number of measured images; 0 without a calibration."""

    def __post_init__(self) -> None:
        for name, allowed in (("score", FINITE), ("error", FINITE), ("images", INDEX)):
            if name != "error" or self.error is not None:
                allowed.check(f'"{name}" of a calibration', getattr(self, name))

    def caveats(
        self, score: float, error: float | None, runner_up: float | None = None, score_name: str = "length"
    ) -> tuple[str, ...]:
        """Return the reasons why an answer is unsure, in words; empty if it is sure.

        Args:
            score: Score of the predicted class; with several objects, the lowest score among the predicted classes.
            error: Squared error of the reconstruction; None for a network without a decoder.
            runner_up: Highest score among the other classes; None if there is no other class.
            score_name: Kind of the scores.
        """
        reasons = []
        if score < self.score:
            reasons.append(f"{score_name} {score:.2f} is below {self.score:.2f}")
        if runner_up is not None and runner_up >= MIN_RUNNER_UP_RATIO * score:
            reasons.append(f"the runner-up has {score_name} {runner_up:.2f}")
        if error is not None and self.error is not None and error > self.error:
            reasons.append(f"the redrawn image is off by {error:.1f} (limit {self.error:.1f})")
        return tuple(reasons)


@dataclass(frozen=True, eq=False)
class Prediction(Scored):
    """Predictions for images, computed by torch or from an ONNX file.

    Args:
        classes: Class with the highest score; with P objects in an image, the P classes with the highest scores, the
            highest first.
        scores: All class scores, 0..1: the lengths ‖v_j‖ of capsules, their activations, or a CNN's probabilities; or
            the values of a regression.
        reconstruction: Image decoded from the capsule with the highest score, pixels 0..1; with several objects, one
            for each class of ``classes`` (or for each target, if targets were given); None without a decoder.
        caveats: Reasons why the answer to each image is unsure, see :meth:`Calibration.caveats`.
        score_name: Kind of the scores.
    """

    classes: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]
    scores: Float[np.ndarray, "N J"]
    reconstruction: Decoded | None
    caveats: Sequence[tuple[str, ...]]
    score_name: ScoreName = "length"

    @classmethod
    def of(
        cls,
        images: Float[np.ndarray, "N C H W"],
        classes: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"],
        scores: Float[np.ndarray, "N J"],
        reconstruction: Decoded | None,
        calibration: Calibration | None,
        score_name: ScoreName = "length",
        task: Task | None = None,
    ) -> Self:
        """Return the prediction for images of pixels 0..1, with caveats by the calibration of the network.

        Answers of a task without thresholds have no caveats; None: the task ``classes``.
        """
        if not (task or find_task(None)).supports("calibrate"):
            return cls(classes, scores, reconstruction, [()] * len(classes), score_name)
        thresholds = Calibration() if calibration is None else calibration
        errors = [None] * len(images) if reconstruction is None else squared_errors(images, reconstruction).tolist()
        chosen = classes.reshape(len(classes), -1)
        lowest = np.take_along_axis(scores, chosen[:, -1:], 1)[:, 0].tolist()
        others = scores.astype(np.float64)
        np.put_along_axis(others, chosen, -np.inf, 1)
        runners_up = (None if math.isinf(score) else score for score in others.max(1).tolist())
        caveats = [thresholds.caveats(*each, score_name) for each in zip(lowest, errors, runners_up, strict=True)]
        return cls(classes, scores, reconstruction, caveats, score_name)


def squared_errors(images: Float[np.ndarray, "N C H W"], reconstructions: Decoded) -> Float[np.ndarray, "N"]:
    """Return Σ(x - r)² over the pixels, 0..1, of each image and its reconstruction.

    It is not divided by Σx², because much ink would then excuse a large error: a letter in broad strokes would pass
    as a digit.
    """
    for name, each in (("images", images), ("reconstructions", reconstructions)):
        if not isinstance(each, np.ndarray):
            raise WrongType(f"squared_errors: {name} must be an array, got {type(each).__name__}")
    return ((images - add_objects(reconstructions)) ** 2).sum((1, 2, 3))


def add_objects(reconstructions: Decoded) -> Float[np.ndarray, "N C H W"]:
    """Return reconstructions of whole images: the sum of the objects of each image, at most 1."""
    return reconstructions if reconstructions.ndim == 4 else reconstructions.sum(1).clip(max=1)
