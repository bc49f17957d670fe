"""Data of a run: loaded, cropped and batched for its recipe, with a fingerprint."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torchcaps.analysis.collector import collector_of
from torchcaps.analysis.inference import inference, to_pixels
from torchcaps.datasets import Augmentation, BatchLoader, Dataset, load_dataset
from torchcaps.datasets.image_set import Images, images_of
from torchcaps.datasets.item_reader import Keys, SampledBatches
from torchcaps.datasets.loading import find_dataset
from torchcaps.datasets.registry import DataRequest
from torchcaps.datasets.scaling import Scale
from torchcaps.datasets.sources.folder import ask_for_task
from torchcaps.datasets.user_data import Form, Opened, hold_out, open_data
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.parts import flat
from torchcaps.ranges import Range
from torchcaps.tasks import Task, find_task
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe
from torchcaps.words import counted

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader
    from torch.utils.data import Dataset as TorchDataset

    OwnData = Dataset | Images | Sequence[Any] | Mapping[Any, Any] | TorchDataset[Any] | DataLoader[Any]

SHARE_OF_IMAGES, VALIDATION_SHARE = Range(0, 1, above=True, below=True), 0.1
"""Shares of the images that :func:`torchcaps.fit` can hold out for validation, and the usual share."""
EVALUATION_BATCH_SIZE = 256
"""Images of a batch in evaluation, over all processes."""


class RunData(NamedTuple):
    """Batches and labels of a run."""

    train: BatchLoader
    validation: BatchLoader | None
    labels: Tensor | None
    """Labels of the training images of an epoch. None: they are not in memory and not needed."""
    fingerprint: list[int]
    """Size of each part and a checksum of all tensors. A change of the data changes them."""
    messages: Sequence[str] = ()
    """Messages about the data, before a run."""
    plain: BatchLoader | None = None
    """Training images without augmentation, on the CPU, the same in all processes. None: not needed by the recipe."""


def run_data(
    data: Dataset | Opened,
    recipe: Recipe,
    fabric: Fabric,
    seed: int,
    validation: Opened | None = None,
    *,
    drop_last: bool = True,
    workers: int = 0,
    needs_labels: bool = False,
) -> RunData:
    """Return the batches of a data set. Training images are augmented by the recipe.

    Args:
        data: The data set, with uncropped images.
        recipe: Recipe with batch size, crop and augmentation.
        fabric: Device and processes.
        seed: Random seed for order and augmentation.
        validation: Validation images, if ``data`` has none.
        drop_last: Omit a smaller last batch of training images.
        workers: Processes that read images ahead.
        needs_labels: Read training labels that are not in memory.
    """
    opened = data if isinstance(data, Opened) else Opened(data)
    check = validation or Opened(None)
    train, validated = opened.data, _center_cropped(check.data, recipe)
    parts = [train, validated]
    if isinstance(train, Dataset):
        seen = cropped(train, recipe)
        train, validated = train.train, seen.validation if validated is None else validated
        parts = [train, seen.validation, seen.test]

    def batches(part: Any, source: Opened, size: int, *, shuffle: bool) -> BatchLoader:
        how: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank, "world_size": fabric.world_size}
        how |= {"sampler": source.sampler, "reading": source.reading, "seed": seed}
        how["workers"] = workers if source.workers is None else source.workers
        if shuffle:
            how |= {"drop_last": drop_last or source.drop_last, "augmentation": augmentation_of(recipe)}
        return BatchLoader(part, size, shuffle=shuffle, **how)

    images, checked = images_of(train), images_of(validated)
    limit = EVALUATION_BATCH_SIZE if checked is None else collector_of(checked.task).max_batch
    size = check.batch_size or min(EVALUATION_BATCH_SIZE, limit)
    plain = None
    if recipe.precise_norm and images is not None:
        plain = BatchLoader(_center_cropped(train, recipe), recipe.batch_size, shuffle=True, seed=seed, drop_last=True)
    loader = batches(train, opened, opened.batch_size or recipe.batch_size, shuffle=True)
    labels = train.tensors[1] if isinstance(train, TensorDataset) else None if images is None else images.targets
    if labels is not None and opened.sampler is not None:
        labels = labels[torch.cat(opened.sampler.draw(seed, 0))]
    return RunData(
        train=loader,
        validation=None if validated is None else batches(validated, check, size, shuffle=False),
        labels=_read_labels(loader) if labels is None and needs_labels and images is None else labels,
        fingerprint=_fingerprint(parts, opened.sampler, check.sampler),
        messages=[*opened.messages, *check.messages],
        plain=plain,
    )


def fit_data(
    network: nn.Module,
    dataset: OwnData,
    validation: OwnData | float | None,
    recipe: Recipe,
    fabric: Fabric,
    *,
    groups: Any = None,
    task: Task,
    loss: object,
    scale: Scale,
    keys: Keys | None,
    seed: int,
    workers: int,
) -> tuple[Opened, RunData]:
    """Open the data of :func:`torchcaps.fit` and return them with their batches.

    The arguments have the same meaning as for ``fit``. The batch size of a ``DataLoader`` overrides the recipe's. A
    network of torchcaps fixes the form of images and labels. With a user's loss, labels other than masks may have any
    form.
    """
    form = Form(task, scale=scale)
    if loss is not None and not isinstance(network, Network) and not form.wants_masks:
        form = dataclasses.replace(form, task=None)
    if isinstance(network, Network):
        sizes: dict[str, Any] = {"num_outputs": network.num_classes, "in_shape": network.in_shape}
        form = dataclasses.replace(form, cropped=recipe.crop is not None, **sizes)
    opened = open_data(dataset, form, keys)
    if isinstance(network, Network):
        check_padding(network, opened.data)
    form = dataclasses.replace(form, class_names=opened.class_names, table=opened.table)
    check: Opened | None = None
    if groups is not None and validation is None:
        validation = VALIDATION_SHARE
    if isinstance(validation, int | float):
        SHARE_OF_IMAGES.check("validation", validation)
        opened, check = hold_out(opened, validation, groups, seed, form.task)
    elif groups is not None:
        raise InputError("groups say how fit splits its images, but validation has images of its own; leave groups out")
    elif validation is not None:
        check = open_data(validation, form, keys, "validation")
    needs_labels = recipe.class_weights == "balanced" or (form.task is not None and bool(form.task.buffers(1)))
    how: dict[str, Any] = {"drop_last": fabric.world_size > 1, "workers": workers, "needs_labels": needs_labels}
    return opened, run_data(opened, recipe, fabric, seed, check, **how)


def _center_cropped(part: Any, recipe: Recipe) -> Any:
    """Return images with the recipe's central crop, which shares memory. Other data are returned unchanged."""
    images = images_of(part)
    return part if recipe.crop is None or images is None else images.cropped(recipe.crop)


