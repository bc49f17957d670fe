"""Which classes are taken for which: a picture of the confusion matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.analysis.evaluation import Evaluation
from torchcaps.analysis.figures import SMALL, TEXT, TINY, drawable, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

_MOST_WITH_NUMBERS = 20  # classes; with more, numbers in the cells can no longer be read
# Inches: a cell with a number in it, without, the least one that a name fits beside, and all cells together at most.
_NUMBERED, _PLAIN, _NAMED, _MOST = 0.42, 0.15, 0.1, 18.0


def figure_confusion(evaluation: Evaluation, *, title: str | None = None) -> Figure:
    """The confusion matrix: true classes down, given ones across.

    What is right (blue, the diagonal) and what is wrong (red) have each their own scale, in percent of the images of
    the true class, so that few errors are seen beside many right ones. Up to 20 classes have the number of images in
    each cell, up to 180 their names at the sides; of more, the axes count the classes. The figure is 20 inches wide
    at most.

    Args:
        evaluation: From :func:`~torchcaps.analysis.evaluate`.
        title: Above the figure; by default how many images are wrong.
    """
    confusion = evaluation.confusion
    classes = len(confusion)
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    right = np.eye(classes, dtype=bool)
    numbers = classes <= _MOST_WITH_NUMBERS
    cell = min(_NUMBERED if numbers else _PLAIN, _MOST / classes)
    size = 1.8 + classes * cell
    wrong = evaluation.num_images - evaluation.num_correct
    figure = new_figure(size + 1.8, size, title or f"{wrong:,} of {evaluation.num_images:,} images wrong")
    axes = figure.subplots()

    scales = {"right": (right & (confusion.sum(1) > 0), "Blues", 100.0)}
    if worst := float(np.where(right, 0, share).max()):
        scales = {"wrong": (~right & (confusion > 0), "Reds", worst), **scales}  # the last bar is the nearest one
    for name, (cells, colours, highest) in scales.items():
        masked = np.ma.masked_where(~cells, share)  # smoothing would mix a cell with the black of masked ones
        shown = axes.imshow(masked, cmap=_middle_of(colours), vmin=0, vmax=highest, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label(f"{name}, % of the true class", fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
        bar.outline.set_visible(False)
        for true, given in np.argwhere(cells & (confusion > 0)) if numbers else ():
            colour = "white" if share[true, given] > 0.6 * highest else "black"
            axes.text(given, true, str(confusion[true, given]), ha="center", va="center", fontsize=SMALL, color=colour)

    if cell >= _NAMED:
        _name_cells(axes, [shorten(name, 1.1, SMALL) for name in drawable(evaluation.class_names)], large=numbers)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel("class given", fontsize=TEXT)
    axes.set_ylabel("true class", fontsize=TEXT)
    return figure


def _name_cells(axes: Axes, names: list[str], *, large: bool) -> None:
    """The classes' names at both sides, and a grid around the cells."""
    upright = max(map(len, names)) <= 2 and large
    style: dict[str, Any] = {"fontsize": SMALL if large else TINY, "parse_math": False}  # names are no formulas
    places, edges = range(len(names)), np.arange(len(names) + 1) - 0.5
    axes.set_xticks(places, names, rotation=0 if upright else 90, **style)
    axes.set_yticks(places, names, **style)
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.6)


def _middle_of(colours: str) -> ListedColormap:
    """A colour map of matplotlib without its ends: even few stand out from white, and many from black."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps[colours](np.linspace(0.15, 0.9, 256)))
