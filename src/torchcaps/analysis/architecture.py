"""A drawing of a network's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.analysis.figures import EDGE, GAP, LINE, MARGIN, MUTED, SMALL, canvas, text_width, write
from torchcaps.analysis.layers import Layer, list_layers
from torchcaps.models import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: a row of the drawing, the longest side of a map, a cell of a grid, the shortest arrow.
WIDEST, LONGEST, CELL, ARROW = 14.5, 1.15, 0.1, 0.45
MOST_CELLS, MOST_VECTORS, MOST_SHEETS = 24, 10, 5
"""Cells of a grid's side, capsules below each other, and types of capsules behind each other, at most."""
MAPS, CAPSULES, NUMBERS = "#cfe3f1", "#f9dcc4", "0.88"


def figure_architecture(model: Network, *, title: str | None = None) -> Figure:
    """A drawing of a network's layers with their sizes: from left to right what comes out of each, arrows between.

    Over an arrow stands what is done, under it how many parameters are learned; the decoder has rows of its own.

    Args:
        model: Of either kind; nothing is computed with it, so that it may be on torch's device ``"meta"``.
        title: Above the figure; by default it says what kind of network it is.
    """
    layers = list_layers(model)
    largest = max(max(layer.shape[-2:]) for layer in layers if len(layer.shape) == 3)
    sizes = [_size(layer.shape, largest) for layer in layers]
    arrows = [_arrow(layer) for layer in layers]
    widths = [
        arrow + max(wide + deep, text_width(_words(layer), SMALL)) + GAP
        for layer, arrow, (wide, _, deep) in zip(layers, arrows, sizes, strict=True)
    ]
    rows: list[list[int]] = []
    for n, layer in enumerate(layers):  # beside each other as far as a row is wide; the decoder's begin one
        begins = n == 0 or layer.in_decoder != layers[n - 1].in_decoder
        if begins or sum(widths[each] for each in rows[-1]) + widths[n] > WIDEST:
            rows.append([])
        rows[-1].append(n)
    drawn = [(high + 0.6 * deep) / 2 for _, high, deep in sizes]
    above = [max(max(drawn[n], len(layers[n].steps) * LINE + GAP) for n in row) for row in rows]
    below = [max(drawn[n] + GAP + 3 * LINE for n in row) for row in rows]
    subtitle = f"{_shape(model.in_shape)} pixels, {model.num_classes} classes, "
    subtitle += f"{sum(layer.parameters for layer in layers):,} parameters"
    y = MARGIN + 0.3 + 2 * LINE
    height = y + sum(above) + sum(below) + LINE * len(rows) + MARGIN
    wide = max(sum(widths[n] for n in row) for row in rows) + 2 * MARGIN
    figure, axes = canvas(wide, height, title or type(model).__name__, subtitle)
    for row, over, under in zip(rows, above, below, strict=True):
        x = MARGIN
        for n in row:
            _draw(axes, layers[n], arrows[n], widths[n] - arrows[n] - GAP, sizes[n], (x, y + over))
            x += widths[n]
        y += over + under + LINE
    return figure


def _draw(
    axes: Axes, layer: Layer, arrow: float, wide: float, size: tuple[float, float, float], at: tuple[float, float]
) -> None:
    """Draw an arrow, ``arrow`` inches long, from ``at`` on, and after it, ``wide`` inches, what comes out."""
    x, middle = at
    if layer.steps:
        head = {"arrowstyle": "->", "color": EDGE, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x + arrow - GAP, middle), (x, middle), arrowprops=head)
        for n, step in enumerate(reversed(layer.steps)):
            write(axes, step, x + arrow / 2, middle - GAP / 2 - n * LINE, size=SMALL, ha="center", va="bottom")
        write(axes, _learned(layer), x + arrow / 2, middle + GAP / 2, size=SMALL, ha="center", color=MUTED)
    width, height, depth = size
    centre = x + arrow + wide / 2
    _draw_output(axes, layer.shape, size, centre - (width + depth) / 2, middle - (height - 0.6 * depth) / 2)
    under = middle + (height + 0.6 * depth) / 2 + GAP
    styles: tuple[dict[str, str], ...] = ({}, {"weight": "bold"}, {"color": MUTED})
    for n, (line, style) in enumerate(zip(_words(layer), styles, strict=True)):
        write(axes, line, centre, under + n * LINE, size=SMALL, ha="center", **style)


