"""Style and layout of figures, and saving them: sizes, colours, images and text in rows and columns.

Figures are made with matplotlib's objects, never with pyplot, so neither its backend nor its global state is changed.
Only the functions that draw import matplotlib.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float

from torchcaps.errors import InputError, WrongType, visible
from torchcaps.files import as_path, atomic_path, check_folder_of, check_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Font sizes, points.
TITLE, TEXT, SMALL, TINY = 11.0, 9.0, 8.0, 6.5
# Lengths, inches: side of a tile, gap between tiles, margin around all tiles, height of a line of size TEXT.
TILE, GAP, MARGIN, LINE = 0.72, 0.07, 0.2, 0.17

MUTED, EDGE = "0.45", "0.35"
WRONG = "#c1272d"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

FORMATS = ("png", "pdf", "svg")
DPI = 160
BAND = 10  # images in a row
MAX_IMAGES, MAX_PIXELS = 5_000, 65_535
"""Largest number of images in a figure, because more take hundreds of megabytes; and largest side of a file, pixels,
because viewers do not open larger ones."""

_CHARACTER = 0.58  # mean width of a character of the default font, in font sizes


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file atomically.

    Args:
        figure: A figure, such as a ``figure_...`` function returns.
        path: The suffix selects the format: .png, .pdf or .svg; default .png. Missing folders are created.

    Returns:
        The path of the file.

    Raises:
        InputError: Another suffix, a folder, or a path that cannot be written.
    """
    if not hasattr(figure, "savefig"):
        raise WrongType(f"figure must be a figure of matplotlib, got {type(figure).__name__}")
    path = figure_file(path)
    # drawn in memory first, because matplotlib's PDF writer raises an unclear error on a full disk
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=DPI)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(drawn.getvalue())
    except OSError as error:
        raise InputError(f"the figure {path} cannot be written: {error.strerror or error}") from error
    return path


def figure_file(path: str | Path) -> Path:
    """Return the path of a figure, with .png if it has no suffix; errors as for :func:`save_figure`."""
    is_folder = str(path).endswith("/")  # a Path drops the slash
    path = as_path("path", path)
    check_path(str(path))
    if is_folder or path.name in ("", "..") or path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; name a file in it for the figure")
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    check_folder_of(path, "file")
    if path.suffix[1:].lower() not in FORMATS:
        raise InputError(f"{str(path)!r} is no figure: it must end in .{', .'.join(FORMATS)}")
    return path


def save_figures(figures: Mapping[str, Figure], path: str | Path) -> list[Path]:
    """Write several figures; each key is appended to the name of ``path``. No file is overwritten.

    If a file exists, ``-2``, ``-3`` and so on is appended to the name. Errors as for :func:`save_figure`.
    """
    path = figure_file(path)
    names = itertools.chain([path.stem], (f"{path.stem}-{n}" for n in itertools.count(2)))
    places = ([path.with_stem(name + suffix) for suffix in figures] for name in names)
    free = next(each for each in places if not any(map(os.path.lexists, each)))
    return [save_figure(figure, place) for figure, place in zip(figures.values(), free, strict=True)]


# ---- figures with axes


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """Return an empty figure with automatic layout. Sizes are in inches; a long title makes the figure wider."""
    from matplotlib.figure import Figure

    lines = [visible(line) for line in (title or "").split("\n")]
    figure = Figure(figsize=(max(width, text_width(lines, TITLE) + 2 * MARGIN), height), layout="constrained")
    if title:  # parse_math=False, because the name of a run may contain a $
        figure.suptitle("\n".join(lines), fontsize=TITLE, parse_math=False)
    return figure


def find_axes(ax: Axes | None, width: float, height: float, title: str = "") -> tuple[Figure, Axes]:
    """Return axes and their figure. Axes of the caller are used; without them, those of a new figure are made."""
    if ax is None:
        figure = new_figure(width, height, title)
        return figure, figure.subplots()
    if title:
        ax.set_title("\n".join(map(visible, title.split("\n"))), fontsize=TITLE, parse_math=False)
    return cast("Figure", ax.figure), ax


