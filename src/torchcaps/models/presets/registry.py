"""Presets: named networks with the recipes of their sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torchcaps.checks import checked
from torchcaps.errors import InputError, shown
from torchcaps.parts import Registry, Tree, complete, find, override

RECOMMENDED: Final = ("first", "compact", "compact-shared")
"""Presets to start with, listed before the published networks."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named network with the recipe of its source."""

    name: str
    """Name that users type."""
    description: str
    """Peculiarities of the network, in a sentence or two."""
    source: str = "unpublished"
    """Publication of the network."""
    network: Tree
    """Complete tree of the network's parts."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the source's training; other settings have the recipe's defaults."""
    data: str = "mnist"
    """Data set of the source."""
    in_shape: tuple[int, ...] = (1, 28, 28)
    """Shape of an image (C, H, W), or of a patch (C, *S), at the network, after a crop by the recipe."""
    num_classes: int = 10
    """Number of classes."""
    published: str = "–"
    """Result that the source reports."""
    grows: bool = False
    """The strides grow with the images; see :func:`fit_to_images`."""
    base: str | None = None
    """Preset that this one is a variant of."""

    @property
    def has_capsules(self) -> bool:
        """True if classes are capsules."""
        return bool(getattr(find("network", self.network["name"]), "has_capsules", False))


_PRESETS: Registry[Preset] = Registry("preset")


@checked
def register_preset(
    name: str,
    description: str,
    *,
    base: str | None = None,
    network: Mapping[str, Any] = {},
    recipe: Mapping[str, Any] = {},
    **others: Any,
) -> Preset:
    """Register a preset, so that it is listed, built and tested.

    Args:
        name: Name that users type.
        description: Peculiarities of the network, in a sentence or two.
        base: Preset that supplies all other values, except the published result.
        network: Options of the network and its parts by their names. Without a base also ``"name"``, the kind of
            network: ``"capsules"`` (default), ``"cnn"``, ``"pooled"`` or one of your own.
        recipe: Settings of the recipe that differ from its defaults, by their names.
        **others: Fields of :class:`Preset`: ``source``, ``data``, ``in_shape``, ``num_classes``, ``published`` and
            ``grows``.

    Raises:
        InputError: The name is taken, the base or an option is unknown (the message suggests the nearest name), or a
            value does not fit its option.
    """
    changes = dict(network)
    if base is None:
        tree = complete("network", changes.pop("name", "capsules"))
        start = Preset(name=name, description=description, network=tree)
    else:
        start = dataclasses.replace(get_preset(base), published=Preset.published)
    preset = dataclasses.replace(
        start,
        name=name,
        description=description,
        network=override("network", start.network, changes, f"option of {name}"),
        recipe={**start.recipe, **recipe},
        base=base,
        **others,
    )
    _PRESETS.add(name, preset)
    return preset


def list_presets() -> list[str]:
    """Return the names of all presets: `RECOMMENDED`, then the rest in the order of registration."""
    return [*RECOMMENDED, *(name for name in _PRESETS if name not in RECOMMENDED)]


def get_preset(name: str) -> Preset:
    """Return the preset of a name.

    Raises:
        InputError: The name is unknown (the message suggests the nearest name), or not a string.
    """
    if not isinstance(name, str):
        raise InputError(f'preset must be a name such as "sabour2017", got {shown(name)}')
    return _PRESETS[name]
