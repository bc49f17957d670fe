"""How a network's accuracy falls when images are turned, or changed by an adversary who knows its gradient.

Capsule networks and CNNs are attacked alike, through their own loss or through their scores. The two differ: a margin
loss is exactly zero, and so is its gradient, for an image that is classified with enough margin. An attack that follows
the loss then stands still, or, where there is a decoder, follows the reconstruction error alone, and the network looks
more robust than it is; one that follows the scores goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.defaults import ANGLES, EPSILONS, PGD_STEPS, STEPS
from torchcaps.analysis.figures import COLOURS, draw_legend, new_figure, style_axes
from torchcaps.analysis.inference import as_pixels, in_batches, inference, over_batches, require_one_object
from torchcaps.analysis.results import Comparison, Result, Table, percent
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.datasets.affine import inverse_maps, linear_maps, warp
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import Range, Seed, Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Objective = Literal["loss", "scores"]
Steps = Annotated[int, STEPS]
Goal = Callable[[Float[Tensor, "B C H W"], Int[Tensor, "B"]], tuple[Float[Tensor, ""], Float[Tensor, "B"] | None]]
"""What an attack makes grow, of pixels and labels; and, where the best place on the way is kept, how bad each image's
place is, infinite where it does not count."""
Kind = Literal["rotation", "fgsm", "fgsm-scores", "pgd", "pgd-scores"]
ANGLE = Range(-1e6, 1e6)
"""Degrees, either way."""

#: The name of each kind of curve, and the unit of its strengths.
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
        kind: One of ``KINDS``: ``"rotation"``; ``"fgsm"`` and ``"pgd"`` along the network's own loss; the same with
            ``"-scores"`` along its scores.
        strengths: Degrees of a rotation, or the largest change of a pixel of 0..1.
        accuracy: Share of correctly classified images at each strength, 0..1.
        num_images: How many images were looked at.
    """

    kind: Kind
    strengths: Sequence[float]
    accuracy: Sequence[float]
    num_images: int


