"""Sliding windows: whole images from their parts, as MONAI's."""

import pytest
import torch

from pixel_support import TinyPixels
from support import assert_close, assert_raises
from torchcaps.errors import InputError
from torchcaps.ops.sliding import sliding_windows

CASES = [((17, 23), (8, 8)), ((9, 30), (16, 8)), ((7, 9, 11), (4, 5, 6)), ((31,), (8,))]


@pytest.mark.parametrize(("size", "window"), CASES)
@pytest.mark.parametrize("weights", ["mean", "gaussian"])
def test_a_function_of_single_pixels_has_the_same_result(size, window, weights) -> None:
    images, seen = torch.rand(2, 3, *size), []

    def double(part):
        seen.append(part.shape[2:])
        return part[:, :2] * 2

    for batch_size in (1, 5):
        found = sliding_windows(double, images, window, weights=weights, batch_size=batch_size)
        assert_close(found, images[:, :2] * 2, tol=1e-5)
    assert set(seen) == {torch.Size(map(min, size, window))}


@pytest.mark.parametrize(("size", "window"), CASES[::2])
@pytest.mark.parametrize("weights", ["mean", "gaussian"])
@pytest.mark.parametrize("overlap", [0.25, 0.5])
def test_windows_equal_those_of_monai(size, window, weights, overlap) -> None:
    inferers = pytest.importorskip("monai.inferers")
    images = torch.rand(2, 3, *size)

    def look(part):  # depends on the place in the window
        return part[:, :2] * torch.arange(part.shape[-1]) + part.mean(tuple(range(1, part.ndim)), keepdim=True)

    mode = "constant" if weights == "mean" else "gaussian"
    theirs = inferers.sliding_window_inference(images, window, 4, look, overlap=overlap, mode=mode)
    ours = sliding_windows(look, images, window, overlap=overlap, weights=weights)
    assert_close(ours, theirs, tol=1e-5)


def test_a_network_goes_into_an_inferer_of_monai() -> None:
    inferers = pytest.importorskip("monai.inferers")
    network, images = TinyPixels((1, 24, 20), 3).eval(), torch.rand(2, 1, 40, 31)
    with torch.no_grad():
        theirs = inferers.SlidingWindowInferer((24, 20), overlap=0.25)(images, network.scores_only())
        assert_close(network._task.infer(network, images).scores, theirs, tol=1e-5)


def test_a_window_of_other_axes_is_refused() -> None:
    images = torch.rand(1, 1, 8, 8)
    assert_raises(InputError, sliding_windows, torch.sin, images, (4,), say="must be 2 sides")
