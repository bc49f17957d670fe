"""Adapt a recipe to few or uneven images, and write messages about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxtyping import Int64
from torch import Tensor

from torchcaps.datasets import Dataset
from torchcaps.datasets.splits import groups_of
from torchcaps.models.presets import fit_to_images, get_preset
from torchcaps.tasks import Task, find_task
from torchcaps.training.config import AUTO_FIELDS, TrainConfig, override
from torchcaps.training.recipe import Recipe
from torchcaps.words import counted

MIN_BATCH_SIZE = 16
"""Images of a batch, at least, after the batch was halved for few images."""
MIN_STEPS_PER_EPOCH = 100
"""The batch is halved until an epoch has this many steps."""
MIN_STEPS = 2_000
"""Epochs are added until a run has this many steps."""
MIN_PATIENCE_EPOCHS = 10
"""Shortest wait for a better epoch in a run of few images. The usual wait is a quarter of its epochs."""
IMBALANCE_RATIO = 2
"""Classes are uneven if one has this many times as many training images as another."""
FEW_IMAGES_PER_CLASS = 50
"""With fewer training images of a class, another preset is recommended."""
PRESET_FOR_FEW_IMAGES = "compact-shared"
CLASSES = find_task("classes")


def fit_network(config: TrainConfig, in_shape: tuple[int, int, int]) -> TrainConfig:
    """Return the configuration with a network that suits images of a size. Only fields in ``config.fitted`` change."""
    fixed_fields = set(AUTO_FIELDS).difference(config.fitted)
    return override(config, fit_to_images(get_preset(config.preset), config.model, in_shape, fixed_fields))


def fit_recipe(config: TrainConfig, labels: Tensor, task: Task = CLASSES, images: int | None = None) -> TrainConfig:
    """Return the configuration with a recipe that suits the training images. Only fields in ``config.fitted`` change.

    Learning needs steps, not epochs. So the batch is halved, down to `MIN_BATCH_SIZE` images, until an epoch has
    `MIN_STEPS_PER_EPOCH`. The learning rate falls with the square root of the batch. Then epochs are added until
    the run has `MIN_STEPS`. The run stops early if a quarter of the epochs bring no better one. If the classes are
    uneven, the balanced accuracy chooses the epoch.

    Args:
        config: The configuration.
        labels: Labels of the training images.
        task: Task of the labels.
        images: Number of training images, or patches of them, in an epoch; None: one for each label.
    """
    recipe, images = config.recipe, images or len(labels)
    batch, epochs, rate = recipe.batch_size, recipe.epochs, recipe.learning_rate
    patience, select = recipe.patience, recipe.select
    if "batch_size" in config.fitted:
        while batch >= 2 * MIN_BATCH_SIZE and images < MIN_STEPS_PER_EPOCH * batch:
            batch //= 2
    if "learning_rate" in config.fitted:
        rate *= math.sqrt(batch / recipe.batch_size)
    if "epochs" in config.fitted:
        epochs = max(epochs, math.ceil(MIN_STEPS / max(images // batch, 1)))
        if "patience" in config.fitted and images < MIN_STEPS_PER_EPOCH * recipe.batch_size:
            patience = max(MIN_PATIENCE_EPOCHS, epochs // 4)
    if "select" in config.fitted and is_uneven(images_per_class(labels, task)):
        select = "balanced-accuracy"
    fields = {"batch_size": batch, "epochs": epochs, "learning_rate": rate, "patience": patience, "select": select}
    return dataclasses.replace(config, recipe=recipe.replace(fields), fitted=())


def fitting_message(
    config: TrainConfig,
    requested: Recipe,
    labels: Tensor,
    images: int,
    task: Task = CLASSES,
    in_shape: Sequence[int] = (),
) -> list[str]:
    """Return lines about changes of the recipe for the number of images; empty if it did not change."""
    recipe = config.recipe
    if recipe.replace({"select": requested.select}) == requested:
        return []
    most = "" if recipe.patience is None else f" or {recipe.patience} without a better one,"
    words = [
        f"Recipe: for {counted(images, 'training image')} {counted(recipe.epochs, 'epoch')}{most} in batches of "
        f"{recipe.batch_size}, "
        f"{counted(recipe.epochs * (images // recipe.batch_size), 'step')}, to a learning rate of "
        f"{recipe.learning_rate:.2g}; "
        "--epochs, --batch-size and --learning-rate choose others"
    ]
    counts = images_per_class(labels, task)
    is_few = counts is not None and images < FEW_IMAGES_PER_CLASS * len(counts)
    if is_few and _may_learn_better(config, labels, task, in_shape):
        words.append(
            f"With fewer than {FEW_IMAGES_PER_CLASS} training images of a class {PRESET_FOR_FEW_IMAGES} learns better"
        )
    return words


def _may_learn_better(config: TrainConfig, labels: Tensor, task: Task, in_shape: Sequence[int]) -> bool:
    """Return True if `PRESET_FOR_FEW_IMAGES` is another preset and takes the images: pictures of one class each."""
    is_picture = len(in_shape) != 3 or in_shape[1] > 1  # a sequence has the height 1
    is_class = images_per_class(labels, task) is not None
    return is_picture and is_class and config.preset != PRESET_FOR_FEW_IMAGES


def images_per_class(labels: Tensor, task: Task) -> Int64[Tensor, "J"] | None:
    """Return the number of images of each class; None for images without exactly one class."""
    return task.class_counts(labels) if isinstance(labels, Tensor) and labels.ndim == 1 else None


def is_uneven(counts: Int64[Tensor, "J"] | None) -> bool:
    """Return True if one class has many more images than another; ``counts`` is None if images have no single class."""
    return counts is not None and bool(counts.max() >= IMBALANCE_RATIO * counts.min())


def imbalance_message(config: TrainConfig, labels: Tensor, names: Sequence[str], task: Task = CLASSES) -> list[str]:
    """Return a line about uneven classes and the measures against them; empty if the classes are even."""
    counts, recipe = images_per_class(labels, task), config.recipe
    if counts is None or not is_uneven(counts):
        return []
    most, least = int(counts.argmax()), int(counts.argmin())
    extremes = (
        f"{counted(int(counts[most]), 'training image')} of {names[most]} and {counts[least]:,} of {names[least]}"
    )
    words = f"Classes: uneven, {extremes}"
    words += "; balanced accuracy chooses the epoch" * (recipe.select == "balanced-accuracy")
    advice = "; --class-weights balanced makes all classes count the same"
    return [words + advice * (recipe.class_weights is None)]


def chance_warning(
    value: float, labels: Tensor, config: TrainConfig, steps: int, task: Task = CLASSES, in_shape: Sequence[int] = ()
) -> str | None:
    """Return a warning that a network is no better than chance, with advice; None if it is better.

    Chance is the result of the best constant answer, as :meth:`torchcaps.tasks.Task.chance` defines it. A network must
    exceed it by more than its standard error.

    Args:
        value: The metric of the network on validation images; balanced, if that chooses the epoch.
        labels: The labels of these images.
        config: The run.
        steps: Steps an epoch.
        task: The network's task.
        in_shape: Shape of an image; empty: a picture.
    """
    is_balanced = config.recipe.select == "balanced-accuracy"
    chance = task.chance(labels, balanced=is_balanced)
    if chance is None or value > sum(chance):
        return None
    result = "balanced " * is_balanced + task.metric.say(value, f"{task.metric.name} ")
    is_class = images_per_class(labels, task) is not None
    another = f"the network {PRESET_FOR_FEW_IMAGES}, which learns from few images, " * _may_learn_better(
        config, labels, task, in_shape
    )
    epochs = max(4 * config.recipe.epochs, math.ceil(MIN_STEPS / steps))
    return (
        f"the network has learned nothing: {result} on the validation images is no better than chance. Try {another}"
        f"more steps (--epochs {epochs}), a smaller --learning-rate ({config.recipe.learning_rate / 3:.1g}), or more "
        f"and clearer images{' of each class' * is_class}"
    )


def narrow_message(data: Dataset) -> Iterator[str]:
    """Yield a warning if all validation images have one class or one group, but the training images have more."""
    parts, output = (data.train, data.validation), data.task.output
    strata = [each.task.strata(each.labels) for each in parts if each.targets is not None]
    groups = [each for part in parts if (each := groups_of(part.names)) is not None]
    counts = {word: [len(each.unique()) for each in values] for word, values in (("group", groups), (output, strata))}
    if ones := [word for word, numbers in counts.items() if len(numbers) == 2 and numbers[0] > 1 == numbers[1]]:
        yield (
            f"Warning: all {len(data.validation):,} validation images are of one {' and one '.join(ones)}. They choose "
            "the best epoch, and measure how sure answers are; hold out more with --validation-size, or try another "
            "--seed"
        )
