from __future__ import annotations

import torch
from torch import Tensor

from support import assert_close
from torchcaps.datasets.affine import cut_windows, inverse_maps, linear_maps, warp

SHAPES = [(1, 6, 6), (2, 5, 5), (1, 6, 5), (3, 7, 4)]


def images(shape: tuple[int, int, int], n: int = 3) -> Tensor:
    return torch.randint(1, 256, (n, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def turned(pixels: Tensor, degrees: float = 0.0, scale: float = 1.0, shift: tuple[float, float] = (0, 0)) -> Tensor:
    """All images under the same map, at their own size."""
    n = len(pixels)
    linear = linear_maps(torch.full((n,), float(degrees)), torch.full((n, 2), scale))
    maps = inverse_maps(linear, torch.tensor(shift, dtype=torch.float64).expand(n, 2))
    return warp(pixels, maps, (pixels.shape[2], pixels.shape[3]))


def test_the_identity_and_quarter_turns_are_rot90_and_counterclockwise() -> None:
    for shape in SHAPES:
        assert_close(turned(images(shape)), images(shape), 1e-9)
    for size in (6, 5):
        for quarters in (-1, 1, 2, 3, 4):
            pixels = images((2, size, size))
            assert_close(turned(pixels, 90 * quarters), torch.rot90(pixels, quarters, (2, 3)), 1e-9)


def test_a_whole_shift_moves_pixels_right_and_down_and_zeros_in() -> None:
    pixels = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    assert_close(turned(pixels, shift=(1, 0)), [[[[0, 1, 2], [0, 4, 5], [0, 7, 8]]]], 1e-9)
    assert_close(turned(pixels, shift=(0, -1)), [[[[4, 5, 6], [7, 8, 9], [0, 0, 0]]]], 1e-9)
    assert turned(pixels, shift=(3, 0)).max() < 1e-9
    assert turned(pixels, shift=(-500, 7000)).count_nonzero() == 0


def test_half_a_pixel_is_the_mean_of_two_and_a_quarter_is_weighted() -> None:
    pixels = torch.tensor([[[[8, 100, 4]]]], dtype=torch.uint8)
    assert_close(turned(pixels, shift=(0.5, 0)), [[[[4, 54, 52]]]], 1e-9)
    assert_close(turned(pixels, shift=(-0.25, 0)), [[[[31, 76, 3]]]], 1e-9)
    assert_close(turned(pixels, shift=(0, 0.5)), [[[[4, 50, 2]]]], 1e-9)  # zeros blend in from above
    four = torch.tensor([[[[0, 16], [32, 64]]]], dtype=torch.uint8)
    assert_close(turned(four, shift=(0.5, 0.5))[0, 0, 1, 1], 28, 1e-9)  # the mean of all four


def test_maps_by_hand() -> None:
    linear = linear_maps(torch.tensor([90.0, 0.0]), torch.tensor([[2.0, 3.0], [1.0, 1.0]]), torch.tensor([0.5, 0.25]))
    right, down = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    # scaled to (2, 0) and turned counterclockwise, which is up
    assert_close(linear[0] @ right, [0, -2], 1e-12)
    # scaled to (0, 3), sheared to (1.5, 3), turned: to the right becomes up, down becomes to the right
    assert_close(linear[0] @ down, [3, -1.5], 1e-12)
    assert_close(linear[1] @ down, [0.25, 1], 1e-12)
    assert linear_maps(torch.zeros(1), torch.ones(1, 2)).tolist() == [[[1, 0], [0, 1]]]


def test_what_lies_outside_is_zero_or_the_nearest_pixel_of_the_edge() -> None:
    image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    still = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    assert_close(warp(image, still, (4, 4)), [[[[0, 0, 0, 0], [0, 1, 2, 0], [0, 3, 4, 0], [0, 0, 0, 0]]]], 1e-6)
    edge = [[[[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]]]
    assert_close(warp(image, still, (4, 4), "edge"), edge, 1e-6)
    corner = torch.zeros(1, 2).long()
    assert cut_windows(image, corner, (2, 2), 1).tolist() == [[[[0, 0], [0, 1]]]]
    assert cut_windows(image, corner, (2, 2), 1, "edge").tolist() == [[[[1, 1], [1, 1]]]]


def test_each_image_has_its_own_window() -> None:
    pixels = torch.arange(2 * 2 * 9, dtype=torch.uint8).view(2, 2, 3, 3)
    seen = cut_windows(pixels[[1, 0, 1]], torch.tensor([[0, 1], [1, 1], [1, 0]]), (2, 2))
    assert torch.equal(seen, torch.stack([pixels[1, :, :2, 1:], pixels[0, :, 1:, 1:], pixels[1, :, 1:, :2]]))
    one = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=torch.uint8)
    for corner, wanted in (((0, 1), [[0, 0, 0], [1, 2, 3]]), ((1, 2), [[2, 3, 0], [5, 6, 0]])):
        assert cut_windows(one, torch.tensor([corner]), (2, 3), 1)[0, 0].tolist() == wanted
