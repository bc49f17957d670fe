"""Networks built from the tree of their parts, and planned without memory for their parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchcaps.errors import InputError, reason_of
from torchcaps.machine import check_memory
from torchcaps.models.images import TooSmall
from torchcaps.parts import Spec, build
from torchcaps.tracing import unset_fake_temporarily

if TYPE_CHECKING:
    from torchcaps.models.network import Network

LARGEST_SIDE = 512
"""Pixels up to which the smallest size of images is looked for that a network takes."""


def build_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """The network that a tree describes.

    Raises:
        InputError: As for :func:`plan_network`, or parameters that do not fit into memory; none is allocated then.
    """
    planned = plan_network(spec, in_shape, num_classes)
    device = torch.get_default_device().type
    if device == "meta":
        return planned
    if device == "cpu":
        sizes = (parameter.numel() * parameter.element_size() for parameter in planned.parameters())
        check_memory(sum(sizes), "the network's parameters")
    network: Network = build("network", spec, in_shape=in_shape, num_classes=num_classes)
    return network


def plan_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """The same without memory for its parameters, on the meta device.

    Raises:
        InputError: Images that do not fit it (the smallest size that fits is given), or more parameters than can be
            counted. Any other error of a part, such as one of your own, is raised as it is.
    """

    def planned(shape: Sequence[int]) -> Network:
        with unset_fake_temporarily(), torch.device("meta"):  # torch's fake mode mistakes constants on meta for real
            network: Network = build("network", spec, in_shape=shape, num_classes=num_classes)
        return network

    def at_least(side: int) -> tuple[int, int, int]:
        return in_shape[0], max(in_shape[1], side), max(in_shape[2], side)

    def fits(side: int) -> bool:
        try:
            planned(at_least(side))
        except TooSmall:
            return False
        return True

    try:
        return planned(in_shape)
    except TooSmall as error:
        larger = range(min(in_shape[1:]) + 1, LARGEST_SIDE + 1)
        try:
            place = bisect_left(larger, True, key=fits)
        except Exception:  # larger images meet another error, so that size is not the reason
            raise InputError(str(error)) from error
        if place == len(larger):
            raise InputError(str(error)) from error
        sizes = ["×".join(map(str, shape[1:])) for shape in (in_shape, at_least(larger[place]))]
        raise InputError(
            f"images of {sizes[0]} are too small for the network's convolutions; the smallest size that fits is "
            f"{sizes[1]}"
        ) from error
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower():  # torch's word for too large a size
            raise
        raise InputError(
            f"the network would have more parameters than can be counted; choose smaller sizes ({reason_of(error)})"
        ) from error
