"""Keep the network of a preset small on large images."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Final

from torchcaps.models.presets.registry import Preset
from torchcaps.parts import Tree, flat

MAX_SIDE_WITHOUT_FIT = 64
"""Largest side of an image, pixels, for which a preset with ``grows`` keeps its strides along this side."""
STRIDES: Final = {"stem_strides": "stem_strides_across", "stack_strides": "stack_strides_across"}
"""Strides that depend on the size of the images: along both sides or down → across."""
FITTED: Final = ("stem_strides", "stack_strides", "stem_strides_across", "stack_strides_across", "decoder_channels")
"""Options whose default depends on the size of the images."""


def fit_to_images(preset: Preset, tree: Tree, in_shape: tuple[int, ...], fixed: Container[str]) -> Tree:
    """Return option values that keep a network small for images with a side above ``MAX_SIDE_WITHOUT_FIT``.

    - Each time a side doubles, the smallest stride along this side doubles too (the first of equal ones), so that the
      maps keep their size.
    - The decoder ends in two convolutions, and in one more for each doubling of the longer side.
    - Options named in ``fixed``, or whose value is not the preset's, do not change.
    """
    if not preset.grows or len(in_shape) != 3:  # a network of planes refuses other shapes itself
        return {}
    down, across = (max(0, math.ceil(math.log2(side / MAX_SIDE_WITHOUT_FIT))) for side in in_shape[1:])
    if down == across == 0:
        return {}
    values, defaults = flat(tree), flat(preset.network)
    free = {name for name in FITTED if name in defaults and name not in fixed and values.get(name) == defaults[name]}
    fitted: Tree = {}
    for strides, strides_across in STRIDES.items():
        if strides in free and defaults[strides]:
            if down:
                fitted[strides] = _doubled(defaults[strides], down)
            if strides_across in free and across != down:
                fitted[strides_across] = _doubled(defaults[strides], across)
    if "decoder_channels" in free:
        fitted["decoder_channels"] = (64,) * (max(down, across) + 1) + (32, 16)
    return fitted


def _doubled(strides: Sequence[int], times: int) -> tuple[int, ...]:
    """Return strides after doubling the smallest one a number of times."""
    larger = list(strides)
    for _ in range(times):
        larger[larger.index(min(larger))] *= 2
    return tuple(larger)
