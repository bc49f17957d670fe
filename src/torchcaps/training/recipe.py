"""Training recipes: optimizers, learning-rate schedules, and the settings of a run's training.

Optimizers are parts, chosen by name: ``optimizer="adamw"``. To add one, put ``@register("optimizer", "mine")`` on a
subclass of ``torch.optim.Optimizer``. Its constructor takes ``params``, ``learning_rate``, and options with defaults.
The loop writes the learning rate of each step into the parameter groups.
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
    Index,
    Pixels,
    PositiveFactor,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    ValidationSplit,
)

WARM_UP_SHARE = 0.3
"""Share of all steps in which the one-cycle schedule rises."""
START_DIVISOR = 25.0
"""Peak of the one-cycle schedule divided by its first learning rate."""

Parameters = Iterable[nn.Parameter]
BETAS = {"torch": (0.9, 0.999), "tensorflow": (torch.tensor(0.9).item(), torch.tensor(0.999).item())}
"""β₁ and β₂ of Adam's moments. TensorFlow keeps them in float32, so its 1 − β₂ is 0.0013 % smaller than 0.001."""


def _is_fused(params: list[nn.Parameter]) -> bool:
    """Return True if torch can do the whole step in one operation on the device of the parameters."""
    return all(each.device.type in ("cpu", "cuda") for each in params)


