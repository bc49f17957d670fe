"""Build a network on the meta device, without memory for its parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import nn

from torchcaps.errors import InputError, reason_of
from torchcaps.models.shapes import TooSmall
from torchcaps.parts import Spec, build
from torchcaps.tracing import unset_fake_temporarily

MAX_SEARCHED_SIDE = 512
"""Largest side, pixels, in the search for the smallest images that a network accepts."""


class SizedNetwork(nn.Module):
    """Base class of :class:`torchcaps.models.Network`, for the files that the class itself uses."""

    in_shape: tuple[int, ...]
    """Shape of an image (C, H, W); in a network for pixels (C, *S), of a patch of one to three axes."""
    num_classes: int
    """Number of classes (J)."""


def plan(spec: Spec, in_shape: Sequence[int], num_classes: int) -> SizedNetwork:
    """Build the network of a tree on the meta device; see :func:`torchcaps.models.plan_network`."""

    def planned(shape: Sequence[int]) -> SizedNetwork:
        with unset_fake_temporarily(), torch.device("meta"):  # fake mode would take constants on meta for real ones
            network: SizedNetwork = build("network", spec, in_shape=shape, num_classes=num_classes)
        return network

    def at_least(side: int) -> tuple[int, ...]:
        return in_shape[0], *(max(size, side) for size in in_shape[1:])

    def fits(side: int) -> bool:
        try:
            planned(at_least(side))
        except TooSmall:
            return False
        return True

    try:
        return planned(in_shape)
    except TooSmall as error:
        larger = range(min(in_shape[1:]) + 1, MAX_SEARCHED_SIDE + 1)
        try:
            smallest = bisect_left(larger, True, key=fits)
        except Exception:  # larger images raise another error, so the size is not the reason
            raise InputError(str(error)) from error
        if smallest == len(larger):
            raise InputError(str(error)) from error
        sizes = ["×".join(map(str, shape[1:])) for shape in (in_shape, at_least(larger[smallest]))]
        raise InputError(
            f"images of {sizes[0]} are too small for the network's convolutions; the smallest size that fits is "
            f"{sizes[1]}"
        ) from error
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower():  # PyTorch's word for a size that is too large
            raise
        raise InputError(
            f"the network would have more parameters than PyTorch can count; choose smaller sizes ({reason_of(error)})"
        ) from error
