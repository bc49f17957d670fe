"""From a preset's name, or from a folder, to a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchcaps.models.network import Network, build_network
from torchcaps.models.presets import get_preset
from torchcaps.parts import override


def create_model(
    preset: str, in_shape: Sequence[int] | None = None, num_classes: int | None = None, **overrides: Any
) -> Network:
    """Build a published network for images of any size.

    Args:
        preset: A name from :func:`torchcaps.list_presets`.
        in_shape: Images (C, H, W); those of the preset's source if None: (1, 28, 28) for MNIST's.
        num_classes: J; that of the preset's source if None: 10 for MNIST's.
        **overrides: Other values for options of the network and its parts, by their own names: ``num_iterations=2``,
            ``routing="dynamic"``, ``layers=(…)``. A module as ``backbone`` stands in place of the preset's.

    Returns:
        A :class:`~torchcaps.CapsNet`, or a :class:`~torchcaps.models.BaselineCNN` for the CNN presets; its weights are
        drawn from torch's random generator.

    Raises:
        InputError: An unknown preset or option (the nearest name is given), a value that does not fit its option,
            images too small for the convolutions, or a network that does not fit into memory.

    Example:
        >>> from torchcaps import create_model
        >>> model = create_model("sabour2017", in_shape=(3, 32, 32), num_iterations=2)
        >>> model.in_shape, model.num_classes
        ((3, 32, 32), 10)
    """
    chosen = get_preset(preset)
    tree = override("network", chosen.network, overrides, f"option of {preset}")
    return build_network(
        tree,
        chosen.in_shape if in_shape is None else in_shape,
        chosen.num_classes if num_classes is None else num_classes,
    )


def load_pretrained(source: str | Path = "compact", *, device: torch.device | str = "cpu", **download: Any) -> Network:
    """Read a trained network of any kind, in evaluation mode; nothing in its files is executed.

    Args:
        source: A folder that ``save_pretrained`` wrote; the name of a network that comes with torchcaps,
            ``"compact"``; or a repository of the Hugging Face hub such as ``"someone/capsnet-mnist"``.
        device: Where to put the network.
        **download: For the hub, as for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: As for :meth:`torchcaps.CapsNet.from_pretrained`.

    Example:
        >>> from torchcaps import create_model, load_pretrained
        >>> create_model("compact").save_pretrained("my-network")
        >>> load_pretrained("my-network").in_shape
        (1, 28, 28)
    """
    return Network.from_pretrained(source, device=device, **download)
