"""Measure the accuracy of a network on rotated images and under adversarial attacks.

Attacks follow the gradient of the network's own loss or of its scores. For capsule networks the difference matters,
because the margin loss and its gradient are exactly zero for an image that is classified with enough margin. An attack
along the loss then stops, or follows only the reconstruction error, and the network seems more robust than it is. An
attack along the scores continues.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.defaults import ANGLES, EPSILONS, PGD_STEPS, STEPS
from torchcaps.analysis.figures import COLOURS, draw_legend, new_figure, style_axes
from torchcaps.analysis.inference import (
    as_pixels,
    in_batches,
    inference,
    over_batches,
    require_one_object,
    require_pixels,
)
from torchcaps.analysis.results import Comparison, Result, Table, percent
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import Fill, Range, Seed, Share
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Objective = Literal["loss", "scores"]
Steps = Annotated[int, STEPS]
Goal = Callable[[Float[Tensor, "B C H W"], Int[Tensor, "B"]], tuple[Float[Tensor, ""], Float[Tensor, "B"] | None]]
"""Function of pixels and labels that an attack maximises. It returns the number to increase, and either None or the
badness of each image: the attack then keeps the step with the smallest badness. Infinite badness: the step is never
kept, unless no other step counts."""
Kind = Literal["rotation", "fgsm", "fgsm-scores", "pgd", "pgd-scores"]
ANGLE = Range(-1e6, 1e6)
"""Degrees, in either direction."""

#: Name and unit of each kind of curve.
KINDS: dict[Kind, tuple[str, str]] = {
    "rotation": ("Rotation", "degrees"),
    "fgsm": ("FGSM", "largest change of a pixel"),
    "fgsm-scores": ("FGSM on the scores", "largest change of a pixel"),
    "pgd": ("PGD", "largest change of a pixel"),
    "pgd-scores": ("PGD on the scores", "largest change of a pixel"),
}


@dataclass(frozen=True)
class RobustnessCurve(Result):
    """Accuracy at each strength of a disturbance.

    Args:
        kind: ``"rotation"``; ``"fgsm"`` or ``"pgd"``, attacks along the network's own loss; ``"fgsm-scores"`` or
            ``"pgd-scores"``, attacks along its scores.
        strengths: Degrees of a rotation, or largest change of a pixel (0..1).
        accuracy: Share of correctly classified images at each strength, 0..1.
        num_images: Number of images.
        fill: Pixels that enter rotated images: ``"zeros"`` or the nearest pixel of the ``"edge"``; None for an attack.
    """

    kind: Kind
    strengths: Sequence[float]
    accuracy: Sequence[float]
    num_images: int
    fill: Fill | None = None

    @property
    def title(self) -> str:
        """Name of the disturbance: ``Rotation``, or ``Rotation, filled with the edge``."""
        return KINDS[self.kind][0] + ", filled with the edge" * (self.fill == "edge")


class Robustness(Comparison):
    """Robustness curves of several networks: a list of :class:`RobustnessCurve` each, of the same kinds."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"curves": [curve.to_dict() for curve in curves]} for curves in self.networks.values()]

    def tables(self) -> list[Table]:
        tables = [Table(note=[*self.title.split("\n"), ""])]
        for curves in zip(*self.networks.values(), strict=True):
            name, unit = ", ".join(dict.fromkeys(curve.title for curve in curves)), KINDS[curves[0].kind][1]
            columns = zip(curves[0].strengths, *(curve.accuracy for curve in curves), strict=True)
            rows = [[f"{strength:g}", *map(percent, accuracies)] for strength, *accuracies in columns]
            tables.append(Table(rows, (unit, *self.networks), f"{name}: accuracy", text_columns=0))
        return tables

    def figures(self, *, ax: Axes | None = None) -> dict[str, Figure]:
        """Draw accuracy over strength: a panel for each kind, a line for each network.

        Several curves of one kind, for example of several seeds, are drawn as their mean with a band of one standard
        deviation.

        Args:
            ax: Axes to draw into, for curves of a single kind; None: a new figure.

        Raises:
            InputError: Curves of one kind have different strengths, or ``ax`` is given for several kinds.
        """
        kinds = list(dict.fromkeys(curve.kind for curves in self.networks.values() for curve in curves))
        if ax is not None:
            if len(kinds) != 1:
                raise InputError(f"ax takes curves of one kind, got {', '.join(kinds) or 'none'}")
            self._draw(ax, kinds[0])
            draw_legend(cast("Figure", ax.figure), columns=3, ax=ax)
            return {"": cast("Figure", ax.figure)}
        columns = min(len(kinds), 3)
        rows = -(-len(kinds) // columns)
        figure = new_figure(3.6 * columns + 0.4, 3.2 * rows + 0.5, self.title)
        for panel, kind in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).ravel(), kinds):
            if kind is None:
                panel.set_axis_off()
            else:
                self._draw(panel, kind)
        draw_legend(figure, columns=3)
        return {"": figure}

    def _draw(self, panel: Axes, kind: Kind) -> None:
        name, unit = KINDS[kind]
        style_axes(panel, name, unit, "accuracy, %")
        panel.set_ylim(0, 102)
        for (network, curves), colour in zip(self.networks.items(), itertools.cycle(COLOURS)):
            mine = [curve for curve in curves if curve.kind == kind]
            if len({tuple(curve.strengths) for curve in mine}) > 1:
                raise InputError(f"the curves of {network} for {name} must have the same strengths to be averaged")
            if not mine:
                continue
            strengths, accuracy = mine[0].strengths, 100 * np.array([curve.accuracy for curve in mine])
            mean = accuracy.mean(0)
            panel.plot(strengths, mean, color=colour, marker="o", markersize=3, linewidth=1.6, label=network)
            if len(mine) > 1:
                spread = accuracy.std(0, ddof=1)
                panel.fill_between(strengths, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)


