"""What one's own images need: a recipe of enough steps, words of its time and of uneven classes, and warnings."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.models import build_network
from torchcaps.models.presets import fit_to_images, get_preset
from torchcaps.parts import build
from torchcaps.tasks import Task, find_task
from torchcaps.training.config import FITTED, TrainConfig, override
from torchcaps.training.progress import duration
from torchcaps.training.recipe import Recipe

LEAST_BATCH, STEPS_AN_EPOCH, LEAST_STEPS = 16, 100, 2_000
"""A recipe for few images: batches of at least so many images, epochs of so many steps, runs of so many steps."""
LEAST_PATIENCE = 10
"""Epochs that a run of few images waits at least for a better one; else a quarter of all."""
UNEVEN = 2
"""Classes are uneven where one has so many times as many training images as another."""
LONG, TOO_LONG = 60, 180
"""Seconds of a run whose time is said, and beyond which that of smaller images is said too."""
FEW, FOR_FEW = 50, "compact-shared"
"""With fewer training images of a class, this preset learns better than others."""
CLASSES = find_task("classes")


def fit_network(config: TrainConfig, in_shape: tuple[int, int, int]) -> TrainConfig:
    """The configuration with a network that suits images of a size, as far as ``config.fitted`` leaves it open."""
    given = set(FITTED).difference(config.fitted)
    return override(config, fit_to_images(get_preset(config.preset), config.model, in_shape, given))


def fit_recipe(config: TrainConfig, labels: Tensor, task: Task = CLASSES) -> TrainConfig:
    """Return the configuration with a recipe that suits the training images, as far as ``config.fitted`` allows.

    A network learns by steps. The batch is halved, down to `LEAST_BATCH` images, until an epoch has `STEPS_AN_EPOCH`,
    and the learning rate goes with the root of the batch; then there are as many epochs as make `LEAST_STEPS`, but a
    run without a better one for a quarter of them ends. Where the recipe has as many anyway, nothing changes. Of uneven
    classes, the balanced accuracy chooses the epoch.
    """
    recipe, images = config.recipe, len(labels)
    batch, epochs, rate = recipe.batch_size, recipe.epochs, recipe.learning_rate
    patience, select = recipe.patience, recipe.select
    if "batch_size" in config.fitted:
        while batch >= 2 * LEAST_BATCH and images < STEPS_AN_EPOCH * batch:
            batch //= 2
    if "learning_rate" in config.fitted:
        rate *= math.sqrt(batch / recipe.batch_size)
    if "epochs" in config.fitted:
        epochs = max(epochs, math.ceil(LEAST_STEPS / max(images // batch, 1)))
        if "patience" in config.fitted and images < STEPS_AN_EPOCH * recipe.batch_size:
            patience = max(LEAST_PATIENCE, epochs // 4)
    if "select" in config.fitted and is_uneven(task.class_counts(labels)):
        select = "balanced-accuracy"
    fields = {"batch_size": batch, "epochs": epochs, "learning_rate": rate, "patience": patience, "select": select}
    return dataclasses.replace(config, recipe=recipe.replace(fields), fitted=())


def words_of_fitting(config: TrainConfig, asked: Recipe, images: int, outputs: int, task: Task = CLASSES) -> list[str]:
    """The lines that say how a recipe was fitted to so many images; none where it is the one that was asked for."""
    recipe = config.recipe
    if recipe.replace({"select": asked.select}) == asked:
        return []
    most = "" if recipe.patience is None else f" or {recipe.patience} without a better one,"
    words = [
        f"Recipe: for {images:,} training images {recipe.epochs} epochs{most} in batches of {recipe.batch_size}, "
        f"{recipe.epochs * (images // recipe.batch_size):,} steps, to a learning rate of {recipe.learning_rate:.2g}; "
        "--epochs, --batch-size and --learning-rate choose others"
    ]
    of_a_class = task.images_per_class(images, outputs)
    if of_a_class is not None and of_a_class < FEW and config.preset != FOR_FEW:
        words.append(f"With fewer than {FEW} training images of a class {FOR_FEW} learns better")
    return words


def is_uneven(counts: Int64[Tensor, "J"] | None) -> bool:
    """Return whether there are many more images of one class than of another; None: images have no class each."""
    return counts is not None and bool(counts.max() >= UNEVEN * counts.min())


def words_of_classes(config: TrainConfig, labels: Tensor, names: Sequence[str], task: Task = CLASSES) -> list[str]:
    """Return the line that says that classes are uneven, and what is done about it; no line if they are not."""
    counts, recipe = task.class_counts(labels), config.recipe
    if counts is None or not is_uneven(counts):
        return []
    most, least = int(counts.argmax()), int(counts.argmin())
    found = f"{counts[most]:,} training images of {names[most]} and {counts[least]:,} of {names[least]}"
    words = f"Classes: uneven, {found}"
    words += "; balanced accuracy chooses the epoch" * (recipe.select == "balanced-accuracy")
    advice = "; --class-weights balanced makes all classes count the same"
    return [words + advice * (recipe.class_weights is None)]


def words_of_time(
    config: TrainConfig, asked: TrainConfig, in_shape: tuple[int, int, int], classes: int, images: int
) -> list[str]:
    """The line that says how long a long run will take, and a run on images of half the size.

    ``asked`` is the configuration before it was fitted to the images: smaller ones may have another network.
    """
    recipe = config.recipe
    steps = recipe.epochs * (images // recipe.batch_size)
    seconds = steps * seconds_of_step(config, in_shape, classes)
    if seconds < LONG:
        return []
    words = f"Time: at most about {duration(seconds)} on this machine"
    side = max(in_shape[1:]) // 2
    if seconds > TOO_LONG and recipe.crop is None and min(in_shape[1:]) > 1:
        with suppress(InputError):  # too small for the network
            shape = in_shape[0], side, side
            smaller = dataclasses.replace(config, model=fit_network(asked, shape).model)
            less = steps * seconds_of_step(smaller, shape, classes)
            words += f"; with images of {side}×{side} (--image-size {side}) about {duration(less)}"
    return [words]


def seconds_of_step(config: TrainConfig, in_shape: tuple[int, int, int], classes: int) -> float:
    """The time of a step of training, measured by two on noise, of which the first warms up."""
    with torch.random.fork_rng(devices=[]):
        network = build_network(config.model, in_shape, classes).train()
        recipe, size = config.recipe, config.recipe.batch_size
        parameters, rate = network.parameters(), recipe.learning_rate
        optimizer: Any = build("optimizer", recipe.optimizer, params=parameters, learning_rate=rate)
        images, labels = torch.rand(size, *in_shape), torch.zeros(size, classes)
        for _ in range(2):
            begin = time.perf_counter()
            output = network(images, network.decoder_targets(labels))
            network.loss(output, images, labels).total.backward()
            optimizer.step()
    return time.perf_counter() - begin


def warning_of_chance(
    value: float, labels: Tensor, config: TrainConfig, steps: int, task: Task = CLASSES
) -> str | None:
    """Return a sentence that a network is no better than chance, and what to try; None if it is better.

    Chance is the best answer that is the same for all images, as :meth:`torchcaps.tasks.Task.chance` defines it; a
    network is better if it is by more than the standard error of that.

    Args:
        value: The metric of the network on validation images; balanced, if that chooses the epoch.
        labels: The labels of these images.
        config: The run.
        steps: Steps an epoch.
        task: The network's task.
    """
    is_balanced = config.recipe.select == "balanced-accuracy"
    chance = task.chance(labels, balanced=is_balanced)
    if chance is None or value > sum(chance):
        return None
    result = "balanced " * is_balanced + task.metric.say(value, f"{task.metric.name} ")
    is_class = task.images_per_class(1, 1) is not None
    another = f"the network {FOR_FEW}, which learns from few images, " * (is_class and config.preset != FOR_FEW)
    epochs = max(4 * config.recipe.epochs, math.ceil(LEAST_STEPS / steps))
    return (
        f"the network has learned nothing: {result} on the validation images is no better than chance. Try {another}"
        f"more steps (--epochs {epochs}), a smaller --learning-rate ({config.recipe.learning_rate / 3:.1g}), or more "
        f"and clearer images{' of each class' * is_class}"
    )
