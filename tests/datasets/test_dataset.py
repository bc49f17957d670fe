from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchcaps.datasets import Dataset, ImageSet, PairSet, center_crop, resize_images
from torchcaps.errors import InputError


def test_length_shape_take_and_select(make_set: Callable[..., ImageSet]) -> None:
    images = make_set(7, (3, 4, 5))
    assert len(images) == 7
    assert images.in_shape == (3, 4, 5)
    assert torch.equal(images.take(2).images, images.images[:2])
    chosen = images.select(torch.tensor([5, 1]))
    assert torch.equal(chosen.images, images.images[[5, 1]])
    assert torch.equal(chosen.labels, images.labels[[5, 1]])


def two_each(n: int = 4, classes: int = 3) -> ImageSet:
    """Images of two objects each, with their parts."""
    random = torch.Generator().manual_seed(n)
    parts = torch.randint(0, 256, (n, 2, 1, 6, 5), generator=random, dtype=torch.uint8)
    first = torch.arange(n) % classes
    return ImageSet(parts.amax(1), torch.stack([first, (first + 1) % classes], 1), parts)


def test_sets_of_several_objects_keep_their_parts() -> None:
    images = two_each()
    assert images.parts is not None
    assert images.num_objects == 2
    assert images.tensors == (images.images, images.labels, images.parts)
    chosen = torch.tensor([3, 1])
    for made, index in ((images.take(2), torch.arange(2)), (images.select(chosen), chosen)):
        assert made.parts is not None
        for got, wanted in zip(made.tensors, images.tensors, strict=True):
            assert torch.equal(got, wanted[index])
    resized = images.resize((12, 10))
    assert resized.parts is not None
    assert (resized.in_shape, resized.parts.shape) == ((1, 12, 10), (4, 2, 1, 12, 10))
    assert torch.equal(resized.parts[1, 1], resize_images(images.parts[1, 1:], (12, 10))[0])
    assert torch.equal(resized.labels, images.labels)


def test_factors_go_with_their_images(make_set: Callable[..., ImageSet]) -> None:
    plain = make_set(7)
    images = ImageSet(plain.images, plain.labels, factors={"azimuth": torch.arange(7) * 20.0, "light": torch.arange(7)})
    for made, index in (
        (images.take(2), [0, 1]),
        (images.select(torch.tensor([5, 1])), [5, 1]),
        (images.resize((12, 10)), list(range(7))),
        (center_crop(images, 3), list(range(7))),
        (images._each(torch.Tensor.clone), list(range(7))),
    ):
        assert made.factors["azimuth"].tolist() == [20.0 * n for n in index]
        assert made.factors["light"].tolist() == index
    assert len(images.tensors) == 2
    with pytest.raises(InputError, match=r"the factor light must have the shape \(7,\), .* got \(6,\)"):
        ImageSet(plain.images, plain.labels, factors={"light": torch.arange(6)})


def test_one_object_is_the_rule(make_set: Callable[..., ImageSet]) -> None:
    images = make_set(7)
    assert (images.num_objects, images.parts, len(images.tensors)) == (1, None, 2)
    assert images.resize((3, 4)).in_shape == (1, 3, 4)
    assert len(images.preview(3)) == 3
    assert len(images.preview(100)) == 7


PIXELS = torch.zeros(2, 1, 3, 3).byte()
BOTH = torch.zeros(2, 2, 1, 3, 3).byte()


