"""Confusion matrices: agreement beyond chance, and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from torchcaps.analysis.figures import SMALL, TEXT, TINY, find_axes, shorten
from torchcaps.analysis.results import MAX_CLASSES
from torchcaps.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Side of a cell, inches: with a number, without one, smallest with a name beside it; and of the whole matrix.
_NUMBERED_CELL, _PLAIN_CELL, _MIN_NAMED_CELL, _MAX_MATRIX = 0.42, 0.15, 0.1, 18.0


def kappas(confusion: Int[np.ndarray, "*N J J"], power: int) -> Float[np.ndarray, "*N"]:
    """Return Cohen's kappa of each confusion matrix, see :attr:`Evaluation.kappa`; NaN where it is undefined."""
    classes = np.arange(confusion.shape[-1])
    distances = np.abs(classes[:, None] - classes)
    weights = distances.astype(np.float64) ** power * (distances > 0)
    expected = confusion.sum(-1)[..., None] * confusion.sum(-2)[..., None, :] / confusion.sum((-1, -2))[..., None, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(1 - (weights * confusion).sum((-1, -2)) / (weights * expected).sum((-1, -2)))


def figure_confusion(
    confusion: Int[np.ndarray, "J J"], class_names: Sequence[str], output: str, title: str, *, ax: Axes | None = None
) -> Figure:
    """Draw a confusion matrix: true classes down, predicted classes across.

    Correct images (blue, the diagonal) and wrong ones (red) have separate colour scales, in percent of the images of
    the true class, so that a few errors are visible beside many correct images. With up to 20 classes, each cell shows
    its number of images. With up to 180 classes, their names stand at the sides.

    Args:
        confusion: Number of images of one class (row) that were predicted as another (column).
        class_names: Name of each class.
        output: Noun for a class, see :attr:`torchcaps.tasks.Task.output`.
        title: Title of the figure.
        ax: Axes to draw into; None: a new figure.
    """
    import matplotlib
    from matplotlib.colors import ListedColormap

    classes = len(confusion)
    share = 100 * confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    few, right = classes <= MAX_CLASSES, np.eye(classes, dtype=bool)
    cell = min(_NUMBERED_CELL if few else _PLAIN_CELL, _MAX_MATRIX / classes)
    size = 1.8 + classes * cell
    figure, axes = find_axes(ax, size + 1.8, size, title)
    scales = (
        ("wrong", ~right & (confusion > 0), "Reds", float(np.where(right, 0, share).max())),
        ("correct", right & (confusion.sum(1) > 0), "Blues", 100.0),  # the bar that is drawn last stands nearest
    )
    for name, cells, colours, highest in scales:
        if not cells.any():
            continue
        # the ends of the colour map are cut, so that small values differ from white and large ones from black
        middle = ListedColormap(matplotlib.colormaps[colours](np.linspace(0.15, 0.9, 256)))
        masked = np.ma.masked_where(~cells, share)
        # nearest, because smoothing would mix a cell with the black of masked cells
        shown = axes.imshow(masked, cmap=middle, vmin=0, vmax=highest, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, pad=max(0.02, 0.1 / size))
        bar.ax.set_title(name, fontsize=SMALL, loc="left", pad=9)
        if len(axes.images) == 1:  # the outer bar; another label would touch it
            bar.set_label(f"% of the true {output}", fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
        bar.outline.set_visible(False)
        for true, predicted in np.argwhere(cells & (confusion > 0)) if few else ():
            colour = "white" if share[true, predicted] > 0.6 * highest else "black"
            axes.text(
                predicted,
                true,
                str(confusion[true, predicted]),
                ha="center",
                va="center",
                fontsize=SMALL,
                color=colour,
            )
    if cell >= _MIN_NAMED_CELL:
        names = [shorten(name, 1.1, SMALL) for name in map(visible, class_names)]
        upright = few and max(map(len, names)) <= 2
        style: dict[str, Any] = {"fontsize": SMALL if few else TINY, "parse_math": False}
        axes.set_xticks(range(classes), names, rotation=0 if upright else 90, **style)
        axes.set_yticks(range(classes), names, **style)
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("0.8")
    axes.set_xlabel(f"predicted {output}", fontsize=TEXT)
    axes.set_ylabel(f"true {output}", fontsize=TEXT)
    return figure
