"""How figures look, and how they are saved: sizes, colours, images in rows and columns.

Figures are made with matplotlib's objects, never with pyplot, so that neither its backend nor its global state is
touched; matplotlib is imported by the functions that draw.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from torchcaps.errors import InputError, visible
from torchcaps.files import atomic_path, check_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Points.
TITLE, TEXT, SMALL, TINY = 11.0, 9.0, 8.0, 6.5
# Inches: width and height of a tile, gap between tiles, margin around a sheet, one line of TEXT.
TILE, GAP, MARGIN, LINE = 0.72, 0.07, 0.2, 0.17

MUTED, EDGE = "0.45", "0.35"
WRONG = "#c1272d"
# Okabe and Ito's colours: told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

FORMATS = ("png", "pdf", "svg")
DPI = 160

_CHARACTER = 0.58  # mean width of a character of the default font, in font sizes


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file, whole or not at all.

    Args:
        figure: What a ``figure_...`` function returned.
        path: Its suffix gives the format: .png, .pdf or .svg; .png is added where there is none. Missing folders are
            made.

    Returns:
        The path written to.

    Raises:
        InputError: Another suffix, a folder, or a place that cannot be written to.
    """
    path = figure_file(path)
    kind = path.suffix[1:].lower()
    # drawn in memory first: where the disk is full, matplotlib's PDF writer fails on its own half-written stream
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=DPI)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(drawn.getvalue())
    except OSError as error:
        raise InputError(f"the figure {path} cannot be written: {error.strerror or error}") from error
    return path


def figure_file(path: str | Path) -> Path:
    """The file that a figure is saved to, with .png where there is no suffix; errors as for :func:`save_figure`."""
    is_folder = str(path).endswith("/")  # which a Path does not keep
    path = Path(path)
    check_path(str(path))
    if is_folder or path.name in ("", "..") or path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; name a file in it for the figure")
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    if path.suffix[1:].lower() not in FORMATS:
        raise InputError(f"{str(path)!r} is no figure: it must end in .{', .'.join(FORMATS)}")
    return path


def drawable(names: Sequence[str]) -> list[str]:
    """Names as they are drawn: control characters, which no font has, are written out."""
    return [visible(name) for name in names]


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of that size in inches that lays out its axes by itself."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        # the name of a run is no formula, even with a $, and may hold what no font has
        figure.suptitle(visible(title), fontsize=TITLE, parse_math=False)
    return figure


