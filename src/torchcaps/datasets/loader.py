"""Batches of a set that lives on the device as uint8: they are gathered, changed and scaled there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from torchcaps.checks import check
from torchcaps.datasets.affine import look_through, windows
from torchcaps.datasets.augmentation import Augmentation, Changes, mirrored, recoloured, turned
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.overlapping_pairs import Pairs, PairSet
from torchcaps.datasets.rng import ORDER, stream_of
from torchcaps.errors import InputError
from torchcaps.ranges import COUNT, INDEX, PROCESSES, SEED


class Batch(NamedTuple):
    """Images and their classes."""

    images: Float[Tensor, "B C H W"]
    """Pixels of 0..1, float32."""
    labels: Int64[Tensor, "B"] | Int64[Tensor, "B P"]
    """The class of each image, or of each of its P objects."""
    parts: Float[Tensor, "B P C H W"] | None = None
    """Pixels of each object alone, 0..1; None for images of one object."""


class BatchLoader:
    """Gives the batches of any epoch, from any of them on, the same every time.

    The images stay uint8 on the device; the pairs of a `PairSet` are made there. For each batch they are gathered,
    changed as the augmentation says, and scaled to 0..1 there. Batch n of epoch e depends on nothing but (seed, e, n):
    a run that was resumed sees what it would have seen, on any device, and N processes see together what one does.

    Args:
        image_set: The images.
        batch_size: Images a batch, over all processes together; the last batch of an epoch may be smaller.
        shuffle: Whether this is for training: a new order in every epoch. Otherwise the images come in their order,
            and the augmentation may only crop them.
        augmentation: How the images are changed at random; not at all if None.
        seed: The seed of all that is random, 0 to 2³² - 1.
        device: The device that keeps the images and makes the batches.
        rank: The number of this process, 0 to world_size - 1. Each process gets its contiguous share of every batch;
            shares differ by one image at most, and those of a small last batch may be empty.
        world_size: How many processes there are.
        drop_last: Whether to leave out a last batch that is not full.

    Raises:
        TypeError: ``augmentation`` is no `Augmentation`.
        InputError: A training batch is larger than the set or cannot be shared out evenly, evaluation images are
            to be changed or pairs to be evaluated on, the augmentation does not go with the images, or a number is out
            of its range.
    """

    def __init__(
        self,
        image_set: ImageSet | PairSet,
        batch_size: int,
        *,
        shuffle: bool,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if augmentation is not None and not isinstance(augmentation, Augmentation):
            raise TypeError(f"BatchLoader: augmentation must be an Augmentation, got {type(augmentation).__name__}")
        self.augmentation = augmentation or Augmentation()
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.device = torch.device(device)
        self.num_images = len(image_set)
        """Images in the set."""
        self._check(image_set)
        self._whole_shape = image_set.in_shape
        there = image_set.to(self.device)
        self._pairs = there if isinstance(there, PairSet) else None
        if isinstance(there, ImageSet):
            self._labels, self._layers = there.labels, self._prepared(_layers(there.images, there.parts))

    def _check(self, image_set: ImageSet | PairSet) -> None:
        SEED.check("seed", self.seed)
        for name, allowed in (("batch_size", COUNT), ("rank", INDEX), ("world_size", PROCESSES)):
            allowed.check(f"BatchLoader: {name}", getattr(self, name))
        for name in ("shuffle", "drop_last"):
            check(f"BatchLoader: {name}", getattr(self, name), bool)
        if (self.shuffle or self.drop_last) and self.batch_size > self.num_images:
            raise InputError(
                f"the batch size is {self.batch_size}, but there are only {self.num_images} images to train on; "
                "choose a smaller one"
            )
        if self.rank >= self.world_size:
            raise InputError(f"rank must be from 0 to world_size - 1 ({self.world_size - 1}), got {self.rank}")
        if self.shuffle and self.batch_size % self.world_size:
            raise InputError(
                f"the batch size is {self.batch_size}, which {self.world_size} processes cannot share evenly; "
                f"choose a multiple of {self.world_size}"
            )
        self.augmentation.check(image_set.in_shape, image_set.num_objects)
        if self.shuffle:
            return
        if isinstance(image_set, PairSet):
            raise InputError(
                "a PairSet makes new pairs each time, for training only (shuffle=True); judge by fixed_pairs"
            )
        for name in self.augmentation.training_only:
            raise InputError(
                f"{name} is {getattr(self.augmentation, name)}, but only training images (shuffle=True) are changed at "
                "random"
            )

    def __len__(self) -> int:
        """Batches an epoch."""
        return self.num_images // self.batch_size if self.drop_last else -(-self.num_images // self.batch_size)

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images in the batches: (C, H, W)."""
        return self._whole_shape[0], *self.augmentation.window(self._whole_shape)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Give this process's share of the batches of an epoch, in turn.

        Args:
            epoch: The number of the epoch, from 0.
            start: The first batch to give, 0 to ``len(self)``; those before it cost nothing.

        Raises:
            InputError: The epoch is negative, or there is no such batch.
        """
        INDEX.check("BatchLoader: epoch", epoch)
        INDEX.check("BatchLoader: start", start)
        if start > len(self):
            raise InputError(f"an epoch has {len(self)} batches, so it cannot start at batch {start}")
        return self._batches(epoch, start)

    def order(self, epoch: int) -> Int64[Tensor, "N"]:
        """The indices of all images in the order of an epoch, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.num_images)
        return torch.randperm(self.num_images, generator=stream_of(ORDER, (self.seed, epoch, 0)))

    def changes(self, epoch: int, batch: int) -> Changes:
        """The changes of each image of a whole batch, on the CPU."""
        if not self.shuffle:
            return self.augmentation.none(self._whole_shape, self.batch_size)
        return self.augmentation.draw(self._whole_shape, self.batch_size, (self.seed, epoch, batch))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.order(epoch)
        for number in range(start, len(self)):
            whole = order[number * self.batch_size : (number + 1) * self.batch_size]
            # the place in the whole batch decides, so that one process and many see the same images
            share = slice(len(whole) * self.rank // self.world_size, len(whole) * (self.rank + 1) // self.world_size)
            index = whole[share].to(self.device, non_blocking=True)
            changes = self.changes(epoch, number).share(share)
            if self._pairs is None:
                yield self._batch(self._layers, index, self._labels[index], changes)
            else:
                pairs = self._composed(self._pairs, index, epoch, number, share)
                layers = self._prepared(_layers(pairs.images, pairs.parts))
                yield self._batch(layers, torch.arange(len(index), device=self.device), pairs.labels, changes)

    def _composed(self, pairs: PairSet, index: Tensor, epoch: int, number: int, share: slice) -> Pairs:
        """Pair each object at ``index`` with another one, both moved to their places."""
        dice, shifts = pairs.draw(self.batch_size, (self.seed, epoch, number))
        dice, shifts = (drawn[share].to(self.device, non_blocking=True) for drawn in (dice, shifts))
        return pairs.compose(index, pairs.partners(index, dice), shifts)

    def _prepared(self, layers: Tensor) -> Tensor:
        """The tensor that batches are gathered from: the layers where they are turned, else all windows onto them."""
        changes = self.augmentation
        return layers if changes.turns else windows(layers, changes.max_shift, self.in_shape[1:], changes.fill)

    def _batch(self, layers: Tensor, index: Tensor, labels: Tensor, changes: Changes) -> Batch:
        if changes.linear is None:
            pixels = look_through(layers, index, changes.corners.to(self.device, non_blocking=True)).to(torch.float32)
        else:
            augmentation = self.augmentation
            pixels = turned(layers[index], changes, augmentation.max_shift, self.in_shape[1:], augmentation.fill)
        pixels = recoloured(mirrored(pixels, changes), changes)
        channels = self._whole_shape[0]
        if pixels.shape[1] == channels:
            return Batch(pixels, labels)
        return Batch(pixels[:, :channels], labels, pixels[:, channels:].unflatten(1, (-1, channels)))


def _layers(images: UInt8[Tensor, "N C H W"], parts: UInt8[Tensor, "N P C H W"] | None) -> UInt8[Tensor, "N L H W"]:
    """Images and their parts in one tensor of channels, so that each change moves both."""
    return images if parts is None else torch.cat([images, parts.flatten(1, 2)], 1)
