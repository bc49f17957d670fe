"""The data of a run: loaded, cropped and batched as its recipe says, with a fingerprint; and what few images need."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from torchcaps.datasets import (
    Augmentation,
    Batch,
    BatchLoader,
    Dataset,
    ImageSet,
    PairSet,
    center_crop,
    list_datasets,
    load_dataset,
)
from torchcaps.datasets.rng import ORDER, stream_of
from torchcaps.errors import InputError
from torchcaps.models import get_preset, list_presets
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.utils.data import Dataset as TorchDataset

    from torchcaps.analysis import Evaluation

    OwnData = Dataset | ImageSet | PairSet | Sequence[Tensor] | TorchDataset[Any]

#: Images of a batch in evaluation, over all processes.
EVALUATION_BATCH = 256
#: A recipe for few images: batches of at least so many images, epochs of so many steps, runs of so many steps.
LEAST_BATCH, STEPS_AN_EPOCH, LEAST_STEPS = 16, 16, 2_000
#: With fewer training images of a class than this, this preset learns better than others.
FEW, FOR_FEW = 50, "compact-shared"


# ---- batches


class Batches(Protocol):
    """Gives the batches of any epoch, from any of them on, the same every time, as `BatchLoader` does."""

    num_images: int

    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch."""


class OwnBatches:
    """Batches of one's own data, in a new order in every epoch if they are for training.

    What the data draw at random when an image is taken comes from torch's generator, which is seeded for each batch.

    Args:
        data: Images and labels, (N, ...) and (N,), or whatever has a length and gives such a pair by its index.
        batch_size: Images a batch, over all processes together.
        shuffle: Whether they are for training.
        drop_last: Whether to leave out a last batch that is not full.
        seed: The seed of all that is random.
        fabric: The device, and the processes that share each batch.
    """

    def __init__(
        self, data: Any, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int, fabric: Fabric
    ) -> None:
        self._tensors = tuple(data) if isinstance(data, tuple | list) else None
        self._data, self._size, self._shuffle, self._seed, self._fabric = data, batch_size, shuffle, seed, fabric
        self.num_images = len(data) if self._tensors is None else len(self._tensors[0])
        self._last = 0 if drop_last else batch_size - 1
        if shuffle and (batch_size > self.num_images or batch_size % fabric.world_size):
            raise InputError(
                f"the batch size must be at most {self.num_images}, the images to train on, and a multiple of "
                f"{fabric.world_size}, the processes, got {batch_size}"
            )

    def __len__(self) -> int:
        return (self.num_images + self._last) // self._size

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch."""
        order = torch.arange(self.num_images)
        if self._shuffle:
            order = torch.randperm(self.num_images, generator=stream_of(ORDER, (self._seed, epoch, 0)))
        rank, processes = self._fabric.global_rank, self._fabric.world_size
        for number in range(start, len(self)):
            index = order[number * self._size : (number + 1) * self._size].tensor_split(processes)[rank]
            if self._tensors is not None:
                images, labels = (each[index] for each in self._tensors)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed((self._seed * 1_000_003 + epoch * len(self) + number) * 1_009 + rank)
                    images, labels = default_collate([self._data[int(each)] for each in index])
            images = images.to(self._fabric.device)
            if not images.is_floating_point():
                images = images / 255
            yield Batch(images, labels.to(self._fabric.device))


class RunData(NamedTuple):
    """The data that a run trains on."""

    train: Batches
    images: int
    """Images that are trained on in an epoch."""
    validation: Batches | None
    labels: Tensor | None
    """The class of each training image, where it is known beforehand."""
    fingerprint: list[int]
    """Numbers that change when the data do."""
    class_names: tuple[str, ...] | None = None


def run_data(
    data: OwnData,
    recipe: Recipe,
    fabric: Fabric,
    seed: int,
    validation: OwnData | None = None,
    *,
    drop_last: bool = True,
) -> RunData:
    """The batches of a data set, whose training images are changed as the recipe says.

    Args:
        data: A `Dataset`, its images whole; an `ImageSet` or `PairSet`; images and labels; or a torch ``Dataset``.
        recipe: Names the batch size, and how training images are changed.
        fabric: The device, and the processes that share each batch.
        seed: The seed of all that is random.
        validation: Validation images, of any of these kinds but the first.
        drop_last: Whether to leave out the images of an epoch that do not fill a batch.

    Raises:
        InputError: The recipe does not go with the data.
    """
    names = None
    if isinstance(data, Dataset):
        names, fingerprint = data.class_names, data_fingerprint(data, recipe)
        train: Any = data.train
        validation = cropped(data, recipe).validation if validation is None else validation
    else:
        train, validation = (_as_images(each) for each in (data, validation))
        fingerprint = _fingerprint([each for each in (train, validation) if each is not None])

    def batches(part: Any, size: int, shuffle: bool) -> Batches:
        change = augmentation_of(recipe) if shuffle else None
        if isinstance(part, ImageSet | PairSet):
            place: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank}
            place |= {"world_size": fabric.world_size, "drop_last": drop_last and shuffle}
            return BatchLoader(part, size, shuffle=shuffle, augmentation=change, seed=seed, **place)
        if change is not None and change != Augmentation():
            raise InputError("only images of uint8, (N, C, H, W), are changed at random; leave that to your own data")
        return OwnBatches(part, size, shuffle=shuffle, drop_last=drop_last and shuffle, seed=seed, fabric=fabric)

    if isinstance(train, ImageSet | PairSet):
        labels = train.labels if isinstance(train, ImageSet) else None
    else:
        labels = train[1] if isinstance(train, tuple | list) else None
    judged = None if validation is None else batches(validation, EVALUATION_BATCH, False)
    trained = batches(train, recipe.batch_size, True)
    images = min(len(trained) * recipe.batch_size, trained.num_images)
    return RunData(trained, images, judged, labels, fingerprint, names)


def _as_images(data: Any) -> Any:
    """Images of uint8 and their labels as an `ImageSet`, which stays on the device; other data as they are."""
    if isinstance(data, tuple | list) and len(data) == 2 and data[0].dtype == torch.uint8 and data[0].ndim == 4:
        return ImageSet(*data)
    return data


def balanced_weights(labels: Tensor | None) -> list[float]:
    """N / (J · N_j) for each class j, so that all classes count the same; a class without images has 1.

    Source: King, Zeng 2001, "Logistic regression in rare events data", and scikit-learn's ``class_weight``.
    """
    if labels is None or labels.ndim != 1:
        raise InputError('class_weights="balanced" needs a label for each training image; give numbers instead')
    counts = labels.bincount().tolist()
    return [len(labels) / (len(counts) * count) if count else 1.0 for count in counts]


# ---- the data of a configuration


def load_run_data(config: TrainConfig) -> Dataset:
    """Load the data set of a run, its images whole; :func:`cropped` crops them.

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
    cropped(loaded, recipe)
    return loaded


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


