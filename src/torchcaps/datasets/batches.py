"""Batches of images. Images in memory stay on the device, mostly as uint8, and are augmented and scaled there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from torchcaps.checks import checked
from torchcaps.datasets.augmentation import Augmentation
from torchcaps.datasets.image_set import Images, images_of, to_floats
from torchcaps.datasets.item_reader import ItemReader, SampledBatches
from torchcaps.datasets.rng import ORDER, Key, seeded, stream_of
from torchcaps.datasets.user_data import Form
from torchcaps.errors import InputError
from torchcaps.ranges import Count, Index, Processes, Seed
from torchcaps.words import counted

WEIGHT = "weight"
"""Name of the factor of an `ImageSet` that weights each image in the gradient."""


class Batch(NamedTuple):
    """Images and their classes."""

    images: Float[Tensor, "B C H W"]
    """Pixels of 0..1, float32; sequences keep their values."""
    labels: Int64[Tensor, "B"] | Int64[Tensor, "B P"] | Float[Tensor, "B J"] | UInt8[Tensor, "B H W"]
    """Class of each image, of each of its P objects or of each pixel (B, H, W); zeros and ones for labels; floats for a
    regression."""
    parts: Float[Tensor, "B P C H W"] | None = None
    """Pixels of each object alone, 0..1; None for images of one object."""
    weights: Float[Tensor, "B"] | None = None
    """Weight of each image in the gradient; None: all weights are equal."""


class BatchLoader:
    """Loader whose batches can be repeated from any epoch and any batch.

    Batch n of epoch e depends only on (seed, e, n). So a resumed run gets the same batches, on any device, and N
    processes together get the batches of one process.

    Images stay uint8 on the device. Each batch is gathered, augmented and scaled to 0..1 there, and the pairs of a
    `PairSet` are made there. A torch ``Dataset`` may draw random numbers when it reads an image. The global generators
    of torch, NumPy and Python are therefore seeded for each batch, so the number of ``workers`` does not matter.

    Args:
        image_set: Images; or a ``TensorDataset``, or any object that returns an image and its label by index.
        batch_size: Images in a batch, over all processes together; the last batch of an epoch may be smaller.
        shuffle: True for training: a new order in every epoch. False: the images keep their order, without
            augmentation.
        augmentation: Random changes of the images; None: no changes.
        seed: Random seed, 0 to 2³² - 1.
        device: Device that keeps the images and makes the batches.
        rank: Number of this process, 0 to world_size - 1. Each process gets a contiguous share of every batch. Shares
            differ by one image at most; in a small last batch a share may be empty.
        world_size: Number of processes.
        drop_last: Leave out a last batch that is not full.
        workers: Processes that read a torch ``Dataset`` ahead.
        sampler: Draws the batches of each epoch; None: all images, in an order that follows from the seed.
        reading: Options of the ``DataLoader`` that reads a torch ``Dataset``, such as ``worker_init_fn``.

    Raises:
        TypeError: ``augmentation`` is no `Augmentation`.
        InputError: A training batch is larger than the set, or its size is no multiple of the number of processes;
            evaluation images have an augmentation; a `PairSet` is used for evaluation; the augmentation does not suit
            the images; or a number is out of range.
    """

    @checked
    def __init__(
        self,
        image_set: Images | TorchDataset[Any],
        batch_size: Count,
        *,
        shuffle: bool,
        augmentation: Augmentation | None = None,
        seed: Seed = 0,
        device: torch.device | str = "cpu",
        rank: Index = 0,
        world_size: Processes = 1,
        drop_last: bool = False,
        workers: Index = 0,
        sampler: SampledBatches | None = None,
        reading: Mapping[str, Any] | None = None,
    ) -> None:
        self.augmentation = augmentation or Augmentation()
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.rank, self.world_size, self.drop_last, self.workers = rank, world_size, drop_last, workers
        self.sampler, self.reading = sampler, dict(reading or {})
        images = images_of(image_set)
        if images is not None and not shuffle:
            images = images.for_evaluation()
            self.batch_size = images.at_once or batch_size
        in_set = len(image_set) if images is None else images.epoch_size  # type: ignore[arg-type]  # it has a length
        self.num_images = in_set if sampler is None else sampler.num_images
        """Images in an epoch: all images or patches of the set, or the number that the sampler draws."""
        if (shuffle or drop_last) and batch_size > self.num_images:
            raise InputError(
                f"the batch size is {batch_size}, but an epoch has only {counted(self.num_images, 'image')}; choose a "
                "smaller one"
            )
        if sampler is not None and world_size > 1 and not sampler.is_repeatable:
            raise InputError(f"{sampler.message}; several processes need that, because they share each batch")
        if rank >= world_size:
            raise InputError(f"rank must be from 0 to world_size - 1 ({world_size - 1}), got {rank}")
        if shuffle and batch_size % world_size:
            raise InputError(
                f"the batch size is {batch_size}, which {world_size} processes cannot share evenly; choose a multiple "
                f"of {world_size}"
            )
        off = vars(replace(Augmentation(), fill=self.augmentation.fill))
        changes = [name for name, value in vars(self.augmentation).items() if value != off[name]]
        if changes and not shuffle:
            raise InputError("only training images (shuffle=True) can be augmented; crop other images with center_crop")
        if changes and not getattr(image_set, "can_be_augmented", False):
            settings = ", ".join(f"{name}={off[name]}" for name in changes)
            dashed = {name.replace("_", "-"): off[name] for name in changes}
            options = " ".join(
                f"--no-{name}" if value is False else f"--{name} {value}".lower() for name, value in dashed.items()
            )
            raise InputError(
                "only pictures, (N, C, H, W) of uint8 or of floats of 0..1, can be augmented; set "
                f"{settings} ({options}), or augment other data in your own data set"
            )
        self.device = torch.device(device)
        self._images, self._items = None if images is None else images.to(self.device), cast(Any, image_set)
        if images is not None and shuffle:
            self.augmentation.check(images.in_shape, images.num_objects, images.masks is not None)
        if images is None and not isinstance(image_set, TensorDataset | ItemReader):
            self._items = ItemReader(image_set, Form().images, Form().labels_of_batch)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        if self.sampler is not None:
            return self.sampler.num_batches
        return self.num_images // self.batch_size if self.drop_last else -(-self.num_images // self.batch_size)

    @checked
    def batches(self, epoch: Index, start: Index = 0) -> Iterator[Batch]:
        """Yield this process's share of each batch of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: First batch to yield, 0 to ``len(self)``. Earlier batches are not computed.

        Raises:
            InputError: The epoch is negative, or ``start`` is out of range.
        """
        if start > len(self):
            raise InputError(f"an epoch has {counted(len(self), 'batch')}, so it cannot start at batch {start}")
        return self._batches(epoch, start)

    def order(self, epoch: int) -> Int64[Tensor, "N"]:
        """Return the indices of all images in the order of an epoch, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.num_images)
        return torch.randperm(self.num_images, generator=stream_of(ORDER, (self.seed, epoch, 0)))

    def _full_batches(self, epoch: int) -> Sequence[Tensor]:
        """Return the indices of each batch of an epoch, over all processes."""
        if self.sampler is None:
            return self.order(epoch).split(self.batch_size)[: len(self)]
        batches = self.sampler.draw(self.seed, epoch)
        if self.shuffle and any(len(each) % self.world_size for each in batches):
            raise InputError(
                f"each batch of the sampler must have a multiple of {self.world_size} images, because "
                f"{self.world_size} processes share it; change its batch size, or set drop_last"
            )
        return batches

    def _shares(self, epoch: int, start: int) -> Iterator[tuple[Tensor, slice, Key]]:
        """Yield this process's share of each batch: the images, their slice of the full batch, and the batch's key."""
        for number, full in enumerate(self._full_batches(epoch)[start:], start):
            # slices of the full batch, so that any number of processes gets the same images
            place = slice(len(full) * self.rank // self.world_size, len(full) * (self.rank + 1) // self.world_size)
            yield full[place], place, (self.seed, epoch, number)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        shares = self._shares(epoch, start)
        if self._images is not None:
            yield from itertools.starmap(partial(self._gathered, self._images), shares)
            return
        first = self.seed * 1_000_003 + epoch * len(self)
        seeded_indices = [((first + number) * 1_009 + self.rank, index) for index, _, (_, _, number) in shares]
        workers = 0 if isinstance(self._items, TensorDataset) else self.workers
        # a separate generator, so that the run's own does not advance
        how: dict[str, Any] = {"num_workers": workers, "generator": torch.Generator()}
        how |= self.reading if workers else {}
        read = DataLoader(_SeededBatches(self._items), batch_size=None, sampler=seeded_indices, **how)
        for images, labels in read:
            pixels = images.to(self.device)
            yield Batch(to_floats(pixels), labels.to(self.device))

    def _gathered(self, data: Images, own: Tensor, place: slice, key: Key) -> Batch:
        """Return a share of a batch in memory: the images at ``own``, at this slice of the full batch."""
        (channels, *_), index = data.in_shape, own.to(self.device, non_blocking=True)
        n = max(self.batch_size, place.stop)
        images, labels, *parts = data.gather(index, key, n, place)
        layers = torch.cat([images, *(each.flatten(1, 2) for each in parts)], 1)  # images and objects change alike
        changes = self.augmentation.draw(data.in_shape, n, key).share(place)
        pixels = self.augmentation.apply(layers, changes) if data.can_be_augmented else layers
        labels = labels if data.masks is None else self.augmentation.apply_to_masks(labels, changes=changes)
        alone = pixels[:, channels:].unflatten(1, (-1, channels)) if parts else None
        weights = data.factors.get(WEIGHT)
        return Batch(pixels[:, :channels], labels, alone, None if weights is None else weights[index])


class _SeededBatches(TorchDataset[Any]):
    """Batches of a torch ``Dataset``, each requested by a seed and the indices of its images."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, key: tuple[int, Tensor]) -> Any:
        seed, index = key
        if isinstance(self._data, TensorDataset):
            return self._data[index]
        with seeded(seed):
            images, labels = self._data.read(index.tolist() or [0])
        return images[: len(index)], labels[: len(index)]  # a share of a small last batch may be empty
