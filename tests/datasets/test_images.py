from __future__ import annotations

import pytest
import torch

from torchcaps.datasets import resize_images


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
    monkeypatch.setattr("torchcaps.datasets.images._CHUNK", 3)
    assert torch.equal(resize_images(images, (9, 9)), whole)
