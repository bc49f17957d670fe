"""How a network's accuracy falls when images are turned, or changed by an adversary who knows its gradient.

Capsule networks and CNNs are attacked alike, through their own loss or through their scores. The two differ: a margin
loss is exactly zero, and so is its gradient, for an image that is classified with enough margin. An attack that follows
the loss then stands still, or, where there is a decoder, follows the reconstruction error alone, and the network looks
more robust than it is; one that follows the scores goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.defaults import ANGLES, EPSILONS, PGD_STEPS, STEPS
from torchcaps.analysis.figures import COLOURS, draw_legend, new_figure, style_axes
from torchcaps.analysis.inference import as_pixels, check_labels, in_batches, inference, require_one_object
from torchcaps.analysis.results import Comparison, Result, Table, percent
from torchcaps.checks import checked
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import PositiveFactor, Range, Seed, Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Objective = Literal["loss", "scores"]
Steps = Annotated[int, STEPS]
Goal = Callable[[Float[Tensor, "B C H W"], Int[Tensor, "B"]], tuple[Float[Tensor, ""], Float[Tensor, "B"] | None]]
"""What an attack makes grow, of pixels and labels; and, where the best place on the way is kept, how bad each image's
place is, infinite where it does not count."""
Attack = Literal["fgsm", "pgd"]
ANGLE = Range(-1e6, 1e6)
"""Degrees, either way."""

#: The name of each kind of curve, and the unit of its strengths.
KINDS = {
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

    kind: str
    strengths: tuple[float, ...]
    accuracy: tuple[float, ...]
    num_images: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(values["kind"], tuple(values["strengths"]), tuple(values["accuracy"]), values["num_images"])


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
        return {"": figure_robustness(self.networks, title=self.title)}


@checked
def rotate(images: Float[Tensor, "B C H W"], degrees: Annotated[float, ANGLE]) -> Float[Tensor, "B C H W"]:
    """Turn images counter-clockwise about their centre: bilinear between pixels, zeros from outside.

    Args:
        images: Floating-point pixels.
        degrees: 90 is a quarter turn to the left.
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


@checked
def fgsm(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: Share,
    *,
    objective: Objective = "loss",
) -> Float[Tensor, "B C H W"]:
    """Images changed by one step of ``epsilon`` along the sign of the gradient: x + ε·sign ∇L, kept in 0..1.

    Args:
        model: A network of one object an image.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: Their classes.
        epsilon: Largest change of a pixel, 0..1.
        objective: What grows: the network's own ``"loss"``, or the difference of ``"scores"`` between the best wrong
            class and the right one (scores of capsules, a CNN's logits), which does not flatten out.

    Source: Goodfellow, Shlens, Szegedy 2014 (arXiv:1412.6572).
    """
    return follow_gradient(model, images, labels, epsilon, goal_of(model, objective))


@checked
def pgd(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: Share,
    *,
    steps: Steps = PGD_STEPS,
    step_size: PositiveFactor | None = None,
    objective: Objective = "loss",
    seed: Seed = 0,
) -> Float[Tensor, "B C H W"]:
    """Images changed by many small steps of :func:`fgsm` from a random start, never by more than ``epsilon``.

    A step changes a pixel by ``step_size``, 2.5·ε/steps if None. The start is uniform in ±ε, drawn from ``seed``. The
    other arguments are those of :func:`fgsm`.

    Source: Madry, Makelov, Schmidt, Tsipras, Vladu 2017 (arXiv:1706.06083).
    """
    start = torch.Generator().manual_seed(seed)
    return follow_gradient(model, images, labels, epsilon, goal_of(model, objective), steps, step_size, start)


def follow_gradient(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: float,
    goal: Goal,
    steps: int = 1,
    size: float | None = None,
    start: torch.Generator | None = None,
) -> Float[Tensor, "B C H W"]:
    """Change images by steps of ``size`` along the sign of a goal's gradient, never by more than ``epsilon``.

    It begins at the images, with steps of ε if ``size`` is None, or, with a generator ``start``, anywhere within ±ε of
    them, with steps of 2.5·ε/steps. The images are where the last step ended, or at the best place on the way where the
    goal says how bad each is; one that was at none that counts stays where it ended. The loop ends early where no step
    moves any image: a goal that is flat stays so.
    """
    require_one_object(model, "an attack")
    pixels = as_pixels(model, images)
    check_labels(model, labels, len(pixels))
    labels, changed = labels.to(pixels.device), pixels
    if start is not None:
        noise = torch.rand(pixels.shape, generator=start).to(pixels)  # drawn on the CPU: alike on every device
        changed = (pixels + epsilon * (2 * noise - 1)).clamp_(0, 1)
    if size is None:
        size = epsilon if start is None else 2.5 * epsilon / steps
    best, least, keeps_best = changed, pixels.new_full((len(pixels),), math.inf), True
    with inference(model, gradients=True):
        for step in range(steps + 1):
            if step == steps and not keeps_best:
                break
            with torch.enable_grad():
                variable = changed.detach().requires_grad_()
                rise, badness = goal(variable, labels)
                (gradient,) = torch.autograd.grad(rise, variable)
            moved = torch.clamp(changed + size * gradient.sign(), pixels - epsilon, pixels + epsilon).clamp_(0, 1)
            is_last = step == steps or torch.equal(moved, changed)
            if badness is None:
                keeps_best = False
            else:
                better = (badness < least) | (is_last & least.isinf())
                least = torch.where(better, badness, least)
                best = torch.where(better[:, None, None, None], changed, best)
            if is_last:
                break
            changed = moved
    return best if keeps_best else changed


