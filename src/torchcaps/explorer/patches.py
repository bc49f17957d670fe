"""Compute the patch of the image that a cell of the routing maps sees (its receptive field)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from torchcaps.models import CapsNet, Network
from torchcaps.nn import ChannelNorm, ConvCapsules, PrimaryCapsules

WINDOWS = nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d
POINTWISE = nn.ReLU | nn.Identity | nn.Dropout | nn.Dropout2d | nn.BatchNorm2d | ChannelNorm
"""Layers that do not mix positions."""


def find_patches(network: Network) -> dict[str, list[int]] | None:
    """Return the receptive fields of the cells of the class capsules' inputs.

    Cell n along an axis sees ``size`` pixels, the first of which is ``first + n·stride``; pixels beyond the edge are
    padding. A layer with kernel k, stride s and padding p changes first, stride and size to first - p·stride, stride·s
    and size + (k - 1)·stride.

    Returns:
        ``first``, ``stride`` and ``size``, each along the height and the width; None if the capsules have no grid
        positions, or if a layer of unknown kind may mix positions in another way.
    """
    if not isinstance(network, CapsNet) or network.flow[-2].grid is None:
        return None
    first, stride, size = np.zeros(2, int), np.ones(2, int), np.ones(2, int)
    places = np.array(network.in_shape[1:])
    for window in _windows(network):
        if window is None:
            return None
        kernel, step, padding = (np.broadcast_to(value, 2) for value in window)
        first, size, stride = first - padding * stride, size + (kernel - 1) * stride, stride * step
        places = (places + 2 * padding - kernel) // step + 1
    if tuple(places) != network.flow[-2].grid[1:]:  # the layers are not in sequence
        return None
    return {"first": first.tolist(), "stride": stride.tolist(), "size": size.tolist()}


def _windows(network: CapsNet) -> Iterator[tuple[Any, Any, Any] | None]:
    """Yield kernel, stride and padding of each layer before the class capsules; None for an unknown layer."""
    for part in network.backbone.modules():
        if isinstance(part, WINDOWS):
            plain = getattr(part, "dilation", 1) in (1, (1, 1)) and not isinstance(part.padding, str)
            yield (part.kernel_size, part.stride, part.padding) if plain else None
        elif not any(part.children()) and not isinstance(part, POINTWISE):
            yield None
    primary: nn.Module = network.primary_capsules  # may be a user's module
    known = isinstance(primary, PrimaryCapsules)
    yield (primary.primary_kernel, primary.primary_stride, primary.primary_padding) if known else None
    for layer in network.layers[:-1]:
        known = isinstance(layer, ConvCapsules) and layer.layer_padding != "same"
        yield (layer.layer_kernel, layer.layer_stride, layer.layer_padding) if known else None
