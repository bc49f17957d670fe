"""Draw the classes of the pixels of a scene as a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from torchcaps.analysis.figures import COLOURS, MUTED, Caption, Cell, tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 3.0
"""Longer side of a map, inches."""
_EMPTY, _RIGHT, _WRONG = (1.0, 1.0, 1.0), (0.85, 0.85, 0.85), (0.757, 0.153, 0.176)


def figure_map(
    labels: Int[np.ndarray, "N"],
    predictions: Int[np.ndarray, "N"],
    places: Int[np.ndarray, "N 2"],
    class_names: Sequence[str],
    title: str,
) -> Figure:
    """Draw the classes of pixels, the answers, and wrong answers (red) at their places; other pixels are white.

    Args:
        labels: Class of each pixel.
        predictions: Predicted class of each pixel.
        places: Row and column of each pixel.
        class_names: Name of each class.
        title: Title of the figure.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex, to_rgb

    palette = np.array([to_rgb(each) for each in COLOURS])
    if len(class_names) > len(palette):
        palette = colormaps["tab20"](np.arange(20))[:, :3]
    colours = palette[np.arange(len(class_names)) % len(palette)]
    size = places.max(0) + 1
    maps = np.full((3, *size, 3), _EMPTY)
    right = np.where((labels == predictions)[:, None], _RIGHT, _WRONG)
    for drawn, values in zip(maps, (colours[labels], colours[predictions], right), strict=True):
        drawn[tuple(places.T)] = values
    legend = [Caption(f"■ {name}", to_hex(colour)) for name, colour in zip(class_names, colours, strict=True)]
    rows: list[list[Cell]] = [[Caption(each, MUTED) for each in ("classes", "answers", "wrong answers")]]
    rows.append([*maps.transpose(0, 3, 1, 2), legend])
    return tiles(rows, title=title, side=SIDE)
