"""The patch of the image that a cell of the routing maps sees, by the windows of the layers before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from torchcaps.models import CapsNet, Network
from torchcaps.nn import ChannelNorm, ConvCapsules, PrimaryCapsules

WINDOWS = nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d
POINTWISE = nn.ReLU | nn.Identity | nn.Dropout | nn.Dropout2d | nn.BatchNorm2d | ChannelNorm
"""Layers that look at each place by itself."""


def find_patches(network: Network) -> dict[str, list[int]] | None:
    """The pixels that the cells of the class capsules' inputs see: ``first``, ``stride`` and ``size``, down and across.

    Cell n along an axis sees ``size`` pixels from pixel ``first + n·stride`` on; those beyond the edge are padding.
    A layer of kernel k, stride s and padding p makes of these first - p·stride, stride·s and size + (k - 1)·stride.

    Returns:
        None where the capsules stand on no map, or where a layer is not known to look through one window.
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
    if tuple(places) != network.flow[-2].grid[1:]:  # the layers do not follow one another
        return None
    return {"first": first.tolist(), "stride": stride.tolist(), "size": size.tolist()}


def _windows(network: CapsNet) -> Iterator[tuple[Any, Any, Any] | None]:
    """Kernel, stride and padding of each layer before the class capsules; None for one of another kind."""
    for part in network.backbone.modules():
        if isinstance(part, WINDOWS):
            plain = getattr(part, "dilation", 1) in (1, (1, 1)) and not isinstance(part.padding, str)
            yield (part.kernel_size, part.stride, part.padding) if plain else None
        elif not any(part.children()) and not isinstance(part, POINTWISE):
            yield None
    primary: nn.Module = network.primary_capsules  # one's own, perhaps
    known = isinstance(primary, PrimaryCapsules)
    yield (primary.primary_kernel, primary.primary_stride, primary.primary_padding) if known else None
    for layer in network.layers[:-1]:
        known = isinstance(layer, ConvCapsules)
        yield (layer.layer_kernel, layer.layer_stride, layer.layer_padding) if known else None
