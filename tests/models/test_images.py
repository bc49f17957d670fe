"""What networks ask of images, and standardised ones."""

from __future__ import annotations

import torch

from support import assert_close, assert_finite
from torchcaps.models.images import standardise


def test_each_image_has_mean_zero_and_deviation_one_over_all_channels() -> None:
    images = torch.rand(4, 3, 5, 6, dtype=torch.float64) * torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    result = standardise(images)
    assert_close(result.mean((1, 2, 3)), 0.0, 1e-12)
    assert_close(result.std((1, 2, 3), correction=0), 1.0, 1e-12)
    assert (result.mean((2, 3)).abs() > 0.1).any()  # a channel by itself is not centred
    assert_close(standardise(images[2:3]), result[2:3], 0)  # nor is the batch


def test_an_image_of_one_colour_is_zero_and_faint_ones_are_not_blown_up() -> None:
    images = torch.full((2, 1, 4, 4), 0.3)
    images[1, 0, 0, 0] += 1e-6
    images.requires_grad_()
    result = standardise(images)
    assert_close(result[0], 0.0, 1e-4)
    assert result[1].abs().max() < 255 * 4 * 1.1e-6  # the deviation counts as 1 / (255 √pixels) at least
    result.square().sum().backward()
    assert_finite([images.grad])
