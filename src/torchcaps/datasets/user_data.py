"""Convert data that a user gives to ``fit`` (arrays, torch Datasets, DataLoaders) to one form."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from torchcaps.datasets.dataset import Dataset
from torchcaps.datasets.image_set import ImageSet, for_task, images_of, to_floats
from torchcaps.datasets.item_reader import ItemReader, Keys, SampledBatches, are_items, find_keys, sampled_batches
from torchcaps.datasets.masks import (
    COLOUR,
    Mask,
    as_mask,
    channel_axis,
    number_array,
    number_values,
    pillow_mask,
    with_table,
)
from torchcaps.datasets.patch_set import PatchSet
from torchcaps.datasets.pixels import as_numbers, prepare_images, scale_pixels
from torchcaps.datasets.records import pad_sequences
from torchcaps.datasets.rng import seeded
from torchcaps.datasets.scaling import Scale, alike, check_scale, note_dark
from torchcaps.datasets.splits import GROUP, groups_of, read_groups, stratified_split
from torchcaps.errors import InputError, WrongType
from torchcaps.ranges import IGNORED
from torchcaps.tasks import TASKS, Task
from torchcaps.tasks.base import as_array
from torchcaps.words import counted

MAX_PROBED = 8
"""Masks of 0 and 255 that are read before the first batch, to see whether other values are numbers of classes."""
FORMS = (
    "a torchcaps Dataset or ImageSet; images and labels, as two tensors, arrays or lists; a torch Dataset with a "
    "length, of pairs (image, label) or dicts; or a DataLoader of one"
)


@dataclass(frozen=True)
class Form:
    """Form of images and labels that a network takes.

    Args:
        task: Task that converts the labels; None: labels stay unchanged, for a user's own loss.
        num_outputs: Number of outputs of the network (J), if known.
        in_shape: Input shape of the network (C, *S). None: the axes of images and the values of floats stay
            unchanged, for a user's own module.
        scale: Range of the pixels; see :func:`~torchcaps.datasets.pixels.scale_pixels`.
        cropped: Images may be larger than ``in_shape``, because the recipe crops them.
        class_names: Names that number labels that are texts; None: the sorted texts.
    """

    task: Task | None = None
    num_outputs: int | None = None
    in_shape: tuple[int, ...] | None = None
    scale: Scale = "auto"
    cropped: bool = False
    class_names: tuple[str, ...] | None = None
    table: Mapping[int, int] | None = None
    """Class of each value of the training masks; None: decided by the masks."""
    where: str = ""
    """Prefix of errors, such as "validation: "."""

    @property
    def wants_masks(self) -> bool:
        """True if the labels are masks."""
        return self.task is not None and bool(self.task.has_masks)

    def images(self, values: Any) -> Tensor:
        """Convert images."""
        if self.in_shape is not None:
            return prepare_images(values, self.in_shape, self.scale, f"{self.where}images", cropped=self.cropped)
        numbers = as_numbers(values, f"{self.where}images")
        keeps = self.scale == "auto" and numbers.is_floating_point()
        return numbers if keeps else scale_pixels(numbers, self.scale, f"{self.where}images")

    def labels(self, values: Any) -> Tensor:
        """Convert labels."""
        where = f"{self.where}labels"
        if isinstance(values, list) and values and isinstance(values[0], Tensor):
            values = as_numbers(values, where)
        if self.task is None:
            return as_numbers(values, where)
        if self.num_outputs is not None or _are_texts(values):
            return self.task.convert_targets(values, self.num_outputs, where, self.class_names)
        values = as_array(values, where)
        numbers = as_numbers(values, where)
        if numbers.ndim == 2 and numbers.shape[1] > 1:  # one-hot rows, or probabilities of classes
            return self.task.convert_targets(values, numbers.shape[1], where)
        highest = int(numbers.max()) if len(numbers) and numbers.isfinite().all() else 0
        return self.task.convert_targets(values, max(highest + 1, int(self.task.output_range.least)), where)

    def masks(self, values: Sequence[Any], sizes: Sequence[Sequence[int]]) -> tuple[list[Any], Mapping[int, int]]:
        """Return the class of each pixel of masks of these sizes, and the class of each value, decided once for all."""
        masks = {f"{self.where}labels[{n}]": self._mask(each, sizes[n]) for n, each in enumerate(values)}
        masks, table = number_values(masks) if self.table is None else (with_table(masks, self.table), self.table)
        return [number_array(mask, table) for mask in masks.values()], table

    def _mask(self, values: Any, size: Sequence[int]) -> Mask:
        """Return one mask, or masks of one size."""
        if isinstance(values, list | tuple):
            values = [pillow_mask(each) if isinstance(each, Image.Image) else each for each in values]
        numbers = pillow_mask(values) if isinstance(values, Image.Image) else values
        return as_mask(as_numbers(numbers, f"{self.where}labels").cpu().numpy(), size, f"{self.where}labels")

    def labels_of_batch(self, values: Any, images: Tensor) -> Tensor:
        """Convert the labels of a batch of ``images``.

        Texts need class names, because a batch may lack some classes, and masks hold numbers, not colours.
        """
        size = (len(images), *images.shape[2:])
        if self.wants_masks and channel_axis(_shape_of(values), size) is not None:
            mask = self._mask(values, size)
            if mask.values[-1] >= COLOUR:
                raise InputError(f"{self.where}labels of items are in colour; give the number of a class in each pixel")
            values = number_array(mask, {})
        first = values[0] if isinstance(values, list | tuple | np.ndarray) and len(values) else values
        if isinstance(first, str | bytes) and self.class_names is None:
            raise InputError(f"labels of items must be numbers, got the text {first!r}; number the classes from 0")
        return self.labels(values)


def _are_texts(labels: Any) -> bool:
    return not isinstance(labels, Tensor) and as_array(labels, "labels").dtype.kind in "US"


class Opened(NamedTuple):
    """Data converted for a run."""

    data: Any
    """A `Dataset`, an `ImageSet`, a `PairSet`, a ``TensorDataset`` or `ItemReader`."""
    sampler: SampledBatches | None = None
    """Draws the batches of an epoch; None: all images, in an order that follows from the seed."""
    batch_size: int | None = None
    """Batch size of a DataLoader."""
    workers: int | None = None
    """Number of worker processes of a DataLoader."""
    drop_last: bool = False
    """True if a DataLoader leaves out a last batch that is not full."""
    reading: Mapping[str, Any] = {}
    """Options of a DataLoader's worker processes."""
    class_names: tuple[str, ...] | None = None
    """Class names, if the labels are texts."""
    message: str | None = None
    """Message that names the guessed entries of image and label; None if nothing was guessed."""
    table: Mapping[int, int] | None = None
    """Class of each value of masks in memory; None for other labels."""

    @property
    def messages(self) -> list[str]:
        """Messages about the data, before a run."""
        own = None if self.sampler is None else self.sampler.message
        return [each for each in (self.message, own) if each is not None]


