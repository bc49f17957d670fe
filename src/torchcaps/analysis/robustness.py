"""How a network's accuracy falls when images are turned, or changed by an adversary who knows its gradient.

Capsule networks and CNNs are attacked alike, through their own loss or through their scores. The two differ: a margin
loss is exactly zero, and so is its gradient, for an image that is classified with enough margin. An attack that follows
the loss then stands still, or, where there is a decoder, follows the reconstruction error alone, and the network looks
more robust than it is; one that follows the scores goes on.
"""

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
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.figures import COLOURS, draw_legend, new_figure, style_axes
from torchcaps.analysis.inference import as_pixels, check_labels, frozen, in_batches, inference
from torchcaps.analysis.strengths import ANGLES, EPSILONS, MOST_STRENGTHS, PGD_STEPS, STEPS
from torchcaps.checks import check, checked
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import SEED, PositiveFactor, Range

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Attack = Literal["fgsm", "pgd"]
Objective = Literal["loss", "scores"]
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

    Raises:
        InputError: Another kind, or not one accuracy for each strength.
    """

    kind: str
    strengths: tuple[float, ...]
    accuracy: tuple[float, ...]
    num_images: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"the kind of a curve must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0 < len(self.strengths) == len(self.accuracy):
            raise InputError(
                f"a curve must have one accuracy for each strength, got {len(self.accuracy)} for {len(self.strengths)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dataclasses.asdict(self) | {"strengths": list(self.strengths), "accuracy": list(self.accuracy)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; InputError if the values are not those of a curve."""
        try:
            sequences = {name: tuple(map(float, values[name])) for name in ("strengths", "accuracy")}
            return cls(kind=values["kind"], num_images=int(values["num_images"]), **sequences)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"no robustness curve: {error}") from None


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
    model: Network,
    image_set: ImageSet,
    *,
    angles: Sequence[float] = ANGLES,
    batch_size: int = 256,
    progress: Callable[[], None] | None = None,
) -> RobustnessCurve:
    """Accuracy on images that are turned by each of some angles.

    Args:
        model: A network of one object an image; in evaluation mode meanwhile, and afterwards as it was.
        image_set: Images and their classes.
        angles: Degrees, counter-clockwise.
        batch_size: Images at a time.
        progress: Called after each batch at each angle.

    Raises:
        InputError: A network of several objects, images that it was not built for, or no angle.
    """
    _check(model, angles, "angle", ANGLE)

    def change(n: int, images: Tensor, _: Tensor) -> Tensor:
        return rotate(images, angles[n])

    return _curve("rotation", model, image_set, angles, batch_size, change, progress)


def fgsm(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: float,
    *,
    objective: Objective = "loss",
) -> Float[Tensor, "B C H W"]:
    """Images changed by one step of ``epsilon`` along the sign of the gradient: x + ε·sign ∇L, kept in 0..1.

    Args:
        model: A network of one object an image; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1.
        labels: Their classes.
        epsilon: Largest change of a pixel, 0..1.
        objective: What grows: the network's own ``"loss"``, or the difference of ``"scores"`` between the best wrong
            class and the right one (scores of capsules, a CNN's logits), which does not flatten out.

    Raises:
        TypeError: Images of another dtype.
        InputError: A network of several objects, images it was not built for, or an option out of its range.

    Source: Goodfellow, Shlens, Szegedy 2014 (arXiv:1412.6572).
    """
    _check_attack(model, [epsilon], objective)
    pixels, labels = _prepare(model, images, labels)
    with frozen(model):
        return _step(model, pixels, labels, epsilon, objective).clamp_(0, 1)


def pgd(
    model: Network,
    images: Shaped[Tensor, "B C H W"],
    labels: Int[Tensor, "B"],
    epsilon: float,
    *,
    steps: int = PGD_STEPS,
    step_size: float | None = None,
    objective: Objective = "loss",
    seed: int = 0,
) -> Float[Tensor, "B C H W"]:
    """Images changed by many small steps of :func:`fgsm` from a random start, never by more than ``epsilon``.

    A step changes a pixel by ``step_size``, 2.5·ε/steps if None. The start is uniform in ±ε, drawn from ``seed``, 0 to
    2³² - 1. The other arguments and the errors are those of :func:`fgsm`.

    Source: Madry, Makelov, Schmidt, Tsipras, Vladu 2017 (arXiv:1706.06083).
    """
    _check_attack(model, [epsilon], objective, steps, step_size, seed)
    pixels, labels = _prepare(model, images, labels)
    generator = torch.Generator().manual_seed(seed)
    with frozen(model):
        return _descend(model, pixels, labels, epsilon, steps, step_size, objective, generator)


