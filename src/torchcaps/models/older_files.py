"""Convert files of format 1 to today's format 2.

Format 2 stores every tensor with the name and the axes of its parameter. In format 1, the weights of transforms had the
axes of the equation, (I, J, D, K) for dense ones, and the parameters and counters of losses had short names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchcaps.nn.transforms import WeightTransform

FORMAT = "format"
"""Metadata entry of a file with its format."""
CURRENT_FORMAT = 2
SHORT_NAMES = {"classification_loss.scale": "score_scale", "classification_loss.steps": "steps"}
"""Ending of a name today → the ending in format 1."""


def to_current_weights(network: nn.Module, tensors: Mapping[str, Tensor], version: int | None) -> dict[str, Tensor]:
    """Return the tensors of a file with the names and axes of the network's parameters.

    Args:
        network: The network that the file is for.
        tensors: The file's tensors by their names.
        version: The file's format; None: unknown, because another program wrote it. Then only tensors whose shape fits
            format 1 and not format 2 are changed.
    """
    found = dict(tensors)
    if version == CURRENT_FORMAT:
        return found
    for name in network.state_dict():
        for now, before in SHORT_NAMES.items():
            old_name = name.removesuffix(now) + before
            if name.endswith(now) and name not in found and old_name in found:
                found[name] = found.pop(old_name)
    for name, module in network.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        if isinstance(module, WeightTransform) and weight in found:
            found[weight] = _to_axes_of(module, found[weight], version)
    return found


def to_current_moments(
    network: nn.Module, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Mapping[str, Any]], version: int | None
) -> dict[int, dict[str, Any]]:
    """Return an optimizer's state in the axes of the parameters, by the number of the parameter in ``groups``."""
    transforms = {id(each.weight): each for each in network.modules() if isinstance(each, WeightTransform)}
    parameters = [parameter for group in groups for parameter in group["params"]]
    found = {number: dict(moments) for number, moments in state.items()}
    for number, moments in found.items():
        transform = transforms.get(id(parameters[number])) if number < len(parameters) else None
        for name, value in moments.items():
            if transform is not None and isinstance(value, Tensor) and version != CURRENT_FORMAT:
                moments[name] = _to_axes_of(transform, value, version)
    return found


def _to_axes_of(transform: WeightTransform, values: Tensor, version: int | None) -> Tensor:
    """Return values in the axes of a transform's weight; permute them if they have the axes of its matrices."""
    axes, own = transform.axes, transform.weight.shape
    if axes is None or values.shape != transform.matrices.shape or (version is None and values.shape == own):
        return values
    return values.permute([axes.index(axis) for axis in range(len(axes))]).contiguous()