@pytest.mark.parametrize(
    ("labels", "parts", "error", "words"),
    [
        ([[0], [1]], None, InputError, r"of two objects or more, .* got \[0\] for image 0"),
        ([[[0, 1]], [[1, 2]]], None, InputError, r"got \(2, 1, 2\)"),
        ([[0, 1], [2, 2]], None, InputError, r"and all differ, got \[2, 2\] for image 1"),
        ([[0, 1, 0], [0, 1, 2]], None, InputError, r"and all differ, got \[0, 1, 0\] for image 0"),
        ([[0, 1], [2, -1]], None, InputError, "0 or greater, got -1"),
        ([0, 1], BOTH, InputError, r"whose labels have the shape \(N, P\)"),
        ([[0, 1, 2], [0, 1, 2]], BOTH, InputError, r"parts must have shape"),
        ([[0, 1], [0, 1]], BOTH[..., :2], InputError, r"parts must have shape"),
        (
            [[0, 1], [0, 1]],
            BOTH.float(),
            TypeError,
            "ImageSet: parts must be uint8 pixels of 0..255, got one of",
        ),
    ],
)
def test_sets_of_several_objects_check_themselves(
    labels: list[object], parts: torch.Tensor | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ImageSet(PIXELS, torch.tensor(labels), parts)


def test_to_the_same_device_copies_nothing(make_set: Callable[..., ImageSet]) -> None:
    images = make_set()
    assert images.to("cpu") is images


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_to_the_gpu(make_set: Callable[..., ImageSet]) -> None:
    images = make_set().to("cuda")
    assert images.images.is_cuda
    assert images.labels.is_cuda


@pytest.mark.parametrize("n", [0, -1, 8])
def test_take_asks_for_images_that_are_there(make_set: Callable[..., ImageSet], n: int) -> None:
    with pytest.raises(InputError, match=f"first {n} images.*1 to 7"):
        make_set(7).take(n)


@pytest.mark.parametrize(
    ("images", "labels", "error", "words"),
    [
        (torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), TypeError, "uint8.*float32"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2), TypeError, "int64.*float32"),
        (torch.zeros(2, 3, 3).byte(), torch.zeros(2).long(), InputError, r"\(N, C, H, W\).*\(2, 3, 3\)"),
        (torch.zeros(0, 1, 3, 3).byte(), torch.zeros(0).long(), InputError, "no axis empty"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(3).long(), InputError, r"\(2,\).*\(3,\)"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.tensor([0, -1]), InputError, "0 or greater, got -1"),
    ],
)
def test_image_set_checks_itself(
    images: torch.Tensor, labels: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ImageSet(images, labels)


def test_dataset_knows_its_shape_and_classes(make_set: Callable[..., ImageSet]) -> None:
    data = Dataset("x", make_set(9), make_set(3), make_set(6), ("a", "b", "c"))
    assert data.in_shape == (1, 6, 5)
    assert data.num_classes == 3


def test_dataset_of_pairs(make_set: Callable[..., ImageSet]) -> None:
    train = PairSet(make_set(9), max_shift=0)
    data = Dataset("x", train, two_each(), two_each(5), ("a", "b", "c"))
    assert (data.num_objects, data.in_shape) == (2, (1, 6, 5))
    assert Dataset("x", make_set(9), make_set(3), make_set(6), ("a", "b", "c")).num_objects == 1
    with pytest.raises(
        InputError, match=r"x: the test images are .* with 1 objects each, but the training images .* with 2$"
    ):
        Dataset("x", train, two_each(), make_set(9), ("a", "b", "c"))
    with pytest.raises(InputError, match=r"x: a validation label is 4, but the 3 classes"):
        Dataset("x", train, two_each(8, 5), two_each(), ("a", "b", "c"))


def test_dataset_checks_that_its_parts_fit(make_set: Callable[..., ImageSet]) -> None:
    with pytest.raises(InputError, match=r"test images are \(1, 5, 5\).*training images \(1, 6, 5\)"):
        Dataset("x", make_set(9), make_set(3), make_set(6, (1, 5, 5)), ("a", "b", "c"))
    with pytest.raises(InputError, match=r"validation label is 3.*0 to 2"):
        Dataset("x", make_set(9), make_set(8, classes=4), make_set(6), ("a", "b", "c"))
    with pytest.raises(InputError, match='x: two classes are called "b"'):
        Dataset("x", make_set(9), make_set(3), make_set(6), ("a", "b", "b"))


def test_resize_keeps_flat_images_flat_and_the_range() -> None:
    flat = torch.full((3, 2, 9, 7), 77, dtype=torch.uint8)
    assert torch.equal(resize_images(flat, (13, 5)), torch.full((3, 2, 13, 5), 77, dtype=torch.uint8))
    checker = ((torch.arange(8)[:, None] + torch.arange(8)) % 2 * 255).to(torch.uint8)[None, None]
    big = resize_images(checker, (31, 31))
    assert big.min() == 0  # bicubic overshoots: without the clamp dark would turn bright
    assert big.max() == 255
    assert resize_images(flat, (9, 7)) is flat


def test_shrinking_smooths_instead_of_skipping_pixels() -> None:
    lines = (torch.arange(64) % 8 == 0).to(torch.uint8).mul(255).expand(1, 1, 64, 64)
    small = resize_images(lines, (8, 8))  # taking the pixels in the middle would find no line at all
    assert (small[..., 2:-2].float() - 255 / 8).abs().max() < 20


def test_resizing_in_pieces_is_resizing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (10, 1, 6, 6), dtype=torch.uint8)
    whole = resize_images(images, (9, 9))
    monkeypatch.setattr("torchcaps.datasets.dataset._CHUNK", 3)
    assert torch.equal(resize_images(images, (9, 9)), whole)