def rotate(images: Float[Tensor, "B C H W"], degrees: float, fill: Fill = "zeros") -> Float[Tensor, "B C H W"]:
    """Rotate images counter-clockwise about their centre, with bilinear interpolation; ``fill`` enters from outside."""
    turn = linear_maps(torch.full((len(images),), degrees), torch.ones(len(images), 2))
    maps = inverse_maps(turn, torch.zeros(len(images), 2)).to(images)
    return warp(images, maps, (images.shape[2], images.shape[3]), fill)


@checked
def attack(
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    labels: Int[Tensor, "N"],
    epsilon: Share,
    *,
    goal: Objective | Goal = "loss",
    steps: Steps = 1,
    seed: Seed | None = None,
) -> Float[Tensor, "N C H W"]:
    """Change images along the sign of a gradient, x + η·sign ∇L, by at most ``epsilon``, and keep pixels in 0..1.

    FGSM is one step of size ε. PGD takes several steps of size 2.5·ε/steps from a random start, uniform in ±ε. Returns
    the images after the last step. If the goal returns a badness, returns the best step of each image instead. The loop
    ends early if a step changes no image, because the next gradient would be the same.

    Args:
        model: A network with one object per image.
        images: uint8 of 0..255 or floating-point of 0..1. Sequences and normalised images have no such range.
        labels: Classes of the images.
        epsilon: Largest change of a pixel, 0..1.
        goal: Number to increase: the network's own ``"loss"``; ``"scores"``, the score of the best wrong class minus
            the score of the right one (logits of a CNN), whose gradient does not vanish; or a function, see ``Goal``.
        steps: Number of steps.
        seed: Random seed of the start; None: start at the images.

    Source: Goodfellow, Shlens, Szegedy 2014 (arXiv:1412.6572); Madry, Makelov, Schmidt, Tsipras, Vladu 2017
    (arXiv:1706.06083).
    """
    require_one_object(model, "an attack", "robustness")
    require_pixels(model, images, "an attack")
    start = None if seed is None else torch.Generator().manual_seed(seed)
    objective = goal_of(model, goal) if isinstance(goal, str) else goal
    size = epsilon if start is None else 2.5 * epsilon / steps
    attacked = []
    for pixels, classes in in_batches(model, images, labels):
        assert classes is not None
        changed = pixels
        if start is not None:
            noise = torch.rand(pixels.shape, generator=start).to(pixels)  # drawn on the CPU, so equal on every device
            changed = (pixels + epsilon * (2 * noise - 1)).clamp_(0, 1)
        with inference(model, gradients=True):
            attacked.append(_follow_gradient(objective, pixels, changed, classes, epsilon, steps, size))
    return torch.cat(attacked)