def goal_of(model: Network, objective: Objective) -> Goal:
    """The network's own loss, or the margin of its scores, see :func:`fgsm`."""

    def goal(pixels: Float[Tensor, "B C H W"], labels: Int[Tensor, "B"]) -> tuple[Float[Tensor, ""], None]:
        output = model(pixels, model.decoder_targets(labels))
        by_loss = objective == "loss"
        return (model.loss(output, pixels, labels).total if by_loss else score_margin(output, labels).sum()), None

    return goal


def score_margin(output: ModelOutput, labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The best wrong class's score less the right one's: scores of capsules, a CNN's logits; above 0 where wrong."""
    scores = output.scores if output.logits is None else output.logits
    right = F.one_hot(labels, scores.shape[1]).bool()
    return scores.masked_fill(right, -math.inf).amax(1) - scores[right]


def rotation_curve(model: Network, image_set: ImageSet, *, angles: Sequence[float] = ANGLES) -> RobustnessCurve:
    """Accuracy on images that are turned by each of some angles.

    Args:
        model: A network of one object an image.
        image_set: Images and their classes.
        angles: Degrees, counter-clockwise, at least one.
    """
    return _curve("rotation", model, image_set, angles, lambda n, images, _: rotate(images, angles[n]))


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
) -> RobustnessCurve:
    """Accuracy on images that an adversary has changed by at most each of some amounts.

    Args:
        model: A network of one object an image.
        image_set: Images and their classes.
        attack: ``"fgsm"`` or ``"pgd"``.
        epsilons: Largest changes of a pixel, 0..1, at least one; at 0 the images are as they are.
        steps: Steps of PGD.
        objective: As for :func:`~torchcaps.analysis.fgsm`.
        seed: Seed of PGD's starts, of 256 images at a time.
    """
    goal, starts = goal_of(model, objective), [torch.Generator().manual_seed(seed) for _ in epsilons]

    def change(n: int, images: Tensor, labels: Tensor) -> Tensor:
        if epsilons[n] == 0:
            return images
        if attack == "fgsm":
            return follow_gradient(model, images, labels, epsilons[n], goal)
        return follow_gradient(model, images, labels, epsilons[n], goal, steps, start=starts[n])

    kind = attack if objective == "loss" else f"{attack}-scores"
    return _curve(kind, model, image_set, epsilons, change)


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
    for panel, kind in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).ravel(), kinds):
        if kind is None:
            panel.set_axis_off()
            continue
        name, unit = KINDS[kind]
        style_axes(panel, name, unit, "accuracy, %")
        panel.set_ylim(0, 102)
        for (network, curves), colour in zip(networks.items(), itertools.cycle(COLOURS)):
            mine = [curve for curve in curves if curve.kind == kind]
            if len({curve.strengths for curve in mine}) > 1:
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
    return figure


def _curve(
    kind: str,
    model: Network,
    image_set: ImageSet,
    strengths: Sequence[float],
    change: Callable[[int, Tensor, Tensor], Tensor],
) -> RobustnessCurve:
    """Accuracy on what ``change`` makes of images for the n-th strength."""
    require_one_object(model, "robustness")
    name, allowed = ("angle", ANGLE) if kind == "rotation" else ("epsilon", Range(0, 1))
    if not strengths:
        raise InputError(f"there must be at least one {name}, got none")
    for strength in strengths:
        allowed.check(name, strength)
    correct = np.zeros(len(strengths), dtype=np.int64)
    for images, labels in in_batches(model, image_set.images, image_set.labels):
        assert labels is not None
        for n in range(len(strengths)):
            changed = change(n, images, labels)
            with inference(model):
                correct[n] += int((model(changed).scores.argmax(-1) == labels).sum())
    accuracy = tuple((correct / len(image_set)).tolist())
    return RobustnessCurve(kind, tuple(map(float, strengths)), accuracy, len(image_set))
