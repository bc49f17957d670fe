"""Images changed by an adversary who knows the network's gradient: one loop, and the goal that it follows.

Capsule networks and CNNs are attacked alike, through their own loss or through their scores. The two differ: a margin
loss is exactly zero, and so is its gradient, for an image that is classified with enough margin. An attack that follows
the loss then stands still, or, where there is a decoder, follows the reconstruction error alone, and the network looks
more robust than it is; one that follows the scores goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from torchcaps.analysis.defaults import PGD_STEPS, STEPS
from torchcaps.analysis.inference import as_pixels, check_labels, frozen
from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput, Network
from torchcaps.ranges import PositiveFactor, Seed, Share

Objective = Literal["loss", "scores"]
Steps = Annotated[int, STEPS]
Goal = Callable[[Float[Tensor, "B C H W"], Int[Tensor, "B"]], tuple[Float[Tensor, ""], Float[Tensor, "B"] | None]]
"""What an attack makes grow, of pixels and labels; and, where the best place on the way is kept, how bad each image's
place is, infinite where it does not count."""


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
    return attack(model, images, labels, epsilon, goal_of(model, objective))


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

    A step changes a pixel by ``step_size``, 2.5·ε/steps if None. The start is uniform in ±ε, drawn from ``seed``, 0 to
    2³² - 1. The other arguments and the errors are those of :func:`fgsm`.

    Source: Madry, Makelov, Schmidt, Tsipras, Vladu 2017 (arXiv:1706.06083).
    """
    size = 2.5 * epsilon / steps if step_size is None else step_size
    start = torch.Generator().manual_seed(seed)
    return attack(model, images, labels, epsilon, goal_of(model, objective), steps, size, start)


def attack(
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

    It begins at the images, or, with a generator ``start``, anywhere within ±ε of them. The images are where the last
    step ended, or at the best place on the way where the goal says how bad each is; one that was at none that counts
    stays where it ended. The loop ends early where no step moves any image: a goal that is flat stays so.
    """
    if model.objects != 1:
        raise InputError(f"images of one object are attacked, but this network finds {model.objects} in each")
    pixels = as_pixels(model, images)
    check_labels(model, labels, len(pixels))
    labels, size, changed = labels.to(pixels.device), epsilon if size is None else size, pixels
    if start is not None:
        noise = torch.rand(pixels.shape, generator=start).to(pixels)  # drawn on the CPU: alike on every device
        changed = (pixels + epsilon * (2 * noise - 1)).clamp_(0, 1)
    best, least, keeps_best = changed, pixels.new_full((len(pixels),), math.inf), True
    with frozen(model):
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
                better = badness < least
                if is_last:
                    better = better | least.isinf()
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
