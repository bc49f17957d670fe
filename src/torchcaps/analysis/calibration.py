"""What a network says about images, and which of it is unsure: what is beyond the usual. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float, Int

from torchcaps.analysis.results import Scored
from torchcaps.errors import WrongType
from torchcaps.ranges import INDEX, Range

USUAL = 0.99
"""The share of validation images that a calibration calls usual."""
FINITE = Range(-1e38, 1e38)
NEAR = 0.9
"""Another class is nearly as likely if its score is at least this share of the score of the class that was given."""
Drawn = Float[np.ndarray, "N C H W"] | Float[np.ndarray, "N P C H W"]
"""Reconstructions, pixels 0..1; with several objects in an image, each by itself."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is usual for a network: the bounds that 99 % of its validation images keep to.

    `torchcaps.analysis.calibrate` measures it. The values here stand for a network of which nothing was measured: half
    of the longest length that there can be, and no bound of the error.
    """

    score: float = 0.5
    """The score of the class that was given; of several objects, of the last of them. 99 % have a higher one."""
    error: float | None = None
    """Σ(x - r)² over the pixels, 0..1, of an image x and its reconstruction r. 99 % have a smaller one."""
    images: int = 0
    """How many images were measured; 0 where none was."""

    def __post_init__(self) -> None:
        for name, within in (("score", FINITE), ("error", FINITE), ("images", INDEX)):
            if name != "error" or self.error is not None:
                within.check(f'"{name}" of a calibration', getattr(self, name))

    def caveats(self, score: float, error: float | None, runner_up: float | None = None) -> tuple[str, ...]:
        """Why an answer is unsure, each reason in words; empty where it is not.

        Args:
            score: Of the class that was given; of several objects, of the last of them.
            error: Of the reconstruction; None for a network without decoder.
            runner_up: The highest score of the other classes, None where there is none.
        """
        usual = usual_words(self)
        reasons = []
        if score < self.score:
            reasons.append(f"its score {score:.2f} is below {self.score:.2f}{usual}")
        if runner_up is not None and runner_up >= NEAR * score:
            reasons.append(f"another class has nearly the same score, {runner_up:.2f} beside {score:.2f}")
        if error is not None and self.error is not None and error > self.error:
            unlike = "the image is unlike the training images: " if self.images else ""
            error_words = f"the squared error of its reconstruction is {error:.1f}, more than {self.error:.1f}{usual}"
            reasons.append(f"{unlike}{error_words}")
        return tuple(reasons)


def usual_words(calibration: Calibration) -> str:
    """Where the bounds come from, as a sentence goes on; nothing where none was measured."""
    return f", the bound of {100 * USUAL:.0f} % of the validation images" if calibration.images else ""


@dataclass(frozen=True, eq=False)
class Prediction(Scored):
    """What a network says about images, by torch or from an ONNX file.

    Args:
        classes: The class of the highest score; with several objects in an image those of the P highest, the highest
            first.
        scores: All class scores, 0..1: the lengths ‖v_j‖ of capsules, their activations, or a CNN's probabilities; or
            the values of a regression.
        reconstruction: The image decoded from the capsule of the highest score, pixels 0..1; with several objects each
            decoded from its own, as ``classes`` has them (or the targets, where they chose); None without a decoder.
        caveats: Why the answer to each image is unsure, see :meth:`Calibration.caveats`.
        score_name: What the scores are.
    """

    classes: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"]
    scores: Float[np.ndarray, "N J"]
    reconstruction: Drawn | None
    caveats: Sequence[tuple[str, ...]]
    score_name: Literal["length", "activation", "probability", "value"] = "length"

    @classmethod
    def of(
        cls,
        images: Float[np.ndarray, "N C H W"],
        classes: Int[np.ndarray, "N"] | Int[np.ndarray, "N P"],
        scores: Float[np.ndarray, "N J"],
        reconstruction: Drawn | None,
        calibration: Calibration | None,
        **more: Any,
    ) -> Self:
        """The prediction for images of pixels 0..1, with its caveats by what is usual for the network."""
        usual = Calibration() if calibration is None else calibration
        off = [None] * len(images) if reconstruction is None else squared_errors(images, reconstruction).tolist()
        chosen = classes.reshape(len(classes), -1)
        last = np.take_along_axis(scores, chosen[:, -1:], 1)[:, 0].tolist()
        others = scores.astype(np.float64)
        np.put_along_axis(others, chosen, -np.inf, 1)
        runners_up = (None if math.isinf(score) else score for score in others.max(1).tolist())
        caveats = [usual.caveats(*each) for each in zip(last, off, runners_up, strict=True)]
        return cls(classes, scores, reconstruction, caveats, **more)


def squared_errors(images: Float[np.ndarray, "N C H W"], reconstructions: Drawn) -> Float[np.ndarray, "N"]:
    """Σ(x - r)² over the pixels, 0..1, of each image and its reconstruction.

    It is not divided by Σx²: then much ink would excuse much error, and a letter of broad strokes pass for a digit.
    """
    for name, each in (("images", images), ("reconstructions", reconstructions)):
        if not isinstance(each, np.ndarray):
            raise WrongType(f"squared_errors: {name} must be an array, got {type(each).__name__}")
    return ((images - full(reconstructions)) ** 2).sum((1, 2, 3))


def full(reconstructions: Drawn) -> Float[np.ndarray, "N C H W"]:
    """Reconstructions of whole images: the objects of each laid over each other, added and cut off at 1."""
    return reconstructions if reconstructions.ndim == 4 else reconstructions.sum(1).clip(max=1)