def _read_labels(loader: BatchLoader) -> Tensor:
    """Read all labels of an epoch, in each process."""
    whole = copy.copy(loader)
    whole.rank, whole.world_size = 0, 1
    return torch.cat([batch.labels.cpu() for batch in whole.batches(0)])


def _fingerprint(parts: Sequence[Any], *samplers: SampledBatches | None) -> list[int]:
    checksum, present = 0, [part for part in parts if part is not None]
    tensors = [tensor for part in present for tensor in getattr(part, "tensors", ())]
    repeatable = [sampler for sampler in samplers if sampler is not None and sampler.is_repeatable]
    tensors += [index for sampler in repeatable for index in sampler.draw(0, 0)]
    for tensor in tensors:
        checksum = zlib.crc32(tensor.contiguous().cpu().numpy().data, checksum)
    return [*map(len, present), checksum]


def augmentation_of(recipe: Recipe) -> Augmentation:
    """Return the augmentation of training images, from the recipe's fields of the same names."""
    return Augmentation(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(Augmentation)})


# ---- the data of a configuration


def load_run_data(config: TrainConfig) -> Dataset:
    """Load the data set of a run with uncropped images; :func:`cropped` crops them.

    Raises:
        InputError: As for :func:`torchcaps.datasets.load_dataset`. Or the images have another number of objects than
            the network, or have no images of single objects for its decoder.
    """
    fields = flat(config.fields)
    options = {name: fields[name] for name in inspect.signature(load_dataset).parameters if name in fields}
    info, path = find_dataset(config.data)
    if info.name == "folder" and path and "task" in config.fitted:
        ask_for_task(DataRequest(path, scale=config.scale, pages=config.pages, task=fields.get("task")))
    loaded = load_dataset(config.data, **({"task": find_task(None).name} | options))
    objects, required = loaded.num_objects, config.model["objects"]
    if objects != required:
        raise InputError(
            f"an image of {loaded.name} holds {counted(objects, 'object')}, but the network looks for "
            f"{required}; set --objects {objects}, or choose another preset or data set"
        )
    sets = (loaded.train, loaded.validation, loaded.test)
    without_parts = not all(each.has_parts for each in sets)
    if objects > 1 and config.model.get("decoder") is not None and without_parts:
        raise InputError(
            f"the decoder needs images of single objects, but {loaded.name} has only images of {objects} objects; set "
            "--no-decoder"
        )
    return loaded


def cropped(dataset: Dataset, recipe: Recipe) -> Dataset:
    """Return a data set with the recipe's central crop of each image.

    Raises:
        InputError: The recipe's crop does not fit the images.
    """
    if recipe.crop is None:
        return dataset
    seen = {part: _center_cropped(getattr(dataset, part), recipe) for part in ("train", "validation", "test")}
    return dataclasses.replace(dataset, **seen)


def check_padding(network: Network, data: Any) -> None:
    """Raise InputError if sequences are padded with NaN, and a network computes with the padding.

    Args:
        network: The network.
        data: An image set or a ``TensorDataset``, whose first tensor holds the images; other data are not checked.
    """
    images = next(iter(getattr(data, "tensors", ())), None)
    if images is None or images.dtype == torch.uint8 or images.shape[1:] != torch.Size(network.in_shape):
        return
    padded = images.flatten(1).isnan().any(1).nonzero()[:1, 0]
    if len(padded):
        with inference(network):
            scores = network(to_pixels(network, images[padded])).scores
        if scores.isnan().any():
            raise InputError(
                "the sequences have several lengths, and this network computes with their padding; choose one that "
                "leaves it out, such as the preset sequences, or cut all sequences to one length"
            )


def check_patch(network: Network, recipe: Recipe) -> None:
    """Raise InputError if the side of a patch is no multiple of the strides of a network for pixels."""
    side, stride = recipe.patch, getattr(network, "stride", 1)
    if side is not None and side % stride:
        fitting = [each for each in (side // stride * stride, -(-side // stride) * stride) if each]
        raise InputError(
            f"a patch of {side} does not divide by {stride}, the strides of this network; take "
            f"{' or '.join(map(str, fitting))}"
        )
