"""Files of format 1, in which weights had other axes and names, brought to the format that is written today.

Format 2 holds every tensor under the name and in the axes of its parameter. In format 1 the weights of transforms had
the axes of the equation, (I, J, D, K) for dense ones, and what a loss learns or counts had a short name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchcaps.nn.transforms import WeightTransform

FORMAT = "format"
"""The entry of a file that says its format."""
CURRENT_FORMAT = 2
SHORT_NAMES = {"classification_loss.scale": "score_scale", "classification_loss.steps": "steps"}
"""The names that ended in these words had these words in format 1."""


def to_current_weights(network: nn.Module, tensors: Mapping[str, Tensor], version: int | None) -> dict[str, Tensor]:
    """Return the tensors of a file as a network of today names and shapes them.

    Args:
        network: The network that the file is for.
        tensors: The file's tensors by their names.
        version: The file's format. None: unknown, as of a file that another program wrote; only tensors whose shape
            fits format 1 alone are changed then.
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
    """Return an optimizer's state for each parameter, by its number in ``groups``, in the axes of the parameters."""
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
    """Return values with the axes of a transform's weight, if they have those of its matrices."""
    axes, own = transform.axes, transform.weight.shape
    if axes is None or values.shape != transform.matrices.shape or (version is None and values.shape == own):
        return values
    return values.permute([axes.index(axis) for axis in range(len(axes))]).contiguous()
