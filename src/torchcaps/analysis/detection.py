"""Detect out-of-distribution and attacked images by their reconstruction error.

The decoder redraws a familiar image well. It redraws an unfamiliar or attacked image as a member of the predicted
class, so the distance between image and reconstruction is large. The threshold of a class is the distance that 5 % of
its validation images exceed. For a network without a decoder, the distance is one minus the highest score.

Source: Frosst, Sabour, Hinton: DARCCC (2018), arXiv:1811.06969; Qin and others (2020), arXiv:1907.02957.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.defaults import EVASION_STEPS
from torchcaps.analysis.inference import over_batches, require_decoder, require_one_object, require_pixels
from torchcaps.analysis.results import Result, Table, percent
from torchcaps.analysis.robustness import Goal, attack, score_margin
from torchcaps.checks import check, checked
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.tasks import task_of
from torchcaps.words import counted

Measure = Literal["reconstruction", "score"]

FALSE_ALARMS = 0.05
"""Share of the validation images above the threshold of their class."""
_MIN_IMAGES = 20  # validation images of a class; with fewer, the threshold of all images is used
_MIN_LIMIT = 1e-6  # a CNN's probabilities round to 1, so distances to 0


@dataclass(frozen=True)
class Detector(Result):
    """Kind of distance, and the threshold of each class.

    Args:
        measure: ``"reconstruction"``: ‖x - x̂‖, x̂ decoded from the capsule of the highest score; ``"score"``: 1 less
            the highest score.
        limits: Threshold of each class, above 0: the distance that 5 % of the validation images with this predicted
            class exceed. With fewer than 20 such images, all validation images are used.
        num_images: Number of validation images.
    """

    measure: Measure
    limits: tuple[float, ...]
    num_images: int

    def ratios(
        self, output: ModelOutput, pixels: Float[Tensor, "B C H W"], classes: Int[Tensor, "B"]
    ) -> Float[Tensor, "B"]:
        """Return distance ÷ threshold of the predicted class for each image; above 1 it is flagged.

        Args:
            output: The network's output for the images, without targets.
            pixels: The images, 0..1.
            classes: The predicted classes.
        """
        if self.measure == "score":
            distances = 1 - output.scores.amax(1)
        else:
            assert output.reconstruction is not None
            distances = (output.reconstruction - pixels).flatten(1).norm(dim=1)
        return distances / distances.new_tensor(self.limits)[classes]


@dataclass(frozen=True)
class Detection(Result):
    """Detection rate of one kind of images.

    Args:
        kind: Name of the kind, such as ``"PGD, ε = 0.1"``.
        num_images: Number of images.
        fooled: Images to detect: attacked images whose predicted class changed, or all images of another data set.
        detected: Flagged images among ``fooled``.
        auroc: Probability that an image of ``fooled`` has a larger ratio than a test image, 0..1; None if ``fooled``
            is 0.
    """

    kind: str
    num_images: int
    fooled: int
    detected: int
    auroc: float | None

    @property
    def undetected(self) -> float:
        """Share of all images that fool the network and are not flagged, 0..1."""
        return (self.fooled - self.detected) / self.num_images

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"undetected": self.undetected}


@dataclass(frozen=True)
class Detections(Result):
    """Detection rates of one detector.

    Args:
        detector: The detector.
        found: First the test images, which all count as fooled, so that ``detected`` counts false alarms; then images
            of other data sets; then attacks.
        title: Network and images.
    """

    detector: Detector
    found: Sequence[Detection]
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"detector": self.detector.to_dict(), "found": [each.to_dict() for each in self.found]}

    def tables(self) -> list[Table]:
        measure = {"reconstruction": "distance to the reconstruction", "score": "1 minus the highest score"}
        clean, *others = self.found
        limits = ["Limits", f"of {counted(self.detector.num_images, 'validation image')}"]
        alarms = ["False alarms", percent(clean.detected / clean.num_images)]
        rows = [
            [
                each.kind,
                percent(each.fooled / each.num_images),
                "–" if each.auroc is None else f"{each.auroc:.3f}",
                percent(each.detected / each.fooled if each.fooled else None),
                percent(each.undetected),
            ]
            for each in others
        ]
        columns = ("images", "fooled", "AUROC", "detected", "fooled, undetected")
        title = f"{self.title}{measure[self.detector.measure]}"
        return [Table([limits, alarms], title=title), *([Table(rows, columns)] if rows else [])]


@checked
def fit_detector(model: Network, validation: ImageSet, *, measure: Measure | None = None) -> Detector:
    """Compute the thresholds of a detector from validation images.

    Args:
        model: A network with one object per image.
        validation: Images that the network was not trained on; labels are not used.
        measure: As for :class:`Detector`. Default: ``"reconstruction"`` if the network has a decoder, else ``"score"``.
    """
    require_one_object(model, "a detector", "detect")
    measure = measure or ("score" if model.decoder is None else "reconstruction")
    check("measure", measure, Measure)
    if measure == "reconstruction":
        require_decoder(model, "a distance to the reconstruction", "detect")
        require_pixels(model, validation.images, "a distance to the reconstruction")
    unit = Detector(measure, (1.0,) * model.num_classes, len(validation))
    distances, classes = distance_ratios(model, validation.images, unit)
    limits = []
    for j in range(model.num_classes):
        mine = distances[classes == j]
        limit = np.quantile(mine if len(mine) >= _MIN_IMAGES else distances, 1 - FALSE_ALARMS)
        limits.append(max(float(limit), _MIN_LIMIT))
    return dataclasses.replace(unit, limits=tuple(limits))


@checked
def distance_ratios(
    model: Network, images: Shaped[Tensor, "N C H W"], detector: Detector
) -> tuple[Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Return distance ÷ threshold of the predicted class, and the predicted class, of each image."""
    if len(detector.limits) != model.num_classes:
        raise InputError(f"the detector has {len(detector.limits)} classes, but the network {model.num_classes}")
    task = task_of(model)

    def measure(pixels: Tensor, _: object) -> tuple[Tensor, Tensor]:
        output = model(pixels)
        predicted = task.predict_classes(output.scores)
        return detector.ratios(output, pixels, predicted), predicted

    ratios, classes = over_batches(measure, model, images)
    if not ratios.isfinite().all():
        raise InputError(
            f"the network's answers to {counted(int((~ratios.isfinite()).sum()), 'image')} are NaN or infinite"
        )
    return ratios.double().numpy(), classes.numpy()


