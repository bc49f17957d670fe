"""Measure certainty: the probability that an answer is right, and sets of classes that contain the right class.

Both are measured on validation images, never on test images. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from torchcaps.errors import InputError
from torchcaps.ranges import COVERAGE, INDEX, is_number

MIN_ISOTONIC_IMAGES = 500
"""Validation images for an isotonic map; fewer would be fitted too closely, so they get a logistic curve."""
MAX_SCORES = 10_000
"""Validation images whose scores are stored; of more images, evenly spaced ones."""
DIGITS = 7
"""Decimal digits of stored scores. They are rounded down, so that rounding leaves no class out of a set."""
BINS = 15
"""Number of bins of the scores, 0..1, for the calibration error."""
MapName = Literal["temperature", "isotonic", "logistic"]
"""Map from scores to a probability. Temperature T: scores to the power 1/T, divided by their sum. Isotonic: an
increasing function of the answer's score, linear between steps. Logistic: σ(a · score + b)."""
CoverageOver = Literal["all", "class", "group"]
"""Images that a coverage holds for: all; those of each class; or those of new groups, such as patients."""
MAP_WORDS = {"temperature": "a temperature", "isotonic": "an isotonic map", "logistic": "a logistic map"}
OVER_WORDS = {"all": "all images", "class": "each class", "group": "new groups"}
NOT_MEASURED = (
    "--coverage needs the scores of validation images, which this network does not store; runs of this version store "
    "them for their best epoch, so train again, or leave --which last out"
)
"""Error of the last epoch, and of a network that was trained before scores were stored, or by fit."""
NO_GROUPS = "the validation images of this network have no groups; set --group in training"
_MAP_SIZES = {"temperature": 1, "logistic": 2}


