"""Read batches of a user's torch ``Dataset``: find, stack and convert image and label of each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data import Dataset as TorchDataset

from torchcaps.datasets.rng import seeded
from torchcaps.errors import InputError, WrongType, reason_of, shown
from torchcaps.words import counted

IMAGE_KEYS = ("image", "images", "img", "pixel_values", "x", "input", "inputs")
"""Usual names of the image in a dict; upper and lower case do not matter."""
LABEL_KEYS = ("label", "labels", "target", "targets", "y", "fine_label")
"""Usual names of the label in a dict."""
MASK_KEYS = ("mask", "masks")
"""Usual names of the label in a dict without any of these."""

Keys = tuple[Any, Any]
"""Image and label of an item: two names of a dict, or two positions of a tuple."""


class ItemReader(TorchDataset[Any]):
    """Reader of batches of a torch ``Dataset``.

    Args:
        data: Object with a length that returns items by index: (image, label), or dicts.
        keys: Names or positions of image and label in an item; None: pairs, or dicts with usual names.
        collate: Function that makes a batch of items; None: stack images and labels.
        read_images: Function that converts the images of a batch.
        read_labels: Function that converts the labels of a batch, given its converted images.

    Raises:
        InputError: The first item cannot be read, or its image and label are ambiguous.
    """

    def __init__(
        self,
        data: Any,
        read_images: Callable[[Any], Tensor],
        read_labels: Callable[[Any, Tensor], Tensor],
        keys: Keys | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.data, self.keys = data, keys
        self.collate = None if collate is default_collate else collate
        self.read_images, self.read_labels = read_images, read_labels
        if len(data) == 0:
            raise InputError("the data set has no items")
        with seeded(0):
            try:
                first = data[0]
            except (KeyError, IndexError, TypeError, NotImplementedError) as error:
                reason = reason_of(error)
                raise InputError(
                    f"the data set must give items by index, from 0 to {len(data) - 1}, but item 0 of this "
                    f"{type(data).__name__} raises {type(error).__name__}: {reason}"
                ) from None
        if self.collate is None:
            self.keys = find_keys(first, keys, "items of the data set")

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the images and labels at these indices."""
        many = getattr(self.data, "__getitems__", None)
        items = list(many(list(index))) if callable(many) else [self.data[each] for each in index]
        if self.collate is None:
            assert self.keys is not None
            image, label = self.keys
            try:
                images, labels = [each[image] for each in items], [each[label] for each in items]
            except (KeyError, IndexError, TypeError):
                raise InputError(
                    f"every item of the data set must have the entries {image!r} and {label!r}, as item 0 has; one of "
                    f"the items {shown(list(index))} lacks them"
                ) from None
        else:
            batch = self.collate(items)
            image, label = find_keys(batch, self.keys, "batches of the collate_fn")
            images, labels = batch[image], batch[label]
        pixels = self.read_images(images)
        targets = self.read_labels(labels, pixels)
        if not len(pixels) == len(targets) == len(index):
            raise InputError(
                f"a batch of {counted(len(index), 'item')} has {counted(len(pixels), 'image')} and "
                f"{counted(len(targets), 'label')}; every item must give one image and one label"
            )
        return pixels, targets


def find_keys(item: Any, keys: Keys | None, where: str) -> Keys:
    """Find the names or positions of images and labels in an item, a batch or a dict of arrays.

    Raises:
        InputError: These entries are missing or ambiguous.
    """
    if isinstance(item, Mapping):
        if keys is None:
            images, labels, masks = (
                [key for key in item if str(key).lower() in usual] for usual in (IMAGE_KEYS, LABEL_KEYS, MASK_KEYS)
            )
            if len(images) == 1 and len(labels or masks) == 1:
                return images[0], (labels or masks)[0]
        elif all(key in item for key in keys):
            return keys
        raise InputError(
            f"{where} must have an entry such as image and one such as label, but have the entries "
            f"{shown(', '.join(map(str, item)))}; name them with keys, such as keys=('image', 'label')"
        )
    if not isinstance(item, list | tuple):
        got = f"a {type(item).__name__}" if not isinstance(item, Tensor) else f"a tensor {tuple(item.shape)}"
        raise WrongType(f"{where} must be pairs (image, label) or dicts, got {got}")
    if keys is None and len(item) == 2:
        return 0, 1
    if keys is None or not all(type(key) is int and -len(item) <= key < len(item) for key in keys):
        raise InputError(
            f"there are {counted(len(item), 'part')} in the {where}; give the positions of image and label with keys, "
            "such as keys=(0, 1)"
        )
    return keys