@checked
def evasion(model: Network, detector: Detector) -> Goal:
    """Return the goal of an adaptive attack, which knows the detector, for :func:`~torchcaps.analysis.attack`.

    While the image still has its class, the attack raises the margin of scores (best wrong class minus the right one).
    Once the class has changed, it lowers the distance. The step with the smallest distance and another class is kept.

    Source: the reconstructive attack of Qin and others 2020 (arXiv:1907.02957), which also alternates the two goals.
    """
    task = task_of(model)

    def goal(pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        output = model(pixels)
        predicted = task.predict_classes(output.scores)
        ratios = detector.ratios(output, pixels, predicted)
        fooled = predicted != classes
        rise = torch.where(fooled, -ratios, score_margin(output, classes)).sum()
        return rise, torch.where(fooled, ratios.detach(), torch.inf)

    return goal


@checked
def detect(
    model: Network,
    test: ImageSet,
    detector: Detector,
    *,
    others: Mapping[str, ImageSet] | None = None,
    epsilons: Sequence[float] = (),
    steps: int = EVASION_STEPS,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> Detections:
    """Measure a detector on test images, on images of other data sets, and on attacked test images.

    Args:
        model: A network with one object per image.
        test: Images of the training distribution, with their classes.
        detector: From :func:`fit_detector`.
        others: Out-of-distribution image sets by name; their labels are not used.
        epsilons: Largest changes of a pixel. For each, three attacks run: FGSM and PGD along the scores, and adaptive
            PGD with :func:`evasion`.
        steps: Steps of PGD and of adaptive PGD.
        seed: Random seed of the starts of PGD.
        progress: Called with the name of each attack when it starts.
    """
    clean, _ = distance_ratios(model, test.images, detector)
    detections = [_compare("test images", clean, clean, np.ones(len(clean), dtype=bool))]
    for name, images in (others or {}).items():
        ratios, _ = distance_ratios(model, images.images, detector)
        detections.append(_compare(name, clean, ratios, np.ones(len(ratios), dtype=bool)))
    many: Any = {"steps": steps, "seed": seed}
    attacks: dict[str, Any] = {
        "FGSM": {"goal": "scores"},
        "PGD": {"goal": "scores"} | many,
        "adaptive PGD": {"goal": evasion(model, detector)} | many,
    }
    for epsilon in epsilons:
        for name, how in attacks.items():
            kind = f"{name}, ε = {epsilon:g}"
            if progress is not None:
                progress(kind)
            changed = attack(model, test.images, test.labels, epsilon, **how)
            ratios, classes = distance_ratios(model, changed, detector)
            detections.append(_compare(kind, clean, ratios, classes != test.labels.numpy()))
    return Detections(detector, detections)


def _compare(
    kind: str, clean: Float[np.ndarray, "N"], ratios: Float[np.ndarray, "M"], fooled: Bool[np.ndarray, "M"]
) -> Detection:
    from sklearn.metrics import roc_auc_score

    sought = ratios[fooled]
    auroc = None
    if len(sought):
        truth = np.repeat([0, 1], [len(clean), len(sought)])
        auroc = float(roc_auc_score(truth, np.concatenate([clean, sought])))
    return Detection(kind, len(ratios), len(sought), int((sought > 1).sum()), auroc)
