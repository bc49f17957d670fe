"""How a network is trained: the recipe, whose fields a preset, a run and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torchcaps.training.optimizers  # noqa: F401  registers them
from torchcaps.parts import Choice, Settings, Spec
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


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """How a network is trained. A preset's recipe is its source's."""

    kind: ClassVar[str] = "recipe field"

    epochs: Count = 20
    """Passes over the training images."""
    stop_at: Share | None = None
    """Training ends with the first epoch whose validation accuracy is at least this share; only with the last epoch if
    none is given."""
    batch_size: Count = 128
    """Images in each step, over all devices."""
    learning_rate: PositiveFactor = 1e-3
    """The learning rate; the peak of the one-cycle schedule."""
    optimizer: Annotated[Spec, Choice("optimizer")] = "adam"
    """What makes the steps: adam, adamw or sgd, or one of your own."""
    schedule: Literal["constant", "decay-by-step", "decay-by-epoch", "one-cycle"] = "constant"
    """Constant; times decay^(step/decay_steps); times decay each epoch; or up to the peak and down to zero, once."""
    decay: ShareAboveZero = 0.96
    """Factor of the decaying schedules."""
    decay_steps: Count = 2000
    """Steps for one factor of the schedule by step."""
    min_learning_rate: Factor = 0.0
    """The decaying schedules stop here."""
    max_shift: Annotated[int, Range(0, 4096, whole=True)] = 0
    """Training images are shifted by at most this many pixels in each direction."""
    crop: Pixels | None = None
    """Squares of this many pixels are cut out of the images: at random places in training, else at the centre; whole
    images if none is given."""
    flip: bool = False
    """Half of the training images are mirrored left to right."""
    brightness: Share = 0.0
    """The pixels (0..1) of each training image are made brighter or darker by at most this."""
    contrast: Share = 0.0
    """The contrast of each training image is multiplied by a factor between 1 − this and 1 + this, about the mean of
    each channel."""
    max_rotation: Degrees = 0.0
    """Training images are rotated by at most this many degrees in either direction."""
    max_scaling: ShareBelowOne = 0.0
    """Training images are scaled by a factor between 1 − this and 1 + this."""
    fill: Fill = "zeros"
    """What comes in from outside of a training image that is shifted, rotated or scaled: zeros, or the nearest pixel of
    its edge. One's own images (folder:PATH, npz:PATH) have their edge, unless another is chosen."""
    select: Literal["accuracy", "loss"] = "accuracy"
    """What chooses the best epoch on the validation images (the loss breaks ties of the accuracy)."""
    validation_size: Count | None = None
    """Images kept from training to choose the best epoch; the data set's default if none is given."""
    validation: ValidationSplit = "random"
    """Which of the training images these are: a random choice with each class's share, or the first or the last ones in
    the order of the data set."""
    limit_train: Count | None = None
    """Train on this many images, the first ones; on all if none is given."""
    limit_test: Count | None = None
    """Test on this many images, the first ones; on all if none is given."""