@dataclass(frozen=True, kw_only=True)
class Certainty:
    """Probabilities and sets of classes, measured on validation images by :func:`torchcaps.analysis.fit_certainty`.

    Raises:
        InputError: A value has the wrong type or is out of range.
    """

    map: MapName
    """Map from scores to the probability that the answer is right."""
    parameters: tuple[float, ...]
    """T; a and b; or score and probability of each step of an isotonic map in turn."""
    scores: tuple[tuple[float, ...], ...]
    """For each class, the score of this class in each of its validation images."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Number of the group of each of these images; None: the images have no groups."""
    images: int
    """Number of validation images."""

    def __post_init__(self) -> None:
        for name in ("parameters", "scores", "groups"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))  # JSON has lists
        expected = _MAP_SIZES.get(str(self.map))
        count = len(self.parameters) if _are_numbers(self.parameters) else 0
        sizes = _sizes(self.scores)
        fits = {
            "map": self.map in get_args(MapName),
            "parameters": count == expected if expected else count >= 4 and count % 2 == 0,
            "scores": sizes is not None and len(sizes) > 1,
            "groups": self.groups is None or (_are_indices(self.groups) and sizes == _sizes(self.groups)),
            "images": self.images in INDEX,
        }
        if self.map == "temperature" and fits["parameters"]:
            fits["parameters"] = self.parameters[0] > 0
        for name, fitting in fits.items():
            if not fitting:
                raise InputError(f'"{name}" of a certainty does not fit its other values')

    @classmethod
    def fit(
        cls,
        scores: Float[np.ndarray, "N J"],
        labels: Int[np.ndarray, "N"],
        classes: Int[np.ndarray, "N"],
        groups: Sequence[str] | None = None,
        *,
        are_probabilities: bool = False,
    ) -> Self:
        """Measure the certainty of the answers to validation images.

        Args:
            scores: Scores of the classes.
            labels: True class of each image.
            classes: Predicted class of each image.
            groups: Name of the group of each image, such as its patient.
            are_probabilities: The scores are those of a softmax, which get a temperature. Other scores, such as
                lengths, get an isotonic map from 500 images on, else a logistic one.
        """
        right, rows = classes == labels, scores.astype(np.float64)
        answered = np.take_along_axis(rows, classes[:, None], 1)[:, 0]
        if are_probabilities:
            name: MapName = "temperature"
            parameters = [_temperature(rows, labels)]
        elif len(labels) >= MIN_ISOTONIC_IMAGES:
            name, parameters = "isotonic", _isotonic(answered, right)
        else:
            name, parameters = "logistic", _logistic(answered, right)
        kept = np.arange(len(labels))
        if len(kept) > MAX_SCORES:
            kept = np.unique(np.linspace(0, len(labels) - 1, MAX_SCORES).round().astype(int))
        true = np.floor(np.take_along_axis(rows, labels[:, None], 1)[:, 0] * 10**DIGITS) / 10**DIGITS
        numbers = None if groups is None else np.unique(np.array(groups), return_inverse=True)[1]
        members = [kept[labels[kept] == j] for j in range(scores.shape[1])]
        return cls(
            map=name,
            parameters=tuple(parameters),
            scores=tuple(tuple(true[each].tolist()) for each in members),
            groups=None if numbers is None else tuple(tuple(numbers[each].tolist()) for each in members),
            images=len(labels),
        )

    def of_groups(self) -> Self:
        """Return the certainty of groups of images that get one answer, by the mean of their scores.

        The score of a validation group is the mean of those of its true class; groups of several classes have none.

        Raises:
            InputError: The validation images have no groups.
        """
        if self.groups is None:
            raise InputError(NO_GROUPS)
        classes = Counter(group for each in self.groups for group in set(each))
        means = list[tuple[float, ...]]()
        for scores, groups in zip(self.scores, self.groups, strict=True):
            values, owners = np.array(scores), np.array(groups)
            alone = (name for name in sorted({*groups}) if classes[name] == 1)
            means.append(tuple(float(values[owners == name].mean()) for name in alone))
        return replace(self, scores=tuple(means), groups=None, images=sum(map(len, means)))

    def probabilities(self, scores: Float[np.ndarray, "N J"], classes: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
        """Return the probability that each answer, its class, is right."""
        rows = scores.astype(np.float64)
        if self.map == "temperature":
            rows = _softened(rows, self.parameters[0])
        answered = np.take_along_axis(rows, classes[:, None], 1)[:, 0]
        if self.map == "isotonic":
            return np.interp(answered, self.parameters[::2], self.parameters[1::2])
        if self.map == "logistic":
            slope, offset = self.parameters
            return 1 / (1 + np.exp(-(slope * answered + offset)))
        return answered

    def sets(
        self, scores: Float[np.ndarray, "N J"], coverage: float, over: CoverageOver = "all"
    ) -> Bool[np.ndarray, "N J"]:
        """Return True for the classes in the set of each image, which holds the true class with a given probability.

        A class is in the set if its score is at least the k-th largest score of the true class in n validation images,
        k = ⌈(n + 1) · coverage⌉; all classes are, if k > n. It holds on average over new images that are drawn as the
        validation images were. Over each class, the images of this class decide its limit. Over groups, each
        of the G groups has the weight 1 / (G + 1), which its images share, so that it holds for images of new groups.

        Args:
            scores: Scores of the classes.
            coverage: Probability, above 0 and below 1.
            over: Images that it holds for.

        Raises:
            InputError: The coverage is out of range, or the validation images have no groups.

        Source: split conformal prediction; Sadinle, Lei, Wasserman 2019 (arXiv:1609.00451); over groups, Lee, Barber,
        Willett 2023 (arXiv:2306.06342).
        """
        COVERAGE.check("coverage", coverage)
        if over == "group" and self.groups is None:
            raise InputError(NO_GROUPS)
        if over == "class":
            limits = [_limit(np.array(each), np.ones(len(each)), coverage) for each in self.scores]
            return scores >= np.array(limits)
        joined = np.concatenate([np.array(each, float) for each in self.scores])
        weights = np.ones(len(joined))
        if over == "group" and self.groups is not None:
            groups = np.concatenate([np.array(each, int) for each in self.groups])
            weights = 1 / np.bincount(groups)[groups]
        return scores >= _limit(joined, weights, coverage)


def calibration_error(certainties: Float[np.ndarray, "N"], right: Bool[np.ndarray, "N"]) -> float:
    """Return the expected calibration error, 0..1: Σ_b |right_b − Σ certainties_b| / N over 15 bins b.

    Source: Guo, Pleiss, Sun, Weinberger 2017 (arXiv:1706.04599), equation 3.
    """
    values = certainties.astype(np.float64)
    bins = (values * BINS).astype(int).clip(0, BINS - 1)
    return float(abs(np.bincount(bins, right - values)).sum()) / len(values)


def _limit(scores: Float[np.ndarray, "n"], weights: Float[np.ndarray, "n"], coverage: float) -> float:
    """Return the smallest score of a class in a set: the images with at least this score have the weight needed.

    The weight needed is ⌈(n + 1) · coverage⌉ for weights of 1; −∞ if all images together have less.
    """
    order = np.argsort(-scores, kind="stable")
    total = weights.sum()
    reached = weights[order].cumsum() >= (total + 1) * coverage * (1 - 1e-12)
    return float(scores[order][reached.argmax()]) if reached.any() else -math.inf


def _softened(rows: Float[np.ndarray, "N J"], temperature: float) -> Float[np.ndarray, "N J"]:
    logits = np.log(rows.clip(min=np.finfo(np.float32).tiny)) / temperature
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _temperature(rows: Float[np.ndarray, "N J"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the temperature with the smallest cross-entropy."""
    from scipy.optimize import minimize_scalar

    def cross_entropy(logarithm: float) -> float:
        true = np.take_along_axis(_softened(rows, math.exp(logarithm)), labels[:, None], 1)
        return float(-np.log(true.clip(min=1e-300)).mean())

    return math.exp(float(minimize_scalar(cross_entropy, bounds=(-3, 3), method="bounded").x))


def _isotonic(answered: Float[np.ndarray, "N"], right: Bool[np.ndarray, "N"]) -> list[float]:
    """Return score and probability of each step of the increasing function with the smallest squared error."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0, y_max=1).fit(answered, right.astype(np.float64))
    steps = np.stack([fitted.X_thresholds_, fitted.y_thresholds_], 1)
    return (steps if len(steps) > 1 else steps.repeat(2, 0)).flatten().tolist()


def _logistic(answered: Float[np.ndarray, "N"], right: Bool[np.ndarray, "N"]) -> list[float]:
    """Return a and b of the logistic curve; its targets are a little inside 0 and 1.

    Source: Platt 1999, "Probabilistic outputs for support vector machines".
    """
    from scipy.optimize import minimize

    positives, negatives = right.sum(), (~right).sum()
    targets = np.where(right, (positives + 1) / (positives + 2), 1 / (negatives + 2))

    def cross_entropy(parameters: np.ndarray) -> float:
        logits = parameters[0] * answered + parameters[1]
        return float((np.logaddexp(0, logits) - targets * logits).mean())

    fitted: list[float] = minimize(cross_entropy, np.array([1.0, 0.0]), bounds=[(0, None), (None, None)]).x.tolist()
    return fitted


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list | tuple) else values


def _are_numbers(values: object) -> bool:
    return isinstance(values, tuple) and all(is_number(each) and math.isfinite(each) for each in values)


def _sizes(rows: object) -> list[int] | None:
    """Return the lengths of rows of numbers; None if they are something else."""
    return [*map(len, rows)] if isinstance(rows, tuple) and all(map(_are_numbers, rows)) else None


def _are_indices(rows: tuple[tuple[int, ...], ...]) -> bool:
    return _sizes(rows) is not None and all(each in INDEX for row in rows for each in row)