def draw_legend(figure: Figure, *entries: Any, columns: int) -> None:
    """A legend below all axes, of the lines and labels ``entries``, or of all that have labels."""
    legend = figure.legend(*entries, fontsize=SMALL, frameon=False, loc="outside lower center", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def style_axes(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Title, labels, and a light grid behind curves."""
    axes.set_title(title, fontsize=TITLE, loc="left")
    axes.set_xlabel(xlabel, fontsize=TEXT)
    axes.set_ylabel(ylabel, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)


def use_whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only: epochs, iterations."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


class Sheet:
    """A figure of images and words, placed in inches from its upper left corner; wide enough for its title."""

    def __init__(self, width: float, height: float, title: str = "", subtitle: str = "") -> None:
        from matplotlib.figure import Figure

        words = max(text_width([title], TITLE), text_width([subtitle], SMALL))
        self.width, self.height = max(width, words + 2 * MARGIN), height
        self.figure = Figure(figsize=(self.width, height))
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.set(xlim=(0, self.width), ylim=(height, 0))
        if title:
            self.text(title, MARGIN, MARGIN, size=TITLE)
        if subtitle:
            self.text(subtitle, MARGIN, MARGIN + 0.25, size=SMALL, color=MUTED)

    def image(self, image: Float[np.ndarray, "C H W"], x: float, y: float, size: tuple[float, float]) -> None:
        """Draw pixels of 0..1, the upper left corner at (x, y), ``size`` (width, height) inches large."""
        self.show(displayable(image), x, y, size)

    def show(self, values: np.ndarray, x: float, y: float, size: tuple[float, float], **colours: Any) -> AxesImage:
        """Draw numbers as ``colours``, options of matplotlib's ``imshow``, say; see :meth:`image`."""
        extent = (x, x + size[0], y + size[1], y)
        shown = self._axes.imshow(values, extent=extent, interpolation="nearest", aspect="auto", **colours)
        self._axes.set(xlim=(0, self.width), ylim=(self.height, 0))  # an image moves the limits
        return shown

    def text(self, text: str, x: float, y: float, *, size: float = TEXT, **style: Any) -> None:
        """Write ``text`` with its upper left corner (or as ``ha``, ``va`` say) at (x, y)."""
        # names of classes are no formulas, even with a dollar sign in them
        self._axes.text(x, y, text, fontsize=size, parse_math=False, **({"ha": "left", "va": "top"} | style))

    def polygon(self, corners: Sequence[tuple[float, float]], colour: str) -> None:
        """Fill a polygon whose ``corners`` are (x, y), with a thin edge."""
        from matplotlib.patches import Polygon

        self._axes.add_patch(Polygon(corners, facecolor=colour, edgecolor=EDGE, linewidth=0.6, joinstyle="round"))

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: str = EDGE) -> None:
        """A thin line from one place (x, y) to another."""
        self._axes.plot(*zip(start, end, strict=True), color=colour, linewidth=0.4)

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A thin arrow from one place (x, y) to another."""
        from matplotlib.patches import FancyArrowPatch

        self._axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="->", mutation_scale=8, color=EDGE, linewidth=0.9, shrinkA=0, shrinkB=0
            )
        )

    def axes(self, x: float, y: float, size: tuple[float, float]) -> Axes:
        """Axes of their own, e.g. for a colour bar."""
        width, height = size
        return self.figure.add_axes(
            (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        )


class Caption(NamedTuple):
    """A word under a tile, and its colour if it is not that of text."""

    text: str
    colour: str | None = None


def draw_tiles(
    images: Mapping[str, Float[np.ndarray, "N C H W"]],
    captions: Mapping[str, Sequence[Caption]],
    columns: int,
    title: str | None = None,
) -> Figure:
    """Images side by side, ``columns`` at a time, with words under each.

    Args:
        images: One kind of image above the other, each with the heading on its left.
        captions: One line of words under the other, each with the heading on its left.
        columns: Images side by side; the others go below.
        title: Above the figure.

    Raises:
        InputError: ``columns`` is below one.
    """
    if columns < 1:
        raise InputError(f"columns must be at least 1, got {columns}")
    count, _, height, width = next(iter(images.values())).shape
    columns = min(columns, count)
    tile = tile_size(height, width)
    pitch = column_width(tile, [caption.text for line in captions.values() for caption in line]) + GAP
    headings = [heading for heading in (*images, *captions) if heading]
    left = MARGIN + (text_width(headings) + GAP if headings else 0)
    top = MARGIN + (0.35 if title else 0)
    band = len(images) * (tile[1] + GAP) + len(captions) * LINE
    bands = -(-count // columns)
    bottom = top + bands * (band + 2 * GAP) - 2 * GAP
    sheet = Sheet(left + columns * pitch - GAP + MARGIN, bottom + MARGIN, title or "")
    for start in range(0, count, columns):
        y = top + start // columns * (band + 2 * GAP)
        shown = range(start, min(start + columns, count))
        for heading, kind in images.items():
            sheet.text(heading, left - GAP, y + tile[1] / 2, ha="right", va="center", color=MUTED)
            for n in shown:
                sheet.image(kind[n], left + (n - start + 0.5) * pitch - (GAP + tile[0]) / 2, y, tile)
            y += tile[1] + GAP
        for heading, line in captions.items():
            sheet.text(heading, left - GAP, y, ha="right", color=MUTED)
            for n in shown:
                x = left + (n - start + 0.5) * pitch - GAP / 2
                sheet.text(shorten(line[n].text, pitch - GAP), x, y, ha="center", color=line[n].colour)
            y += LINE
    return sheet.figure


def displayable(image: Float[np.ndarray, "C H W"]) -> Float[np.ndarray, "H W 3"]:
    """Pixels of 0..1 as RGB: three channels are colour, any other number is shown as their mean, in grey."""
    clipped = np.clip(np.asarray(image, dtype=np.float64), 0, 1)
    rgb = clipped if len(clipped) == 3 else np.repeat(clipped.mean(0, keepdims=True), 3, axis=0)
    return rgb.transpose(1, 2, 0)


def tile_size(height: int, width: int) -> tuple[float, float]:
    """Width and height in inches of an image of ``height``×``width`` pixels: the longer side is one tile."""
    longer = max(height, width)
    return TILE * width / longer, TILE * height / longer


def column_width(tile: tuple[float, float], texts: Sequence[str]) -> float:
    """Inches for a tile and the words over or under it; very long words will be shortened."""
    return max(tile[0], TILE, min(text_width(texts), 2 * TILE))


def shorten(text: str, width: float, size: float = TEXT) -> str:
    """``text`` cut with an ellipsis to about ``width`` inches at that font size."""
    fits = max(int(width * 72 / (size * _CHARACTER) + 1e-6), 2)
    return text if len(text) <= fits else text[: fits - 1] + "…"


def text_width(texts: Sequence[str], size: float = TEXT) -> float:
    """About how wide the longest of the texts is, in inches."""
    return max((len(text) for text in texts), default=0) * size * _CHARACTER / 72