def open_data(data: Any, form: Form, keys: Keys | None = None, where: str = "dataset") -> Opened:
    """Convert data of :data:`FORMS` for a run, to the form of images and labels that the network takes.

    ``keys`` are those of `ItemReader`; ``where`` is the name of the argument in errors.

    Raises:
        WrongType: The data have none of these forms.
        InputError: Pixels or labels do not fit the network.
    """
    check_scale(form.scale)
    form = form if where == "dataset" else replace(form, where=f"{where}: ")
    if keys is not None and (not isinstance(keys, tuple | list) or len(keys) != 2):
        raise InputError(f"keys must be two names or positions, of image and label, got {keys!r}")
    keys = None if keys is None else (keys[0], keys[1])
    if not isinstance(data, DataLoader):
        return _open(data, form, keys, where)
    sampler = sampled_batches(data)
    if data.collate_fn is torch.utils.data.default_collate:
        opened = _open(data.dataset, form, keys, where)
    else:
        items = ItemReader(data.dataset, form.images, form.labels_of_batch, keys, data.collate_fn)
        opened = Opened(_checked_items(items, form))
    names = ("worker_init_fn", "timeout", "multiprocessing_context", "prefetch_factor")
    return opened._replace(
        sampler=sampler,
        batch_size=data.batch_size if sampler is None or data.batch_size is not None else sampler.largest,
        workers=data.num_workers,
        drop_last=data.drop_last,
        reading={name: getattr(data, name) for name in names},
    )


