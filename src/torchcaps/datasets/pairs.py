"""Images of two overlapping objects of different classes, made of images of single objects, as in MultiMNIST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import check, checked
from torchcaps.datasets.affine import cut_windows
from torchcaps.datasets.image_set import Images, ImageSet, resize_images
from torchcaps.datasets.rng import FIXED_SEED, PARTNERS, PLACES, Key, generator, stream_of
from torchcaps.errors import InputError
from torchcaps.tasks import Task, find_task

_DICE = 2**62  # random integers below this choose partners, large enough that none is favoured noticeably


@dataclass(frozen=True, eq=False)
class PairSet(Images):
    """Images of two objects of different classes, made on demand. An epoch has one pair for each object.

    Each object is moved by a random whole number of pixels. The canvas has ``max_shift`` more pixels on each side, so
    no pixel is lost. The two images are added and clipped at 255.

    Args:
        objects: Images of one object each, of at least two classes.
        max_shift: Largest shift in each direction, pixels.
        size: Height and width of the pairs after resizing; None: the size of the canvas.

    Raises:
        InputError: All images have one class, images have several objects, or the shift is negative.

    Source:
        Sabour, Frosst, Hinton: Dynamic Routing Between Capsules (2017), arXiv:1710.09829, section 6 (MultiMNIST).
    """

    objects: ImageSet
    max_shift: int = 4
    size: tuple[int, int] | None = None
    num_objects: ClassVar[int] = 2
    task: ClassVar[Task] = find_task("classes", 2)
    can_be_augmented: ClassVar[bool] = True
    has_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check("PairSet: objects", self.objects, ImageSet)
        check("PairSet: max_shift", self.max_shift, int)
        if self.objects.num_objects != 1:
            raise InputError(f"pairs are made of images of one object, got {self.objects.num_objects} objects in each")
        if self.labels.min() == self.labels.max():
            raise InputError("pairs need images of two classes, but all images have the same class")
        if self.max_shift < 0:
            raise InputError(f"max_shift must be 0 pixels or more, got {self.max_shift}")

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def labels(self) -> Int64[Tensor, "N"]:
        """Class of each single object."""
        return self.objects.labels

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Images and labels of the single objects; a run's fingerprint is computed from them."""
        return self.objects.tensors

    @property
    def in_shape(self) -> tuple[int, int, int]:
        channels, *sides = self.objects.in_shape
        height, width = self.size or (side + 2 * self.max_shift for side in sides)
        return channels, height, width

    def to(self, device: torch.device | str) -> PairSet:
        objects = self.objects.to(device)
        return self if objects is self.objects else replace(self, objects=objects)

    def resize(self, size: tuple[int, int]) -> PairSet:
        """Return the same pairs with each object resized to (height, width) before the two are added."""
        return replace(self, size=size)

    @property
    def factors(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def targets(self) -> None:
        """None, because pairs are made anew in each epoch."""

    def with_labels(self, change: Callable[[Tensor], Tensor]) -> PairSet:
        return replace(self, objects=self.objects.with_labels(change))

    def for_evaluation(self) -> PairSet:
        raise InputError(
            "a PairSet makes new pairs each time, for training only (shuffle=True); validate with fixed_pairs"
        )

    def cropped(self, size: int) -> PairSet:  # noqa: ARG002  as the base class
        raise InputError("new training images are made in each epoch, and these cannot be cropped; omit crop (--crop)")

    def preview(self, n: int) -> ImageSet:
        """Return ``n`` pairs to be shown, always the same: the first objects with random partners."""
        index = torch.arange(min(n, len(self)))
        return ImageSet(*self.to("cpu").gather(index, (FIXED_SEED, 0, 0), len(index)))

    def gather(
        self, index: Int64[Tensor, "B"], key: Key, n: int, share: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs of the objects at ``index`` with random partners of other classes, all equally likely."""
        m = self.max_shift
        dice = torch.randint(_DICE, (n,), generator=stream_of(PARTNERS, key))
        shifts = torch.randint(-m, m + 1, (n, 2, 2), generator=stream_of(PLACES, key))
        dice, shifts = (drawn[share].to(index.device, non_blocking=True) for drawn in (dice, shifts))
        ordered, first, count = self._by_class
        label = self.labels[index]
        place = dice % (len(self) - count[label])  # index among the objects of other classes, sorted by class
        return self.compose(index, ordered[place + count[label] * (place >= first[label])], shifts)

    def compose(
        self, first: Int64[Tensor, "B"], second: Int64[Tensor, "B"], shifts: Int64[Tensor, "B 2 2"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs of the objects at ``first`` and ``second``: images, labels and parts, as of an `ImageSet`.

        ``shifts`` holds the shift of both objects of each pair (down, right), -max_shift..max_shift pixels. All three
        arguments are on the device of the objects.
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
        """Return the objects sorted by class, the first position of each class, and its number of objects."""
        count = self.labels.bincount()
        return self.labels.argsort(stable=True), count.cumsum(0) - count, count


@checked
def fixed_pairs(objects: ImageSet, max_shift: int = 4) -> ImageSet:
    """Return fixed pairs for validation, with parts: as many as objects, each object in exactly two pairs.

    Args:
        objects: Images of one object each; no class may have more than half of them.
        max_shift: Largest shift in each direction, pixels.

    Raises:
        InputError: A class has more than half of the objects, so some would have no partner of another class; or images
            have several objects.
    """
    pairs, random = PairSet(objects, max_shift), generator(FIXED_SEED)
    first, second = _matched(objects.labels.numpy(), random)
    shifts = random.randint(-max_shift, max_shift + 1, (len(objects), 2, 2))
    return ImageSet(*pairs.compose(*map(torch.from_numpy, (first, second, shifts))))


def _matched(labels: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Return two random orders of all objects that have different classes at every position."""
    largest = int(np.bincount(labels).max())
    if 2 * largest > len(labels):
        raise InputError(
            f"{largest} of {len(labels)} images have the same class, but each needs a partner of another class, so "
            "no class may have more than half of them"
        )
    first, second = random.permutation(len(labels)), random.permutation(len(labels))
    ours, theirs = labels[first], labels[second]
    for place in np.flatnonzero(ours == theirs):
        if ours[place] != theirs[place]:  # an earlier exchange separated them
            continue
        # exchange partners with a position without this class; one exists, because the class has at most half of the
        # objects and this position uses two of them
        others = np.flatnonzero((ours != ours[place]) & (theirs != ours[place]))
        other = random.choice(others)
        for each in (second, theirs):
            each[[place, other]] = each[[other, place]]
    return first, second
