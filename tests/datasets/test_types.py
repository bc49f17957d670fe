from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchcaps.datasets import Dataset, ImageSet
from torchcaps.errors import InputError


def test_length_shape_take_and_select(make_set: Callable[..., ImageSet]) -> None:
    images = make_set(7, (3, 4, 5))
    assert len(images) == 7
    assert images.in_shape == (3, 4, 5)
    assert torch.equal(images.take(2).images, images.images[:2])
    chosen = images.select(torch.tensor([5, 1]))
    assert torch.equal(chosen.images, images.images[[5, 1]])
    assert torch.equal(chosen.labels, images.labels[[5, 1]])


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


def test_dataset_checks_that_its_parts_fit(make_set: Callable[..., ImageSet]) -> None:
    with pytest.raises(InputError, match=r"test images are \(1, 5, 5\).*training images \(1, 6, 5\)"):
        Dataset("x", make_set(9), make_set(3), make_set(6, (1, 5, 5)), ("a", "b", "c"))
    with pytest.raises(InputError, match=r"validation label is 3.*0 to 2"):
        Dataset("x", make_set(9), make_set(8, classes=4), make_set(6), ("a", "b", "c"))
    with pytest.raises(InputError, match='x: two classes are called "b"'):
        Dataset("x", make_set(9), make_set(3), make_set(6), ("a", "b", "b"))
