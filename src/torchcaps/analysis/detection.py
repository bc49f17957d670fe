"""Images unlike those that a network was trained on, told by how far the reconstruction of an image is from it.

A network reconstructs what it was trained on from the capsule of the class that it gives; of another kind of image, or
of one that an adversary made, the reconstruction looks like that class, not like the image. The limit of the distance
is what 5 % of the validation images of that class pass. A network without a decoder is judged by what its highest score
lacks to 1, which any network can be judged by.

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
from torchcaps.analysis.inference import over_batches, require_decoder, require_one_object
from torchcaps.analysis.results import Result, Table, percent
from torchcaps.analysis.robustness import Goal, attack, score_margin
from torchcaps.checks import check
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network

Measure = Literal["reconstruction", "score"]

FALSE_ALARMS = 0.05
"""Share of the validation images that pass their class's limit."""
_FEWEST = 20  # images of a class, for a limit of its own
_LEAST = 1e-6  # a limit is no less: a CNN's probabilities round to 1


@dataclass(frozen=True)
class Detector(Result):
    """The distance of an image from what a network knows, and the limit of each class.

    Args:
        measure: ``"reconstruction"``: ‖x - x̂‖, x̂ decoded from the capsule of the highest score; ``"score"``: 1 less
            the highest score.
        limits: Of each class, above 0: the distance that 5 % of the validation images that were given the class pass;
            of all validation images where fewer than 20 were given it.
        num_images: How many validation images there were.
    """

    measure: Measure
    limits: tuple[float, ...]
    num_images: int

    def ratios(self, output: ModelOutput, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
        """The distance of each image in limits of the class that it was given: above 1 it is flagged.

        Args:
            output: The network's output for the images, without targets.
            pixels: The images, 0..1.
        """
        if self.measure == "score":
            distances = 1 - output.scores.amax(1)
        else:
            assert output.reconstruction is not None
            distances = (output.reconstruction - pixels).flatten(1).norm(dim=1)
        return distances / distances.new_tensor(self.limits)[output.scores.argmax(1)]


@dataclass(frozen=True)
class Detection(Result):
    """How well images of one kind are told from test images.

    Args:
        kind: What they are.
        num_images: How many there are.
        fooled: How many of them should be found: those that an adversary brought another class, or all images of
            another data set.
        detected: How many of these are flagged.
        auroc: How often one of these is farther from what the network knows than a test image, 0..1, in limits of
            the class; None where there is none.
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
    """What a detector finds.

    Args:
        detector: The detector.
        found: First the test images, all of which count as fooled, so that what is ``detected`` are false alarms; then
            images of other data sets, then attacks.
        title: Of which network, on which images.
    """

    detector: Detector
    found: Sequence[Detection]
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"detector": self.detector.to_dict(), "found": [each.to_dict() for each in self.found]}

    def tables(self) -> list[Table]:
        measure = {"reconstruction": "distance to the reconstruction", "score": "1 less the highest score"}
        clean, *others = self.found
        limits = ["Limits", f"of {self.detector.num_images:,} validation images"]
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


def fit_detector(model: Network, validation: ImageSet, *, measure: Measure | None = None) -> Detector:
    """Take the limits of a detector from validation images, which the network was not trained on.

    Args:
        model: A network of one object an image.
        validation: The images; their labels are not looked at.
        measure: As for :class:`Detector`; ``"reconstruction"`` where there is a decoder if None.
    """
    require_one_object(model, "a detector", "detect")
    measure = measure or ("score" if model.decoder is None else "reconstruction")
    check("measure", measure, Measure)
    if measure == "reconstruction":
        require_decoder(model, "a distance to the reconstruction", "detect")
    unit = Detector(measure, (1.0,) * model.num_classes, len(validation))
    distances, classes = judge(model, validation.images, unit)
    limits = []
    for j in range(model.num_classes):
        mine = distances[classes == j]
        limit = np.quantile(mine if len(mine) >= _FEWEST else distances, 1 - FALSE_ALARMS)
        limits.append(max(float(limit), _LEAST))
    return dataclasses.replace(unit, limits=tuple(limits))


def judge(
    model: Network, images: Shaped[Tensor, "N C H W"], detector: Detector
) -> tuple[Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """How far images are from what a network knows, in limits of the class that it gives them, and that class."""
    if len(detector.limits) != model.num_classes:
        raise InputError(f"the detector has {len(detector.limits)} classes, but the network {model.num_classes}")

    def look(pixels: Tensor, _: object) -> tuple[Tensor, Tensor]:
        output = model(pixels)
        return detector.ratios(output, pixels).double(), output.scores.argmax(1)

    ratios, classes = over_batches(look, model, images)
    return ratios.numpy(), classes.numpy()


def evasion(model: Network, detector: Detector) -> Goal:
    """The goal of an adversary who knows the detector, for :func:`~torchcaps.analysis.attack`.

    What grows is the margin of scores (best wrong class less the right one) while the image has its class, and the
    distance downwards while it has another. Of all places that were passed, the nearest to what the network knows is
    kept, among those of another class.

    Source: the reconstructive attack of Qin and others 2020 (arXiv:1907.02957), which has its two goals in turns, too.
    """

    def goal(pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        output = model(pixels)
        ratios = detector.ratios(output, pixels)
        fooled = output.scores.argmax(1) != classes
        rise = torch.where(fooled, -ratios, score_margin(output, classes)).sum()
        return rise, torch.where(fooled, ratios.detach(), torch.inf)

    return goal


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
    """Judge a detector: by test images, by images of other data sets, and by attacks on the test images.

    Args:
        model: A network of one object an image.
        test: Images as those that the network was trained on, and their classes.
        detector: From :func:`fit_detector`.
        others: Sets of images of another kind, by name; their labels are not looked at.
        epsilons: For each the attacks FGSM, PGD (both along the scores) and PGD with :func:`evasion`, which may change
            a pixel by so much.
        steps: Steps of PGD and the last attack.
        seed: Seed of their starts.
        progress: Called with each attack that begins, in words.
    """
    clean, _ = judge(model, test.images, detector)
    found = [_compare("test images", clean, clean, np.ones(len(clean), dtype=bool))]
    for name, images in (others or {}).items():
        ratios, _ = judge(model, images.images, detector)
        found.append(_compare(name, clean, ratios, np.ones(len(ratios), dtype=bool)))
    many: Any = {"steps": steps, "seed": seed}
    attacks: dict[str, Any] = {
        "FGSM": {"goal": "scores"},
        "PGD": {"goal": "scores"} | many,
        "PGD that knows": {"goal": evasion(model, detector)} | many,
    }
    for epsilon in epsilons:
        for name, how in attacks.items():
            kind = f"{name}, ε = {epsilon:g}"
            if progress is not None:
                progress(kind)
            changed = attack(model, test.images, test.labels, epsilon, **how)
            ratios, classes = judge(model, changed, detector)
            found.append(_compare(kind, clean, ratios, classes != test.labels.numpy()))
    return Detections(detector, found)


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