def draw_legend(figure: Figure, *, columns: int, ax: Axes | None = None) -> None:
    """Draw one legend below all axes of a figure, or inside the caller's axes; equal labels appear once."""
    if ax is not None:
        for text in ax.legend(fontsize=SMALL, frameon=False).get_texts():
            text.set_parse_math(False)
        return
    labelled = [zip(*axes.get_legend_handles_labels()[::-1], strict=True) for axes in figure.axes]
    entries = dict(itertools.chain(*labelled))
    style: Any = {"fontsize": SMALL, "frameon": False, "loc": "outside lower center", "ncols": columns}
    for text in figure.legend(list(entries.values()), list(entries), **style).get_texts():
        text.set_parse_math(False)


def style_axes(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set title and labels, and draw a light grid behind curves."""
    axes.set_title(title, fontsize=TITLE, loc="left")
    axes.set_xlabel(xlabel, fontsize=TEXT)
    axes.set_ylabel(ylabel, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)


# ---- images and words in rows and columns


class Caption(NamedTuple):
    """A line of text; None: the colour of text."""

    text: str
    colour: str | None = None
    bold: bool = False


Cell = np.ndarray | str | Caption | Sequence[Caption] | None
"""A cell of :func:`tiles`: an image (C, H, W) of pixels 0..1, a map (H, W) of numbers, or lines of text."""


def tiles(
    rows: Sequence[Sequence[Cell]],
    *,
    title: str = "",
    subtitle: str = "",
    side: float = TILE,
    room: float = 0.0,
    **colours: Any,
) -> Figure:
    """Draw images and text in rows and columns.

    Text in a column of images is centred and cut to the width of two tiles. Text in other columns is right-aligned, in
    the last column left-aligned. Neighbouring columns of images are equally wide. A row or column without cells is a
    gap.

    Args:
        rows: Cells of each row; a shorter row is filled with empty cells.
        title: Title above the figure.
        subtitle: Smaller line below the title.
        side: Longer side of an image, inches.
        room: Free space on the right, inches.
        **colours: Options of matplotlib's ``imshow`` for maps of numbers.

    Raises:
        InputError: More than 5,000 images, or a figure of more than 65,535 pixels in height or width.
    """
    columns = list(itertools.zip_longest(*rows))
    widths: list[float] = []
    has_images = [any(isinstance(cell, np.ndarray) for cell in column) for column in columns]
    for pictured, run in itertools.groupby(zip(has_images, columns, strict=True), key=lambda each: each[0]):
        words = [text_width([line.text for cell in column for line in _lines(cell)]) for _, column in run]
        alike = max(side, min(max(words), 2 * side))
        widths += [alike if pictured else each or MARGIN for each in words]
    heights = [max([_height(cell, side) for cell in row], default=0) or 2 * GAP for row in rows]
    top = MARGIN + (0.35 if title else 0) + (2 * LINE if subtitle else 0)
    lefts = list(itertools.accumulate((width + GAP for width in widths), initial=MARGIN))
    tops = list(itertools.accumulate(heights, initial=top))
    drawn = sum(isinstance(cell, np.ndarray) for row in rows for cell in row)
    if drawn > MAX_IMAGES or max(lefts[-1], tops[-1]) * DPI > MAX_PIXELS:
        raise InputError(
            f"a figure holds at most {MAX_IMAGES:,} images on {MAX_PIXELS:,} pixels a side, got {drawn:,} images on "
            f"{lefts[-1] * DPI:,.0f}×{tops[-1] * DPI:,.0f}; draw fewer"
        )
    figure, axes = canvas(lefts[-1] - GAP + room + MARGIN, tops[-1] + MARGIN, title, subtitle)
    limits: Any = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    for row, y, height in zip(rows, tops, heights, strict=False):
        for n, (cell, x, width) in enumerate(zip(row, lefts, widths, strict=False)):
            if isinstance(cell, np.ndarray):
                wide, high = tile_size(cell, side)
                left = x + (width - wide) / 2
                extent: Any = (left, left + wide, y + high, y)
                shown, style = (cell, colours) if cell.ndim == 2 else (displayable(cell), {})
                axes.imshow(shown, extent=extent, interpolation="nearest", aspect="auto", **style)
            elif has_images[n]:
                _write_lines(axes, cell, x + width / 2, y, "center", width)
            elif n == len(columns) - 1:
                _write_lines(axes, cell, x + GAP, y, "left")
            else:  # beside the middle of the images
                _write_lines(axes, cell, x + width, y + max(height - GAP - LINE * len(_lines(cell)), 0) / 2, "right")
    axes.set(**limits)  # imshow changed them
    return figure


def in_bands(rows: Mapping[str, Sequence[Cell]]) -> list[list[Cell]]:
    """Break rows with headings into bands of ten cells, one below the other, for :func:`tiles`."""
    bands: list[list[Cell]] = []
    for start in range(0, len(next(iter(rows.values()))), BAND):
        bands += [[]] if bands else []
        bands += [[Caption(heading, MUTED), *cells[start : start + BAND]] for heading, cells in rows.items()]
    return bands


def canvas(width: float, height: float, title: str = "", subtitle: str = "") -> tuple[Figure, Axes]:
    """Return a figure that is wide enough for its title, and axes over all of it.

    Coordinates are inches from the upper left corner.
    """
    from matplotlib.figure import Figure

    width = max(width, max(text_width([title], TITLE), text_width([subtitle], SMALL)) + 2 * MARGIN)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    write(axes, title, MARGIN, MARGIN, size=TITLE)
    write(axes, subtitle, MARGIN, MARGIN + 0.25, size=SMALL, color=MUTED)
    return figure, axes


def write(axes: Axes, text: str, x: float, y: float, **style: Any) -> None:
    """Write ``text`` at (x, y), its upper left corner, or as ``ha`` and ``va`` align it."""
    # parse_math=False, because names of classes may contain a $
    options: Any = {"size": TEXT, "ha": "left", "va": "top", "parse_math": False} | style
    if text:
        axes.text(x, y, visible(text), **options)


def _write_lines(axes: Axes, cell: Cell, x: float, y: float, align: str, width: float | None = None) -> None:
    """Write the lines of a cell below each other, cut to ``width`` unless that is None."""
    for number, line in enumerate(_lines(cell)):
        text = line.text if width is None else shorten(line.text, width)
        weight = "bold" if line.bold else "normal"
        write(axes, text, x, y + number * LINE, ha=align, color=line.colour, weight=weight)


def _lines(cell: Cell) -> Sequence[Caption]:
    if cell is None or isinstance(cell, np.ndarray):
        return []
    if isinstance(cell, str):
        return [Caption(cell)]
    return [cell] if isinstance(cell, Caption) else cell


def _height(cell: Cell, side: float) -> float:
    return tile_size(cell, side)[1] + GAP if isinstance(cell, np.ndarray) else LINE * len(_lines(cell))


def displayable(image: Float[np.ndarray, "C H W"]) -> Float[np.ndarray, "H W 3"]:
    """Convert pixels of 0..1 to RGB: three channels are colour, others become their mean, in grey."""
    clipped = np.clip(np.asarray(image, dtype=np.float64), 0, 1)
    rgb = clipped if len(clipped) == 3 else np.repeat(clipped.mean(0, keepdims=True), 3, axis=0)
    return rgb.transpose(1, 2, 0)


def tile_size(image: Float[np.ndarray, "... H W"], side: float = TILE) -> tuple[float, float]:
    """Return width and height in inches of an image whose longer side is ``side``."""
    height, width = image.shape[-2:]
    return side * width / max(height, width), side * height / max(height, width)


def shorten(text: str, width: float, size: float = TEXT) -> str:
    """Cut ``text`` with an ellipsis to about ``width`` inches at a font size in points."""
    fits = max(int(width * 72 / (size * _CHARACTER) + 1e-6), 2)
    return text if len(text) <= fits else text[: fits - 1] + "…"


def text_width(texts: Sequence[str], size: float = TEXT) -> float:
    """Estimate the width of the longest text in inches."""
    return max((len(text) for text in texts), default=0) * size * _CHARACTER / 72
