"""Answers for images larger than a network's input, from overlapping windows."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.ranges import Count, ShareBelowOne
from torchcaps.words import counted

WindowWeights = Literal["mean", "gaussian"]
"""Weights of overlapping windows: all equal, or largest in the middle of a window."""
SIGMA = 0.125
"""Standard deviation of the Gaussian weights, in sides of the window."""
MIN_WEIGHT = 1e-3
"""Smallest Gaussian weight, at the corners of a window."""


@checked
def sliding_windows(
    function: Callable[[Tensor], Tensor],
    images: Float[Tensor, "B C *S"],
    window: Sequence[int],
    *,
    overlap: ShareBelowOne = 0.25,
    weights: WindowWeights = "mean",
    batch_size: Count = 4,
) -> Float[Tensor, "B J *S"]:
    """Apply a function to windows of images, and average its results where windows overlap.

    Neighbouring windows are ⌊side · (1 − overlap)⌋ pixels apart. The last one of a row ends at the edge of the image.
    An axis that is shorter than the window is taken whole.

    Args:
        function: Function of windows (b, C, *window) that returns numbers (b, J, *window), such as logits.
        images: Images of any size.
        window: Sides of a window, pixels, one for each axis of the image.
        overlap: Share of a side that neighbouring windows have in common.
        weights: ``"mean"``, or ``"gaussian"``: exp(−d² / 2σ²) of the distance d from the middle, with σ an eighth of
            the side, at least 0.001.
        batch_size: Windows of a call.

    Source: MONAI's ``sliding_window_inference`` has the same windows and weights.
    """
    sizes = images.shape[2:]
    if len(window) != len(sizes) or min(window) < 1:
        raise InputError(f"window must be {counted(len(sizes), 'side')} of at least 1 pixel, got {tuple(window)}")
    sides = [min(side, size) for side, size in zip(window, sizes, strict=True)]
    starts = [_starts(size, side, overlap) for size, side in zip(sizes, sides, strict=True)]
    corners = list(itertools.product(range(len(images)), *starts))
    places = [(image, tuple(map(slice, first, map(operator.add, first, sides)))) for image, *first in corners]
    weight = _weights(sides, weights).to(images)
    total, count = None, images.new_zeros(len(images), 1, *sizes)
    for first in range(0, len(places), batch_size):
        chosen = places[first : first + batch_size]
        results = function(torch.stack([images[image][:, *where] for image, where in chosen]))
        if total is None:
            total = results.new_zeros(len(images), results.shape[1], *sizes)
        for result, (image, where) in zip(results, chosen, strict=True):
            total[image][:, *where] += result * weight
            count[image][:, *where] += weight
    assert total is not None  # images and windows are at least 1
    return total / count


def _starts(size: int, side: int, overlap: float) -> list[int]:
    """Return the first pixel of each window along an axis."""
    step = max(int(side * (1 - overlap)), 1)
    return [min(step * n, size - side) for n in range(math.ceil((size - side) / step) + 1)]


def _weights(sides: Sequence[int], weights: WindowWeights) -> Tensor:
    result = torch.ones(*sides)
    if weights == "mean":
        return result
    for axis, side in enumerate(sides):
        distance = torch.arange(side) - (side - 1) / 2
        bell = torch.exp(-(distance**2) / (2 * (SIGMA * side) ** 2))
        result = result * bell.view([-1 if other == axis else 1 for other in range(len(sides))])
    return result.clamp_min(max(float(result[result > 0].min()), MIN_WEIGHT))
