"""Which classes are taken for which: a picture of the confusion matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.analysis.evaluation import Evaluation
from torchcaps.analysis.figures import SMALL, TEXT, TINY, TITLE, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

_MOST_WITH_NUMBERS = 20  # classes; with more, numbers in the cells can no longer be read


def figure_confusion(evaluation: Evaluation, *, title: str | None = None) -> Figure:
    """The confusion matrix: true classes down, given ones across.

    What is right (blue, the diagonal) and what is wrong (red) have each their own scale, in percent of the images of
    the true class, so that few errors are seen beside many right ones. Up to 20 classes have the number of images in
    each cell.

    Args:
        evaluation: From :func:`~torchcaps.analysis.evaluate`.
        title: Above the figure; by default how many images are wrong.
    """
    confusion = evaluation.confusion
    classes = len(confusion)
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    right = np.eye(classes, dtype=bool)
    numbers = classes <= _MOST_WITH_NUMBERS
    size = 1.8 + classes * (0.42 if numbers else 0.15)
    figure = new_figure(size + 1.8, size)
    axes = figure.subplots()
    wrong = evaluation.num_images - evaluation.num_correct
    figure.suptitle(title or f"{wrong:,} of {evaluation.num_images:,} images wrong", fontsize=TITLE)

    scales = {"right": (right & (confusion.sum(1) > 0), "Blues", 100.0)}
    if worst := float(np.where(right, 0, share).max()):
        scales = {"wrong": (~right & (confusion > 0), "Reds", worst), **scales}  # the last bar is the nearest one
    for name, (cells, colours, highest) in scales.items():
        shown = axes.imshow(np.ma.masked_where(~cells, share), cmap=_middle_of(colours), vmin=0, vmax=highest)
        bar = figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label(f"{name}, % of the true class", fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
        bar.outline.set_visible(False)
        for true, given in np.argwhere(cells & (confusion > 0)) if numbers else ():
            colour = "white" if share[true, given] > 0.6 * highest else "black"
            axes.text(given, true, str(confusion[true, given]), ha="center", va="center", fontsize=SMALL, color=colour)

    names = [shorten(name, 1.1, SMALL) for name in evaluation.class_names]
    upright = max(map(len, names)) <= 2 and numbers
    style: dict[str, Any] = {"fontsize": SMALL if numbers else TINY, "parse_math": False}  # names are no formulas
    axes.set_xticks(range(classes), names, rotation=0 if upright else 90, **style)
    axes.set_yticks(range(classes), names, **style)
    axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel("class given", fontsize=TEXT)
    axes.set_ylabel("true class", fontsize=TEXT)
    return figure


def _middle_of(colours: str) -> ListedColormap:
    """A colour map of matplotlib without its ends: even few stand out from white, and many from black."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps[colours](np.linspace(0.15, 0.9, 256)))