def _draw_output(axes: Axes, shape: Sequence[int], size: tuple[float, float, float], x: float, y: float) -> None:
    """Numbers as a bar, capsules as rows of components, maps as a block, types of capsules behind each other."""
    from matplotlib.patches import Polygon

    def polygon(colour: str, *corners: tuple[float, float]) -> None:
        style: Any = {"facecolor": colour, "edgecolor": EDGE, "linewidth": 0.6, "joinstyle": "round"}
        axes.add_patch(Polygon(corners, **style))

    def box(colour: str, left: float, top: float, high: float, rows: int = 1, columns: int = 1) -> None:
        """A rectangle with lines between rows, and between columns, where there are not too many."""
        right, bottom = left + width, top + high
        polygon(colour, (left, top), (right, top), (right, bottom), (left, bottom))
        style: Any = {"colors": EDGE, "linewidth": 0.4}
        if rows <= MOST_CELLS:
            axes.hlines([top + n * high / rows for n in range(1, rows)], left, right, **style)
        if columns <= MOST_CELLS:
            axes.vlines([left + n * width / columns for n in range(1, columns)], top, bottom, **style)

    width, height, depth = size
    right, up = x + width, y - 0.6 * depth
    if len(shape) == 1:
        box(NUMBERS, x, y, height)
    elif len(shape) == 2:
        rows = min(shape[0], MOST_VECTORS)
        box(CAPSULES, x, y, rows * CELL, rows, shape[1])
        if shape[0] > rows:
            write(axes, "⋮", x + width / 2, y + height - CELL / 2, size=SMALL, ha="center", va="center")
    elif len(shape) == 3:
        box(MAPS, x, y, height)
        polygon(MAPS, (x, y), (x + depth, up), (right + depth, up), (right, y))
        polygon(MAPS, (right, y), (right + depth, up), (right + depth, up + height), (right, y + height))
    else:
        for n in range(min(shape[0], MOST_SHEETS) - 1, -1, -1):
            box(CAPSULES, x + n * CELL, y - 0.6 * n * CELL, height, *(shape[1:3] if n == 0 else ()))


def _size(shape: Sequence[int], largest: int) -> tuple[float, float, float]:
    """Width and height of the front, and how far what is behind it reaches to the right; inches.

    The longest side of any map of the network has ``largest`` pixels.
    """
    if len(shape) == 1:
        return 0.16, 0.3 + 0.09 * math.log2(shape[0]), 0.0
    if len(shape) == 2:
        rows = min(shape[0], MOST_VECTORS) + (shape[0] > MOST_VECTORS)  # the last for an ellipsis
        return min(shape[1], MOST_CELLS) * CELL, rows * CELL, 0.0
    height, width = shape[1:3]
    scale = LONGEST / math.sqrt(largest) / math.sqrt(max(height, width))  # areas as the sides of the maps
    depth = CELL * (min(shape[0], MOST_SHEETS) - 1) if len(shape) == 4 else 0.05 + 0.06 * math.log2(shape[0])
    return max(width * scale, CELL), max(height * scale, CELL), depth


def _arrow(layer: Layer) -> float:
    return max(ARROW, text_width([*layer.steps, _learned(layer)], SMALL)) + 2 * GAP if layer.steps else 0.0


def _words(layer: Layer) -> tuple[str, str, str]:
    *places, last = layer.shape
    note = f"{math.prod(places):,} of {last} components" if len(places) in (1, 3) else ""
    return layer.name, _shape(layer.shape), note


def _learned(layer: Layer) -> str:
    return f"{layer.parameters:,} parameters" if layer.parameters else ""


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
