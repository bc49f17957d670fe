"""Build a network from the tree of its parts, or plan it without memory for its parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from torchcaps.errors import InputError, reason_of
from torchcaps.machine import check_memory
from torchcaps.models.shapes import TooSmall, shared_shapes
from torchcaps.parts import Spec, build
from torchcaps.tracing import unset_fake_temporarily

MAX_SEARCHED_SIDE = 512
"""Largest side, pixels, in the search for the smallest images that a network accepts."""


def build_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Any:
    """Build the network of a tree, a :class:`torchcaps.models.Network`.

    Raises:
        InputError: As for :func:`plan_network`; or the parameters do not fit into memory, and none is allocated.
    """
    inferred: list[Any] = []
    planned = plan_network(spec, in_shape, num_classes, inferred)
    device = torch.get_default_device().type
    if device == "meta":
        return planned
    if device == "cpu":
        sizes = (parameter.numel() * parameter.element_size() for parameter in planned.parameters())
        check_memory(sum(sizes), "the network's parameters")
    with shared_shapes(iter(inferred)):
        return build("network", spec, in_shape=in_shape, num_classes=num_classes)


def plan_network(spec: Spec, in_shape: Sequence[int], num_classes: int, inferred: list[Any] | None = None) -> Any:
    """Build the network of a tree, a :class:`torchcaps.models.Network`, without memory for its parameters.

    Other errors of a part, such as one of your own, are raised unchanged.

    Args:
        spec: Tree of the network.
        in_shape: Shape of an image (C, H, W), or of a patch (C, *S).
        num_classes: Number of classes (J).
        inferred: List for the shapes inside the network; see :func:`torchcaps.models.shapes.shared_shapes`.

    Raises:
        InputError: The images are too small (the message gives the smallest size that fits), or the network has more
            parameters than PyTorch can count.
    """

    def planned(shape: Sequence[int]) -> Any:
        # fake mode would take constants on meta for real ones
        with unset_fake_temporarily(), torch.device("meta"), shared_shapes([] if inferred is None else inferred):
            return build("network", spec, in_shape=shape, num_classes=num_classes)

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
