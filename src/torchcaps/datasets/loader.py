"""Batches from a set that lives on the device as uint8: gathered, shifted and scaled there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from torchcaps.datasets.splits import check_seed
from torchcaps.datasets.types import ImageSet
from torchcaps.errors import InputError

# Which of its random streams a generator is for, so that the order and the shifts are independent of each other.
_ORDER, _SHIFTS = 0, 1


class Batch(NamedTuple):
    """Images and their classes.

    Args:
        images: Pixels of 0..1, float32, (B, C, H, W).
        labels: (B,) int64.
    """

    images: Float[Tensor, "B C H W"]
    labels: Int64[Tensor, "B"]


class BatchLoader:
    """Gives the batches of any epoch, from any of them on, the same every time.

    The images stay uint8 on the device. For each batch they are gathered, each moved by its own whole number of
    pixels with zeros moving in, and scaled to 0..1 there. Order and shifts of batch n of epoch e depend on nothing but
    (seed, e, n): a run that was resumed sees what it would have seen, on any device, and N processes see together what
    one does.

    Args:
        image_set: The images.
        batch_size: Images a batch, over all processes together; the last batch of an epoch may be smaller.
        shuffle: Whether this is for training: a new order in every epoch. Otherwise the images come in their order.
        max_shift: Largest shift in pixels; each image's shifts down and to the right are uniform in
            -max_shift..max_shift. For training only: images are judged as they are.
        seed: Of order and shifts, 0 to 2³² - 1.
        device: Where images are kept and batches are made.
        rank: Which process this is, 0 to world_size - 1. Each gets its contiguous share of every batch; shares differ
            by one image at most, and those of a small last batch may be empty.
        world_size: How many processes there are.
        drop_last: Whether to leave out a last batch that is not full.

    Raises:
        InputError: When a training batch is larger than the set or cannot be shared out evenly, evaluation images are
            to be shifted, a shift is as large as the image, or a number is out of its range.
    """

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        *,
        shuffle: bool,
        max_shift: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        check_seed(seed)
        _check_sizes(image_set, batch_size, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size)
        _check_shift(image_set, max_shift, shuffle=shuffle)
        self.batch_size, self.shuffle, self.max_shift, self.seed = batch_size, shuffle, max_shift, seed
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.device = torch.device(device)
        self._labels = image_set.labels.to(self.device)
        self._windows = _windows(image_set.images.to(self.device), max_shift)

    def __len__(self) -> int:
        """Batches an epoch."""
        return self.num_images // self.batch_size if self.drop_last else -(-self.num_images // self.batch_size)

    @property
    def num_images(self) -> int:
        """Images in the set."""
        return len(self._labels)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, in turn.

        Args:
            epoch: Which epoch, from 0.
            start: The first batch to give, 0 to ``len(self)``; those before it cost nothing.

        Raises:
            InputError: When the epoch is negative or there is no such batch.
        """
        if epoch < 0:
            raise InputError(f"epochs are counted from 0, got {epoch}")
        if not 0 <= start <= len(self):
            raise InputError(f"an epoch has {len(self)} batches, so it cannot start at batch {start}")
        return self._batches(epoch, start)

    def order(self, epoch: int) -> Int64[Tensor, "N"]:
        """The indices of all images in the order of an epoch, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.num_images)
        return torch.randperm(self.num_images, generator=_generator(self.seed, epoch, _ORDER))

    def shifts(self, epoch: int, batch: int) -> Int64[Tensor, "batch_size 2"]:
        """How far each image of a whole batch is moved (down, to the right), in pixels, on the CPU."""
        shape, m = (self.batch_size, 2), self.max_shift
        if m == 0:
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randint(-m, m + 1, shape, generator=_generator(self.seed, epoch, _SHIFTS, batch))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.order(epoch)
        for number in range(start, len(self)):
            whole = order[number * self.batch_size : (number + 1) * self.batch_size]
            # the place in the whole batch decides, so that one process and many see the same images
            share = slice(len(whole) * self.rank // self.world_size, len(whole) * (self.rank + 1) // self.world_size)
            # a window that begins at m - shift shows the image moved by the shift
            corners = self.max_shift - self.shifts(epoch, number)[: len(whole)][share]
            yield self._gather(whole[share].to(self.device), corners.to(self.device))

    def _gather(self, index: Int64[Tensor, "b"], corners: Int64[Tensor, "b 2"]) -> Batch:
        pixels = self._windows[index, :, corners[:, 0], corners[:, 1]]  # (b, C, H, W)
        return Batch(pixels.to(torch.float32).div_(255), self._labels[index])


def _windows(images: Tensor, max_shift: int) -> Tensor:
    """A view (N, C, 2m+1, 2m+1, H, W) of the images at every shift; [..., m, m, :, :] is the image unmoved."""
    height, width = images.shape[2:]
    padded = F.pad(images, (max_shift,) * 4) if max_shift else images
    return padded.unfold(2, height, 1).unfold(3, width, 1)


def _generator(*key: int) -> torch.Generator:
    """A generator on the CPU, whatever the device, for one key; any two keys' streams are unrelated."""
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def _check_sizes(
    image_set: ImageSet, batch_size: int, *, shuffle: bool, drop_last: bool, rank: int, world_size: int
) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, got {batch_size}")
    if (shuffle or drop_last) and batch_size > len(image_set):
        raise InputError(
            f"the batch size is {batch_size}, but there are only {len(image_set)} images to train on; "
            "choose a smaller one"
        )
    if not 0 <= rank < world_size:
        raise InputError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), got {rank}")
    if shuffle and batch_size % world_size:
        raise InputError(
            f"the batch size is {batch_size}, which {world_size} processes cannot share evenly; "
            f"choose a multiple of {world_size}"
        )


def _check_shift(image_set: ImageSet, max_shift: int, *, shuffle: bool) -> None:
    smallest = min(image_set.in_shape[1:])
    if not 0 <= max_shift < smallest:
        raise InputError(
            f"max_shift is {max_shift} pixels, but images of {smallest} pixels can be moved by 0 to {smallest - 1}"
        )
    if max_shift and not shuffle:
        raise InputError(f"max_shift is {max_shift}, but only training images (shuffle=True) are shifted")
