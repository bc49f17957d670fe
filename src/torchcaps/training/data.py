"""The data of a run: loaded and cropped as its configuration says, with a fingerprint by which they are recognised."""

from __future__ import annotations

import dataclasses
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
from torchcaps.models.config import Recipe
from torchcaps.training.config import TrainConfig


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
    )
    check_objects(loaded.name, loaded.num_objects, config)
    sets = (loaded.train, loaded.validation, loaded.test)
    without_parts = any(isinstance(each, ImageSet) and each.parts is None for each in sets)
    if loaded.num_objects > 1 and config.model.decodes and without_parts:
        raise InputError(
            f"the images of {loaded.name} hold {loaded.num_objects} objects, but none of them alone, which the "
            "network is to reconstruct; set --no-decoder"
        )
    as_seen(loaded, recipe)
    return loaded


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
    wanted = config.model.objects
    if objects == wanted:
        return
    ways = [f"set --objects {objects}"]
    if objects > 1:
        fit = [name for name in list_presets() if get_preset(name).model.objects == objects]
        ways += [f"take a preset made for that ({', '.join(fit)})"] * bool(fit)
    if wanted > 1:
        ways += [f"give --data {info.spec}" for info in list_datasets() if info.num_objects == wanted]
    raise InputError(
        f"an image of {data} holds {objects} object{'s' * (objects > 1)}, but the network looks for {wanted}; "
        f"{', or '.join(ways)}"
    )
