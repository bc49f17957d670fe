"""From a preset's name, or from a folder, to a network."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchcaps.errors import InputError
from torchcaps.machine import check_memory
from torchcaps.models.images import TooSmall
from torchcaps.models.network import Network, image_shape
from torchcaps.models.presets import get_preset
from torchcaps.models.pretrained import SHIPPED
from torchcaps.parts import Spec, build, override
from torchcaps.ranges import PIXELS


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


def build_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """The network that a tree describes.

    Raises:
        InputError: Images that do not fit it (the smallest size that fits is given), or parameters that do not fit into
            memory; none is allocated then.
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
    """The same without memory for its parameters, on the meta device."""
    try:
        with torch.device("meta"):
            network: Network = build("network", spec, in_shape=in_shape, num_classes=num_classes)
        return network
    except TooSmall as error:
        raise InputError(_smallest_size_that_fits(spec, in_shape, num_classes, error)) from error
    except InputError:
        raise
    except (RuntimeError, OverflowError, ValueError) as error:  # of torch or a layer: a size beyond all numbers
        raise InputError("the network would have more parameters than can be counted; choose smaller sizes") from error


def _smallest_size_that_fits(spec: Spec, in_shape: Sequence[int], num_classes: int, error: TooSmall) -> str:
    """Why images do not fit a network, and which squares would; if some fit, larger ones do too."""
    channels, height, width = image_shape(in_shape)

    def fits(side: int) -> bool:
        try:
            with torch.device("meta"):
                build("network", spec, in_shape=(channels, side, side), num_classes=num_classes)
        except TooSmall:
            return False
        except (RuntimeError, OverflowError, ValueError):
            return True  # large enough, at any rate
        return True

    too_small = min(height, width)
    if too_small > PIXELS.most:
        return "the network would have more numbers than can be counted; choose smaller images"
    sides = range(too_small + 1, 2 * max(too_small, int(PIXELS.most)) + 1)
    smallest = bisect_left(sides, True, key=fits)
    if smallest == len(sides):
        if isinstance(error.__cause__, InputError):  # of a part, which says it itself
            return str(error)
        return f"images of {height}×{width} do not fit the network, and larger ones neither: {error}"
    return (
        f"images of {height}×{width} are too small for the network's convolutions; the smallest size that fits is "
        f"{sides[smallest]}×{sides[smallest]}"
    )


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
