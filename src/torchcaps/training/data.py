"""The data of a run: loaded as its configuration says, and known again when it goes on."""

from __future__ import annotations

import zlib

from torchcaps.datasets import Dataset, load_dataset
from torchcaps.training.config import TrainConfig


def load_run_data(config: TrainConfig) -> Dataset:
    """The data set of a run, with the limits of its recipe as far as they bite.

    A recipe made for a large data set trains on a small one too: a limit that leaves no image out is none.

    Raises:
        InputError: As for :func:`torchcaps.datasets.load_dataset`.
    """
    recipe = config.recipe

    def load(limit_train: int | None, limit_test: int | None) -> Dataset:
        return load_dataset(
            config.data,
            data_dir=config.data_dir,
            image_size=config.image_size,
            validation_size=recipe.validation_size,
            seed=config.seed,
            limit_train=limit_train,
            limit_test=limit_test,
        )

    whole = load(None, None)
    limit_train = _biting(recipe.limit_train, len(whole.train))
    limit_test = _biting(recipe.limit_test, len(whole.test))
    return whole if limit_train is None and limit_test is None else load(limit_train, limit_test)


def _biting(limit: int | None, size: int) -> int | None:
    return limit if limit is not None and limit < size else None


def fingerprint(dataset: Dataset) -> list[int]:
    """Numbers that change when the data do: sizes of the parts, and a checksum of images and labels."""
    parts = (dataset.train, dataset.validation, dataset.test)
    checksum = 0
    for part in parts:
        for tensor in (part.images, part.labels):
            checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    return [*(len(part) for part in parts), checksum]
