"""How a network is trained: its optimizer, its learning rates, and the recipe that names them.

Optimizers are parts, chosen by name: ``optimizer="adamw"``. One's own is ``@register("optimizer", "mine")`` on a class
of torch's kind whose constructor takes ``params`` and ``learning_rate``, and options with defaults. The learning rate
of each step is written into its parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.parts import Choice, Settings, Spec, register
from torchcaps.ranges import (
    Count,
    Degrees,
    Factor,
    Fill,
    Pixels,
    PositiveFactor,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    ValidationSplit,
)

#: The one-cycle schedule rises in this share of the steps, from the peak divided by this number.
WARM_UP_SHARE, START_DIVISOR = 0.3, 25.0

Parameters = Iterable[nn.Parameter]
BETAS = {"torch": (0.9, 0.999), "tensorflow": (torch.tensor(0.9).item(), torch.tensor(0.999).item())}
"""β₁ and β₂ of Adam's moments. TensorFlow keeps them in float32: 1 − β₂ is 1.3e-5 of itself smaller than 0.001."""


def _is_fused(params: list[nn.Parameter]) -> bool:
    """Whether torch makes the whole step in one operation on the device of the parameters."""
    return all(each.device.type in ("cpu", "cuda") for each in params)


@register("optimizer", "adam")
class Adam(torch.optim.Adam):
    """Adam, in PyTorch's form or in TensorFlow's.

    TensorFlow corrects the bias of both moments by a factor on its rate, so that its epsilon is added to a root that is
    not yet corrected: ``rate · √(1 − β₂^t) / (1 − β₁^t) · m / (√v + eps)``. That is PyTorch's step with an epsilon of
    ``eps / √(1 − β₂^t)``.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        adam: Where Adam adds its epsilon to the root of the second moment: after the correction of that moment's bias,
            as in the paper's algorithm and PyTorch, or before it, as in TensorFlow and Keras, where the epsilon of step
            t is 1/√(1 − 0.999^t) times as large: 32 times in the first step, 1.3 times after 1,000.
        adam_eps: Adam's epsilon.

    Source: Kingma, Ba 2015 (arXiv:1412.6980), algorithm 1, and the end of section 2.
    """

    def __init__(
        self,
        params: Parameters,
        learning_rate: float,
        *,
        adam: Literal["torch", "tensorflow"] = "torch",
        adam_eps: PositiveFactor = 1e-8,
    ) -> None:
        params = list(params)
        super().__init__(params, lr=learning_rate, betas=BETAS[adam], eps=adam_eps, fused=_is_fused(params))
        self.adam, self.adam_eps = adam, adam_eps

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step."""
        if self.adam == "tensorflow":
            made = next((float(state["step"]) for state in self.state.values()), 0.0)
            for group in self.param_groups:
                group["eps"] = self.adam_eps / math.sqrt(1 - group["betas"][1] ** (made + 1))
        return super().step(closure)


@register("optimizer", "adamw")
class AdamW(torch.optim.AdamW):
    """Adam with a decay of the weights that does not pass through the moments.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        adam_eps: Adam's epsilon.
        weight_decay: In each step, weights shrink by this times the learning rate.

    Source: Loshchilov, Hutter 2019 (arXiv:1711.05101).
    """

    def __init__(
        self, params: Parameters, learning_rate: float, *, adam_eps: PositiveFactor = 1e-8, weight_decay: Factor = 0.01
    ) -> None:
        params = list(params)
        super().__init__(params, lr=learning_rate, eps=adam_eps, weight_decay=weight_decay, fused=_is_fused(params))


@register("optimizer", "sgd")
class SGD(torch.optim.SGD):
    """Stochastic gradient descent.

    Args:
        params: What is learned.
        learning_rate: Of the first step.
        momentum: Share of the last step that is made again.
        weight_decay: Factor of the weights that is added to their gradients.
    """

    def __init__(
        self, params: Parameters, learning_rate: float, *, momentum: ShareBelowOne = 0.9, weight_decay: Factor = 0.0
    ) -> None:
        params = list(params)
        super().__init__(
            params, lr=learning_rate, momentum=momentum, weight_decay=weight_decay, fused=_is_fused(params)
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """How a network is trained. A preset's recipe is its source's."""

    kind: ClassVar[str] = "recipe field"

    epochs: Count = 20
    """Passes over the training images."""
    stop_at: Share | None = None
    """Stop at this validation accuracy, a share: training ends with the first epoch that reaches it."""
    patience: Count | None = None
    """Stop after so many epochs without a better one."""
    batch_size: Count = 128
    """Images in each step, over all devices."""
    learning_rate: PositiveFactor = 1e-3
    """Learning rate; the peak of the one-cycle schedule."""
    optimizer: Annotated[Spec, Choice("optimizer")] = "adam"
    """What makes the steps: adam, adamw or sgd, or one of your own."""
    max_gradient_norm: PositiveFactor | None = None
    """Largest norm of the gradients of a step, over all weights: larger ones are scaled down."""
    class_weights: Literal["balanced"] | tuple[PositiveFactor, ...] | None = None
    """How much each class counts: in the gradient of an image, one number for each class, 1 the usual one; or
    "balanced", N / (J · images of the class), so that rare classes count as much as frequent ones."""
    schedule: Literal["constant", "decay-by-step", "decay-by-epoch", "one-cycle"] = "constant"
    """How the learning rate changes: constant; times decay^(step/decay_steps); times decay each epoch; up and down."""
    decay: ShareAboveZero = 0.96
    """Factor of the decaying schedules."""
    decay_steps: Count = 2000
    """Steps for one factor of the decay by step."""
    min_learning_rate: Factor = 0.0
    """Where the decaying schedules stop."""
    max_shift: Annotated[int, Range(0, 4096, whole=True)] = 0
    """Largest shift of training images, pixels: in each direction, at random."""
    crop: Pixels | None = None
    """Cut squares of this many pixels: at random places in training, else at the centre."""
    flip: bool = False
    """Mirror half of the training images left to right."""
    brightness: Share = 0.0
    """Largest change of brightness: at most this is added to the pixels (0..1) of a training image."""
    contrast: Share = 0.0
    """Largest change of contrast: a factor between 1 − this and 1 + this, about the mean of each channel."""
    max_rotation: Degrees = 0.0
    """Largest rotation of training images, degrees: in either direction, at random."""
    max_scaling: ShareBelowOne = 0.0
    """Largest change of size: training images are scaled by a factor between 1 − this and 1 + this."""
    fill: Fill = "zeros"
    """What comes in at the edges: of a training image that is shifted, rotated or scaled, zeros, or the nearest
    pixel of its edge. One's own images (folder:PATH, npz:PATH) have their edge, unless another is chosen."""
    precise_norm: bool = False
    """Judge batch normalisation by unchanged images: before each validation, it takes its means and variances from
    training images as they are, since those that are turned or scaled are smoother. One's own images (folder:PATH,
    npz:PATH) have this, unless another is chosen."""
    select: Literal["accuracy", "balanced-accuracy", "loss"] = "accuracy"
    """What chooses the best epoch: on the validation images (the loss breaks ties of the accuracy). The balanced
    accuracy, the mean of the classes' recalls, chooses for one's own uneven classes unless another is given."""
    validation_size: Count | None = None
    """Images kept from training for validation: they choose the best epoch."""
    validation: ValidationSplit = "random"
    """Which images these are: a random choice with each class's share, or the first or the last ones."""
    limit_train: Count | None = None
    """Train on the first so many images; on all if none is given."""
    limit_test: Count | None = None
    """Test on the first so many images; on all if none is given."""
    compile: bool = False
    """Compile the network with torch.compile before training: the first step takes a minute or more, and later steps
    take about as long as without on a CPU; results may differ in their last bits."""
    logger: str | None = None
    """Where metrics go besides metrics.csv: tensorboard (extra torchcaps[tensorboard]), or the class of a
    logger of Lightning, PACKAGE.CLASS; two of them write into the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights == ():
            raise InputError('class_weights must be "balanced" or a number for each class, got none')


@checked
def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step.

    ``one-cycle`` rises on a cosine from a 25th of the peak to the peak in the first 30 % of all steps and falls on a
    cosine to zero in the rest.

    Args:
        recipe: Names the schedule and its numbers.
        step: Steps done before this one.
        steps_per_epoch: Steps of an epoch.

    Source: Smith, Topin 2018, "Super-convergence" (arXiv:1708.07120), with cosines.
    """
    peak = recipe.learning_rate
    if recipe.schedule == "decay-by-step":
        return max(peak * recipe.decay ** (step / recipe.decay_steps), recipe.min_learning_rate)
    if recipe.schedule == "decay-by-epoch":
        return max(peak * recipe.decay ** (step // steps_per_epoch), recipe.min_learning_rate)
    if recipe.schedule == "one-cycle":
        total = recipe.epochs * steps_per_epoch
        rise = max(1.0, WARM_UP_SHARE * total)
        if step < rise:
            return _cosine(peak / START_DIVISOR, peak, step / rise)
        return _cosine(peak, 0.0, (step - rise) / (total - rise)) if total > rise else peak
    return peak


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
