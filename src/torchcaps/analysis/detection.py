"""Images unlike those that a network was trained on, told by how far the reconstruction of an image is from it.

A network reconstructs what it was trained on from the capsule of the class that it gives; of another kind of image, or
of one that an adversary made, the reconstruction looks like that class, not like the image. The limit of the distance
is what 5 % of the validation images of that class pass. A network without a decoder is judged by what its highest score
lacks to 1, which any network can be judged by.

Source: Frosst, Sabour, Hinton: DARCCC (2018), arXiv:1811.06969; Qin and others (2020), arXiv:1907.02957.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis import attacks
from torchcaps.analysis.attacks import Steps, fgsm, pgd, score_margin
from torchcaps.analysis.defaults import EVASION_STEPS
from torchcaps.analysis.inference import in_batches, inference, require_decoder
from torchcaps.analysis.results import Table, percent
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import Seed, Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measure = Literal["reconstruction", "score"]

FALSE_ALARMS = 0.05
"""Share of the validation images that pass their class's limit."""
_FEWEST = 20  # images of a class, for a limit of its own
_LEAST = 1e-6  # a limit is no less: a CNN's probabilities round to 1


@dataclass(frozen=True)
class Detector:
    """The distance of an image from what a network knows, and the limit of each class.

    Args:
        measure: ``"reconstruction"``: ‖x - x̂‖, x̂ decoded from the capsule of the highest score; ``"score"``: 1 less
            the highest score.
        limits: Of each class, above 0: the distance that 5 % of the validation images that were given the class pass;
            of all validation images where fewer than 20 were given it.
        num_images: How many validation images there were.

    Raises:
        InputError: Another measure, or no limit above 0 for each class.
    """

    measure: Measure
    limits: tuple[float, ...]
    num_images: int

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise InputError(f"measure must be one of {', '.join(get_args(Measure))}, got {self.measure!r}")
        if not self.limits or min(self.limits) <= 0:
            raise InputError(f"limits must be above 0, one for each class, got {self.limits}")

    def distances(self, output: ModelOutput, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
        """The distance of each image, of which ``output`` is what the network returned without targets."""
        if self.measure == "score":
            return 1 - output.scores.amax(1)
        assert output.reconstruction is not None
        return (output.reconstruction - pixels).flatten(1).norm(dim=1)

    def ratios(self, output: ModelOutput, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
        """The distance of each image in limits of the class that it was given: above 1 it is flagged."""
        distances = self.distances(output, pixels)
        return distances / distances.new_tensor(self.limits)[output.scores.argmax(1)]

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dataclasses.asdict(self) | {"limits": list(self.limits)}


@dataclass(frozen=True)
class Detection:
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
        """All fields, and :attr:`undetected`, as JSON takes them."""
        return dataclasses.asdict(self) | {"undetected": self.undetected}


@dataclass(frozen=True)
class Detections:
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
        """The ``detector``, and what it ``found``."""
        return {"detector": self.detector.to_dict(), "found": [each.to_dict() for each in self.found]}

    def tables(self) -> list[Table]:
        """The limits and false alarms, and a row for each kind of images."""
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

    def figures(self) -> dict[str, Figure]:
        """None."""
        return {}


def fit_detector(
    model: Network, validation: ImageSet, *, measure: Measure | None = None, batch_size: int = 256
) -> Detector:
    """Take the limits of a detector from validation images, which the network was not trained on.

    Args:
        model: A network of one object an image; in evaluation mode meanwhile, and afterwards as it was.
        validation: The images; their labels are not looked at.
        measure: As for :class:`Detector`; ``"reconstruction"`` where there is a decoder if None.
        batch_size: Images at a time.

    Raises:
        InputError: Several objects in an image, images that the network was not built for, ``"reconstruction"``
            without a decoder, or another measure.
    """
    if model.objects != 1:
        raise InputError(f"images are told by one object, but this network finds {model.objects} in each")
    if measure is None:
        measure = "score" if model.decoder is None else "reconstruction"
    if measure == "reconstruction":
        require_decoder(model, "a distance to the reconstruction")
    unit = Detector(measure, (1.0,) * model.num_classes, len(validation))
    distances, classes = judge(model, validation.images, unit, batch_size=batch_size)
    overall = np.quantile(distances, 1 - FALSE_ALARMS)
    limits = []
    for j in range(model.num_classes):
        mine = distances[classes == j]
        limits.append(float(max(np.quantile(mine, 1 - FALSE_ALARMS) if len(mine) >= _FEWEST else overall, _LEAST)))
    return dataclasses.replace(unit, limits=tuple(limits))


def judge(
    model: Network, images: Shaped[Tensor, "N C H W"], detector: Detector, *, batch_size: int = 256
) -> tuple[Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """How far images are from what a network knows, in limits of the class that it gives them, and that class.

    Raises:
        InputError: A detector of another number of classes, or images that the network was not built for.
    """
    if len(detector.limits) != model.num_classes:
        raise InputError(f"the detector has {len(detector.limits)} classes, but the network {model.num_classes}")
    ratios, classes = [], []
    with inference(model):
        for pixels, _ in in_batches(model, images, None, batch_size):
            output = model(pixels)
            ratios.append(detector.ratios(output, pixels).double().cpu())
            classes.append(output.scores.argmax(1).cpu())
    return torch.cat(ratios).numpy(), torch.cat(classes).numpy()


@checked
def evade(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    detector: Detector,
    epsilon: Share,
    *,
    steps: Steps = EVASION_STEPS,
    seed: Seed = 0,
) -> Float[Tensor, "B C H W"]:
    """Images changed by an adversary who knows the detector, never by more than ``epsilon``.

    Each step of 2.5·ε/steps goes along the sign of a gradient: that of the margin of scores (best wrong class less the
    right one) while the image has its class, and that of the distance downwards while it has another. Of all places
    that were passed, the nearest to what the network knows is kept, among those of another class.

    Args:
        model: As for :func:`fit_detector`.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: Their classes.
        detector: Whose distance is to be small.
        epsilon: Largest change of a pixel, 0..1.
        steps: How many.
        seed: Of the start, which is uniform in ±ε; 0 to 2³² - 1.

    Raises:
        TypeError: Images of another dtype.
        InputError: Images that the network was not built for, or an option out of its range.

    Source: the reconstructive attack of Qin and others 2020 (arXiv:1907.02957), which has its two goals in turns, too.
    """

    def goal(pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        output = model(pixels)
        ratios = detector.ratios(output, pixels)
        fooled = output.scores.argmax(1) != classes
        rise = torch.where(fooled, -ratios, score_margin(output, classes)).sum()
        return rise, torch.where(fooled, ratios.detach(), torch.inf)

    start = torch.Generator().manual_seed(seed)
    return attacks.attack(model, images, labels, epsilon, goal, steps, 2.5 * epsilon / steps, start)


def detect(
    model: Network,
    test: ImageSet,
    detector: Detector,
    *,
    others: Mapping[str, ImageSet] | None = None,
    epsilons: Sequence[float] = (),
    steps: int = EVASION_STEPS,
    seed: int = 0,
    batch_size: int = 256,
    progress: Callable[[str], None] | None = None,
) -> list[Detection]:
    """Judge a detector: by test images, by images of other data sets, and by attacks on the test images.

    Args:
        model: As for :func:`fit_detector`.
        test: Images as those that the network was trained on, and their classes.
        detector: From :func:`fit_detector`.
        others: Sets of images of another kind, by name; their labels are not looked at.
        epsilons: For each the attacks FGSM, PGD (both along the scores) and :func:`evade`, which may change a pixel by
            so much.
        steps: Of PGD and :func:`evade`.
        seed: Of their starts.
        batch_size: Images at a time; the starts depend on it.
        progress: Called with each attack that begins, in words.

    Returns:
        As for :class:`Detections`.

    Raises:
        InputError: As for :func:`fit_detector`, :func:`judge` and :func:`evade`.
    """
    clean, _ = judge(model, test.images, detector, batch_size=batch_size)
    found = [_compare("test images", clean, clean, np.ones(len(clean), dtype=bool))]
    for name, images in (others or {}).items():
        ratios, _ = judge(model, images.images, detector, batch_size=batch_size)
        found.append(_compare(name, clean, ratios, np.ones(len(ratios), dtype=bool)))
    labels = test.labels.numpy()
    for name, change in _attacks(model, detector, epsilons, steps, seed):
        if progress is not None:
            progress(name)
        parts = [
            judge(model, change(*part), detector, batch_size=batch_size)
            for part in zip(test.images.split(batch_size), test.labels.split(batch_size), strict=True)
        ]
        ratios, classes = (np.concatenate(values) for values in zip(*parts, strict=True))
        found.append(_compare(name, clean, ratios, classes != labels))
    return found


def _attacks(
    model: Network, detector: Detector, epsilons: Sequence[float], steps: int, seed: int
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    for epsilon in epsilons:
        named: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "FGSM": partial(fgsm, model, epsilon=epsilon, objective="scores"),
            "PGD": partial(pgd, model, epsilon=epsilon, steps=steps, objective="scores", seed=seed),
            "PGD that knows": partial(evade, model, detector=detector, epsilon=epsilon, steps=steps, seed=seed),
        }
        yield from ((f"{name}, ε = {epsilon:g}", attack) for name, attack in named.items())


def _compare(kind: str, clean: Float[np.ndarray, "N"], ratios: Float[np.ndarray, "M"], fooled: np.ndarray) -> Detection:
    from sklearn.metrics import roc_auc_score

    sought = ratios[fooled]
    auroc = None
    if len(sought):
        truth = np.repeat([0, 1], [len(clean), len(sought)])
        auroc = float(roc_auc_score(truth, np.concatenate([clean, sought])))
    return Detection(kind, len(ratios), len(sought), int((sought > 1).sum()), auroc)