@register("optimizer", "adam")
class Adam(torch.optim.Adam):
    """Adam, in PyTorch's form or in TensorFlow's.

    TensorFlow corrects the bias of both moments by a factor on the learning rate:
    ``rate · √(1 − β₂^t) / (1 − β₁^t) · m / (√v + eps)``. So its epsilon is added to an uncorrected root. PyTorch's step
    with the epsilon ``eps / √(1 − β₂^t)`` gives the same result.

    Args:
        params: Parameters to optimise.
        learning_rate: Learning rate of the first step.
        adam: Form of Adam. torch: the epsilon is added to the root of the second moment after its bias correction, as
            in the paper's algorithm. tensorflow: it is added before the correction, as in TensorFlow and Keras. That
            makes the epsilon of step t 1/√(1 − 0.999^t) times larger: 32 times in step 1, 1.3 times after 1,000.
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
        """Do one step, with the epsilon of the chosen form."""
        if self.adam == "tensorflow":
            steps_done = next((float(state["step"]) for state in self.state.values()), 0.0)
            for group in self.param_groups:
                group["eps"] = self.adam_eps / math.sqrt(1 - group["betas"][1] ** (steps_done + 1))
        return super().step(closure)


@register("optimizer", "adamw")
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: the decay does not pass through the moments.

    Args:
        params: Parameters to optimise.
        learning_rate: Learning rate of the first step.
        adam_eps: Adam's epsilon.
        weight_decay: Weight decay. Each step shrinks the weights by this share times the learning rate.

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
        params: Parameters to optimise.
        learning_rate: Learning rate of the first step.
        momentum: Momentum: share of the previous update that is added to the next one.
        weight_decay: Weight decay. The weights times this factor are added to their gradients.
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
    """Hyperparameters of training. The recipe of a preset comes from the preset's source."""

    kind: ClassVar[str] = "recipe field"

    epochs: Count = 20
    """Passes over the training images."""
    stop_at: Share | None = None
    """Stop at this validation accuracy (0..1). Training ends after the first epoch that reaches it."""
    patience: Count | None = None
    """Epochs to wait for an improvement. Then the run stops."""
    batch_size: Count = 128
    """Batch size: images of a step, over all devices."""
    learning_rate: PositiveFactor = 1e-3
    """Learning rate. For the one-cycle schedule, its peak."""
    optimizer: Annotated[Spec, Choice("optimizer")] = "adam"
    """Optimizer: adam, adamw, sgd, or a registered one."""
    max_gradient_norm: PositiveFactor | None = None
    """Clip gradients to this norm, taken over all weights."""
    class_weights: Literal["balanced"] | tuple[PositiveFactor, ...] | None = None
    """Weight of each class in the gradient: one number for each class, or "balanced". Balanced weights are
    N / (J · images of the class), for N images and J classes. With them, all classes count the same."""
    schedule: Literal["constant", "decay-by-step", "decay-by-epoch", "one-cycle"] = "constant"
    """Learning-rate schedule. decay-by-step multiplies by decay^(step/decay_steps), decay-by-epoch by decay each epoch,
    and one-cycle rises and then falls."""
    decay: ShareAboveZero = 0.96
    """Decay factor of the decaying schedules."""
    decay_steps: Count = 2000
    """Steps per decay factor, for the schedule decay-by-step."""
    warm_up_steps: Index = 0
    """Steps in which the learning rate also rises linearly from zero, at the start."""
    min_learning_rate: Factor = 0.0
    """Lowest learning rate, for the decaying schedules."""
    max_shift: Annotated[int, Range(0, 4096, whole=True)] = 0
    """Largest random shift, pixels. Training images are shifted in each direction."""
    crop: Pixels | None = None
    """Crop images to squares of this side, pixels. Crops are random in training and central in evaluation."""
    patch: Pixels | None = None
    """Train on patches of this side, pixels, for images with masks, which may then differ in size. Half of the patches
    lie around a pixel of a class, the rest anywhere. Evaluation takes whole images. The default is whole images."""
    flip: bool = False
    """Mirror images at random. Training images are mirrored left to right with probability 1/2."""
    brightness: Share = 0.0
    """Largest random change of brightness, added to the pixels (0..1) of a training image."""
    contrast: Share = 0.0
    """Largest random change of contrast: a factor between 1 − this and 1 + this, about the mean of each channel."""
    max_rotation: Degrees = 0.0
    """Largest random rotation, degrees. Training images are rotated in either direction."""
    max_scaling: ShareBelowOne = 0.0
    """Largest random scaling. Training images are scaled by a factor between 1 − this and 1 + this."""
    fill: Fill = "zeros"
    """Fill for borders of augmented images: zeros, or edge for the nearest pixel of the image. Shifted, rotated and
    scaled images have such borders. The default for your own images (folder:PATH, csv:PATH, npz:PATH) is edge."""
    published_augmentation: Literal["none", "hvc2021"] = "none"
    """Published augmentation. It replaces all other changes of images."""
    average_weights: ShareBelowOne = 0.0
    """Decay of the weights' moving average. Validation and saved networks use it; 0 turns it off."""
    precise_norm: bool = False
    """Take batch norm from unaugmented images. Its means and variances are recomputed before each validation, because
    rotation and scaling blur the augmented images. On by default for your own images (folder:PATH, csv:PATH,
    npz:PATH)."""
    select: Literal["accuracy", "balanced-accuracy", "loss"] = "accuracy"
    """Metric that selects the best epoch, computed on the validation images. The loss breaks ties of the accuracy.
    Balanced accuracy is the mean of the classes' recalls. It is the default for your own images if their classes are
    uneven."""
    validation_size: Count | None = None
    """Number of validation images. They are held out from training and select the best epoch."""
    validation: ValidationSplit = "random"
    """Choice of the validation images: random with the same share of each class, or the first or the last images."""
    limit_train: Count | None = None
    """Train on this many images, the first ones. The default is all."""
    limit_test: Count | None = None
    """Test on this many images, the first ones. The default is all."""
    compile: bool = False
    """Compile the network with torch.compile. The first step takes a minute or more. On a CUDA GPU, later steps are
    replayed as CUDA graphs; on a CPU, they take about as long as without it. Results may differ in their last bits."""
    logger: str | None = None
    """Logger besides metrics.csv: tensorboard (needs torchcaps[tensorboard]), or the PACKAGE.CLASS of a Lightning
    logger. Loggers that write files get the run folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights == ():
            raise InputError('class_weights must be "balanced" or one number for each class, got none')


@checked
def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step.

    ``one-cycle`` rises from 1/25 of the peak to the peak in the first 30 % of all steps, and falls to zero in the rest.
    Both parts are half a period of a cosine. In the first ``warm_up_steps``, the rate of any schedule is multiplied by
    the share of these steps that are done.

    Args:
        recipe: Recipe with the schedule and its numbers.
        step: Number of steps before this one.
        steps_per_epoch: Number of steps in an epoch.

    Source: Smith, Topin 2018, "Super-convergence" (arXiv:1708.07120), here with cosines.
    """
    return _scheduled(recipe, step, steps_per_epoch) * min(1.0, (step + 1) / max(recipe.warm_up_steps, 1))


def _scheduled(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step by the schedule alone."""
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
