"""Build a network from the tree of its parts, or plan it without memory for its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchcaps.machine import check_memory
from torchcaps.models.network import Network
from torchcaps.models.planning import plan
from torchcaps.models.shapes import shape_plan
from torchcaps.parts import Spec, build


def build_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """Build the network of a tree.

    Raises:
        InputError: As for :func:`plan_network`; or the parameters do not fit into memory, and none is allocated.
    """
    with shape_plan() as shapes:
        planned = plan_network(spec, in_shape, num_classes)
        device = torch.get_default_device().type
        if device == "meta":
            return planned
        if device == "cpu":
            sizes = (parameter.numel() * parameter.element_size() for parameter in planned.parameters())
            check_memory(sum(sizes), "the network's parameters")
        shapes.rewind()
        network: Network = build("network", spec, in_shape=in_shape, num_classes=num_classes)
    return network


def plan_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """Build the network of a tree on the meta device, without memory for its parameters.

    Other errors of a part, such as one of your own, are raised unchanged.

    Raises:
        InputError: The images are too small (the message gives the smallest size that fits), or the network has more
            parameters than PyTorch can count.
    """
    network: Any = plan(spec, in_shape, num_classes)
    return network
