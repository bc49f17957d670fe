"""Photos of drawings, made here of the embedded digits, come out as these digits; and what is none comes out whole."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from support import assert_raises
from torchcaps.datasets import Preparation, list_datasets, load_dataset, prepare_image, read_image, read_photo
from torchcaps.errors import InputError

SHAPE, MNIST, DIGITS = (1, 28, 28), Preparation(), Preparation(centre="box")
BLUE, PAPER = (30, 50, 150), (235, 230, 215)


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return load_dataset("digits").test.images.numpy()


def drawn(
    digit: np.ndarray,
    size: tuple[int, int] = (300, 240),
    at: tuple[int, int] = (150, 40),
    side: int = 120,
    ink: tuple[int, int, int] = BLUE,
    paper: tuple[int, int, int] = PAPER,
) -> np.ndarray:
    """A digit (1, 28, 28) written on paper, uint8 (3, h, w); ``side`` is that of the 28 pixels."""
    large = np.asarray(Image.fromarray(digit[0]).resize((side, side), Image.Resampling.BICUBIC)) / 255
    amount = np.zeros(size)
    amount[at[0] : at[0] + side, at[1] : at[1] + side] = large
    colours = np.array(paper) + amount[:, :, None] * (np.array(ink) - np.array(paper))
    return colours.transpose(2, 0, 1).round().astype(np.uint8)


def unlike(first: np.ndarray, second: np.ndarray) -> float:
    """1 less the correlation of two images, one of them moved by up to a pixel each way: 0 for the same drawing."""
    moved = [np.roll(second, (y, x), (-2, -1)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    return 1 - max(np.corrcoef(first.ravel(), other.ravel())[0, 1] for other in moved)


def test_the_images_of_the_data_are_returned_as_they_are(digits: np.ndarray) -> None:
    for digit in digits:
        prepared = prepare_image(digit, SHAPE, DIGITS)
        assert np.array_equal(prepared.image, digit)
        assert (prepared.changes, prepared.box) == ((), None)
    prepared = prepare_image(255 - digits[3], SHAPE, MNIST)  # dark on light of the right size is turned round alone
    assert np.array_equal(prepared.image, digits[3])
    assert prepared.changes == ("dark ink turned light",)


def test_whatever_the_colours(digits: np.ndarray) -> None:
    for digit, other in itertools.pairwise(digits[:21]):
        prepared = prepare_image(drawn(digit), SHAPE, DIGITS)
        assert unlike(prepared.image, digit) < min(0.06, unlike(prepared.image, other))
    for ink, paper in (
        ((10, 10, 10), (200, 200, 200)),  # dark grey on light grey
        ((240, 240, 230), (30, 60, 45)),  # chalk
        ((200, 40, 40), (200, 200, 60)),  # red on yellow: the same in the red channel
        ((90, 90, 255), (128, 128, 128)),  # about as light as its ground
    ):
        prepared = prepare_image(drawn(digits[0], ink=ink, paper=paper), SHAPE, DIGITS)
        assert unlike(prepared.image, digits[0]) < 0.06, (ink, paper)


def test_uneven_light_and_noise_are_flattened(digits: np.ndarray) -> None:
    photo = drawn(digits[0])
    light = np.linspace(0.4, 1, photo.shape[2]) * np.linspace(1, 0.7, photo.shape[1])[:, None]
    noise = np.random.default_rng(0).normal(0, 6, photo.shape)
    prepared = prepare_image((photo * light + noise).clip(0, 255).astype(np.uint8), SHAPE, DIGITS)
    assert unlike(prepared.image, digits[0]) < 0.06
    assert any(words.startswith("uneven light flattened") for words in prepared.changes)
    border = np.concatenate([prepared.image[0, :3].ravel(), prepared.image[0, -3:].ravel()])
    assert not border.any()  # nothing of the paper is left


def test_a_drawing_on_a_sheet_that_lies_on_a_dark_desk(digits: np.ndarray) -> None:
    """The desk covers most of the photo, and dark ink is more like it than the paper is."""
    for digit in digits[:6]:
        photo = drawn(digit, (400, 400), (270, 200), 60)
        desk = np.array((60, 50, 45), np.uint8)[:, None, None]
        photo[:, :240], photo[:, :, :60] = desk, desk
        prepared = prepare_image(photo, SHAPE, DIGITS)
        assert "dark ink turned light" in prepared.changes
        assert unlike(prepared.image, digit) < 0.1


def test_the_drawing_is_scaled_and_put_in_the_middle(digits: np.ndarray) -> None:
    for preparation, shape, side in ((MNIST, SHAPE, 20), (DIGITS, SHAPE, 20), (Preparation(box=30), (1, 40, 44), 30)):
        for number in range(5):
            image = prepare_image(drawn(digits[number]), shape, preparation).image[0]
            assert image.shape == shape[1:]
            assert (image.dtype, image.max()) == (np.uint8, 255)
            box = ndimage.find_objects((image > 100).astype(int))[0]
            assert abs(max(part.stop - part.start for part in box) - side) <= 1
            middle = ndimage.center_of_mass(image)
            if preparation.centre == "box":
                middle = [(part.start + part.stop) / 2 for part in box]
            assert np.abs(np.array(middle) - np.array(image.shape) / 2).max() <= 1


def test_what_was_changed_is_said_where_it_is_much(digits: np.ndarray) -> None:
    small = prepare_image(drawn(digits[0]), SHAPE, DIGITS)
    top, left, bottom, right = small.box or (0, 0, 0, 0)
    cut = f"drawing of {bottom - top}×{right - left} pixels cut out of 300×240"
    assert small.changes == ("dark ink turned light", cut)
    enlarged = np.asarray(Image.fromarray(digits[0, 0]).resize((280, 280), Image.Resampling.BICUBIC))[None]
    assert prepare_image(enlarged, SHAPE, DIGITS).changes == ()
    two = np.concatenate([drawn(digits[0]), drawn(digits[1])], axis=2)
    assert "other ink left out" in prepare_image(two, SHAPE, DIGITS).changes
    photo = np.full((1, 400, 400), 230, np.uint8)
    photo[0, 100:300, 200:203] = 40  # 3 of 200 pixels: 0.3 of 20
    thin = prepare_image(photo, SHAPE, MNIST)
    assert "thin strokes widened" in thin.changes
    assert 1 <= thin.image[0, 14].sum() / 255 <= 3


def test_what_is_ink_and_where() -> None:
    photo = np.full((1, 200, 200), 120, np.uint8)
    photo[0, 50:90, 50:60] = 0
    photo[0, 120:150, 150:156] = 200
    assert prepare_image(photo, SHAPE, MNIST).box == (50, 50, 90, 60)
    large = prepare_image(photo.repeat(6, 1).repeat(6, 2), SHAPE, MNIST)  # it is shrunk to look for it
    assert np.abs(np.subtract(large.box or (), (300, 300, 540, 360))).max() <= 24
    assert prepare_image(photo, SHAPE, MNIST, light_ink=True).box == (120, 150, 150, 156), "where that is known"
    photo = np.full((1, 200, 200), 230, np.uint8)
    photo[0, 60:140, 90:100] = 30
    photo[0, 50:58, 90:130] = 30  # the bar of a five, apart by two pixels
    photo[0, 20:24, 20:24] = 30  # a speck
    assert prepare_image(photo, SHAPE, MNIST).box == (50, 90, 140, 130)
    noise = np.random.default_rng(0).normal(200, 5, (3, 300, 400)).clip(0, 255)
    for empty in (np.full((3, 90, 120), 200), noise, np.zeros((1, 50, 60))):
        prepared = prepare_image(empty.astype(np.uint8), SHAPE, MNIST)
        assert (prepared.changes, prepared.box, prepared.image.any()) == (("no drawing found",), None, False)


def test_odd_sizes() -> None:
    random = np.random.default_rng(0)
    for size in ((1, 1), (1, 2000), (2000, 1), (2, 3), (3, 900), (28, 28)):
        for photo in (random.integers(0, 256, (1, *size)), np.full((3, *size), 255)):
            image = prepare_image(photo.astype(np.uint8), SHAPE, MNIST).image
            assert (image.shape, image.dtype) == (SHAPE, np.uint8)
    photo = np.full((1, 200, 200), 230, np.uint8)
    photo[0, 50:150, 90:110] = 30  # larger than the image: cut off
    image = prepare_image(photo, (1, 12, 40), MNIST).image[0]
    assert list(np.flatnonzero(image.min(0) > 128)) in ([18, 19, 20, 21], [19, 20, 21, 22])


def test_files_are_prepared_before_they_are_brought_to_size(digits: np.ndarray, tmp_path: Path) -> None:
    photo, path = drawn(digits[0]), tmp_path / "photo.png"
    Image.fromarray(photo.transpose(1, 2, 0)).save(path)
    read = read_photo(path, SHAPE, preparation=DIGITS)
    assert np.array_equal(read.pixels, photo)
    for image in (prepare_image(photo, SHAPE, DIGITS).image, read_image(path, SHAPE, preparation=DIGITS)):
        assert np.array_equal(read.prepared.image, image)
    assert unlike(read_image(path, SHAPE, preparation=DIGITS, invert=True), digits[0]) < 0.06
    small = read.shrunk(100)
    assert small.pixels.shape == (3, 100, 80)
    assert np.abs(np.subtract(small.prepared.box or (), np.array(read.prepared.box) / 3)).max() <= 0.5
    assert read.shrunk(300) is read


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    grey = np.zeros((1, 40, 40), np.uint8)
    for image, in_shape in ((grey, (3, 28, 28)), (np.zeros((2, 40, 40), np.uint8), SHAPE), (grey[0], SHAPE)):
        said = "only images of 1 or 3 channels are prepared"
        assert_raises(InputError, prepare_image, image, in_shape, MNIST, say=said)
    Image.fromarray(grey[0]).save(tmp_path / "a.png")
    for wrong in ((), "", (28, 28), torch.zeros(0), (1, 0, 28), (1, 2**62, 28)):
        for read, image in ((prepare_image, grey), (read_image, tmp_path / "a.png")):
            assert_raises(InputError, read, image, wrong, say="in_shape", preparation=MNIST)  # type: ignore[operator]
    for box in (0, 1e9, math.nan):
        assert_raises(InputError, Preparation, say="box must be 1 to 1024", box=box)
    with pytest.raises(InputError, match='centre must be "mass" or "box"'):
        Preparation(centre="middle")  # type: ignore[arg-type]


def test_which_data_sets_are_of_drawings() -> None:
    named = {info.name: info.preparation for info in list_datasets() if info.preparation}
    assert named == {"mnist": MNIST, "digits": DIGITS, "mnist-40": MNIST, "affnist": MNIST}
    assert MNIST.scaled(1.5) == Preparation(box=30)
    assert str(DIGITS) == "light on dark, the longer side of the ink's box 20 pixels, its box in the middle"
