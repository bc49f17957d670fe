from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import assert_close
from torchcaps.datasets.affine import FARTHEST, inverse_maps, linear_maps, sample

SHAPES = [(1, 6, 6), (2, 5, 5), (1, 6, 5), (3, 7, 4)]


def images(shape: tuple[int, int, int], n: int = 3) -> Tensor:
    return torch.randint(1, 256, (n, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def turned(pixels: Tensor, degrees: float = 0.0, scale: float = 1.0, shift: tuple[float, float] = (0, 0)) -> Tensor:
    """All images under the same map, at their own size."""
    n = len(pixels)
    linear = linear_maps(torch.full((n,), float(degrees)), torch.full((n, 2), scale))
    maps = inverse_maps(linear, torch.tensor(shift, dtype=torch.float64).expand(n, 2))
    return sample(pixels, maps, (pixels.shape[2], pixels.shape[3]))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_identity_returns_the_images_exactly(shape: tuple[int, int, int]) -> None:
    pixels = images(shape)
    assert torch.equal(turned(pixels), pixels.float())


@pytest.mark.parametrize("quarters", [-1, 1, 2, 3, 4])
@pytest.mark.parametrize("size", [6, 5])
def test_quarter_turns_are_rot90_exactly_and_counterclockwise(quarters: int, size: int) -> None:
    pixels = images((2, size, size))
    assert torch.equal(turned(pixels, 90 * quarters), torch.rot90(pixels, quarters, (2, 3)).float())


def test_a_whole_shift_moves_pixels_right_and_down_and_zeros_in() -> None:
    pixels = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    assert turned(pixels, shift=(1, 0)).tolist() == [[[[0, 1, 2], [0, 4, 5], [0, 7, 8]]]]
    assert turned(pixels, shift=(0, -1)).tolist() == [[[[4, 5, 6], [7, 8, 9], [0, 0, 0]]]]
    assert turned(pixels, shift=(3, 0)).count_nonzero() == 0
    assert turned(pixels, shift=(-500, 7000)).count_nonzero() == 0


def test_half_a_pixel_is_the_mean_of_two_and_a_quarter_is_weighted() -> None:
    pixels = torch.tensor([[[[8, 100, 4]]]], dtype=torch.uint8)
    assert turned(pixels, shift=(0.5, 0)).tolist() == [[[[4, 54, 52]]]]
    assert turned(pixels, shift=(-0.25, 0)).tolist() == [[[[31, 76, 3]]]]
    assert turned(pixels, shift=(0, 0.5)).tolist() == [[[[4, 50, 2]]]]  # zeros blend in from above
    four = torch.tensor([[[[0, 16], [32, 64]]]], dtype=torch.uint8)
    assert turned(four, shift=(0.5, 0.5))[0, 0, 1, 1] == 28  # the mean of all four


def test_enlarged_twice_by_hand() -> None:
    pixels = torch.tensor([[[[0, 64], [64, 0]]]], dtype=torch.uint8)
    # the middles of 4 pixels lie at ±0.5 and ±1.5 of them, hence at ±0.25 and ±0.75 of the source's
    maps = inverse_maps(linear_maps(torch.zeros(1), torch.full((1, 2), 2.0)), torch.zeros(1, 2))
    large = sample(pixels, maps, (4, 4))[0, 0]
    assert large[1, 1] == 64 * 2 * 0.25 * 0.75
    assert large[1, 2] == 64 * (0.75**2 + 0.25**2)
    assert large[0, 0] == 64 * 0  # a quarter outside, and the pixel itself is 0
    assert large[0, 3] == 64 * 0.75**2
    assert torch.equal(large, large.flip((0, 1)))


def test_maps_by_hand() -> None:
    linear = linear_maps(torch.tensor([90.0, 0.0]), torch.tensor([[2.0, 3.0], [1.0, 1.0]]), torch.tensor([0.5, 0.25]))
    right, down = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    # scaled to (2, 0) and turned counterclockwise, which is up
    assert_close(linear[0] @ right, [0, -2], 1e-12)
    # scaled to (0, 3), sheared to (1.5, 3), turned: to the right becomes up, down becomes to the right
    assert_close(linear[0] @ down, [3, -1.5], 1e-12)
    assert_close(linear[1] @ down, [0.25, 1], 1e-12)
    assert linear_maps(torch.zeros(1), torch.ones(1, 2)).tolist() == [[[1, 0], [0, 1]]]


@settings(max_examples=20, deadline=None)
@given(st.floats(-180, 180), st.floats(0.3, 3), st.floats(0.3, 3), st.floats(-1, 1), st.floats(-9, 9))
def test_the_inverse_leads_back(degrees: float, wide: float, high: float, shear: float, shift: float) -> None:
    linear = linear_maps(torch.tensor([degrees]), torch.tensor([[wide, high]]), torch.tensor([shear]))
    moved = torch.tensor([[shift, -2 * shift]], dtype=torch.float64)
    back = inverse_maps(linear, moved)[0]
    place = torch.tensor([3.0, -4.0], dtype=torch.float64)
    there = linear[0] @ place + moved[0]
    assert_close(back[:, :2] @ there + back[:, 2], place, 1e-9)


@pytest.mark.parametrize(("shape", "size"), [((1, 9, 9), (9, 9)), ((2, 8, 5), (6, 11)), ((1, 28, 28), (40, 40))])
def test_it_agrees_with_pytorchs_own_interpolation(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    pixels = images(shape, 5)
    random = torch.Generator().manual_seed(1)
    linear = linear_maps(torch.rand(5, generator=random) * 360, 0.6 + torch.rand(5, 2, generator=random))
    maps = inverse_maps(linear, 4 * torch.rand(5, 2, generator=random) - 2)
    got = sample(pixels, maps, size)
    # the same map between coordinates of -1..1
    into, out = (torch.tensor([width, height]).double() / 2 for height, width in (shape[1:], size))
    relative = torch.cat([maps[:, :, :2] * out / into[:, None], maps[:, :, 2:] / into[:, None]], 2)
    grid = F.affine_grid(relative, [5, shape[0], *size], align_corners=False)
    wanted = F.grid_sample(pixels.double(), grid, align_corners=False)
    # read at 256ths of a pixel: off by half a step at most each way, and pixels differ by at most 255
    assert (got - wanted).abs().max() <= 255 * 2 * 0.51 / 256
    assert (got - wanted).abs().mean() < 0.2
    other = sample(pixels, maps + 0.1, size)
    assert (other - wanted).abs().max() > 255 * 2 * 0.51 / 256  # which a tenth of a pixel breaks


def test_values_are_whole_65536ths_within_0_and_255() -> None:
    pixels = images((1, 20, 20), 10)
    random = torch.Generator().manual_seed(2)
    linear = linear_maps(torch.rand(10, generator=random) * 360, 0.6 + torch.rand(10, 2, generator=random))
    values = sample(pixels, inverse_maps(linear, torch.rand(10, 2, generator=random)), (20, 20)).double()
    assert torch.equal(values * 2**16, (values * 2**16).round())
    assert values.min() >= 0
    assert values.max() <= 255
    full = torch.full((10, 1, 40, 40), 255, dtype=torch.uint8)
    assert (sample(full, inverse_maps(linear, torch.zeros(10, 2)), (10, 10)) == 255).all()


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    pixels = images((2, 6, 6), 4)
    linear = linear_maps(torch.tensor([10.0, 20.0, 30.0, 40.0]), torch.ones(4, 2))
    maps = inverse_maps(linear, torch.full((4, 2), 0.3))
    together = sample(pixels, maps, (6, 6))
    for i in range(4):
        assert torch.equal(sample(pixels[i : i + 1], maps[i : i + 1], (6, 6))[0], together[i])


def test_a_small_turn_keeps_the_ink() -> None:
    pixels = torch.zeros(1, 1, 21, 21, dtype=torch.uint8)
    pixels[..., 7:14, 9:12] = 200
    ink = float(pixels.sum(dtype=torch.float64))
    for degrees in (5, 37, 60):
        assert float(turned(pixels, degrees).sum()) == pytest.approx(ink, rel=0.03)
    assert float(turned(pixels, scale=1.5).sum()) == pytest.approx(ink * 1.5**2, rel=0.06)
    assert math.isclose(float(turned(pixels, shift=(0.3, -1.7)).sum()), ink, rel_tol=1e-3)


def test_places_as_far_away_as_can_be_are_outside() -> None:
    pixels = torch.full((8, 1, 28, 28), 255, dtype=torch.uint8)
    tiny = 14 * math.sqrt(2) / FARTHEST
    linear = linear_maps(torch.arange(8) * 45.0, torch.full((8, 2), tiny))
    shown = sample(pixels, inverse_maps(linear, torch.full((8, 2), 0.5)), (28, 28))  # on the middle of a pixel
    assert (shown.flatten(1).count_nonzero(1) == 1).all()
    assert (shown[:, 0, 14, 14] == 255).all()


@pytest.mark.gpu
def test_the_same_values_on_the_gpu() -> None:
    pixels = images((1, 28, 28), 50)
    random = torch.Generator().manual_seed(3)
    linear = linear_maps(torch.rand(50, generator=random) * 360, 0.6 + torch.rand(50, 2, generator=random))
    maps = inverse_maps(linear, torch.rand(50, 2, generator=random))
    assert torch.equal(sample(pixels.cuda(), maps, (40, 40)).cpu(), sample(pixels, maps, (40, 40)))
