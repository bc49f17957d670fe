"""Make the samplers of a user's ``DataLoader`` repeatable: an epoch follows from the seed and its number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from torchcaps.datasets.rng import seeded
from torchcaps.errors import InputError, shown
from torchcaps.words import counted


class SampledBatches:
    """Batches of a sampler, the same for the same seed and epoch.

    Before each epoch, the global generators of torch, NumPy and Python are seeded, and so are generators in attributes
    of the sampler or of a sampler inside it. ``set_epoch`` is called if the sampler has it.

    Args:
        sampler: Iterable of image indices; if ``batch_size`` is None, of lists of indices.
        images: Number of images in the data set.
        batch_size: Images in a batch; None if the sampler yields batches.
        drop_last: Leave out a last batch that is not full.

    Raises:
        InputError: An index is out of range, no batch is drawn, or two draws of one epoch differ.
    """

    def __init__(self, sampler: Any, images: int, batch_size: int | None, drop_last: bool = False) -> None:
        self.sampler, self.images, self.batch_size, self.drop_last = sampler, images, batch_size, drop_last
        first, again = self._draw(0, 0), self._draw(0, 0)
        if list(map(Tensor.tolist, first)) != list(map(Tensor.tolist, again)):
            raise InputError(
                f"the sampler {type(sampler).__name__} draws other images each time that one epoch is drawn, so a run "
                "could not be resumed; let it use the global generator of torch, NumPy or Python, or a generator in "
                "one of its attributes"
            )
        if not first:
            raise InputError(f"the sampler {type(sampler).__name__} gives no batch of {images} images")
        self.num_batches = len(first)
        self.num_images = sum(map(len, first))
        self.largest = max(map(len, first))

    def draw(self, seed: int, epoch: int) -> list[Int64[Tensor, "b"]]:
        """Return the indices of each batch of an epoch.

        Raises:
            InputError: The epoch and the first epoch differ in the number of batches.
        """
        batches = self._draw(seed, epoch)
        if len(batches) != self.num_batches:
            raise InputError(
                f"the sampler gives {counted(len(batches), 'batch', 'batches')} in epoch {epoch + 1} but "
                f"{self.num_batches} in the first; "
                "every epoch must have the same number"
            )
        return batches

    def _draw(self, seed: int, epoch: int) -> list[Tensor]:
        number = seed * 1_000_003 + epoch
        with seeded(number):
            for own in _generators(self.sampler):
                _reseed(own, number)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            drawn = list(self.sampler)
        if self.batch_size is None:
            batches = [self._checked(each) for each in drawn]
        else:
            batches = list(self._checked(drawn).split(self.batch_size)) if drawn else []
            if self.drop_last and batches and len(batches[-1]) < self.batch_size:
                del batches[-1]
        return [each for each in batches if len(each)]

    def _checked(self, indices: Any) -> Int64[Tensor, "b"]:
        try:
            index = torch.tensor([int(each) for each in indices], dtype=torch.int64)
        except (TypeError, ValueError):
            kind = "lists of indices" if self.batch_size is None else "indices"
            raise InputError(f"a sampler must give {kind} of images, got {shown(indices)}") from None
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.images:
            raise InputError(
                f"the sampler gives the index {int(index.max()) if index.min() >= 0 else int(index.min())}, but the "
                f"{self.images} images have indices from 0 to {self.images - 1}"
            )
        return index


def _generators(sampler: Any) -> Iterator[Any]:
    """Yield the generators in attributes of a sampler and of the samplers inside it."""
    inside: list[Any] = [sampler]
    while inside and len(inside) < 10:  # a batch sampler has a sampler, which may have another; 10 stops endless loops
        held = getattr(inside.pop(), "__dict__", {}).values()
        yield from (each for each in held if isinstance(each, _GENERATORS))
        inside += [each for each in held if isinstance(each, torch.utils.data.Sampler)]


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _reseed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number % 2**63)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number % 2**32)
    else:
        generator.seed(number)


def sampled_batches(loader: DataLoader[Any]) -> SampledBatches | None:
    """Return the batches of a loader's sampler or batch sampler; None if it takes all images, in order or shuffled.

    Raises:
        InputError: The data set has no length, batching is disabled, or the sampler distributes images over processes.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise InputError("the data set of a DataLoader must have a length and items by index, got an IterableDataset")
    if loader.batch_sampler is None:
        raise InputError("a DataLoader must have a batch_size or a batch_sampler, got batch_size=None")
    by_batches = loader.batch_size is None
    sampler: Any = loader.batch_sampler if by_batches else loader.sampler
    if isinstance(sampler, DistributedSampler) or isinstance(getattr(sampler, "sampler", None), DistributedSampler):
        raise InputError("fit distributes images over processes itself; leave the DistributedSampler out")
    images = len(loader.dataset)  # type: ignore[arg-type]
    takes_all = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if takes_all and len(sampler) == images:
        return None
    return SampledBatches(sampler, images, loader.batch_size, loader.drop_last)
