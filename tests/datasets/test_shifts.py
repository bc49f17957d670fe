from __future__ import annotations

import torch

from torchcaps.datasets.affine import look_through, windows


def test_windows_by_hand() -> None:
    images = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=torch.uint8)
    views = windows(images, 1, (2, 3))
    assert views.shape == (1, 1, 3, 3, 2, 3)
    assert views[0, 0, 1, 1].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert views[0, 0, 0, 1].tolist() == [[0, 0, 0], [1, 2, 3]]  # moved down by one
    assert views[0, 0, 1, 2].tolist() == [[2, 3, 0], [5, 6, 0]]  # moved to the left by one
    small = windows(images, 0, (1, 2))
    assert small.shape == (1, 1, 2, 2, 1, 2)
    assert small[0, 0, 1, 1].tolist() == [[5, 6]]


def test_without_a_margin_nothing_is_copied() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(1, 1, 3, 4)
    assert windows(images, 0, (2, 2)).data_ptr() == images.data_ptr()


def test_each_image_through_its_own_window() -> None:
    images = torch.arange(2 * 2 * 9, dtype=torch.uint8).view(2, 2, 3, 3)
    seen = look_through(windows(images, 0, (2, 2)), torch.tensor([1, 0, 1]), torch.tensor([[0, 1], [1, 1], [1, 0]]))
    assert torch.equal(seen[0], images[1, :, 0:2, 1:3])
    assert torch.equal(seen[1], images[0, :, 1:3, 1:3])
    assert torch.equal(seen[2], images[1, :, 1:3, 0:2])
    seen.zero_()
    assert images.count_nonzero() == 35  # it was a copy