def are_items(data: Any) -> bool:
    """Return True for a list of items (pairs or dicts), False for two arrays of images and labels."""
    return isinstance(data, list) and len(data) > 2 and all(isinstance(each, Mapping | tuple) for each in data)


class SampledBatches:
    """Batches of the sampler of a ``DataLoader``, drawn under a seed of the epoch.

    The global generators of torch, NumPy and Python, and ``generator`` of the loader and its samplers, are seeded for
    each epoch, and ``set_epoch`` is called if the sampler has it. So an epoch can be drawn again, unless the sampler
    has randomness of another kind.

    Raises:
        InputError: A sampler gives no batches, or other things than indices of images.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.images = loader, len(loader.dataset)  # type: ignore[arg-type]
        self.name = type(loader.sampler if loader.batch_size is not None else loader.batch_sampler).__name__
        self.num_batches = 0
        first, again = self.draw(0, 0), self.draw(0, 0)
        self.is_repeatable = list(map(Tensor.tolist, first)) == list(map(Tensor.tolist, again))
        """True if a resumed run gets the same batches."""
        self.num_images, self.largest = sum(map(len, first)), max(map(len, first))

    def draw(self, seed: int, epoch: int) -> list[Int64[Tensor, "b"]]:
        """Return the indices of each batch of an epoch.

        Raises:
            InputError: The number of batches differs from that of the first epoch.
        """
        number, sampler = seed * 1_000_003 + epoch, cast(Any, self.loader.batch_sampler)
        with seeded(number):
            parts: tuple[Any, ...] = (self.loader, sampler, getattr(sampler, "sampler", None))
            for each in parts:
                if isinstance(own := getattr(each, "generator", None), torch.Generator):
                    own.manual_seed(number % 2**63)
                if hasattr(each, "set_epoch"):
                    each.set_epoch(epoch)
            try:
                batches = [torch.tensor([int(i) for i in each], dtype=torch.int64) for each in sampler]
            except (TypeError, ValueError):
                raise InputError(f"the sampler {self.name} must give indices of images, or lists of them") from None
        batches = [each for each in batches if len(each)]
        if len(batches) != (self.num_batches or len(batches)) or not batches:
            raise InputError(
                f"the sampler {self.name} gives {counted(len(batches), 'batch')} in epoch {epoch + 1} but "
                f"{self.num_batches} in the first; every epoch must have the same number, at least 1"
            )
        self.num_batches, every = len(batches), torch.cat(batches)
        if not 0 <= int(every.min()) <= int(every.max()) < self.images:
            raise InputError(
                f"the sampler {self.name} gives indices from {int(every.min())} to {int(every.max())}, but the "
                f"{self.images} images have indices from 0 to {self.images - 1}"
            )
        return batches

    @property
    def message(self) -> str | None:
        """Message that a resumed run is not exact; None if it is."""
        if self.is_repeatable:
            return None
        return (
            f"Data: the sampler {self.name} draws other images each time, so a resumed run differs from one without a "
            "stop; randomness of torch's, NumPy's or Python's global generator, or of generator=, makes it exact"
        )


def sampled_batches(loader: DataLoader[Any]) -> SampledBatches | None:
    """Return the batches of a loader's sampler or batch sampler; None if it takes all images, in order or shuffled.

    Raises:
        InputError: The data set has no length, batching is disabled, or the sampler distributes images over processes.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise InputError("the data set of a DataLoader must have a length and items by index, got an IterableDataset")
    if loader.batch_sampler is None:
        raise InputError("a DataLoader must have a batch_size or a batch_sampler, got batch_size=None")
    sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if isinstance(sampler, DistributedSampler) or isinstance(getattr(sampler, "sampler", None), DistributedSampler):
        raise InputError("fit distributes images over processes itself; leave the DistributedSampler out")
    takes_all = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    return None if takes_all and len(sampler) == len(loader.dataset) else SampledBatches(loader)  # type: ignore[arg-type]
