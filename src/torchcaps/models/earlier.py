"""Networks that version 0.1 of torchcaps wrote: how their files are read by this one.

It described a network in one flat list of fields, without the name of its kind, and kept the weights of its two capsule
layers under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = {
    "stem.": "backbone.stem.",
    "conv.": "backbone.conv.",
    "conv_norm.": "backbone.norm.",
    "class_capsules.weight": "layers.0.transform.weight",
    "class_capsules.bias": "layers.0.routing.bias",
    "class_capsules.prior": "layers.0.routing.prior",
}
"""Names of weights of a capsule network, before and now."""


def with_name(description: Mapping[str, Any]) -> dict[str, Any]:
    """A network's fields with the name of its kind, which those of version 0.1 have not."""
    if "name" in description:
        return dict(description)
    is_cnn = "channels" in description  # a field that capsule networks did not have
    return {"name": "cnn" if is_cnn else "capsules", **present_fields(description)}


def present_fields(description: Mapping[str, Any]) -> dict[str, Any]:
    """A network's fields without those of a decoder that it has not, which one flat list had all the same."""
    absent = ("decoder_hidden", "decoder_init", "decoder_mask") if description.get("decoder") is False else ()
    return {name: value for name, value in description.items() if name not in absent}


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have now."""
    if not any(name.startswith("class_capsules.") for name in tensors):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        before = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        found[_PREFIXES.get(before, "") + name.removeprefix(before)] = tensor
    return found
