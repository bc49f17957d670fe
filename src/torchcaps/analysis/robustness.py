"""How a network's accuracy falls when images are turned, or changed by an adversary, see :mod:`.attacks`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torchcaps.analysis import attacks
from torchcaps.analysis.attacks import Objective, Steps
from torchcaps.analysis.defaults import ANGLES, EPSILONS, MOST_STRENGTHS, PGD_STEPS
from torchcaps.analysis.figures import COLOURS, draw_legend, new_figure, style_axes
from torchcaps.analysis.inference import in_batches, inference
from torchcaps.analysis.results import Table, percent
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.ranges import Range, Seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Attack = Literal["fgsm", "pgd"]
ANGLE = Range(-1e6, 1e6)
"""Degrees, either way."""

#: What each kind of curve is called, and the unit of its strengths.
KINDS = {
    "rotation": ("Rotation", "degrees"),
    "fgsm": ("FGSM", "largest change of a pixel"),
    "fgsm-scores": ("FGSM on the scores", "largest change of a pixel"),
    "pgd": ("PGD", "largest change of a pixel"),
    "pgd-scores": ("PGD on the scores", "largest change of a pixel"),
}


@dataclass(frozen=True)
class RobustnessCurve:
    """Accuracy at each strength of a disturbance.

    Args:
        kind: One of ``KINDS``: ``"rotation"``; ``"fgsm"`` and ``"pgd"`` along the network's own loss; the same with
            ``"-scores"`` along its scores.
        strengths: Degrees of a rotation, or the largest change of a pixel of 0..1.
        accuracy: Share of the images that were given their class at each strength, 0..1.
        num_images: How many images were looked at.
    """

    kind: str
    strengths: tuple[float, ...]
    accuracy: tuple[float, ...]
    num_images: int

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dataclasses.asdict(self) | {"strengths": list(self.strengths), "accuracy": list(self.accuracy)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(values["kind"], tuple(values["strengths"]), tuple(values["accuracy"]), values["num_images"])


@dataclass(frozen=True)
class Robustness:
    """The curves of several networks beside each other, the same kinds of each.

    Args:
        networks: The curves of each network, by the name to show.
        images: The images that each was measured on, in words.
    """

    networks: Mapping[str, Sequence[RobustnessCurve]]
    images: Mapping[str, str]

    def to_dict(self) -> list[dict[str, Any]]:
        """The ``curves`` of each network."""
        return [{"curves": [curve.to_dict() for curve in curves]} for curves in self.networks.values()]

    def tables(self) -> list[Table]:
        """Accuracy at each strength, a table for each kind and a column for each network."""
        each = ", ".join(f"of {name} on {words}" for name, words in self.images.items())
        title = f"Accuracy {each}" if self._differ else f"Accuracy on {next(iter(self.images.values()))}"
        found = []
        for curves in zip(*self.networks.values(), strict=True):
            name, unit = KINDS[curves[0].kind]
            rows = [
                [f"{strength:g}", *(percent(curve.accuracy[n]) for curve in curves)]
                for n, strength in enumerate(curves[0].strengths)
            ]
            found.append(Table(rows, (unit, *self.networks), f"{name}. {title}", left=0))
        return found

    def figures(self) -> dict[str, Figure]:
        """The curves, see :func:`figure_robustness`."""
        lines = (f"{name}: {words}" for name, words in self.images.items())
        return {"": figure_robustness(self.networks, title="\n".join(lines) if self._differ else None)}

    @property
    def _differ(self) -> bool:
        return len(set(self.images.values())) > 1


@checked
def rotate(images: Float[Tensor, "B C H W"], degrees: Annotated[float, ANGLE]) -> Float[Tensor, "B C H W"]:
    """Turn images counter-clockwise about their centre: bilinear between pixels, zeros from outside.

    Args:
        images: Floating-point pixels.
        degrees: How far; 90 is a quarter turn to the left.

    Raises:
        InputError: Images of another shape, or an angle out of its range.
    """
    height, width = images.shape[2:]
    if not images.numel():
        return images.clone()
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    # from a place in the turned image to that in the original, both in -1..1 across and down, of which the units differ
    matrix = torch.tensor([[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]])
    places = matrix.to(images).expand(len(images), 2, 3)
    grid = F.affine_grid(places, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def rotation_curve(
    model: Network, image_set: ImageSet, *, angles: Sequence[float] = ANGLES, batch_size: int = 256
) -> RobustnessCurve:
    """Accuracy on images that are turned by each of some angles.

    Args:
        model: A network of one object an image; in evaluation mode meanwhile, and afterwards as it was.
        image_set: Images and their classes.
        angles: Degrees, counter-clockwise.
        batch_size: Images at a time.

    Raises:
        InputError: A network of several objects, images that it was not built for, or no angle.
    """
    _check(model, angles, "angle", ANGLE)

    def change(n: int, images: Tensor, _: Tensor) -> Tensor:
        return rotate(images, angles[n])

    return _curve("rotation", model, image_set, angles, batch_size, change)


@checked
def attack_curve(
    model: Network,
    image_set: ImageSet,
    attack: Attack,
    *,
    epsilons: Sequence[float] = EPSILONS,
    steps: Steps = PGD_STEPS,
    objective: Objective = "loss",
    seed: Seed = 0,
    batch_size: int = 256,
) -> RobustnessCurve:
    """Accuracy on images that an adversary has changed by at most each of some amounts.

    Args:
        model: As for :func:`~torchcaps.analysis.fgsm`.
        image_set: Images and their classes.
        attack: ``"fgsm"`` or ``"pgd"``.
        epsilons: Largest changes of a pixel, 0..1; at 0 the images are as they are.
        steps: Of PGD.
        objective: As for :func:`~torchcaps.analysis.fgsm`.
        seed: Of PGD's starts; 0 to 2³² - 1.
        batch_size: Images at a time; PGD's starts depend on it.

    Raises:
        InputError: As for :func:`~torchcaps.analysis.fgsm`, or an unknown attack.
    """
    _check(model, epsilons, "epsilon", Range(0, 1))
    goal, starts = attacks.goal_of(model, objective), [torch.Generator().manual_seed(seed) for _ in epsilons]

    def change(n: int, images: Tensor, labels: Tensor) -> Tensor:
        epsilon = epsilons[n]
        if epsilon == 0:
            return images
        if attack == "fgsm":
            return attacks.attack(model, images, labels, epsilon, goal)
        return attacks.attack(model, images, labels, epsilon, goal, steps, 2.5 * epsilon / steps, starts[n])

    kind = attack if objective == "loss" else f"{attack}-scores"
    return _curve(kind, model, image_set, epsilons, batch_size, change)


def figure_robustness(networks: Mapping[str, Sequence[RobustnessCurve]], *, title: str | None = None) -> Figure:
    """Accuracy against the strength of each kind of disturbance, one line a network.

    Args:
        networks: The curves of each network, by the name to show. Several curves of one kind, such as those of several
            seeds, are drawn as their mean within a band of one standard deviation.
        title: Above the figure.

    Raises:
        InputError: There is no curve, or the curves of one kind and network differ in their strengths.
    """
    kinds = list(dict.fromkeys(curve.kind for curves in networks.values() for curve in curves))
    if not kinds:
        raise InputError("there must be at least one curve to draw, got none")
    columns = min(len(kinds), 3)
    rows = -(-len(kinds) // columns)
    figure = new_figure(3.6 * columns + 0.4, 3.2 * rows + 0.5, title)
    lines: dict[str, Line2D] = {}
    for panel, kind in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).ravel(), kinds):
        if kind is None:
            panel.set_axis_off()
            continue
        name, unit = KINDS[kind]
        style_axes(panel, name, unit, "accuracy, %")
        panel.set_ylim(0, 102)
        for (network, curves), colour in zip(networks.items(), itertools.cycle(COLOURS)):
            mine = [curve for curve in curves if curve.kind == kind]
            if not mine:
                continue
            if len({curve.strengths for curve in mine}) > 1:
                raise InputError(f"the curves of {network} for {name} must have the same strengths to be averaged")
            strengths, accuracy = mine[0].strengths, 100 * np.array([curve.accuracy for curve in mine])
            mean = accuracy.mean(0)
            (lines[network],) = panel.plot(strengths, mean, color=colour, marker="o", markersize=3, linewidth=1.6)
            if len(mine) > 1:
                spread = accuracy.std(0, ddof=1)
                panel.fill_between(strengths, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    shown = [network for network in networks if network in lines]
    draw_legend(figure, [lines[network] for network in shown], shown, columns=3)
    return figure


def _curve(
    kind: str,
    model: Network,
    image_set: ImageSet,
    strengths: Sequence[float],
    batch_size: int,
    change: Callable[[int, Tensor, Tensor], Tensor],
) -> RobustnessCurve:
    """Accuracy on what ``change`` makes of images for the n-th strength."""
    correct = np.zeros(len(strengths), dtype=np.int64)
    for images, labels in in_batches(model, image_set.images, image_set.labels, batch_size):
        assert labels is not None
        for n in range(len(strengths)):
            changed = change(n, images, labels)
            with inference(model):
                correct[n] += int((model(changed).scores.argmax(-1) == labels).sum())
    accuracy = tuple((correct / len(image_set)).tolist())
    return RobustnessCurve(kind, tuple(map(float, strengths)), accuracy, len(image_set))


def _check(model: Network, strengths: Sequence[float], name: str, allowed: Range) -> None:
    if model.objects != 1:
        raise InputError(
            f"robustness is measured on images of one object, but this network finds {model.objects} in each"
        )
    if not 0 < len(strengths) <= MOST_STRENGTHS:
        raise InputError(f"there must be at least one {name}, and at most {MOST_STRENGTHS}, got {len(strengths)}")
    for strength in strengths:
        allowed.check(name, strength)