def hold_out(opened: Opened, share: float, groups: Any, seed: int, task: Task | None) -> tuple[Opened, Opened]:
    """Split the data of a run into data for training and for validation.

    Args:
        opened: All data.
        share: Share of the images to hold out, in proportion to the classes if there are classes in memory.
        groups: Group of each image, which is never divided; None: those of an image set, or each image is a group.
        seed: Random seed of the choice.
        task: Task of the labels; None: no task.

    Raises:
        InputError: The data cannot be split.
    """
    data = opened.data
    if isinstance(data, Dataset) or not isinstance(data, ImageSet | TensorDataset | ItemReader):
        raise InputError(f"a {type(data).__name__} is not split by fit; leave groups and a share for validation out")
    if opened.sampler is not None:
        raise InputError(
            "a sampler draws the images of the DataLoader, so it cannot be split; give a DataLoader without one, or "
            "give validation images"
        )
    strata, count = torch.zeros(len(data), dtype=torch.int64), len(data)
    if not isinstance(data, ItemReader) and task is not None and task.has_form(data.tensors[1]):
        strata = task.strata(data.tensors[1])
    if groups is not None:
        groups = {GROUP: read_groups(groups, count, "groups")}
    numbers = groups_of(getattr(data, "names", {}) if groups is None else groups)
    parts = stratified_split(strata, max(round(share * count), 1), seed=seed, groups=numbers)
    left, held = (opened._replace(data=_selected(data, indices)) for indices in parts)
    return left, held._replace(message=None)


def _selected(data: Any, indices: Tensor) -> Any:
    """Return the images at these indices."""
    if isinstance(data, ImageSet):
        return data.select(indices)
    if isinstance(data, TensorDataset):
        return TensorDataset(*(each[indices] for each in data.tensors))
    chosen = copy.copy(data)
    chosen.data = Subset(data.data, indices.tolist())
    return chosen


def _open(data: Any, form: Form, keys: Keys | None, where: str) -> Opened:
    if isinstance(data, Dataset):
        return Opened(data)
    if (images := images_of(data)) is not None:
        return Opened(images if form.task is None else for_task(images, form.task, form.num_outputs))
    pair = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(pair, Mapping | tuple | list) and not are_items(pair):
        image, label = find_keys(pair, keys, where)
        lengths = pair.get("lengths") if isinstance(pair, Mapping) else None
        names, labels = form.class_names, pair[label]
        if names is None and form.task is not None and not form.wants_masks and _are_texts(labels):
            names = form.task.names(labels)
        in_memory, table = _in_memory(pair[image], labels, form, lengths)
        message = None if keys else _message((image, label))
        return Opened(in_memory, class_names=names, message=message, table=table)
    has_items = all(callable(getattr(type(data), name, None)) for name in ("__getitem__", "__len__"))
    if not has_items or isinstance(data, IterableDataset | str | bytes | Tensor | np.ndarray):
        got = "None" if data is None else f"a value of type {type(data).__name__}"
        raise WrongType(f"{where} must be {FORMS}; got {got}")
    items = _checked_items(ItemReader(data, form.images, form.labels_of_batch, keys), form)
    return Opened(items, message=None if keys else _message(items.keys))


