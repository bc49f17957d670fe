"""From a preset's name to a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchcaps.errors import InputError
from torchcaps.machine import check_memory
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.config import CapsNetConfig, NetworkConfig
from torchcaps.models.network import Network
from torchcaps.models.presets import get_preset
from torchcaps.models.pretrained import SHIPPED


def create_model(
    preset: str, in_shape: Sequence[int] | None = None, num_classes: int | None = None, **overrides: Any
) -> Network:
    """Build a published network for images of any size.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        in_shape: Images (C, H, W); those of the preset's source if None: (1, 28, 28) for MNIST's.
        num_classes: J; that of the preset's source if None: 10 for MNIST's.
        **overrides: Other values for fields of the preset's :class:`~torchcaps.models.CapsNetConfig` (or CNNConfig) and
            its parts, by their own names: ``num_iterations=2``, ``routing="dynamic"``, ``layers=(…)``. A module as
            ``backbone`` stands in place of the one that the preset describes.

    Returns:
        A :class:`~torchcaps.models.CapsNet`, or a :class:`~torchcaps.models.BaselineCNN` for the CNN presets; its
        weights are drawn from torch's random generator.

    Raises:
        InputError: An unknown preset or field (the nearest name is given), a value that does not fit its field,
            images too small for the convolutions, or a network that does not fit into memory.

    Example:
        >>> from torchcaps import create_model
        >>> model = create_model("sabour2017", in_shape=(3, 32, 32), num_iterations=2)
        >>> model.in_shape, model.num_classes
        ((3, 32, 32), 10)
    """
    backbone = overrides.pop("backbone") if isinstance(overrides.get("backbone"), nn.Module) else None
    chosen = get_preset(preset).with_overrides(overrides)
    in_shape = chosen.in_shape if in_shape is None else in_shape
    num_classes = chosen.num_classes if num_classes is None else num_classes
    if backbone is None:
        return build_model(chosen.model, in_shape, num_classes)
    if not isinstance(chosen.model, CapsNetConfig):
        raise InputError(f"backbone must be left out for {preset}, which has no capsules")
    return CapsNet(chosen.model, in_shape, num_classes, backbone=backbone)


def build_model(config: NetworkConfig, in_shape: Sequence[int], num_classes: int) -> Network:
    """The network that a configuration describes.

    Raises:
        InputError: Images that do not fit it, or parameters that do not fit into memory; none is allocated then.
    """
    try:
        with torch.device("meta"):
            planned = config.build(in_shape, num_classes)
    except InputError:
        raise
    except (RuntimeError, OverflowError, ValueError) as error:  # of torch or a layer: a size beyond all numbers
        raise InputError("the network would have more parameters than can be counted; choose smaller sizes") from error
    if torch.get_default_device().type == "meta":
        return planned
    if torch.get_default_device().type == "cpu":
        sizes = (parameter.numel() * parameter.element_size() for parameter in planned.parameters())
        check_memory(sum(sizes), "the network's parameters")
    return config.build(in_shape, num_classes)


def load_pretrained(source: str | Path = SHIPPED[0], *, device: torch.device | str = "cpu", **download: Any) -> Network:
    """Read a trained network of any kind, in evaluation mode; nothing in its files is executed.

    Args:
        source: A folder that ``save_pretrained`` wrote; the name of a network that comes with torchcaps,
            ``"compact"``; or a repository of the Hugging Face hub such as ``"someone/capsnet-mnist"``.
        device: Where to put the network.
        **download: For the hub, as for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: As for :meth:`torchcaps.CapsNet.from_pretrained`; or torchcaps was installed without its weights.

    Example:
        >>> from torchcaps import create_model, load_pretrained
        >>> create_model("compact").save_pretrained("my-network")
        >>> load_pretrained("my-network").in_shape
        (1, 28, 28)
    """
    return Network.from_pretrained(source, device=device, **download)
