"""The data of a run: loaded, cropped and batched as its recipe says, with a fingerprint."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from torchcaps.datasets import (
    Augmentation,
    Batch,
    BatchLoader,
    Dataset,
    ImageSet,
    PairSet,
    center_crop,
    load_dataset,
)
from torchcaps.datasets.rng import ORDER, stream_of
from torchcaps.errors import InputError
from torchcaps.models.output import Task
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    OwnData = Dataset | ImageSet | PairSet | Sequence[Tensor] | TorchDataset[Any] | DataLoader[Any]

EVALUATION_BATCH = 256
"""Images of a batch in evaluation, over all processes."""


# ---- batches


class OwnBatches(TorchDataset[Any]):
    """Batches of one's own data: of a ``TensorDataset``, or of whatever gives an image and its label by its index.

    What the data draw at random when an image is taken comes from torch's generator, which is seeded for each batch, so
    that batches are the same in any process, also in those ``workers`` that read ahead. The other arguments are those
    of :class:`torchcaps.datasets.BatchLoader`.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        device: torch.device,
        rank: int,
        world_size: int,
        workers: int,
    ) -> None:
        self._data, self._size, self._shuffle, self._seed = data, batch_size, shuffle, seed
        self._device, self._rank, self._world_size, self._workers = device, rank, world_size, workers
        self.num_images, self._last = len(data), 0 if drop_last else batch_size - 1
        if shuffle and (batch_size > self.num_images or batch_size % world_size):
            raise InputError(
                f"the batch size must be at most {self.num_images}, the images to train on, and a multiple of "
                f"{world_size}, the processes, got {batch_size}"
            )

    def __len__(self) -> int:
        return (self.num_images + self._last) // self._size

    def __getitem__(self, key: tuple[int, Tensor]) -> Any:
        """A batch, by its seed and the indices of its images."""
        seed, index = key
        if isinstance(self._data, TensorDataset):
            return self._data[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = default_collate([self._data[each] for each in index.tolist() or [0]])
        return [each[: len(index)] for each in first]  # none in a share of a small last batch

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch."""
        order = torch.arange(self.num_images)
        if self._shuffle:
            order = torch.randperm(self.num_images, generator=stream_of(ORDER, (self._seed, epoch, 0)))
        keys = []
        for number in range(start, len(self)):
            full = order[number * self._size : (number + 1) * self._size]
            seed = (self._seed * 1_000_003 + epoch * len(self) + number) * 1_009 + self._rank
            keys.append((seed, full.tensor_split(self._world_size)[self._rank]))
        workers = 0 if isinstance(self._data, TensorDataset) else self._workers
        own = torch.Generator()  # else it would draw from that of the run
        for images, labels in DataLoader(self, batch_size=None, sampler=keys, num_workers=workers, generator=own):
            pixels = images.to(self._device)
            yield Batch(pixels if pixels.is_floating_point() else pixels / 255, labels.to(self._device))


Batches = BatchLoader | OwnBatches


class RunData(NamedTuple):
    """The data that a run trains on."""

    train: Batches
    validation: Batches | None
    labels: Tensor | None
    """The labels of the training images, where they are known beforehand."""
    fingerprint: list[int]
    """The size of each part, and a checksum of all tensors; they change when the data do."""
    judged_labels: Tensor | None = None
    """Those of the validation images."""
    plain: Batches | None = None
    """Training images as they are, on the CPU, the same in all processes; None where the recipe needs none."""


def run_data(
    data: OwnData,
    recipe: Recipe,
    fabric: Fabric,
    seed: int,
    validation: OwnData | None = None,
    *,
    drop_last: bool = True,
    workers: int = 0,
) -> RunData:
    """The batches of a data set, whose training images are changed as the recipe says.

    Args:
        data: A `Dataset`, its images whole; an `ImageSet` or `PairSet`; images and labels; or a torch ``Dataset``.
        recipe: Names the batch size, and how training images are changed.
        fabric: The device, and the processes that share each batch.
        seed: The seed of all that is random.
        validation: Validation images, of any of these kinds but the first.
        drop_last: Whether to leave out the images of an epoch that do not fill a batch.
        workers: Processes that read a torch ``Dataset`` ahead.

    Raises:
        InputError: The recipe does not go with the data.
    """
    train, judged = _as_images(data), _as_images(validation)
    parts: list[Any] = [each for each in (train, judged) if each is not None]
    if isinstance(data, Dataset):
        seen = cropped(data, recipe)
        train, judged = data.train, seen.validation if validation is None else judged
        parts = [data.train, seen.validation, seen.test]

    def batches(part: Any, size: int, *, shuffle: bool) -> Batches:
        change = augmentation_of(recipe) if shuffle else Augmentation()
        how: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last and shuffle, "seed": seed}
        how |= {"device": fabric.device, "rank": fabric.global_rank, "world_size": fabric.world_size}
        if isinstance(part, ImageSet | PairSet):
            return BatchLoader(part, size, augmentation=change, **how)
        if change != Augmentation():
            raise InputError("only images of uint8, (N, C, H, W), are changed at random; leave that to your own data")
        return OwnBatches(part, size, workers=workers, **how)

    plain = None
    if recipe.precise_norm and isinstance(train, ImageSet):
        still = train if recipe.crop is None else center_crop(train, recipe.crop)
        plain = BatchLoader(still, recipe.batch_size, shuffle=True, seed=seed)
    return RunData(
        train=batches(train, recipe.batch_size, shuffle=True),
        validation=None if judged is None else batches(judged, EVALUATION_BATCH, shuffle=False),
        labels=_labels(train),
        fingerprint=_fingerprint(parts),
        judged_labels=_labels(judged),
        plain=plain,
    )


def _labels(part: Any) -> Tensor | None:
    return part.labels if isinstance(part, ImageSet) else part.tensors[1] if isinstance(part, TensorDataset) else None


def _as_images(data: Any) -> Any:
    """Two tensors as an `ImageSet`, which stays on the device, or a ``TensorDataset``; the data of a ``DataLoader``."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or data.collate_fn is not default_collate:
            raise InputError(
                "of a DataLoader the data set is taken, which must have a length and items by their index, and no "
                "collate_fn of its own"
            )
        data = data.dataset
    if not isinstance(data, tuple | list):
        return data
    is_images = len(data) == 2 and data[0].dtype == torch.uint8 and data[0].ndim == 4
    return ImageSet(*data) if is_images else TensorDataset(*data)


def _fingerprint(parts: Sequence[Any]) -> list[int]:
    checksum = 0
    for tensor in (tensor for part in parts for tensor in getattr(part, "tensors", ())):
        checksum = zlib.crc32(tensor.contiguous().cpu().numpy().data, checksum)
    return [*map(len, parts), checksum]


def augmentation_of(recipe: Recipe) -> Augmentation:
    """The random changes of training images, which a recipe holds as fields of its own."""
    return Augmentation(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augmentation)})