def _checked_items(items: ItemReader, form: Form) -> ItemReader:
    """Return the reader; raise InputError if masks of 0 and 255 would be read batch by batch, with 255 ignored."""
    if not form.wants_masks:
        return items
    values, marked = set[int](), 0
    with seeded(0):
        for n in torch.randperm(len(items)).tolist():
            held = set(items.read([n])[1].unique().tolist())
            values, marked = values | held, marked + (IGNORED in held)
            if not values <= {0, IGNORED} or marked == MAX_PROBED:
                break
    if IGNORED in values and values <= {0, IGNORED}:
        raise InputError(
            f"{form.where}labels of items hold only 0 and {IGNORED}, but {IGNORED} is ignored; give 0 and 1, such as "
            f"labels // {IGNORED}"
        )
    return items


def _message(keys: Keys | None) -> str | None:
    """Return a message that names the guessed entries; None if they are the usual positions."""
    if keys is None or keys == (0, 1):
        return None
    return f"Data: images are {keys[0]!r} and labels {keys[1]!r}"


def _in_memory(images: Any, labels: Any, form: Form, lengths: Any = None) -> tuple[Any, Mapping[int, int] | None]:
    """Return images and labels as an `ImageSet`, which can be augmented, or as a ``TensorDataset``.

    Images of several sizes with masks become a `PatchSet`. The second result is the class of each value of masks.
    ``lengths`` are those of sequences, for a network of sequences.
    """
    table = None
    if form.wants_masks and isinstance(images, list | tuple) and len({_size_of(each) for each in images}) > 1:
        return _in_patches(images, labels, form)
    pixels = form.images(images)
    if form.in_shape is not None and form.in_shape[1:-1] != (1,) and form.scale != "none":
        note_dark([pixels.cpu().numpy()], f"{form.where}images", form.scale, any_bits=True)
    if form.wants_masks and _are_masks_of(labels, size := (len(pixels), *pixels.shape[2:])):
        (labels,), table = form.masks([labels], [size])
    targets = form.labels(labels)
    if lengths is not None and form.in_shape is not None and form.in_shape[1:-1] == (1,):
        steps = as_numbers(lengths, f"{form.where}lengths").cpu().numpy()
        rows = list(to_floats(pixels)[:, :, 0].cpu().numpy())
        pixels = torch.from_numpy(pad_sequences(rows, pixels.shape[-1], f"{form.where}images", steps))
    if len(pixels) != len(targets):
        raise InputError(
            f"there must be a label for each image, got {counted(len(pixels), 'image')} and "
            f"{counted(len(targets), 'label')}"
        )
    tasks = TASKS.values() if form.task is None else (form.task,)
    if pixels.dtype == torch.uint8 and pixels.ndim == 4 and any(task.has_form(targets) for task in tasks):
        return ImageSet(pixels, targets), table
    return TensorDataset(pixels, targets), table


def _size_of(image: Any) -> tuple[int, ...]:
    return tuple(image.size[::-1] if isinstance(image, Image.Image) else np.shape(image))


def _are_masks_of(labels: Any, size: tuple[int, ...]) -> bool:
    """Return True if labels have the size of the images, or an axis of channels beside it."""
    shape = _shape_of(labels)
    return shape == size or channel_axis(shape, size) is not None


def _shape_of(labels: Any) -> tuple[int, ...]:
    is_list = isinstance(labels, list | tuple) and len(labels)
    return (len(labels), *np.shape(labels[0])) if is_list else tuple(np.shape(labels))


def _in_patches(images: Sequence[Any], labels: Any, form: Form) -> tuple[PatchSet, Mapping[int, int]]:
    """Return images of several sizes and their masks as patches of the size that the network takes."""
    if form.in_shape is None or len(images) != len(labels):
        raise InputError(
            f"{form.where}images have several sizes, so there must be a network of torchcaps, which takes patches of "
            f"them, and a mask for each image, got {counted(len(images), 'image')} and {counted(len(labels), 'mask')}"
        )
    pixels = [
        prepare_images([image], form.in_shape, form.scale, f"{form.where}images", any_size=True)[0].numpy()
        for image in images
    ]
    masks, table = form.masks(labels, [image.shape[1:] for image in pixels])
    targets = tuple(form.labels(mask[None])[0] for mask in masks)
    return PatchSet(tuple(map(torch.from_numpy, alike(pixels))), targets, patch=form.in_shape[1:]), table