def augmentation_of(recipe: Recipe) -> Augmentation:
    """The random changes of training images, which a recipe holds as fields of its own."""
    return Augmentation(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augmentation)})


def data_fingerprint(dataset: Dataset, recipe: Recipe) -> list[int]:
    """Numbers that change when the data of a run, here whole, do: sizes of the parts, and a checksum of all tensors."""
    seen = cropped(dataset, recipe)
    return _fingerprint([dataset.train, seen.validation, seen.test])


def _fingerprint(parts: Sequence[Any]) -> list[int]:
    """The size of each part, and a checksum of the tensors that they hold."""
    checksum, sizes = 0, []
    for part in parts:
        tensors = part if isinstance(part, tuple | list) else getattr(part, "tensors", ())
        for tensor in tensors:
            checksum = zlib.crc32(tensor.contiguous().cpu().numpy().data, checksum)
        sizes.append(len(part[0]) if isinstance(part, tuple | list) else len(part))
    return [*sizes, checksum]


# ---- few images


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


def chance(images: ImageSet) -> float:
    """The accuracy that a network must exceed to be better than one that gives every image the most frequent class.

    It is that class's share p of the N images, and one standard error, √(p·(1 − p) / N).
    """
    share = float(images.labels.bincount().max()) / len(images)
    return share + math.sqrt(share * (1 - share) / len(images))


def warning_of_chance(judged: Evaluation, recipe: Recipe, preset: str, steps: int) -> str:
    """A sentence that a network is no better than chance on the validation images, and what to try.

    Args:
        judged: The network on the validation images.
        recipe: How it was trained.
        preset: The preset of which it is.
        steps: Steps an epoch.
    """
    another = "" if preset == FOR_FEW else f"the network {FOR_FEW}, which learns from few images, "
    epochs = max(4 * recipe.epochs, math.ceil(LEAST_STEPS / steps))
    given = judged.confusion.sum(0)
    is_one = np.count_nonzero(given) == 1
    what = f'takes every validation image for "{judged.class_names[given.argmax()]}"' if is_one else "guesses"
    return (
        f"the network has learned nothing: it {what}, {judged.accuracy:.1%} right, which is no better than chance. Try "
        f"{another}more steps (--epochs {epochs}), a smaller --learning-rate ({recipe.learning_rate / 3:.1g}), or "
        "more and clearer images of each class"
    )
