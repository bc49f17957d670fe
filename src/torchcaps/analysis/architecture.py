"""A drawing of a network's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchcaps.analysis.figures import GAP, LINE, MARGIN, MUTED, SMALL, Sheet, text_width
from torchcaps.analysis.layers import Layer, list_layers
from torchcaps.models import Network

if TYPE_CHECKING:
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
    total = sum(layer.parameters for layer in layers)
    title = title or type(model).__name__
    subtitle = f"{_shape(model.in_shape)} pixels, {model.num_classes} classes, {total:,} parameters"
    largest = max(max(layer.shape[-2:]) for layer in layers if len(layer.shape) == 3)
    blocks = [_Block(layer, largest) for layer in layers]
    rows = _rows(blocks)
    heights = [max(block.height for block in row) for row in rows]
    top = MARGIN + 0.3 + 2 * LINE
    wide = max(sum(block.width for block in row) + GAP * len(row) for row in rows)
    sheet = Sheet(wide + 2 * MARGIN, top + sum(heights) + LINE * len(rows) + MARGIN, title, subtitle)
    y = top
    for row, height in zip(rows, heights, strict=True):
        x, middle = MARGIN, y + max(block.above for block in row)
        for block in row:
            block.draw(sheet, x, middle)
            x += block.width + GAP
        y += height + LINE
    return sheet.figure


class _Block:
    """A layer in the drawing: an arrow with what is done, and after it what comes out.

    The longest side of any map of the network has ``largest`` pixels.
    """

    def __init__(self, layer: Layer, largest: int) -> None:
        self.layer, self.largest = layer, largest
        *places, last = layer.shape
        note = f"{math.prod(places):,} of {last} components" if len(places) in (1, 3) else ""
        self.under = [layer.name, _shape(layer.shape), note]
        self.learned = f"{layer.parameters:,} parameters" if layer.parameters else ""
        self.arrow = max(ARROW, text_width([*layer.steps, self.learned], SMALL)) + 2 * GAP if layer.steps else 0.0
        self.size, self.depth = self._measure()
        self.shown = max(self.size[0] + self.depth, text_width(self.under, SMALL))
        self.width = self.arrow + self.shown
        drawn = (self.size[1] + 0.6 * self.depth) / 2
        self.above = max(drawn, len(layer.steps) * LINE + GAP)
        self.below = max(drawn + GAP + len(self.under) * LINE, LINE + GAP)
        self.height = self.above + self.below

    def draw(self, sheet: Sheet, x: float, middle: float) -> None:
        """Draw it with its left end at ``x``, the arrow at the height ``middle``; inches."""
        centre = x + self.arrow / 2
        if self.layer.steps:
            sheet.arrow((x, middle), (x + self.arrow - GAP, middle))
        for n, step in enumerate(reversed(self.layer.steps)):
            sheet.text(step, centre, middle - GAP / 2 - n * LINE, size=SMALL, ha="center", va="bottom")
        sheet.text(self.learned, centre, middle + GAP / 2, size=SMALL, ha="center", color=MUTED)
        left = x + self.arrow + (self.shown - self.size[0] - self.depth) / 2
        top = middle - (self.size[1] - 0.6 * self.depth) / 2  # of the front
        self._draw_output(sheet, left, top)
        under = middle + (self.size[1] + 0.6 * self.depth) / 2 + GAP
        styles: tuple[dict[str, str], ...] = ({}, {"weight": "bold"}, {"color": MUTED})
        for n, (line, style) in enumerate(zip(self.under, styles, strict=True)):
            sheet.text(line, x + self.arrow + self.shown / 2, under + n * LINE, size=SMALL, ha="center", **style)

    def _measure(self) -> tuple[tuple[float, float], float]:
        """Width and height of the front, and how far what is behind it reaches to the right; inches."""
        shape = self.layer.shape
        if len(shape) == 1:
            return (0.16, 0.3 + 0.09 * math.log2(shape[0])), 0.0
        if len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS) + (shape[0] > MOST_VECTORS)  # the last for an ellipsis
            return (min(shape[1], MOST_CELLS) * CELL, rows * CELL), 0.0
        height, width = shape[1:3]
        scale = LONGEST / math.sqrt(self.largest) / math.sqrt(max(height, width))  # areas as the sides of the maps
        front = (max(width * scale, CELL), max(height * scale, CELL))
        if len(shape) == 4:
            return front, CELL * (min(shape[0], MOST_SHEETS) - 1)
        return front, 0.05 + 0.06 * math.log2(shape[0])

    def _draw_output(self, sheet: Sheet, left: float, top: float) -> None:
        """Numbers as a bar, capsules as rows of components, maps as a block, types of capsules behind each other."""
        shape, (width, height), depth = self.layer.shape, self.size, self.depth
        if len(shape) == 1:
            _box(sheet, left, top, self.size, NUMBERS)
        elif len(shape) == 2:
            rows = min(shape[0], MOST_VECTORS)
            _box(sheet, left, top, (width, rows * CELL), CAPSULES, rows, shape[1])
            if shape[0] > rows:
                sheet.text("⋮", left + width / 2, top + height - CELL / 2, size=SMALL, ha="center", va="center")
        elif len(shape) == 3:
            right, bottom, up = left + width, top + height, top - 0.6 * depth
            _box(sheet, left, top, self.size, MAPS)
            sheet.polygon([(left, top), (left + depth, up), (right + depth, up), (right, top)], MAPS)
            sheet.polygon([(right, top), (right + depth, up), (right + depth, up + height), (right, bottom)], MAPS)
        else:
            for n in range(min(shape[0], MOST_SHEETS) - 1, 0, -1):
                _box(sheet, left + n * CELL, top - 0.6 * n * CELL, self.size, CAPSULES)
            _box(sheet, left, top, self.size, CAPSULES, *shape[1:3])


def _box(
    sheet: Sheet, left: float, top: float, size: tuple[float, float], colour: str, rows: int = 1, columns: int = 1
) -> None:
    """A rectangle with lines between rows, and between columns, where there are not too many."""
    right, bottom = left + size[0], top + size[1]
    sheet.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], colour)
    for n in range(1, rows if rows <= MOST_CELLS else 1):
        y = top + n * size[1] / rows
        sheet.line((left, y), (right, y))
    for n in range(1, columns if columns <= MOST_CELLS else 1):
        x = left + n * size[0] / columns
        sheet.line((x, top), (x, bottom))


def _rows(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Blocks beside each other as far as a row is wide; the decoder's begin a row."""
    rows: list[list[_Block]] = []
    for n, block in enumerate(blocks):
        begins = n == 0 or block.layer.in_decoder != blocks[n - 1].layer.in_decoder
        if begins or sum(each.width + GAP for each in rows[-1]) + block.width > WIDEST:
            rows.append([])
        rows[-1].append(block)
    return rows


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
