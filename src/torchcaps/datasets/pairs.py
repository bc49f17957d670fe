"""Images of two overlapping objects of different classes, made of images of one object, as for MultiMNIST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import check, checked
from torchcaps.datasets.affine import cut_windows
from torchcaps.datasets.image_set import ImageSet, resize_images
from torchcaps.datasets.rng import FIXED_SEED, PARTNERS, PLACES, Key, generator, stream_of
from torchcaps.errors import InputError
from torchcaps.tasks import Task, find_task

_DICE = 2**62  # random whole numbers below this choose partners; it is so large that no partner is favoured


@dataclass(frozen=True, eq=False)
class PairSet:
    """Images of two objects of different classes, made on demand; an epoch has one for each object.

    Each object is moved by its own whole number of pixels on a canvas with ``max_shift`` pixels more on each side, so
    that none of it is lost; the two are added and clipped at 255.

    Args:
        objects: Images of one object each, of two classes at least.
        max_shift: Largest shift each way, pixels.
        size: Height and width to bring the pairs to; None leaves them at those of the canvas.

    Raises:
        InputError: There is only one class, the images have several objects already, or the shift is negative.

    Source:
        Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017), arXiv:1710.09829, section 6 (MultiMNIST).
    """

    objects: ImageSet
    max_shift: int = 4
    size: tuple[int, int] | None = None
    num_objects: ClassVar[int] = 2
    task: ClassVar[Task] = find_task("classes", 2)
    factors: ClassVar[Mapping[str, Tensor]] = {}
    is_pixels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check("PairSet: objects", self.objects, ImageSet)
        check("PairSet: max_shift", self.max_shift, int)
        if self.objects.num_objects != 1:
            raise InputError(f"pairs are made of images of one object, got {self.objects.num_objects} an image")
        if self.labels.min() == self.labels.max():
            raise InputError("pairs are of two classes, but all images are of one")
        if self.max_shift < 0:
            raise InputError(f"max_shift must be 0 pixels or more, got {self.max_shift}")

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def labels(self) -> Int64[Tensor, "N"]:
        """The class of each single object."""
        return self.objects.labels

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Images and labels of the single objects, which a run's fingerprint is made of."""
        return self.objects.tensors

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every pair: (C, H, W)."""
        channels, *sides = self.objects.in_shape
        height, width = self.size or (side + 2 * self.max_shift for side in sides)
        return channels, height, width

    def to(self, device: torch.device | str) -> PairSet:
        """The same set on another device (itself when it is there already)."""
        objects = self.objects.to(device)
        return self if objects is self.objects else replace(self, objects=objects)

    def resize(self, size: tuple[int, int]) -> PairSet:
        """The same pairs, each object brought to another height and width before they are added."""
        return replace(self, size=size)

    def preview(self, n: int) -> ImageSet:
        """At most ``n`` pairs to look at, always the same: the first objects, with random others."""
        index = torch.arange(min(n, len(self)))
        return ImageSet(*self.to("cpu").gather(index, (FIXED_SEED, 0, 0), len(index)))

    def gather(
        self, index: Int64[Tensor, "B"], key: Key, n: int, share: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of the objects at ``index``, each with a partner, all of other classes being equally likely.

        Args:
            index: The objects, on their device.
            key: The batch (seed, epoch, batch): all that is random follows from it.
            n: How many pairs the full batch has.
            share: Which of the full batch's pairs these are.

        Returns:
            Images, labels and parts, as of an `ImageSet`.
        """
        m = self.max_shift
        dice = torch.randint(_DICE, (n,), generator=stream_of(PARTNERS, key))
        shifts = torch.randint(-m, m + 1, (n, 2, 2), generator=stream_of(PLACES, key))
        dice, shifts = (drawn[share].to(index.device, non_blocking=True) for drawn in (dice, shifts))
        ordered, first, count = self._by_class
        label = self.labels[index]
        place = dice % (len(self) - count[label])  # among those of other classes, in the order of the classes
        return self.compose(index, ordered[place + count[label] * (place >= first[label])], shifts)

    def compose(
        self, first: Int64[Tensor, "B"], second: Int64[Tensor, "B"], shifts: Int64[Tensor, "B 2 2"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of the objects at ``first`` and ``second``: images, labels and parts, as of an `ImageSet`.

        ``shifts`` says how far the two objects of each pair are moved (down, to the right), -max_shift..max_shift
        pixels. All three are on the device of the objects.
        """
        m, (_, height, width) = self.max_shift, self.objects.in_shape
        both = [  # a window that begins at m - shift shows the object moved by the shift
            cut_windows(self.objects.images[each], m - shifts[:, i], (height + 2 * m, width + 2 * m), 2 * m)
            for i, each in enumerate((first, second))
        ]
        if self.size is not None:
            both = [resize_images(each, self.size) for each in both]
        images = (both[0].to(torch.int16) + both[1]).clamp_(max=255).to(torch.uint8)
        return images, torch.stack([self.labels[first], self.labels[second]], 1), torch.stack(both, 1)

    @cached_property
    def _by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """The objects in the order of their classes, and where each class begins there, and its size."""
        count = self.labels.bincount()
        return self.labels.argsort(stable=True), count.cumsum(0) - count, count


@checked
def fixed_pairs(objects: ImageSet, max_shift: int = 4) -> ImageSet:
    """Pairs to judge by, with their parts, always the same: as many as objects, each object in exactly two pairs.

    Args:
        objects: Images of one object each; no class has more than half of them.
        max_shift: As for `PairSet`.

    Raises:
        InputError: A class has more than half of the objects, each of which needs a partner of another class; or the
            images have several objects already.
    """
    pairs, random = PairSet(objects, max_shift), generator(FIXED_SEED)
    first, second = _matched(objects.labels.numpy(), random)
    shifts = random.randint(-max_shift, max_shift + 1, (len(objects), 2, 2))
    return ImageSet(*pairs.compose(*map(torch.from_numpy, (first, second, shifts))))


def _matched(labels: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Two random orders of all objects, with different classes at every place."""
    largest = int(np.bincount(labels).max())
    if 2 * largest > len(labels):
        raise InputError(
            f"{largest} of {len(labels)} images are of one class; to put each in a pair with one of another class, "
            "no class may have more than half of them"
        )
    first, second = random.permutation(len(labels)), random.permutation(len(labels))
    ours, theirs = labels[first], labels[second]
    for place in np.flatnonzero(ours == theirs):
        if ours[place] != theirs[place]:  # an earlier exchange has changed it
            continue
        # the partners of two places are exchanged where neither has this class: there is such a place, as the class
        # has at most half of the objects, and this place takes up two of them
        others = np.flatnonzero((ours != ours[place]) & (theirs != ours[place]))
        other = random.choice(others)
        for each in (second, theirs):
            each[[place, other]] = each[[other, place]]
    return first, second
