"""What few images need: a recipe of enough steps, and a warning where nothing was learned from them."""

from __future__ import annotations

import dataclasses
import math

from torchcaps.datasets import ImageSet
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

LEAST_BATCH, STEPS_AN_EPOCH, LEAST_STEPS = 16, 16, 2_000
"""A recipe for few images: batches of at least so many images, epochs of so many steps, runs of so many steps."""
FEW, FOR_FEW = 50, "compact-shared"
"""With fewer training images of a class, this preset learns better than others."""


def fit_recipe(config: TrainConfig, images: int) -> TrainConfig:
    """The configuration with a recipe that suits so many training images, as far as ``config.fitted`` leaves it open.

    A network learns by steps. The batch is halved, down to `LEAST_BATCH` images, until an epoch has `STEPS_AN_EPOCH`,
    and the learning rate goes with the root of the batch; then there are as many epochs as make `LEAST_STEPS`. Where
    the recipe has as many anyway, nothing changes.
    """
    recipe = config.recipe
    batch, epochs, rate = recipe.batch_size, recipe.epochs, recipe.learning_rate
    if "batch_size" in config.fitted:
        while batch >= 2 * LEAST_BATCH and images < STEPS_AN_EPOCH * batch:
            batch //= 2
    if "learning_rate" in config.fitted:
        rate *= math.sqrt(batch / recipe.batch_size)
    if "epochs" in config.fitted:
        epochs = max(epochs, math.ceil(LEAST_STEPS / max(images // batch, 1)))
    fields = {"batch_size": batch, "epochs": epochs, "learning_rate": rate}
    return dataclasses.replace(config, recipe=recipe.replace(fields), fitted=())


def words_of_fitting(config: TrainConfig, asked: Recipe, images: int, classes: int) -> list[str]:
    """The lines that say how a recipe was fitted to so many images; none where it is the one that was asked for."""
    recipe = config.recipe
    if recipe == asked:
        return []
    words = [
        f"Recipe: for {images:,} training images {recipe.epochs} epochs in batches of {recipe.batch_size}, "
        f"{recipe.epochs * (images // recipe.batch_size):,} steps, to a learning rate of {recipe.learning_rate:.2g}; "
        "--epochs, --batch-size and --learning-rate choose others"
    ]
    if images < FEW * classes and config.preset != FOR_FEW:
        words.append(f"With fewer than {FEW} training images of a class {FOR_FEW} learns better")
    return words


def warning_of_chance(accuracy: float, images: ImageSet, config: TrainConfig, steps: int) -> str | None:
    """A sentence that a network is no better than chance, and what to try; None where it is better.

    Chance gives every image the most frequent class: with its share p of the N images, it comes to an accuracy of p,
    with a standard error of √(p·(1 − p) / N).

    Args:
        accuracy: Of the network on validation images.
        images: These.
        config: The run.
        steps: Steps an epoch.
    """
    share = float(images.labels.bincount().max()) / len(images)
    if accuracy > share + math.sqrt(share * (1 - share) / len(images)):
        return None
    another = "" if config.preset == FOR_FEW else f"the network {FOR_FEW}, which learns from few images, "
    epochs = max(4 * config.recipe.epochs, math.ceil(LEAST_STEPS / steps))
    return (
        f"the network has learned nothing: {accuracy:.1%} of the validation images are right, which is no better than "
        f"chance. Try {another}more steps (--epochs {epochs}), a smaller --learning-rate "
        f"({config.recipe.learning_rate / 3:.1g}), or more and clearer images of each class"
    )