def _follow_gradient(
    goal: Goal,
    pixels: Float[Tensor, "B C H W"],
    changed: Float[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: float,
    steps: int,
    size: float,
) -> Float[Tensor, "B C H W"]:
    best, least = changed, pixels.new_full((len(pixels),), math.inf)
    for step in range(steps + 1):
        with torch.enable_grad():
            variable = changed.detach().requires_grad_()
            rise, badness = goal(variable, labels)
            (gradient,) = torch.autograd.grad(rise, variable)
        moved = torch.clamp(changed + size * gradient.sign(), pixels - epsilon, pixels + epsilon).clamp_(0, 1)
        is_last = step == steps - (badness is None) or torch.equal(moved, changed)
        if badness is not None:
            better = (badness < least) | (is_last & least.isinf())
            least = torch.where(better, badness, least)
            best = torch.where(better[:, None, None, None], changed, best)
        if is_last:
            return moved if badness is None else best
        changed = moved
    raise AssertionError("the last step ends the loop")


@checked
def goal_of(model: Network, goal: Objective) -> Goal:
    """Return the goal of an attack on the network's loss, or on the margin of its scores, see :func:`attack`."""

    def compute(pixels: Float[Tensor, "B C H W"], labels: Int[Tensor, "B"]) -> tuple[Float[Tensor, ""], None]:
        output = model(pixels, model.decoder_targets(labels))
        by_loss = goal == "loss"
        return (model.loss(output, pixels, labels).total if by_loss else score_margin(output, labels).sum()), None

    return compute


def score_margin(output: ModelOutput, labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return the score of the best wrong class minus the score of the right one (logits of a CNN); above 0 if wrong."""
    scores = output.scores if output.logits is None else output.logits
    right = F.one_hot(labels, scores.shape[1]).bool()
    return scores.masked_fill(right, -math.inf).amax(1) - scores[right]


@checked
def accuracy_curve(
    model: Network,
    image_set: ImageSet,
    kind: Kind,
    strengths: Sequence[float] | None = None,
    *,
    steps: Steps = PGD_STEPS,
    seed: Seed = 0,
    fill: Fill = "zeros",
) -> RobustnessCurve:
    """Measure the accuracy on rotated or attacked images at each strength.

    Args:
        model: A network with one object per image.
        image_set: Images and their classes.
        kind: Kind of the curve, as for :class:`RobustnessCurve`.
        strengths: At least one: degrees, counter-clockwise; or largest changes of a pixel, 0..1, where 0 means no
            attack. None: −90° to 90° in steps of 15°, or 0 to 0.3 in steps of 0.05.
        steps: Number of steps of PGD.
        seed: Random seed of the starts of PGD.
        fill: Pixels that enter rotated images, as in the training of the network: ``"zeros"``, or the nearest pixel of
            the ``"edge"``. Dark corners can lower the accuracy of photos more than the rotation itself.
    """
    require_one_object(model, "robustness", "robustness")
    is_rotation = kind == "rotation"
    require_pixels(model, image_set.images, KINDS[kind][0], planes=is_rotation)
    name, allowed, default = ("angle", ANGLE, ANGLES) if is_rotation else ("epsilon", Range(0, 1), EPSILONS)
    strengths, accuracy = default if strengths is None else strengths, []
    if not strengths:
        raise InputError(f"there must be at least one {name}, got none")
    for strength in strengths:
        allowed.check(name, strength)
    options: Any = {"goal": "scores" if kind.endswith("-scores") else "loss"}
    options |= {"steps": steps, "seed": seed} if kind.startswith("pgd") else {}

    task = task_of(model)

    def answered_right(pixels: Tensor, labels: Tensor | None) -> list[Tensor]:
        assert labels is not None
        return [task.predict_classes(model(pixels).scores).eq(labels)]

    for strength in strengths:
        images = image_set.images
        if is_rotation:
            images = rotate(as_pixels(model, images), strength, fill)
        elif strength:
            images = attack(model, images, image_set.labels, strength, **options)
        (right,) = over_batches(answered_right, model, images, image_set.labels)
        accuracy.append(float(right.double().mean()))
    shown = tuple(map(float, strengths)), tuple(accuracy), len(image_set)
    return RobustnessCurve(kind, *shown, fill=fill if is_rotation else None)
