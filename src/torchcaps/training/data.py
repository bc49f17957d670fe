"""The data of a run: loaded, cropped and batched as its recipe says, with a fingerprint."""

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

from torchcaps.datasets import Augmentation, BatchLoader, Dataset, ImageSet, PairSet, center_crop, load_dataset
from torchcaps.datasets.door import Form, Opened, open_data
from torchcaps.datasets.items import Keys
from torchcaps.datasets.pixels import Scale
from torchcaps.datasets.samplers import SampledBatches
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.parts import flat
from torchcaps.tasks import find_task, task_of
from torchcaps.training.config import TrainConfig
from torchcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader
    from torch.utils.data import Dataset as TorchDataset

    OwnData = Dataset | ImageSet | PairSet | Sequence[Any] | Mapping[Any, Any] | TorchDataset[Any] | DataLoader[Any]

EVALUATION_BATCH = 256
"""Images of a batch in evaluation, over all processes."""


class RunData(NamedTuple):
    """The data that a run trains on."""

    train: BatchLoader
    validation: BatchLoader | None
    labels: Tensor | None
    """The labels of the training images of an epoch; None if they would have to be read and nothing needs them."""
    fingerprint: list[int]
    """The size of each part, and a checksum of all tensors; they change when the data do."""
    plain: BatchLoader | None = None
    """Training images as they are, on the CPU, the same in all processes; None where the recipe needs none."""


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
    """Return the batches of a data set, its images whole; training images are augmented as the recipe says.

    With ``needs_labels``, training labels that are not in memory are read once. The other arguments are those of
    :func:`torchcaps.fit` and :class:`torchcaps.datasets.BatchLoader`.
    """
    opened = data if isinstance(data, Opened) else Opened(data)
    check = validation or Opened(None)
    train, judged = opened.data, _middle(check.data, recipe)
    parts = [train, judged]
    if isinstance(train, Dataset):
        seen = cropped(train, recipe)
        train, judged = train.train, seen.validation if judged is None else judged
        parts = [train, seen.validation, seen.test]

    def batches(part: Any, source: Opened, size: int, *, shuffle: bool) -> BatchLoader:
        how: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank, "world_size": fabric.world_size}
        how |= {"sampler": source.sampler, "reading": source.reading, "seed": seed}
        how["workers"] = workers if source.workers is None else source.workers
        if shuffle:
            how |= {"drop_last": drop_last or source.drop_last, "augmentation": augmentation_of(recipe)}
        return BatchLoader(part, size, shuffle=shuffle, **how)

    evaluated = check.batch_size or EVALUATION_BATCH
    plain = None
    if recipe.precise_norm and isinstance(train, ImageSet):
        plain = BatchLoader(_middle(train, recipe), recipe.batch_size, shuffle=True, seed=seed)
    loader = batches(train, opened, opened.batch_size or recipe.batch_size, shuffle=True)
    labels = _labels(train)
    if labels is not None and opened.sampler is not None:
        labels = labels[torch.cat(opened.sampler.draw(seed, 0))]
    return RunData(
        train=loader,
        validation=None if judged is None else batches(judged, check, evaluated, shuffle=False),
        labels=_read_labels(loader) if labels is None and needs_labels and not isinstance(train, PairSet) else labels,
        fingerprint=_fingerprint(parts, opened.sampler, check.sampler),
        plain=plain,
    )


def fit_data(
    network: nn.Module,
    dataset: OwnData,
    validation: OwnData | None,
    recipe: Recipe,
    fabric: Fabric,
    *,
    loss: object,
    scale: Scale,
    keys: Keys | None,
    seed: int,
    workers: int,
) -> tuple[Opened, RunData]:
    """Return the data that :func:`torchcaps.fit` is given: opened, and in batches.

    Arguments are those of ``fit``; the batch size of a ``DataLoader`` comes before that of the recipe. A network of
    torchcaps says which form images and labels have. A loss of the user's own takes any labels.
    """
    form = Form(task_of(network) if loss is None or isinstance(network, Network) else None, scale=scale)
    if isinstance(network, Network):
        sizes: dict[str, Any] = {"num_outputs": network.num_classes, "in_shape": network.in_shape}
        form = dataclasses.replace(form, cropped=recipe.crop is not None, **sizes)
    opened = open_data(dataset, form, keys)
    form = dataclasses.replace(form, class_names=opened.class_names)
    check = None if validation is None else open_data(validation, form, keys, "validation")
    needs_labels = recipe.class_weights == "balanced" or (form.task is not None and bool(form.task.buffers(1)))
    how: dict[str, Any] = {"drop_last": fabric.world_size > 1, "workers": workers, "needs_labels": needs_labels}
    return opened, run_data(opened, recipe, fabric, seed, check, **how)


def _middle(part: Any, recipe: Recipe) -> Any:
    """Images as the network sees them: with a crop, the middle of each, whose pixels are shared; others as they are."""
    return center_crop(part, recipe.crop) if recipe.crop is not None and isinstance(part, ImageSet) else part


def _labels(part: Any) -> Tensor | None:
    return part.labels if isinstance(part, ImageSet) else part.tensors[1] if isinstance(part, TensorDataset) else None


def _read_labels(loader: BatchLoader) -> Tensor:
    """Read the labels of an epoch, all of them in each process."""
    whole = copy.copy(loader)
    whole.rank, whole.world_size = 0, 1
    return torch.cat([batch.labels.cpu() for batch in whole.batches(0)])


def _fingerprint(parts: Sequence[Any], *samplers: SampledBatches | None) -> list[int]:
    checksum, there = 0, [part for part in parts if part is not None]
    tensors = [tensor for part in there for tensor in getattr(part, "tensors", ())]
    tensors += [index for sampler in samplers if sampler is not None for index in sampler.draw(0, 0)]
    for tensor in tensors:
        checksum = zlib.crc32(tensor.contiguous().cpu().numpy().data, checksum)
    return [*map(len, there), checksum]


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
    fields = flat(config.fields)
    given = {name: fields[name] for name in inspect.signature(load_dataset).parameters if name in fields}
    loaded = load_dataset(config.data, **({"task": find_task(None).name} | given))
    objects, wanted = loaded.num_objects, config.model["objects"]
    if objects != wanted:
        raise InputError(
            f"an image of {loaded.name} holds {objects} object{'s' * (objects > 1)}, but the network looks for "
            f"{wanted}; set --objects {objects}, or take another preset or data set"
        )
    sets = (loaded.train, loaded.validation, loaded.test)
    without_parts = any(isinstance(each, ImageSet) and each.parts is None for each in sets)
    if objects > 1 and config.model.get("decoder") is not None and without_parts:
        raise InputError(
            f"the images of {loaded.name} hold {objects} objects, but none of them alone, which the network is to "
            "reconstruct; set --no-decoder"
        )
    return loaded


def cropped(dataset: Dataset, recipe: Recipe) -> Dataset:
    """A data set as the network sees it: with a crop, the middle of each image.

    Raises:
        InputError: The images do not go with the recipe's crop.
    """
    if recipe.crop is None:
        return dataset
    if isinstance(dataset.train, PairSet):
        raise InputError(f"{dataset.name} makes new training images in each epoch, which are not cropped; omit --crop")
    seen = {part: _middle(getattr(dataset, part), recipe) for part in ("train", "validation", "test")}
    return dataclasses.replace(dataset, **seen)