def attack_curve(
    model: Network,
    image_set: ImageSet,
    attack: Attack,
    *,
    epsilons: Sequence[float] = EPSILONS,
    steps: int = PGD_STEPS,
    objective: Objective = "loss",
    seed: int = 0,
    batch_size: int = 256,
    progress: Callable[[], None] | None = None,
) -> RobustnessCurve:
    """Accuracy on images that an adversary has changed by at most each of some amounts.

    Args:
        model: As for :func:`fgsm`.
        image_set: Images and their classes.
        attack: ``"fgsm"`` or ``"pgd"``.
        epsilons: Largest changes of a pixel, 0..1; at 0 the images are as they are.
        steps: Of PGD.
        objective: As for :func:`fgsm`.
        seed: Of PGD's starts; 0 to 2³² - 1.
        batch_size: Images at a time; PGD's starts depend on it.
        progress: Called after each batch at each strength.

    Raises:
        InputError: As for :func:`fgsm`, or an unknown attack.
    """
    _check_attack(model, epsilons, objective, steps, seed=seed)
    if attack not in ("fgsm", "pgd"):
        raise InputError(f'attack must be "fgsm" or "pgd", got {attack!r}')
    generators = [torch.Generator().manual_seed(seed) for _ in epsilons]

    def change(n: int, images: Tensor, labels: Tensor) -> Tensor:
        if epsilons[n] == 0:
            return images
        with frozen(model):
            if attack == "fgsm":
                return _step(model, images, labels, epsilons[n], objective).clamp_(0, 1)
            return _descend(model, images, labels, epsilons[n], steps, None, objective, generators[n])

    kind = attack if objective == "loss" else f"{attack}-scores"
    return _curve(kind, model, image_set, epsilons, batch_size, change, progress)


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
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    lines: dict[str, Line2D] = {}
    for panel, kind in itertools.zip_longest(panels, kinds):
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


def score_margin(output: ModelOutput, labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The best wrong class's score less the right one's: scores of capsules, a CNN's logits; above 0 where wrong."""
    scores = output.scores if output.logits is None else output.logits
    right = F.one_hot(labels, scores.shape[1]).bool()
    return scores.masked_fill(right, -math.inf).amax(1) - scores[right]


def _curve(
    kind: str,
    model: Network,
    image_set: ImageSet,
    strengths: Sequence[float],
    batch_size: int,
    change: Callable[[int, Tensor, Tensor], Tensor],
    progress: Callable[[], None] | None,
) -> RobustnessCurve:
    """Accuracy on what ``change`` makes of images for the n-th strength."""
    correct = np.zeros(len(strengths), dtype=np.int64)
    for images, labels in in_batches(model, image_set.images, image_set.labels, batch_size):
        assert labels is not None
        for n in range(len(strengths)):
            changed = change(n, images, labels)
            with inference(model):
                correct[n] += int((model(changed).scores.argmax(-1) == labels).sum())
            if progress is not None:
                progress()
    accuracy = tuple((correct / len(image_set)).tolist())
    return RobustnessCurve(kind, tuple(map(float, strengths)), accuracy, len(image_set))


def _step(model: Network, pixels: Tensor, labels: Tensor, size: float, objective: Objective) -> Tensor:
    """One step of ``size`` along the sign of the gradient of the objective."""
    with torch.enable_grad():
        variable = pixels.detach().requires_grad_()
        output = model(variable, model.decoder_targets(labels))
        by_loss = objective == "loss"
        goal = model.loss(output, variable, labels).total if by_loss else score_margin(output, labels).sum()
        (gradient,) = torch.autograd.grad(goal, variable)
    return pixels.detach() + size * gradient.sign()


def _descend(
    model: Network,
    pixels: Tensor,
    labels: Tensor,
    epsilon: float,
    steps: int,
    step_size: float | None,
    objective: Objective,
    generator: torch.Generator,
) -> Tensor:
    size = 2.5 * epsilon / steps if step_size is None else step_size
    noise = torch.rand(pixels.shape, generator=generator).to(pixels)  # drawn on the CPU: alike on every device
    changed = (pixels + epsilon * (2 * noise - 1)).clamp_(0, 1)
    for _ in range(steps):
        moved = _step(model, changed, labels, size, objective)
        changed = torch.clamp(moved, pixels - epsilon, pixels + epsilon).clamp_(0, 1)
    return changed


def _prepare(
    model: Network, images: Shaped[Tensor, "B C H W"], labels: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, "B"]]:
    """Images as the network takes them, and their labels beside them."""
    pixels = as_pixels(model, images)
    check_labels(model, labels, len(pixels))
    return pixels, labels.to(pixels.device)


def _check(model: Network, strengths: Sequence[float], name: str, allowed: Range) -> None:
    if model.objects != 1:
        raise InputError(
            f"robustness is measured on images of one object, but this network finds {model.objects} in each"
        )
    if not strengths:
        raise InputError(f"there must be at least one {name}, got none")
    if len(strengths) > MOST_STRENGTHS:
        raise InputError(f"there must be at most {MOST_STRENGTHS} numbers for {name}, got {len(strengths)}")
    for strength in strengths:
        allowed.check(name, strength)


def _check_attack(
    model: Network,
    epsilons: Sequence[float],
    objective: Objective,
    steps: int = PGD_STEPS,
    step_size: float | None = None,
    seed: int = 0,
) -> None:
    _check(model, epsilons, "epsilon", Range(0, 1))
    if objective not in ("loss", "scores"):
        raise InputError(f'objective must be "loss" or "scores", got {objective!r}')
    STEPS.check("steps", steps)
    check("step_size", step_size, PositiveFactor | None)
    SEED.check("seed", seed)