# ---- the data of a configuration


def load_run_data(config: TrainConfig) -> Dataset:
    """Load the data set of a run, its images whole; :func:`cropped` crops them.

    Raises:
        InputError: As for :func:`torchcaps.datasets.load_dataset`; or the images do not fit the number of objects that
            the network looks for, or do not show alone what it reconstructs.
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
    objects, wanted = loaded.num_objects, config.model["objects"]
    if objects != wanted:
        raise InputError(
            f"an image of {loaded.name} holds {objects} object{'s' * (objects > 1)}, but the network looks for "
            f"{wanted}; set --objects {objects}, or take another preset or data set"
        )
    sets = (loaded.train, loaded.validation, loaded.test)
    without_parts = any(isinstance(each, ImageSet) and each.parts is None for each in sets)
    require_task(loaded, config.model.get("task", "classes"))
    if objects > 1 and config.model.get("decoder") is not None and without_parts:
        raise InputError(
            f"the images of {loaded.name} hold {objects} objects, but none of them alone, which the network is to "
            "reconstruct; set --no-decoder"
        )
    return loaded


def require_task(dataset: Dataset, task: Task) -> None:
    """Raise InputError unless the labels of a data set are of a task."""
    labels = dataset.test.labels
    if dataset.test.has_targets == (task == "classes"):
        held = "numbers for each image" if dataset.test.has_targets else "a class for each image"
        wanted = "set --task labels or --task regression" if dataset.test.has_targets else "leave --task out"
        raise InputError(f"{dataset.name} has {held}, which is not for the task {task}; {wanted}")
    if task == "labels" and not ((labels == 0) | (labels == 1)).all():
        raise InputError(f"{dataset.name} has labels other than 0 and 1; set --task regression")


def cropped(dataset: Dataset, recipe: Recipe) -> Dataset:
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