class Robustness(Comparison):
    """The :class:`RobustnessCurve` of each kind, the same kinds of each network."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"curves": [curve.to_dict() for curve in curves]} for curves in self.networks.values()]

    def tables(self) -> list[Table]:
        found = [Table(note=[*self.title.split("\n"), ""])]
        for curves in zip(*self.networks.values(), strict=True):
            name, unit = KINDS[curves[0].kind]
            columns = zip(curves[0].strengths, *(curve.accuracy for curve in curves), strict=True)
            rows = [[f"{strength:g}", *map(percent, accuracies)] for strength, *accuracies in columns]
            found.append(Table(rows, (unit, *self.networks), f"{name}: accuracy", left=0))
        return found

    def figures(self) -> dict[str, Figure]:
        """Accuracy against the strength of each kind of disturbance, one line a network.

        Several curves of one kind, such as those of several seeds, are drawn as their mean within a band of one
        standard deviation; InputError where they differ in their strengths.
        """
        kinds = list(dict.fromkeys(curve.kind for curves in self.networks.values() for curve in curves))
        columns = min(len(kinds), 3)
        rows = -(-len(kinds) // columns)
        figure = new_figure(3.6 * columns + 0.4, 3.2 * rows + 0.5, self.title)
        for panel, kind in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).ravel(), kinds):
            if kind is None:
                panel.set_axis_off()
                continue
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
        draw_legend(figure, columns=3)
        return {"": figure}


def rotate(images: Float[Tensor, "B C H W"], degrees: float) -> Float[Tensor, "B C H W"]:
    """Turn images counter-clockwise about their centre: bilinear between pixels, zeros from outside."""
    turn = linear_maps(torch.full((len(images),), degrees), torch.ones(len(images), 2))
    maps = inverse_maps(turn, torch.zeros(len(images), 2)).to(images)
    return warp(images, maps, (images.shape[2], images.shape[3]))


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
    """Images changed along the sign of a gradient, x + η·sign ∇L, never by more than ``epsilon``, and kept in 0..1.

    One step of ε is FGSM. PGD is many from a random start, uniform in ±ε, each of 2.5·ε/steps. The images are where the
    last step ended, or at the best place on the way where the goal says how bad each is; one that was at none that
    counts stays where it ended. The loop ends early where no step moves any image: a goal that is flat stays so.

    Args:
        model: A network of one object an image.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: Their classes.
        epsilon: Largest change of a pixel, 0..1.
        goal: What grows: the network's own ``"loss"``, or the difference of ``"scores"`` between the best wrong class
            and the right one (scores of capsules, a CNN's logits), which does not flatten out; or a function, see
            ``Goal``.
        steps: How many.
        seed: Of the start; None begins at the images.

    Source: Goodfellow, Shlens, Szegedy 2014 (arXiv:1412.6572); Madry, Makelov, Schmidt, Tsipras, Vladu 2017
    (arXiv:1706.06083).
    """
    require_one_object(model, "an attack", "robustness")
    start = None if seed is None else torch.Generator().manual_seed(seed)
    wanted = goal_of(model, goal) if isinstance(goal, str) else goal
    size = epsilon if start is None else 2.5 * epsilon / steps
    found = []
    for pixels, classes in in_batches(model, images, labels):
        assert classes is not None
        changed = pixels
        if start is not None:
            noise = torch.rand(pixels.shape, generator=start).to(pixels)  # drawn on the CPU: alike on every device
            changed = (pixels + epsilon * (2 * noise - 1)).clamp_(0, 1)
        with inference(model, gradients=True):
            found.append(_follow_gradient(wanted, pixels, changed, classes, epsilon, steps, size))
    return torch.cat(found)


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
    """The network's own loss, or the margin of its scores, see :func:`attack`."""

    def follow(pixels: Float[Tensor, "B C H W"], labels: Int[Tensor, "B"]) -> tuple[Float[Tensor, ""], None]:
        output = model(pixels, model.decoder_targets(labels))
        by_loss = goal == "loss"
        return (model.loss(output, pixels, labels).total if by_loss else score_margin(output, labels).sum()), None

    return follow


def score_margin(output: ModelOutput, labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The best wrong class's score less the right one's: scores of capsules, a CNN's logits; above 0 where wrong."""
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
) -> RobustnessCurve:
    """Accuracy on images that are turned, or that an adversary has changed, by each of some strengths.

    Args:
        model: A network of one object an image.
        image_set: Images and their classes.
        kind: As for :class:`RobustnessCurve`.
        strengths: Degrees, counter-clockwise, or largest changes of a pixel, 0..1; at least one. At 0 an attack leaves
            images as they are.
        steps: Steps of PGD.
        seed: Seed of PGD's starts.
    """
    require_one_object(model, "robustness", "robustness")
    name, allowed, usual = ("angle", ANGLE, ANGLES) if kind == "rotation" else ("epsilon", Range(0, 1), EPSILONS)
    strengths, accuracy = usual if strengths is None else strengths, []
    if not strengths:
        raise InputError(f"there must be at least one {name}, got none")
    for strength in strengths:
        allowed.check(name, strength)
    how: Any = {"goal": "scores" if kind.endswith("-scores") else "loss"}
    how |= {"steps": steps, "seed": seed} if kind.startswith("pgd") else {}
    for strength in strengths:
        images = image_set.images
        if kind == "rotation":
            images = rotate(as_pixels(model, images), strength)
        elif strength:
            images = attack(model, images, image_set.labels, strength, **how)
        (right,) = over_batches(
            lambda pixels, labels: [model(pixels).scores.argmax(-1) == labels], model, images, image_set.labels
        )
        accuracy.append(float(right.double().mean()))
    return RobustnessCurve(kind, tuple(map(float, strengths)), tuple(accuracy), len(image_set))
