"""The data of a run: loaded and cropped as its configuration says, with a fingerprint by which they are recognised."""

from __future__ import annotations

import dataclasses
import math
import zlib

import torch

from torchcaps.datasets import (
    Augmentation,
    BatchLoader,
    Dataset,
    ImageSet,
    PairSet,
    center_crop,
    list_datasets,
    load_dataset,
)
from torchcaps.errors import InputError
from torchcaps.models import get_preset, list_presets
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

#: A recipe for few images: batches of at least so many images, epochs of so many steps, runs of so many steps.
LEAST_BATCH, STEPS_AN_EPOCH, LEAST_STEPS = 16, 16, 2_000
#: With fewer training images of a class than this, this preset learns better than others.
FEW, FOR_FEW = 50, "compact-shared"


def load_run_data(config: TrainConfig) -> Dataset:
    """Load the data set of a run, its images whole; :func:`as_seen` crops them.

    Raises:
        InputError: As for :func:`torchcaps.datasets.load_dataset`; or the images do not fit the recipe's crop or the
            number of objects that the network looks for, or do not show alone what it reconstructs.
    """
    recipe = config.recipe
    loaded = load_dataset(
        config.data,
        data_dir=config.data_dir,
        image_size=config.image_size,
        validation_size=recipe.validation_size,
        validation=recipe.validation,
        seed=config.seed,
        limit_train=recipe.limit_train,
        limit_test=recipe.limit_test,
        skip_damaged=config.skip_damaged,
    )
    check_objects(loaded.name, loaded.num_objects, config)
    sets = (loaded.train, loaded.validation, loaded.test)
    without_parts = any(isinstance(each, ImageSet) and each.parts is None for each in sets)
    if loaded.num_objects > 1 and config.model.get("decoder") is not None and without_parts:
        raise InputError(
            f"the images of {loaded.name} hold {loaded.num_objects} objects, but none of them alone, which the "
            "network is to reconstruct; set --no-decoder"
        )
    as_seen(loaded, recipe)
    return loaded


def fit_recipe(config: TrainConfig, images: int) -> TrainConfig:
    """The configuration with a recipe that suits so many training images, as far as ``config.fitted`` leaves it open.

    A network learns by steps. The batch is halved, down to `LEAST_BATCH` images, until an epoch has `STEPS_AN_EPOCH`,
    and the learning rate goes with the root of the batch; then there are as many epochs as make `LEAST_STEPS`. Where
    the recipe has as many anyway, nothing changes.

    Args:
        config: The run.
        images: How many images there are to train on.
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


def as_seen(dataset: Dataset, recipe: Recipe) -> Dataset:
    """A data set as the network sees it: with a crop, the middle of each image; the pixels are shared.

    Raises:
        InputError: The images do not go with the recipe's crop.
    """
    if recipe.crop is None:
        return dataset
    if isinstance(dataset.train, PairSet):
        raise InputError(f"{dataset.name} makes new training images in each epoch, which are not cropped; omit --crop")
    parts = (dataset.train, dataset.validation, dataset.test)
    train, validation, test = (center_crop(part, recipe.crop) for part in parts)
    return dataclasses.replace(dataset, train=train, validation=validation, test=test)


def training_loader(
    config: TrainConfig, train: ImageSet | PairSet, device: torch.device | str, rank: int = 0, processes: int = 1
) -> BatchLoader:
    """The batches that a run trains on, its whole training images changed as its recipe says.

    Raises:
        InputError: As for :class:`torchcaps.datasets.BatchLoader`.
    """
    recipe = config.recipe
    return BatchLoader(
        train,
        recipe.batch_size,
        shuffle=True,
        augmentation=augmentation_of(recipe),
        seed=config.seed,
        device=device,
        rank=rank,
        world_size=processes,
        drop_last=True,
    )


def augmentation_of(recipe: Recipe) -> Augmentation:
    """The random changes of training images, which a recipe holds as fields of its own."""
    return Augmentation(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augmentation)})


def fingerprint(dataset: Dataset, recipe: Recipe) -> list[int]:
    """Numbers that change when the data of a run, here whole, do: sizes of the parts, and a checksum of all tensors."""
    seen = as_seen(dataset, recipe)
    parts = (dataset.train, seen.validation, seen.test)
    checksum = 0
    for part in parts:
        for tensor in part.tensors:
            checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    return [*(len(part) for part in parts), checksum]


def check_objects(data: str, objects: int, config: TrainConfig) -> None:
    """Raise InputError unless the network looks for as many objects as an image of the data set ``data`` holds."""
    wanted = config.model["objects"]
    if objects == wanted:
        return
    ways = [f"set --objects {objects}"]
    if objects > 1:
        fit = [name for name in list_presets() if get_preset(name).network["objects"] == objects]
        ways += [f"take a preset made for that ({', '.join(fit)})"] * bool(fit)
    if wanted > 1:
        ways += [f"give --data {info.spec}" for info in list_datasets() if info.num_objects == wanted]
    raise InputError(
        f"an image of {data} holds {objects} object{'s' * (objects > 1)}, but the network looks for {wanted}; "
        f"{', or '.join(ways)}"
    )
