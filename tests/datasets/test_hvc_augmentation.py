"""The augmentation of Byerly et al. 2021, each step against another way to compute it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_close, assert_raises
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, hvc_augmentation
from torchcaps.errors import InputError

KEY = (3, 1, 4)
NONE = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9, 0.0, 0.0]
"""Numbers of an image that is neither rotated nor shifted. It loses one pixel of its width, and a square."""


def changed(images: torch.Tensor, **numbers: float) -> torch.Tensor:
    """Images with chosen numbers of the first four steps, before a square is erased."""
    order = ("angle", "is_rotated", "down", "right", "squeeze", "offset", "is_up", "is_left")
    chosen = torch.tensor(NONE, dtype=torch.float64).repeat(len(images), 1)
    for name, number in numbers.items():
        chosen[:, order.index(name)] = number
    return hvc_augmentation.apply(images, chosen)


def test_a_row_is_squeezed_as_pillow_resizes_it() -> None:
    """Pillow's Lanczos filter has the radius and the antialiasing of TensorFlow's."""
    row = torch.rand(1, 28, dtype=torch.float64)
    for fewer in range(1, 8):
        for right in (0, 1):
            image = Image.fromarray(row.float().numpy(), mode="F")
            narrow = np.asarray(image.resize((28 - fewer, 1), Image.Resampling.LANCZOS))[0]
            expected, start = torch.zeros(29), fewer // 2 + right
            expected[start : start + 28 - fewer] = torch.tensor(narrow)
            assert_close(row @ hvc_augmentation._squeeze(28, fewer, right), expected[None, :28].double(), 1e-5)


def test_images_are_rotated_about_the_pixel_right_of_the_centre() -> None:
    """A quarter turn about the pixel (H/2, W/2) moves whole pixels: (y, x) goes to (c − (x − c), c + (y − c))."""
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 10, 19] = 1
    turned = hvc_augmentation._rotated(image, torch.tensor([90.0], dtype=torch.float64))
    assert_close(turned[0, 0, 14 - (19 - 14), 14 + (10 - 14)], torch.tensor(1.0), 1e-5)
    still = changed(image, angle=0.9, is_rotated=0.1)
    assert torch.equal(still, changed(image)), "half of the images are not rotated"


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.49, 2), (0.9999, 5)])
def test_shifts_are_a_share_of_the_margin(share: float, expected: int) -> None:
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 6:20, 9:23] = torch.rand(14, 14) + 0.1  # 6 rows above, 8 below; 9 columns left, 5 right
    moved = hvc_augmentation._shifted(image, torch.tensor([[0.0, share]]), torch.tensor([[False, False]]))
    assert torch.equal(moved, image.roll(expected, 3))
    back = hvc_augmentation._shifted(image, torch.tensor([[share, 0.0]]), torch.tensor([[True, False]]))
    assert torch.equal(back, image.roll(-math.ceil(share * 6), 2))


def test_shifts_and_squares_follow_their_distributions() -> None:
    images = torch.zeros(3000, 1, 28, 28)
    images[:, :, 10:18, 10:18] = 1.0
    numbers = hvc_augmentation.draw(3000, KEY)
    moved = hvc_augmentation._shifted(images, numbers[:, 2:4].abs(), numbers[:, 6:8] < 0.5)
    assert_close(moved.sum((1, 2, 3)), torch.full((3000,), 64.0), 0)  # nothing leaves an image
    tops = (moved.sum((1, 3)) > 0).int().argmax(1)
    assert set(tops.tolist()) == set(range(21))
    erased = hvc_augmentation._erased(torch.ones(3000, 1, 28, 28), numbers[:, 8:]) == 0
    assert torch.equal(erased.sum((1, 2, 3)), torch.full((3000,), 16))
    for axis in (2, 3):
        firsts = erased.any(5 - axis).squeeze(1).int().argmax(1)
        assert set(firsts.tolist()) == set(range(4, 23))


def test_a_batch_is_the_same_in_any_number_of_processes() -> None:
    images = ImageSet(torch.randint(256, (8, 1, 12, 10), dtype=torch.uint8), torch.arange(8) % 3)
    how: Any = {"shuffle": True, "augmentation": Augmentation(published_augmentation="hvc2021"), "seed": 2}
    (whole,) = BatchLoader(images, 8, **how).batches(1)
    parts = [next(iter(BatchLoader(images, 8, rank=rank, world_size=2, **how).batches(1))) for rank in range(2)]
    assert_close(torch.cat([part.images for part in parts]), whole.images, 1e-6)
    assert not torch.equal(whole.images, next(iter(BatchLoader(images, 8, **how).batches(2))).images)


@pytest.mark.parametrize(
    ("shape", "objects", "masks", "others", "say"),
    [
        ((1, 28, 28), 1, False, {"max_shift": 2, "flip": True}, "leave out max_shift and flip"),
        ((1, 28, 28), 2, False, {}, "is for images of one object without masks"),
        ((1, 28, 28), 1, True, {}, "is for images of one object without masks"),
        ((1, 9, 9, 9), 1, False, {}, "is for images of one object without masks"),
        ((1, 28, 8), 1, False, {}, "needs images of at least 9×9 pixels, got 28×8"),
    ],
)
def test_images_that_it_does_not_suit_are_refused(
    shape: tuple[int, ...], objects: int, masks: bool, others: dict[str, Any], say: str
) -> None:
    augmentation = Augmentation(published_augmentation="hvc2021", **others)
    assert_raises(InputError, augmentation.check, shape, objects, masks, say=say)
