from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchcaps.datasets import Dataset, ImageSet, PairSet, center_crop, resize_images
from torchcaps.errors import InputError

MakeSet = Callable[..., ImageSet]


def two_each(n: int = 4, classes: int = 3) -> ImageSet:
    """Images of two objects each, with their parts and a factor."""
    random = torch.Generator().manual_seed(n)
    parts = torch.randint(0, 256, (n, 2, 1, 6, 5), generator=random, dtype=torch.uint8)
    first = torch.arange(n) % classes
    labels = torch.stack([first, (first + 1) % classes], 1)
    return ImageSet(parts.amax(1), labels, parts, factors={"azimuth": torch.arange(n) * 20.0})


def test_all_that_a_set_holds_goes_where_its_images_go() -> None:
    images = two_each()
    assert images.parts is not None
    assert (len(images), images.in_shape, images.num_objects) == (4, (1, 6, 5), 2)
    assert images.tensors == (images.images, images.labels, images.parts)
    chosen = torch.tensor([3, 1])
    for made, index in (
        (images.take(2), torch.arange(2)),
        (images.preview(3), torch.arange(3)),
        (images.select(chosen), chosen),
        (images._each(torch.Tensor.clone), torch.arange(4)),
    ):
        for got, wanted in zip(made.tensors, images.tensors, strict=True):
            assert torch.equal(got, wanted[index])
        assert made.factors["azimuth"].tolist() == (20 * index).tolist()
    assert images.take(4) is images.take(None) is images.preview(9) is images.to("cpu") is images
    resized = images.resize((12, 10))
    assert resized.parts is not None
    assert (resized.in_shape, resized.parts.shape) == ((1, 12, 10), (4, 2, 1, 12, 10))
    assert torch.equal(resized.parts[1, 1], resize_images(images.parts[1, 1:], (12, 10))[0])
    middle = center_crop(images, 4)
    assert torch.equal(middle.parts, images.parts[..., 1:5, 0:4])  # type: ignore[arg-type]
    for made in (resized, middle):
        assert torch.equal(made.labels, images.labels)
        assert made.factors.keys() == {"azimuth"}


PIXELS, BOTH = torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2, 2, 1, 3, 3).byte()
ONE, TWO = torch.zeros(2).long(), torch.tensor([[0, 1], [0, 1]])


def test_sets_that_cannot_be() -> None:
    for images, labels, parts, named in (
        (PIXELS.double(), ONE, None, "images"),
        (PIXELS, ONE.float(), None, "labels"),
        (PIXELS, TWO, BOTH.float(), "parts"),
        (PIXELS[0], ONE, None, "images"),
        (PIXELS[:0], ONE[:0], None, "images"),
        *(
            (PIXELS, torch.tensor(wrong), None, "labels")
            for wrong in ([0] * 3, [0, -1], [[0], [1]], [[[0, 1]], [[1, 2]]], [[0, 1], [2, 2]], [[0, 1], [2, -1]])
        ),
        (PIXELS, ONE, BOTH, "parts"),
        (PIXELS, torch.tensor([[0, 1, 2]] * 2), BOTH, "parts"),
        (PIXELS, TWO, BOTH[..., :2], "parts"),
    ):
        wrong_type = any(each is not None and each.is_floating_point() for each in (images, parts))
        with pytest.raises(TypeError if wrong_type else InputError, match=named):
            ImageSet(images, labels, parts)
    with pytest.raises(InputError, match=r"the factor light must have shape \(2,\), got \(6,\)"):
        ImageSet(PIXELS, ONE, factors={"light": torch.arange(6)})


def test_a_dataset_and_its_parts_that_do_not_fit(make_set: MakeSet) -> None:
    names = ("a", "b", "c")
    data = Dataset("x", make_set(9), make_set(3), make_set(6), names)
    assert (data.in_shape, data.num_classes, data.num_objects) == ((1, 6, 5), 3, 1)
    pairs = PairSet(make_set(9), max_shift=0)
    data = Dataset("x", pairs, two_each(), two_each(5), names)
    assert (data.in_shape, data.num_objects) == ((1, 6, 5), 2)
    for parts, given, says in (
        (
            (make_set(9), make_set(3), make_set(6, (1, 5, 5))),
            names,
            r"test images are \(1, 5, 5\).*training .*\(1, 6, 5",
        ),
        ((pairs, two_each(), make_set(9)), names, r"x: the test images are .* 1 objects each, but .* with 2$"),
        ((make_set(9), make_set(8, classes=4), make_set(6)), names, "x: a validation label is 3, .* 0 to 2"),
        ((pairs, two_each(8, 5), two_each()), names, "x: a validation label is 4"),
        ((make_set(9), make_set(3), make_set(6)), ("a", "b", "b"), 'x: two classes are called "b"'),
        ((make_set(9), make_set(3), make_set(6)), ("a", "b\udce9", "c"), r"the class 'b\\udce9' has a name .*UTF-8"),
    ):
        with pytest.raises(InputError, match=says):
            Dataset("x", *parts, given)


def test_resize_keeps_flat_images_flat_and_the_range() -> None:
    flat = torch.full((3, 2, 9, 7), 77, dtype=torch.uint8)
    assert torch.equal(resize_images(flat, (13, 5)), torch.full((3, 2, 13, 5), 77, dtype=torch.uint8))
    checker = ((torch.arange(8)[:, None] + torch.arange(8)) % 2 * 255).to(torch.uint8)[None, None]
    big = resize_images(checker, (31, 31))
    assert (big.min(), big.max()) == (0, 255)  # bicubic overshoots: without the clamp dark would turn bright
    assert resize_images(flat, (9, 7)) is flat
