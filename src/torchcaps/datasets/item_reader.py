"""Read batches of a user's torch ``Dataset``: find, stack and convert image and label of each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from torchcaps.datasets.rng import seeded
from torchcaps.errors import InputError, WrongType, reason_of, shown
from torchcaps.words import counted

IMAGE_KEYS = ("image", "images", "img", "pixel_values", "x", "input", "inputs")
"""Usual names of the image in a dict; upper and lower case do not matter."""
LABEL_KEYS = ("label", "labels", "target", "targets", "y", "fine_label")
"""Usual names of the label in a dict."""

Keys = tuple[Any, Any]
"""Image and label of an item: two names of a dict, or two positions of a tuple."""


class ItemReader(TorchDataset[Any]):
    """Reader of batches of a torch ``Dataset``.

    Args:
        data: Object with a length that returns items by index: (image, label), or dicts.
        keys: Names or positions of image and label in an item; None: pairs, or dicts with usual names.
        collate: Function that makes a batch of items; None: stack images and labels.
        read_images: Function that converts the images of a batch.
        read_labels: Function that converts the labels of a batch.

    Raises:
        InputError: The first item cannot be read, or its image and label are ambiguous.
    """

    def __init__(
        self,
        data: Any,
        read_images: Callable[[Any], Tensor],
        read_labels: Callable[[Any], Tensor],
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
        made = self.read_images(images), self.read_labels(labels)
        if any(len(each) != len(index) for each in made):
            raise InputError(
                f"a batch of {counted(len(index), 'item')} has {counted(len(made[0]), 'image')} and "
                f"{counted(len(made[1]), 'label')}; "
                "every item must give one image and one label"
            )
        return made


def find_keys(item: Any, keys: Keys | None, where: str) -> Keys:
    """Find the names or positions of images and labels in an item, a batch or a dict of arrays.

    Raises:
        InputError: These entries are missing or ambiguous.
    """
    if isinstance(item, Mapping):
        if keys is None:
            found = [[key for key in item if str(key).lower() in usual] for usual in (IMAGE_KEYS, LABEL_KEYS)]
            if all(len(each) == 1 for each in found):
                return found[0][0], found[1][0]
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
            f"{where} have {counted(len(item), 'part')}; give the positions of image and label with keys, such as "
            "keys=(0, 1)"
        )
    return keys


def are_items(data: Any) -> bool:
    """Return True for a list of items (pairs or dicts), False for two arrays of images and labels."""
    return isinstance(data, list) and len(data) > 2 and all(isinstance(each, Mapping | tuple) for each in data)
