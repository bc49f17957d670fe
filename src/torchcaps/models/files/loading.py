"""Read a network from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from torchcaps.errors import InputError, reason_of
from torchcaps.files import read_json
from torchcaps.models.files.hub import find_pretrained
from torchcaps.models.files.weights import CONFIG, WEIGHTS, load_weights, read_weights
from torchcaps.models.planning import plan_network
from torchcaps.nn.layers import current_tree
from torchcaps.parts import complete

NetworkT = TypeVar("NetworkT", bound=nn.Module)


def load(source: str | Path, kind: type[NetworkT], **download: Any) -> NetworkT:
    """Load a network of a class; see :meth:`torchcaps.CapsNet.from_pretrained` for arguments and errors."""
    folder = find_pretrained(source, **download)
    described = read_json(folder / CONFIG, "configuration")
    in_shape, num_classes = described.pop("in_shape", None), described.pop("num_classes", None)
    try:
        network = plan_network(complete("network", current_tree(described)), in_shape, num_classes)
    except Exception as error:  # a configuration from elsewhere may hold anything
        raise InputError(f"configuration {folder / CONFIG} does not describe a network: {reason_of(error)}") from error
    if not isinstance(network, kind):
        raise InputError(f"{source} holds a {type(network).__name__}, not a {kind.__name__}")
    load_weights(network, read_weights(folder / WEIGHTS), folder / WEIGHTS)
    return network
